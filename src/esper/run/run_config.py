"""Configuration of runs and policy trainings from flags, files and presets; all invalid settings are reported
at once."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from esper.leyline import Detail, EsperError, UnknownNameError
from esper.simic.config import MOST, MOST_SLOTS, EpisodeSettings, TrainingConfig

_READERS: Final = {"plan": "periodic", "rotation": "heuristic", "checkpoint": "ppo", "policy_device": "ppo"}
"""Settings that only one controller reads, with the name of that controller."""
Names = Annotated[tuple[str, ...], Field(max_length=MOST_SLOTS)]


def _is_number(slots: tuple[str, ...]) -> bool:
    return len(slots) == 1 and slots[0].isdecimal()


class ConfigError(EsperError):
    """Error: one or more settings are invalid; the message lists all invalid settings."""


class Settings(BaseModel):
    """Base class of a command's settings: every field is a flag, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RunConfig(Settings, EpisodeSettings):
    """Grow a network on a task and report what each seed contributed."""

    controller: str = "heuristic"
    """Controller: heuristic, counting, random, periodic, off, ppo."""
    rng_seed: int = Field(0, ge=0, lt=2**63)
    """Root of every random stream; equal rng seeds give equal runs."""
    episodes: int = Field(1, ge=1, le=MOST)
    """Number of episodes, which run one after the other."""
    slots: Names = ()
    """Ids of the slots that may grow, such as r0c0 r0c2; or the number of slots of the host."""
    rotation: Names = ()
    """Blueprints that the heuristic tries, in this order; all unless given."""
    plan: str = "every:1:conv_heavy"
    """Schedule of the periodic controller: blueprint@slot:step,… or every:K[:blueprint,…]."""
    incubation_epochs: int | None = Field(None, ge=0, le=MOST)
    """Number of epochs of incubation before a seed is blended in; the preset's unless given."""
    checkpoint: Path | None = None
    """Folder of a trained policy, for the ppo controller."""
    against: Names = ()
    """Controllers to compare with; each runs with the same rng seed."""
    detail: Detail = "full"
    """Level of detail of the telemetry."""
    out: Path | None = None
    """Run directory; a new one below runs/ unless given."""
    as_json: bool = False
    """Print the result as JSON and nothing else."""

    @property
    def slot_count(self) -> int | None:
        """Number of slots if the setting ``slots`` is a number; None if it lists slot ids."""
        return int(self.slots[0]) if _is_number(self.slots) else None

    @field_validator("slots")
    @classmethod
    def _slots_can_be_built(cls, slots: tuple[str, ...]) -> tuple[str, ...]:
        if _is_number(slots) and (len(slots[0]) > 4 or not 1 <= int(slots[0]) <= MOST_SLOTS):
            raise ValueError(f"a host can have 1 to {MOST_SLOTS} slots; found {slots[0][:20]}")
        return slots

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> RunConfig:
        controllers = (self.controller, *self.against)
        for name, reader in _READERS.items():
            given = name in self.model_fields_set and getattr(self, name) is not None
            if given and reader not in controllers:
                raise ValueError(f"{name} is read by the {reader} controller only; add --controller {reader}")
        if len(set(controllers)) != len(controllers):
            raise ValueError(f"every controller runs once; found {', '.join(controllers)}")
        return self


PRESETS: Final[Mapping[str, Mapping[str, object]]] = tomllib.loads(
    Path(__file__).with_name("presets.toml").read_text()
)
"""Settings of policy trainings by name of the preset; each preset trains on one task."""

MOST_BYTES: Final = 100_000
"""Largest size of a configuration file in bytes."""
Config = TypeVar("Config", bound=BaseModel)


def training_config(
    preset: str | None, from_file: Mapping[str, object], given: Mapping[str, object]
) -> TrainingConfig:
    """Return the configuration of a policy training, merged from preset, file and flags.

    Args:
        preset: Name of a preset in ``PRESETS``, or None.
        from_file: Settings of a configuration file, which override those of the preset.
        given: Settings given as flags, which override those of the file.

    Raises:
        UnknownNameError: There is no preset of this name.
        ConfigError: A setting is invalid, or the task is not the task of the preset.
    """
    if preset is not None and preset not in PRESETS:
        raise UnknownNameError("preset", preset, PRESETS)
    named = PRESETS[preset] if preset is not None else {}
    config = checked(TrainingConfig, {**named, **from_file, **given})
    if named and config.task != named["task"]:
        raise ConfigError(
            f"preset '{preset}' is of task {named['task']} and cannot train {config.task};"
            " leave out the preset or the task"
        )
    return config


def checked(kind: type[Config], settings: Mapping[str, object]) -> Config:
    """Return a configuration of the class ``kind``; raise a ``ConfigError`` that lists all invalid
    settings.
    """
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        problems = [_sentence(problem, list(kind.model_fields)) for problem in error.errors()]
        raise ConfigError("; ".join(problems)) from None


def run_config(**settings: object) -> RunConfig:
    """Return a ``RunConfig`` with the given settings; raise ``ConfigError`` if a setting is invalid."""
    return checked(RunConfig, settings)


def read_settings(path: Path) -> dict[str, object]:
    """Return the settings in a TOML or JSON file."""
    readers = {".toml": tomllib.loads, ".json": json.loads}
    if path.suffix not in readers:
        raise ConfigError(f"'{path}' must end in {' or '.join(readers)}")
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"'{path}' is larger than a configuration: {path.stat().st_size:,} bytes")
        content = readers[path.suffix](path.read_text())
        # encode() raises an error for lone surrogates, which could not be written to a file.
        json.dumps(content, default=str, ensure_ascii=False).encode()
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"'{path}' nests lists or tables too deeply") from None
    except ValueError as error:
        raise ConfigError(f"'{path}' is not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"'{path}' holds {type(content).__name__} where a table of settings is expected")
    return content


def _short(value: object) -> str:
    """Return the ``repr`` of a value, cut off after 80 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # repr() fails for very long numbers and deeply nested lists.
        return f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= 80 else f"{text[:80]}…"


def _sentence(problem: ErrorDetails, known: list[str]) -> str:
    name = ".".join(map(str, problem["loc"]))[:80]
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        return f"unknown key '{name}'; {hint}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return message
    sentence = f"{name}: {message[0].lower()}{message[1:]}; found {_short(problem['input'])}"
    if problem["type"] == "literal_error":
        allowed = re.findall("'([^']*)'", message)
        near = difflib.get_close_matches(_short(problem["input"]).strip("'"), allowed, n=1)
        sentence += f" (did you mean {near[0]}?)" if near else ""
    return sentence
