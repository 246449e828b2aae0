"""Controllers that do not learn: nothing, chance, a fixed plan.

They are the arms that a policy must beat, so they see the same facts and the same legality as it.
"""

from collections.abc import Sequence

import numpy as np

from esper.leyline import (
    CANONICAL_ACTION,
    HEADS_OF_OP,
    ActionSpace,
    EpochFacts,
    Head,
    LifecycleOp,
    LifecycleRules,
    SlotTable,
    Stage,
    derive_seed,
    head_sizes,
    legal_slots_by_op,
)
from esper.leyline.factored_actions import BoolArray, IntArray
from esper.leyline.protocols import Decisions
from esper.tamiyo.schedule import Plan


def wait_everywhere(num_envs: int) -> IntArray:
    """``[env, 8]``: WAIT in every environment."""
    return np.tile(CANONICAL_ACTION, (num_envs, 1))


def ready_to_advance(table: SlotTable, rules: LifecycleRules, legal: BoolArray) -> BoolArray:
    """``[env, slot]``: the stage is over and nothing but ADVANCE moves it on (auto-forward is off)."""
    incubated = (table.stage == Stage.TRAINING) & (table.epochs_in_stage >= rules.min_training_epochs)
    blended = (table.stage == Stage.BLENDING) & ~table.ramping & (table.alpha_target == 1.0)
    over: BoolArray = (table.stage == Stage.GERMINATED) | incubated | blended
    return legal[:, LifecycleOp.ADVANCE] & over


class OffController:
    """Never does anything."""

    name = "off"

    def __init__(self, space: ActionSpace) -> None:
        self.space = space

    def reset(self, episode: int) -> None:
        """Nothing to forget."""

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        return Decisions(wait_everywhere(table.num_envs))


class RandomController:
    """Uniform over legal ops, then over the legal slots of that op, then over each head it reads.

    Row ``i`` of the table is environment ``env_indices[i]`` of the run and draws from that
    environment's own stream: how many others there are changes nothing in it.
    """

    name = "random"

    def __init__(self, space: ActionSpace, rng_seed: int, env_indices: Sequence[int]) -> None:
        self._space = space
        self._rng_seed = rng_seed
        self._env_indices = tuple(env_indices)
        self._sizes = head_sizes(space.slot_config.num_slots)
        self.reset(0)

    def reset(self, episode: int) -> None:
        """Begin the streams of ``episode``."""
        self._streams = [
            np.random.default_rng(derive_seed(self._rng_seed, "env", env, "episode", episode, "decider"))
            for env in self._env_indices
        ]

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        legal = legal_slots_by_op(table, self._space.rules)
        rows = [self._draw(rng, legal[env]) for env, rng in enumerate(self._streams)]
        return Decisions(np.array(rows, dtype=np.int64))

    def _draw(self, rng: np.random.Generator, legal: BoolArray) -> IntArray:
        """One action ``[8]`` from the legal pairs ``[op, slot]``."""
        action = CANONICAL_ACTION.copy()
        action[Head.OP] = op = rng.choice(np.flatnonzero(legal.any(axis=1)))
        action[Head.SLOT] = rng.choice(np.flatnonzero(legal[op]))
        for head in np.flatnonzero(HEADS_OF_OP[op])[2:]:
            selectable = self._space.blueprints if head == Head.BLUEPRINT else self._sizes[head]
            action[head] = rng.choice(selectable)
        return action


class PeriodicController:
    """Follows a plan fixed in advance, the same in every environment.

    A germination due at this step comes first; otherwise a HOLDING seed is fossilized as soon as
    that is legal, and without auto-forward the seed that is ready is moved on.
    """

    name = "periodic"

    def __init__(self, space: ActionSpace, plan: Plan) -> None:
        self._space = space
        self._plan = plan

    def reset(self, episode: int) -> None:
        """Nothing to forget: the plan follows each environment's own epoch."""

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        rules = self._space.rules
        legal = legal_slots_by_op(table, rules)
        ready = ready_to_advance(table, rules, legal)
        actions = wait_everywhere(table.num_envs)
        for env, action in enumerate(actions):
            due = self._plan.due(int(facts.epoch[env]), legal[env, LifecycleOp.GERMINATE])
            if due is not None:
                slot, seed = due
                action[: Head.ALPHA_TARGET + 1] = LifecycleOp.GERMINATE, slot, *seed
            elif legal[env, LifecycleOp.FOSSILIZE].any():
                action[: Head.SLOT + 1] = LifecycleOp.FOSSILIZE, np.argmax(legal[env, LifecycleOp.FOSSILIZE])
            elif ready[env].any():
                action[: Head.SLOT + 1] = LifecycleOp.ADVANCE, np.argmax(ready[env])
        return Decisions(actions)
