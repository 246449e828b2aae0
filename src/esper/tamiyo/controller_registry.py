"""Table of controllers by name, for ``esper run``, studies and growth inside a user's training loop; and the
log of decisions from which the state of a controller can be rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from esper import tamiyo
from esper.leyline import ActionSpace, EsperError, UnknownNameError
from esper.leyline.factored_actions import IntArray
from esper.leyline.signals import Controller, EnvFacts, EpochFacts, RaceResult
from esper.leyline.slot_table import SlotTable

KEEP: Final = "keep:"
"""Text in front of a plan that makes every seed permanent, whatever it contributes."""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Settings of all controllers; each controller reads only some of the settings."""

    rng_seed: int = 0
    """Root rng seed of the actions drawn by controller ``random``."""
    rotation: tuple[str, ...] = ()
    """Blueprints in order of preference, read by controller ``heuristic``; empty for the default order."""
    plan: str | None = None
    """Plan such as ``conv_light@r0c0:4``, read by controller ``periodic``."""
    checkpoint: Path | None = None
    """Folder of a trained policy, read by controller ``ppo``."""
    epochs: int | None = None
    """Last epoch of the training, read by controller ``saturation``."""
    device: str = "cpu"
    """Torch device of the policy, read by controller ``ppo``."""


def _periodic(space: ActionSpace, settings: ControllerSettings) -> Controller:
    if settings.plan is None:
        raise EsperError("the periodic controller needs a plan, such as conv_light@r0c0:4")
    return tamiyo.PeriodicController(space, tamiyo.parse_plan(settings.plan, space))


def _ppo(space: ActionSpace, settings: ControllerSettings) -> Controller:
    if settings.checkpoint is None:
        raise EsperError("the ppo controller needs a trained policy; name its folder with --checkpoint")
    policy = tamiyo.load_policy(settings.checkpoint).to(settings.device)
    return tamiyo.PolicyController(space, 1, policy)


CONTROLLERS: Final[Mapping[str, Callable[[ActionSpace, ControllerSettings], Controller]]] = {
    "heuristic": lambda space, settings: tamiyo.HeuristicController(
        space, num_envs=1, settings=tamiyo.HeuristicSettings(rotation=settings.rotation)
    ),
    "counting": lambda space, settings: tamiyo.CountingController(space, num_envs=1),
    "random": lambda space, settings: tamiyo.RandomController(space, settings.rng_seed, env_indices=(0,)),
    "periodic": _periodic,
    "off": lambda space, settings: tamiyo.OffController(space),
    "saturation": lambda space, settings: tamiyo.SaturationController(space, settings.epochs),
    "race": lambda space, settings: tamiyo.RaceController(space),
    "ppo": _ppo,
}
"""Functions that build a controller for one environment; a controller's module is imported on first use."""


def make_controller(name: str, space: ActionSpace, settings: ControllerSettings | None = None) -> Controller:
    """Return the controller called ``name``, for one environment.

    Args:
        name: Name of the controller, a key of ``CONTROLLERS``.
        space: The slots, blueprints and lifecycle rules that the controller decides on.
        settings: Settings of all controllers, of which the named controller reads some; defaults if omitted.

    Raises:
        UnknownNameError: No controller is called ``name``.
        EsperError: The plan or policy that the controller needs is missing or does not fit ``space``.
    """
    if name not in CONTROLLERS:
        raise UnknownNameError("controller", name, CONTROLLERS)
    return CONTROLLERS[name](space, settings or ControllerSettings())


def controller_from(wanted: Any, space: ActionSpace, epochs: int | None = None) -> Controller | None:
    """Return the controller that a user's argument ``controller`` describes.

    Args:
        wanted: A name of ``CONTROLLERS``, a plan such as ``conv_light@layer2:4``, the folder of a policy, a
            controller, a function from an action space to a controller, or None. With ``keep:`` in front, a
            plan makes every seed permanent; otherwise only seeds that are worth more than their error.
        space: Action space of the network.
        epochs: Last epoch of the training, if known.

    Raises:
        EsperError: ``wanted`` does not describe a controller, or a plan plants a seed too early or too late.
    """
    if wanted is None or (isinstance(wanted, Controller) and not isinstance(wanted, type)):
        return wanted
    if isinstance(wanted, str) and wanted in CONTROLLERS:
        return make_controller(wanted, space, ControllerSettings(epochs=epochs))
    if isinstance(wanted, Path) or (isinstance(wanted, str) and Path(wanted).is_dir()):
        return make_controller("ppo", space, ControllerSettings(checkpoint=Path(wanted)))
    if _is_plan(wanted):
        return _planned(wanted, space, epochs)
    if callable(wanted):
        return controller_from(wanted(space), space, epochs)
    found = f"'{wanted}'" if isinstance(wanted, str) else type(wanted).__name__
    raise EsperError(
        f"controller is {found}; pass 'auto', {', '.join(CONTROLLERS)}, a plan such as"
        " 'conv_light@layer2:4', the folder of a trained policy, an object with reset and decide (or a"
        " function from an action space to one), or None"
    )


def blueprints_of(wanted: Any) -> set[str] | None:
    """Return the names of the blueprints that a controller may plant, if its description, the argument
    ``wanted`` of ``controller_from``, states them; else None."""
    if wanted is None:
        return set()
    return tamiyo.planned_blueprints(wanted.removeprefix(KEEP)) if _is_plan(wanted) else None


def _is_plan(wanted: Any) -> bool:
    is_name = isinstance(wanted, str) and wanted not in CONTROLLERS and not Path(wanted).is_dir()
    return is_name and ("@" in wanted or ":" in wanted)


def _planned(text: str, space: ActionSpace, epochs: int | None) -> Controller:
    plan = tamiyo.parse_plan(text.removeprefix(KEEP), space)
    steps = [entry.step for entry in plan.entries] if isinstance(plan, tamiyo.Schedule) else []
    if 0 in steps:
        raise EsperError(
            f"plan '{text}' plants at step 0, and the first decision comes at the end of epoch 1; write"
            " 1, or germinate by hand before the loop"
        )
    if epochs is not None and max(steps, default=0) >= epochs:
        raise EsperError(
            f"plan '{text}' plants after epoch {max(steps)} of {epochs}, when no training is left for"
            " the seed; plan an earlier epoch, or train for more"
        )
    return tamiyo.PeriodicController(space, plan, keeps_all=text.startswith(KEEP))


# --- log of decisions ---------------------------------------------------------------------------------------


class ControllerLog:
    """Log of everything that a controller has decided on; the state of a controller itself is not saved.

    Args:
        controller: Controller of one network.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.name = controller.name
        self._decided = 0
        """Number of epochs that the controller has decided on since its last reset."""
        self.entries: list[dict[str, Any]] = []
        """Facts and slot table of every epoch that the controller has decided on, as plain values."""

    def decide(self, facts: EnvFacts, table: SlotTable) -> IntArray:
        """Return the actions of the controller, and add its inputs to the log."""
        self.entries.append({"facts": asdict(facts), "table": table.plain()})
        return self._decide(facts, table)

    def _decide(self, facts: EnvFacts, table: SlotTable) -> IntArray:
        self._decided += 1
        return self._controller.decide(EpochFacts.stack([facts]), table).actions

    def load(self, entries: list[dict[str, Any]]) -> None:
        """Replace the log, and rebuild the state of the controller."""
        self.entries[:] = entries
        self._decided = -1
        self.rebuild()

    def rebuild(self) -> None:
        """Reset the controller and let it decide on all epochs of the log again, if it decided on others."""
        if self._decided != len(self.entries):
            self._controller.reset(0)
            self._decided = 0
            for entry in self.entries:
                race = RaceResult.from_plain(entry["facts"]["race"])
                facts = EnvFacts(**{**entry["facts"], "race": race})
                self._decide(facts, SlotTable.from_plain(entry["table"]))
