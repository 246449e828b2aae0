"""Rule-based controller: germinate on a plateau, fossilize seeds that raise the score, prune the others.

The heuristic controller takes one action per environment and step. The rules of the heuristic are, in order:
fossilize, prune, advance (only without auto-forward), germinate. The first rule with a legal candidate slot
decides the action; without such a rule the action is WAIT.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from esper.leyline.factored_actions import (
    TEMPO_EPOCHS,
    BoolArray,
    FloatArray,
    Head,
    IntArray,
    LifecycleOp,
    Tempo,
)
from esper.leyline.rules import ActionSpace, LifecycleRules
from esper.leyline.signals import Decisions, EpochFacts, TrainingSignals
from esper.leyline.slot_table import SlotTable, legal_slots_by_op
from esper.leyline.stages import Stage
from esper.leyline.thresholds import CONFIDENCE_Z
from esper.tamiyo.controllers import apply_rule, ready_to_advance, wait_everywhere
from esper.tamiyo.schedule import blueprint_index
from esper.tamiyo.tracker import SignalTracker

STRONGEST_FIRST: Final = (
    ["conv_heavy", "conv_light", "bottleneck", "depthwise", "norm", "conv_small", "attention"],
    ["mlp", "attention", "mlp_small", "lora_large", "flex_attention", "lora", "norm"],
)
"""Blueprints of image hosts and of token hosts, in the order in which the heuristic tries them."""
TEMPO: Final = Tempo.FAST
EVALUATION_EPOCHS: Final = 1
"""Number of epochs at constant alpha before a seed can be pruned for a negative contribution."""


@dataclass(frozen=True, slots=True)
class HeuristicSettings:
    """Settings of the heuristic controller; all epochs are epochs of the host's training."""

    patience: int = 0
    """Number of plateau epochs before a germination; with 0 a seed is planted whenever a slot is free."""
    rotation: tuple[str, ...] = ()
    """Names of blueprints in order of preference; empty means all blueprints of the host, strongest first."""
    penalty_steps: int = 10
    """Steps for which a blueprint is tried last after one of its seeds was removed.

    The steps of several removals add up.
    """
    stuck_epochs: int = 5
    """Number of epochs beyond the regular length of a stage after which a seed is pruned as stuck.

    HOLDING has no regular length: after ``stuck_epochs`` in HOLDING a seed with a positive contribution is
    fossilized and any other is pruned, without regard to the confidence interval.
    """


class HeuristicController:
    """Rule-based controller of ``num_envs`` environments, each with its own trends and penalties."""

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
        """Clear the trends and the blueprint penalties of all environments."""
        self._tracker.reset()
        self._penalty: IntArray = np.zeros((self._shape[0], len(self._rotation)), dtype=np.int64)
        self._kept: BoolArray = np.zeros(self._shape, dtype=np.bool_)
        self._blueprint: IntArray = np.full(self._shape, -1, dtype=np.int64)

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        signals = self._tracker.update(facts)
        self._penalise_removals(facts, table)
        legal = legal_slots_by_op(table, self._space.rules)
        ready = ready_to_advance(table, self._space.rules, legal)
        plantable = self._wants_seed(facts, signals)[:, None] & legal[:, LifecycleOp.GERMINATE]
        actions = keep_or_remove(table, self._space.rules, self._settings)
        apply_rule(actions, LifecycleOp.ADVANCE, ready)
        apply_rule(actions, LifecycleOp.GERMINATE, plantable, -slot_ranks(table.enabled))
        self._choose_seeds(actions)
        return Decisions(actions)

    def _penalise_removals(self, facts: EpochFacts, table: SlotTable) -> None:
        """Penalise the blueprints of seeds that were removed, or began a ramp to zero, since the last step.

        Removals are read from the slot table and not from past actions: the governor removes seeds too, and a
        prune can be refused.
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
        """Return bool ``[env]``, true on a plateau with enough epochs left to evaluate a new seed."""
        rules = self._space.rules
        # Without auto-forward a seed spends one epoch in GERMINATED.
        waiting = 0 if rules.auto_forward else 1
        needed = waiting + rules.min_training_epochs + TEMPO_EPOCHS[TEMPO] + 1
        return (signals.plateau_epochs >= self._settings.patience) & (
            facts.epoch + needed <= facts.max_epochs
        )

    def _choose_seeds(self, actions: IntArray) -> None:
        """Set tempo and blueprint of germinations; the blueprint is the first with the least penalty."""
        planting = actions[:, Head.OP] == LifecycleOp.GERMINATE
        actions[:, Head.BLUEPRINT] = self._rotation[self._penalty.argmin(axis=1)]
        actions[:, Head.TEMPO] = TEMPO
        # A seed that does not fit its slot, or is removed in its first epoch, never appears in the slot
        # table. All planted seeds are recorded here, so that the blueprint of a seed that is missing in the
        # next step is penalised.
        envs, slots = np.flatnonzero(planting), actions[planting, Head.SLOT]
        self._kept[envs, slots] = True
        self._blueprint[envs, slots] = actions[planting, Head.BLUEPRINT]


def keep_or_remove(table: SlotTable, rules: LifecycleRules, settings: HeuristicSettings) -> IntArray:
    """Return actions ``[env, head]`` that fossilize one good seed, else prune one bad seed, else wait."""
    legal = legal_slots_by_op(table, rules)
    worthy, unwanted = evaluate(table, rules, settings)
    value = np.nan_to_num(table.contribution)
    actions = wait_everywhere(table.num_envs)
    apply_rule(actions, LifecycleOp.FOSSILIZE, worthy & legal[:, LifecycleOp.FOSSILIZE], value)
    apply_rule(actions, LifecycleOp.PRUNE, unwanted & legal[:, LifecycleOp.PRUNE], -value)
    return actions


def evaluate(
    table: SlotTable, rules: LifecycleRules, settings: HeuristicSettings
) -> tuple[BoolArray, BoolArray]:
    """Return two bool arrays ``[env, slot]``: seeds to fossilize and seeds to prune.

    A seed without a measured contribution is neither fossilized nor pruned, unless it is stuck in TRAINING or
    BLENDING.
    """
    blending, holding = table.stage == Stage.BLENDING, table.stage == Stage.HOLDING
    # In BLENDING, epochs are counted from the end of the alpha ramp, because the contribution at partial
    # alpha does not predict the contribution at full alpha.
    beyond = table.epochs_in_stage - _stage_length(table, rules)
    overdue = beyond >= settings.stuck_epochs
    undecided = holding & overdue & table.measured
    margin = np.where(undecided, 0.0, CONFIDENCE_Z * table.contribution_error)

    worthy = holding & (table.contribution - margin > 0.0)
    if rules.strict_fossilize:
        # Gate G5 would refuse to fossilize a seed below ``min_contribution`` at every step, and no later rule
        # would be applied.
        lower = table.contribution - CONFIDENCE_Z * table.contribution_error
        worthy &= lower >= rules.min_contribution

    at_rest = (blending | holding) & ~table.ramping
    seen = beyond >= EVALUATION_EPOCHS
    hurts = at_rest & seen & (table.contribution + margin < 0.0)
    waiting = (table.stage == Stage.TRAINING) | (blending & ~table.ramping)
    stuck = undecided | (waiting & overdue)
    return worthy, (hurts | stuck) & ~worthy


def _stage_length(table: SlotTable, rules: LifecycleRules) -> IntArray:
    """Return the regular number of epochs ``[env, slot]`` of a slot's stage; 0 for stages without one."""
    length = np.where(table.stage == Stage.TRAINING, rules.min_training_epochs, 0)
    return np.where(table.stage == Stage.BLENDING, table.ramp_epochs, length)


def slot_ranks(enabled: BoolArray) -> FloatArray:
    """Return the distance ``[env, slot]`` of every enabled slot from the middle of the enabled slots.

    The heuristic controller germinates in the free slot with the smallest distance.
    """
    index: FloatArray = np.cumsum(enabled, axis=1, dtype=np.float64) - 1.0
    return np.abs(index - 0.5 * index[:, -1:])


def default_rotation(space: ActionSpace) -> tuple[int, ...]:
    """Return the selectable blueprints in order of ``STRONGEST_FIRST``, then other blueprints by index.

    Blueprints are matched by name: a user's blueprint may have the index of a built-in blueprint for another
    kind of host.
    """
    index_of = {space.blueprint_names[index]: index for index in space.blueprints}
    order = max(STRONGEST_FIRST, key=lambda names: len(index_of.keys() & set(names)))
    ranked = [index_of[name] for name in order if name in index_of]
    return (*ranked, *(index for index in space.blueprints if index not in ranked))
