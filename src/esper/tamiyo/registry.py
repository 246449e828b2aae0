"""Controllers by name: the one table for ``esper run``, studies and growth inside a user's training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from esper.leyline import ActionSpace, Controller, EsperError, UnknownNameError
from esper.tamiyo.controllers import OffController, PeriodicController, RandomController
from esper.tamiyo.counting import CountingController
from esper.tamiyo.heuristic import HeuristicController, HeuristicSettings
from esper.tamiyo.schedule import parse_plan


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Settings of controllers; each controller reads only its own."""

    rng_seed: int = 0
    """Read by ``random``."""
    rotation: tuple[str, ...] = ()
    """Blueprints in the order of preference, read by ``heuristic``; empty for its default order."""
    plan: str | None = None
    """Plan such as ``conv_light@r0c0:4``, read by ``periodic``."""
    checkpoint: Path | None = None
    """Folder of a trained policy, read by ``ppo``."""
    device: str = "cpu"
    """Torch device of the policy, read by ``ppo``."""


def _periodic(space: ActionSpace, settings: ControllerSettings) -> Controller:
    if settings.plan is None:
        raise EsperError("the periodic controller needs a plan, such as conv_light@r0c0:4")
    return PeriodicController(space, parse_plan(settings.plan, space))


def _ppo(space: ActionSpace, settings: ControllerSettings) -> Controller:
    from esper.tamiyo.policy.checkpoint import load_policy  # noqa: PLC0415  loads torch
    from esper.tamiyo.policy.controller import PolicyController  # noqa: PLC0415

    if settings.checkpoint is None:
        raise EsperError("the ppo controller needs a trained policy; name its folder with --checkpoint")
    return PolicyController(space, 1, load_policy(settings.checkpoint).to(settings.device))


CONTROLLERS: Final[Mapping[str, Callable[[ActionSpace, ControllerSettings], Controller]]] = {
    "heuristic": lambda space, settings: HeuristicController(
        space, num_envs=1, settings=HeuristicSettings(rotation=settings.rotation)
    ),
    "counting": lambda space, settings: CountingController(space, num_envs=1),
    "random": lambda space, settings: RandomController(space, settings.rng_seed, env_indices=(0,)),
    "periodic": _periodic,
    "off": lambda space, settings: OffController(space),
    "ppo": _ppo,
}
"""Factories of controllers for one environment."""


def make_controller(name: str, space: ActionSpace, settings: ControllerSettings | None = None) -> Controller:
    """Return the controller of this name, for one environment.

    Args:
        name: A key of ``CONTROLLERS``.
        space: The slots, blueprints and lifecycle rules that the controller decides on.
        settings: The settings that the named controller reads; defaults where omitted.

    Raises:
        UnknownNameError: No controller has this name.
        EsperError: A required setting is missing, or the plan or policy does not fit ``space``.
    """
    if name not in CONTROLLERS:
        raise UnknownNameError("controller", name, CONTROLLERS)
    return CONTROLLERS[name](space, settings or ControllerSettings())
