"""What a run or a training is told: flags, files and presets, checked with all errors named at once."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from esper.leyline.errors import EsperError, UnknownNameError
from esper.leyline.lifecycle_rules import IncubationMode
from esper.leyline.rows import Detail
from esper.simic.settings import MOST, MOST_SLOTS, EpisodeSettings
from esper.simic.training_config import TrainingConfig

_READERS: Final = {"plan": "periodic", "rotation": "heuristic", "checkpoint": "ppo", "policy_device": "ppo"}
"""Settings that one controller reads."""
Names = Annotated[tuple[str, ...], Field(max_length=MOST_SLOTS)]


class ConfigError(EsperError):
    """One or more settings that cannot be used, all of them named."""


class Settings(BaseModel):
    """What a command is told: every field is also a flag, and what is unknown is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunConfig(Settings, EpisodeSettings):
    """One network that grows, under one controller."""

    controller: str = Field(
        "heuristic", description="Controller: heuristic, counting, random, periodic, off, ppo."
    )
    rng_seed: int = Field(0, ge=0, lt=2**63, description="Root of every random stream; same seed, same run.")
    episodes: int = Field(1, ge=1, le=MOST, description="Episodes, one after the other.")
    slots: Names = Field(
        (), description="Slots that may grow, by ids such as r0c0 r0c2; or a number, for a host with so many."
    )
    rotation: Names = Field((), description="Blueprints the heuristic tries, favourite first; else all.")
    plan: str = Field(
        "every:1:conv_heavy",
        description="Schedule of the periodic controller: blueprint@slot:step,… or every:K[:blueprint,…].",
    )
    incubation: IncubationMode = Field("shadow", description="How a seed learns before it is blended in.")
    incubation_epochs: int | None = Field(
        None, ge=0, le=MOST, description="Epochs before a seed is blended in; the preset's unless given."
    )
    checkpoint: Path | None = Field(None, description="Folder of a trained policy, for the ppo controller.")
    against: Names = Field((), description="Controllers to run with the same rng seed and compare with.")
    detail: Detail = Field("full", description="How much is written of every episode.")
    out: Path | None = Field(None, description="Run directory; a new one below runs/ unless given.")
    as_json: bool = Field(False, description="Print the result as JSON and nothing else.")

    @property
    def slot_count(self) -> int | None:
        """Slots of the host where a number was given for them instead of ids."""
        is_number = len(self.slots) == 1 and self.slots[0].isdecimal()
        return int(self.slots[0]) if is_number else None

    @field_validator("slots")
    @classmethod
    def _slots_can_be_built(cls, slots: tuple[str, ...]) -> tuple[str, ...]:
        number = slots[0] if len(slots) == 1 and slots[0].isdecimal() else "1"
        if len(number) > 4 or not 1 <= int(number) <= MOST_SLOTS:
            raise ValueError(f"a host can have 1 to {MOST_SLOTS} slots; found {number[:20]}")
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


PRESETS: Final[Mapping[str, Mapping[str, object]]] = {
    "quick": {"task": "digits_impaired", "envs": 8, "iterations": 10, "evaluate_episodes": 8},
    "study": {
        "task": "digits_impaired",
        "envs": 16,
        "iterations": 60,
        "evaluate_every": 10,
        "evaluate_episodes": 24,
    },
    "mixture": {
        "task": "digits_mixture",
        "envs": 24,
        "iterations": 36,
        "context": True,
        "hidden_dim": 64,
        "update_epochs": 16,
        "hold_heads": ("style", "alpha_target", "alpha_speed", "alpha_curve"),
        "reward_family": "log_loss",
        "reward_scale": 1.0,
        "rent": 0.0,
        "evaluate_every": 9,
        "evaluate_episodes": 24,
    },
    "any_slots": {"task": "digits_impaired", "iterations": 80, "capacity": 8, "vary_slots": True},
}
"""Trainings by name; each is of one task."""

MOST_BYTES: Final = 100_000
"""Size of a configuration file."""
Config = TypeVar("Config", bound=BaseModel)


def training_config(
    preset: str | None, from_file: Mapping[str, object], given: Mapping[str, object]
) -> TrainingConfig:
    """A training from a preset, a file and flags, each overriding what comes before it."""
    named: Mapping[str, object] = {}
    if preset is not None:
        if preset not in PRESETS:
            raise UnknownNameError("preset", preset, PRESETS)
        named = PRESETS[preset]
    config = checked(TrainingConfig, {**named, **from_file, **given})
    if named and config.task != named["task"]:
        raise ConfigError(
            f"preset '{preset}' is of task {named['task']} and cannot train {config.task};"
            " leave out the preset or the task"
        )
    return config


def checked(kind: type[Config], settings: Mapping[str, object]) -> Config:
    """A configuration with all settings checked at once; a single error lists everything that is wrong."""
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        known = list(kind.model_fields)
        problems = "; ".join(_sentence(dict(problem), known) for problem in error.errors())
        raise ConfigError(problems) from None


def run_config(**settings: object) -> RunConfig:
    """A ``RunConfig``, checked."""
    return checked(RunConfig, settings)


def read_settings(path: Path) -> dict[str, object]:
    """The settings of a TOML or JSON file."""
    readers = {".toml": tomllib.loads, ".json": json.loads}
    if path.suffix not in readers:
        raise ConfigError(f"'{path}' must end in {' or '.join(readers)}")
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"'{path}' is larger than a configuration: {path.stat().st_size:,} bytes")
        content = readers[path.suffix](path.read_text())
        json.dumps(content, default=str, ensure_ascii=False).encode()  # JSON can spell half a character
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
    """A value as it was written, cut off where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, a list of lists of lists …
        return f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= 80 else f"{text[:80]}…"


def _sentence(problem: dict[str, object], known: list[str]) -> str:
    location = problem["loc"]
    name = ".".join(map(str, location))[:80] if isinstance(location, tuple) else ""
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        return f"unknown key '{name}'; {hint}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return message
    sentence = f"{name}: {message[0].lower()}{message[1:]}; found {_short(problem['input'])}"
    if problem["type"] == "literal_error":
        allowed = re.findall("'([^']*)'", message)
        near = difflib.get_close_matches(_short(problem["input"]).strip("'"), allowed, n=1)
        sentence += f" (did you mean {near[0]}?)" if near else ""
    return sentence
