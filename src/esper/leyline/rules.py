"""Lifecycle rules of a run, and the action space that follows from rules, slots and blueprints."""

from dataclasses import dataclass

from esper.leyline.errors import UnknownNameError
from esper.leyline.factored_actions import CANONICAL_ACTION, CHOICES, HEAD_NAMES, OP_NAMES, IntArray
from esper.leyline.slot_config import SlotConfig


@dataclass(frozen=True, slots=True)
class LifecycleRules:
    """Delays and limits of the lifecycle; ages and delays are in host epochs."""

    min_training_epochs: int = 10
    """Length of the TRAINING stage in epochs; with 0 a seed enters BLENDING directly."""
    enters_at_once: bool = False
    """The first alpha ramp of a seed has length 0, so the tempo head has no effect."""
    min_prune_age: int = 5
    embargo_epochs: int = 5
    max_seeds: int = 0
    """Largest number of live and fossilized seeds at one time; 0 means no limit."""
    auto_forward: bool = True
    """Seeds move to the next stage automatically; if false, only by the op ADVANCE."""
    strict_fossilize: bool = False
    """Gate G5 requires a lower confidence bound of a seed's contribution, not only a measurement."""
    min_contribution: float = 0.0
    """Smallest lower bound of a contribution that passes gate G5 with ``strict_fossilize``, in points."""
    blueprints: tuple[str, ...] = ()
    """Names of the selectable blueprints; empty means all blueprints of the host."""
    fossil_watch_epochs: int = 50
    """Age in epochs from which the contribution of a fossilized seed is no longer measured."""


@dataclass(frozen=True, slots=True)
class ActionSpace:
    """Slots, lifecycle rules and blueprints of one host, from which a controller chooses."""

    slot_config: SlotConfig
    rules: LifecycleRules
    blueprints: tuple[int, ...]
    """Selectable blueprint indices, ascending."""
    blueprint_names: tuple[str, ...]
    """Name of every blueprint index of the host, selectable or not."""
    unfit: frozenset[tuple[int, int]] = frozenset()
    """(slot, blueprint) pairs where a selectable blueprint does not fit the width of the slot."""

    def action(self, op: str, **choices: str) -> IntArray:
        """Return one action ``[1, 8]`` from the names of op, slot and other choices.

        Args:
            op: Op in any case, such as ``"germinate"``.
            choices: Names of values by head; heads that are not named keep their canonical value.

        Raises:
            UnknownNameError: A head or a value does not exist, or a blueprint is not selectable.

        Example:
            ``space.action("germinate", slot="layer2", blueprint="norm")``
        """
        action = CANONICAL_ACTION.copy()
        for name, choice in {"op": op.upper(), **choices}.items():
            if name not in HEAD_NAMES:
                raise UnknownNameError("part of a decision", name, HEAD_NAMES)
            head = HEAD_NAMES.index(name)
            names = self.choice_names[head]
            allowed = [names[index] for index in self.blueprints] if name == "blueprint" else names
            if choice not in allowed:
                raise UnknownNameError(name, choice, allowed)
            action[head] = names.index(choice)
        return action[None]

    @property
    def choice_names(self) -> tuple[tuple[str, ...], ...]:
        """Names of the values of each head in index order, heads in the order of ``HEAD_NAMES``."""
        others = (tuple(choice.name.lower() for choice in kind) for kind in CHOICES[1:])
        return (OP_NAMES, self.slot_config.slot_ids, self.blueprint_names, *others)
