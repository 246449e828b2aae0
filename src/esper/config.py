"""What a run is told: the single source of truth for flags, and for what the run records of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from esper.leyline.errors import EsperError


class ConfigError(EsperError):
    """One or more settings that cannot be used, all of them named."""


class RunConfig(BaseModel):
    """One network that grows, under one decision maker; every field is also a flag."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: str = Field("digits_impaired", description="Task preset.")
    decider: str = Field("heuristic", description="Who decides: heuristic, random, periodic or off.")
    rng_seed: int = Field(0, ge=0, description="Root of every random stream; same seed, same run.")
    episodes: int = Field(1, ge=1, description="Host lives, one after the other.")
    steps: int | None = Field(None, ge=1, description="Host epochs per life; the preset's unless given.")
    slots: tuple[str, ...] = Field(
        (), description="Slots that may grow: ids such as r0c0 r0c2, or a count; all unless given."
    )
    rotation: tuple[str, ...] = Field(
        (), description="Blueprints the heuristic tries, favourite first; all unless given."
    )
    plan: str = Field(
        "every:1:conv_heavy",
        description="Schedule of the periodic decider: blueprint@slot:step,… or every:K[:blueprint,…].",
    )
    incubation: Literal["shadow", "straight_through"] = Field(
        "shadow", description="How a seed learns before it is blended in."
    )
    incubation_epochs: int | None = Field(
        None, ge=0, description="Epochs before a seed is blended in; the preset's unless given."
    )
    against: tuple[str, ...] = Field(
        (), description="Control deciders to run with the same rng seed and compare with."
    )
    out: Path | None = Field(None, description="Run directory; a new one below runs/ unless given.")
    as_json: bool = Field(False, description="Print the result as JSON and nothing else.")

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> RunConfig:
        deciders = (self.decider, *self.against)
        if "plan" in self.model_fields_set and "periodic" not in deciders:
            raise ValueError("plan is read by the periodic decider only; add --decider periodic")
        if "rotation" in self.model_fields_set and "heuristic" not in deciders:
            raise ValueError("rotation is read by the heuristic only; add --decider heuristic")
        if len(set(deciders)) != len(deciders):
            raise ValueError(f"every decider runs once; found {', '.join(deciders)}")
        return self


def run_config(**settings: object) -> RunConfig:
    """Check all settings at once; a single error lists everything that is wrong."""
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(dict(problem)) for problem in error.errors())) from None


def _sentence(problem: dict[str, object]) -> str:
    location = problem["loc"]
    name = ".".join(map(str, location)) if isinstance(location, tuple) else ""
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not name:
        return message
    return f"{name}: {message[0].lower()}{message[1:]}; found {problem['input']!r}"
