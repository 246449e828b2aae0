"""The hand-written controller: plant on a plateau, keep what contributes, remove what hurts.

One action per environment and step, the first of these rules that finds a slot: fossilize, prune,
advance (only without auto-forward), germinate; else wait. Every rule looks at all slots, and what is
possible is leyline's to say.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from esper.leyline import (
    TEMPO_EPOCHS,
    ActionSpace,
    EpochFacts,
    Head,
    LifecycleOp,
    LifecycleRules,
    SlotTable,
    Stage,
    Tempo,
    TrainingSignals,
    legal_slots_by_op,
)
from esper.leyline.factored_actions import BoolArray, FloatArray, IntArray
from esper.leyline.protocols import Decisions
from esper.leyline.thresholds import CONFIDENCE_Z
from esper.tamiyo.controllers import ready_to_advance, wait_everywhere
from esper.tamiyo.schedule import blueprint_index
from esper.tamiyo.tracker import SignalTracker

STRONGEST_FIRST: Final = (
    ["conv_heavy", "conv_light", "bottleneck", "depthwise", "norm", "conv_small", "attention"],
    ["mlp", "attention", "mlp_small", "lora_large", "flex_attention", "lora", "norm"],
)
"""Blueprints of images and of tokens."""
TEMPO: Final = Tempo.FAST
EVALUATION_EPOCHS: Final = 1
"""At a resting alpha, before a seed may be removed for its contribution."""


@dataclass(frozen=True, slots=True)
class HeuristicSettings:
    """What can be tuned; epochs are host epochs."""

    patience: int = 0
    """Plateau epochs before a germination; 0 means whenever a slot is free."""
    rotation: tuple[str, ...] = ()
    """Blueprints by name, the favourite first; empty means all of the host's, strongest first."""
    penalty_steps: int = 10
    """Steps for which a pruned blueprint stands behind the others; a second prune adds as many."""
    stuck_epochs: int = 5
    """Epochs beyond its stage's own length after which a seed counts as stuck.

    A held seed has no such length: after this many epochs its contribution decides without error bar.
    """


class HeuristicController:
    """Applies the rules to ``num_envs`` environments; each has its own trends and penalties."""

    name = "heuristic"

    def __init__(self, space: ActionSpace, num_envs: int, settings: HeuristicSettings | None = None) -> None:
        self._space = space
        self._settings = settings or HeuristicSettings()
        names = self._settings.rotation
        indices = tuple(blueprint_index(name, space) for name in names) or default_rotation(space)
        self._rotation: IntArray = np.array(indices, dtype=np.int64)
        self._shape = (num_envs, space.slot_config.num_slots)
        self._tracker = SignalTracker(num_envs)
        self.reset(0)

    def reset(self, episode: int) -> None:
        """Forget trends and penalties."""
        self._tracker.reset()
        self._penalty: IntArray = np.zeros((self._shape[0], len(self._rotation)), dtype=np.int64)
        self._kept: BoolArray = np.zeros(self._shape, dtype=np.bool_)
        self._blueprint: IntArray = np.full(self._shape, -1, dtype=np.int64)

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        signals = self._tracker.update(facts)
        self._note_losses(facts, table)
        rules = self._space.rules
        legal = legal_slots_by_op(table, rules)
        worthy, unwanted = evaluate(table, rules, self._settings)
        value = np.nan_to_num(table.contribution)
        plantable = self._wants_seed(facts, signals)[:, None] & legal[:, LifecycleOp.GERMINATE]

        actions = wait_everywhere(table.num_envs)
        undecided = np.ones(table.num_envs, dtype=np.bool_)
        for op, candidates, preference in (
            (LifecycleOp.FOSSILIZE, worthy & legal[:, LifecycleOp.FOSSILIZE], value),
            (LifecycleOp.PRUNE, unwanted & legal[:, LifecycleOp.PRUNE], -value),
            (LifecycleOp.ADVANCE, ready_to_advance(table, rules, legal), np.zeros_like(value)),
            (LifecycleOp.GERMINATE, plantable, -slot_ranks(table.enabled)),
        ):
            chosen = undecided & candidates.any(axis=1)
            slot = np.where(candidates, preference, -np.inf).argmax(axis=1)
            actions[chosen, Head.OP] = op
            actions[chosen, Head.SLOT] = slot[chosen]
            undecided &= ~chosen
        self._choose_seeds(actions)
        return Decisions(actions)

    def _note_losses(self, facts: EpochFacts, table: SlotTable) -> None:
        """Penalise the blueprints of seeds that went, or began to go, since the last step.

        The table is asked rather than the own prunes remembered: a seed that the governor removed has
        failed as well, and a prune that was refused has not happened.
        """
        born = facts.epoch == 0
        self._penalty[born] = 0
        self._kept[born] = False
        self._penalty = np.maximum(self._penalty - 1, 0)
        kept = table.occupied & ~table.leaving
        for env, slot in np.argwhere(self._kept & ~kept):
            failed = self._rotation == self._blueprint[env, slot]
            self._penalty[env, failed] += self._settings.penalty_steps
        self._kept, self._blueprint = kept, table.blueprint.copy()

    def _wants_seed(self, facts: EpochFacts, signals: TrainingSignals) -> BoolArray:
        """``[env]``: progress has stalled, and a seed planted today could still be evaluated."""
        rules = self._space.rules
        # GERMINATED takes an epoch of its own where nothing moves by itself.
        waiting = 0 if rules.auto_forward else 1
        needed = waiting + rules.min_training_epochs + TEMPO_EPOCHS[TEMPO] + 1
        return (signals.plateau_epochs >= self._settings.patience) & (
            facts.epoch + needed <= facts.max_epochs
        )

    def _choose_seeds(self, actions: IntArray) -> None:
        """Fill in what is germinated: least penalty first, then the place in the rotation."""
        planting = actions[:, Head.OP] == LifecycleOp.GERMINATE
        actions[:, Head.BLUEPRINT] = self._rotation[self._penalty.argmin(axis=1)]
        actions[:, Head.TEMPO] = TEMPO
        # A seed that does not fit, or dies in its first epoch, never shows up in the table: counting it
        # as kept from here makes the next step see it as lost, so that it is not tried for ever.
        envs, slots = np.flatnonzero(planting), actions[planting, Head.SLOT]
        self._kept[envs, slots] = True
        self._blueprint[envs, slots] = actions[planting, Head.BLUEPRINT]


def evaluate(
    table: SlotTable, rules: LifecycleRules, settings: HeuristicSettings
) -> tuple[BoolArray, BoolArray]:
    """``[env, slot]`` twice: seeds that are worth keeping, seeds that should go.

    What was never measured is neither, unless it is stuck before anything could be measured.
    """
    blending, holding = table.stage == Stage.BLENDING, table.stage == Stage.HOLDING
    # Counted from the end of a ramp: a contribution measured on the way up says little about the top.
    beyond = table.epochs_in_stage - _stage_length(table, rules)
    overdue = beyond >= settings.stuck_epochs
    undecided = holding & overdue & table.measured
    margin = np.where(undecided, 0.0, CONFIDENCE_Z * table.contribution_error)

    worthy = holding & (table.contribution - margin > 0.0)
    if rules.strict_fossilize:
        # Gate G5 would refuse the others step after step, and nothing else would get a turn.
        lower = table.contribution - CONFIDENCE_Z * table.contribution_error
        worthy &= lower >= rules.min_contribution

    at_rest = (blending | holding) & ~table.ramping
    seen = beyond >= EVALUATION_EPOCHS
    hurts = at_rest & seen & (table.contribution + margin < 0.0)
    waiting = (table.stage == Stage.TRAINING) | (blending & ~table.ramping)
    stuck = undecided | (waiting & overdue)
    return worthy, (hurts | stuck) & ~worthy


def _stage_length(table: SlotTable, rules: LifecycleRules) -> IntArray:
    """Epochs ``[env, slot]`` that a seed's stage takes when all goes well; 0 where it has no length."""
    length = np.where(table.stage == Stage.TRAINING, rules.min_training_epochs, 0)
    return np.where(table.stage == Stage.BLENDING, table.ramp_epochs, length)


def slot_ranks(enabled: BoolArray) -> FloatArray:
    """Rank ``[env, slot]`` of every enabled slot, the lowest to be planted first: the middle ones."""
    index: FloatArray = np.cumsum(enabled, axis=1, dtype=np.float64) - 1.0
    return np.abs(index - 0.5 * index[:, -1:])


def default_rotation(space: ActionSpace) -> tuple[int, ...]:
    """The selectable blueprints, strongest first; those nobody has ranked follow in index order.

    Known by name: the index of a blueprint may be a user's own on the other kind of host.
    """
    index_of = {space.blueprint_names[index]: index for index in space.blueprints}
    order = max(STRONGEST_FIRST, key=lambda names: len(index_of.keys() & set(names)))
    ranked = [index_of[name] for name in order if name in index_of]
    return (*ranked, *(index for index in space.blueprints if index not in ranked))
