"""Baseline controllers without learning: no growth, random actions, a fixed plan.

Baseline controllers get the same facts and the same legal actions as a policy.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from esper.leyline.factored_actions import (
    CANONICAL_ACTION,
    HEADS_OF_OP,
    BoolArray,
    FloatArray,
    Head,
    IntArray,
    LifecycleOp,
    head_sizes,
)
from esper.leyline.rules import ActionSpace, LifecycleRules
from esper.leyline.signals import Decisions, EpochFacts
from esper.leyline.slot_table import SlotTable, legal_slots_by_op
from esper.leyline.stages import Stage
from esper.leyline.stream_seeds import derive_seed
from esper.tamiyo.schedule import Plan

TRIAL_EPOCHS: Final = 5
"""Number of epochs in HOLDING after which a plan removes a seed that is worth less than its error."""


def wait_everywhere(num_envs: int) -> IntArray:
    """Return actions ``[env, head]`` with the op WAIT in every environment."""
    return np.tile(CANONICAL_ACTION, (num_envs, 1))


def planting(slot: int, blueprint: int) -> IntArray:
    """Return the action ``[env, head]`` that germinates ``blueprint`` in ``slot``, for one environment."""
    actions = wait_everywhere(1)
    actions[0, [Head.OP, Head.SLOT, Head.BLUEPRINT]] = LifecycleOp.GERMINATE, slot, blueprint
    return actions


def apply_rule(
    actions: IntArray, op: LifecycleOp, candidates: BoolArray, preference: FloatArray | float = 0.0
) -> None:
    """Set ``op`` and its preferred candidate slot in environments whose action is still WAIT.

    Args:
        actions: Actions ``[env, head]``, changed in place.
        op: Op that the rule applies.
        candidates: Bool ``[env, slot]``, slots to which the rule applies.
        preference: Values ``[env, slot]``; the candidate slot with the largest value is chosen, the first one
            if several slots have this value. By default the first candidate slot is chosen.
    """
    chosen = (actions[:, Head.OP] == LifecycleOp.WAIT) & candidates.any(axis=1)
    slot = np.where(candidates, preference, -np.inf).argmax(axis=1)
    actions[chosen, Head.OP] = op
    actions[chosen, Head.SLOT] = slot[chosen]


def ready_to_advance(table: SlotTable, rules: LifecycleRules, legal: BoolArray) -> BoolArray:
    """Return bool ``[env, slot]``: seeds that have completed their stage, so that ADVANCE would be accepted.

    With auto-forward every entry is false, since ADVANCE is never legal.
    """
    incubated = (table.stage == Stage.TRAINING) & (table.epochs_in_stage >= rules.min_training_epochs)
    blended = (table.stage == Stage.BLENDING) & ~table.ramping & (table.alpha_target == 1.0)
    over: BoolArray = (table.stage == Stage.GERMINATED) | incubated | blended
    return legal[:, LifecycleOp.ADVANCE] & over


class OffController:
    """Controller that waits in every step: the host is trained without growth."""

    name = "off"

    def __init__(self, space: ActionSpace) -> None:
        self.space = space

    def reset(self, episode: int) -> None:
        """Do nothing, since OffController has no state."""

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        return Decisions(wait_everywhere(table.num_envs))


class RandomController:
    """Controller that draws uniformly a legal op, a legal slot of the op, and each head that the op reads.

    Row ``i`` of the slot table belongs to environment ``env_indices[i]`` of the run. Each environment has its
    own random stream, so the actions in one environment do not depend on the number of environments.
    """

    name = "random"

    def __init__(self, space: ActionSpace, rng_seed: int, env_indices: Sequence[int]) -> None:
        self._space = space
        self._rng_seed = rng_seed
        self._env_indices = tuple(env_indices)
        self._sizes = head_sizes(space.slot_config.num_slots)
        self.reset(0)

    def reset(self, episode: int) -> None:
        """Create the random streams that draw the actions of ``episode``."""
        self._streams = [
            np.random.default_rng(derive_seed(self._rng_seed, "env", env, "episode", episode, "decider"))
            for env in self._env_indices
        ]

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        legal = legal_slots_by_op(table, self._space.rules)
        rows = [self._draw(rng, legal[env]) for env, rng in enumerate(self._streams)]
        return Decisions(np.array(rows, dtype=np.int64))

    def _draw(self, rng: np.random.Generator, legal: BoolArray) -> IntArray:
        """Draw one action ``[head]``; its op and slot are a pair from ``legal``, bool ``[op, slot]``."""
        action = CANONICAL_ACTION.copy()
        action[Head.OP] = op = rng.choice(np.flatnonzero(legal.any(axis=1)))
        action[Head.SLOT] = rng.choice(np.flatnonzero(legal[op]))
        for head in np.flatnonzero(HEADS_OF_OP[op])[2:]:
            selectable = self._space.blueprints if head == Head.BLUEPRINT else self._sizes[head]
            action[head] = rng.choice(selectable)
        return action


class PeriodicController:
    """Controller that follows a fixed plan of germinations, the same in every environment.

    In each step the controller takes the first possible of these actions: a germination that is planned for
    the step, FOSSILIZE, PRUNE of a seed after its trial, ADVANCE of a seed whose stage is complete (only
    without auto-forward), WAIT.

    Args:
        space: Action space of the networks.
        plan: Plan of the germinations.
        keeps_all: Whether every seed becomes permanent; otherwise only seeds that are worth more than their
            error, and the others are pruned after ``TRIAL_EPOCHS`` epochs.
    """

    name = "periodic"

    def __init__(self, space: ActionSpace, plan: Plan, *, keeps_all: bool = True) -> None:
        self._space = space
        self._plan = plan
        self._keeps_all = keeps_all

    def reset(self, episode: int) -> None:
        """Do nothing, since a plan depends only on the epoch of each environment."""

    def unworthy(self, table: SlotTable) -> BoolArray:
        """Return bool ``[env, slot]``: seeds on trial that are not worth more than their standard error, or
        than 0 if the error is unknown."""
        worth = np.nan_to_num(table.contribution) > np.nan_to_num(table.contribution_error)
        return table.live & table.in_forward & ~worth & (not self._keeps_all)

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        rules = self._space.rules
        legal, unworthy = legal_slots_by_op(table, rules), self.unworthy(table)
        measured = legal[:, LifecycleOp.FOSSILIZE]
        actions = wait_everywhere(table.num_envs)
        for env, action in enumerate(actions):
            due = self._plan.due(int(facts.epoch[env]), legal[env, LifecycleOp.GERMINATE])
            if due is not None:
                slot, seed = due
                action[: Head.ALPHA_TARGET + 1] = LifecycleOp.GERMINATE, slot, *seed
        apply_rule(actions, LifecycleOp.FOSSILIZE, measured & ~unworthy)
        is_over = table.epochs_in_stage >= TRIAL_EPOCHS
        apply_rule(actions, LifecycleOp.PRUNE, measured & unworthy & is_over)
        apply_rule(actions, LifecycleOp.ADVANCE, ready_to_advance(table, rules, legal))
        return Decisions(actions)
