"""Oracle environments with the real lifecycle of seeds (legality, gates, delays, alpha) and no network.

A formula gives the contribution of every seed, to which measurement noise is added. The reward family is
``paired``, so the return is the sum of the committed seeds' contributions minus their rent.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.kasmina import actuator
from esper.leyline import EpochFacts, GradientStatistics, SlotConfig, SlotTable, Stage, legal_slots_by_op
from esper.leyline.factored_actions import BLUEPRINT_NAMES, BlueprintAction, Head, LifecycleOp, canonicalise
from esper.leyline.rules import ActionSpace, LifecycleRules
from esper.simic.rewards.families import FAMILIES, RewardFunction, RewardInputs, total
from esper.tamiyo.policy.features import Observation, Observer
from tests.simic.oracles.toy_envs import NUM_SLOTS, PARAMS, Actions, Oracle, Rewards

NOISE = 2.0
"""Standard deviation of the noise in measured scores and contributions, in points of score."""
SCALE = 5.0
RENT = 0.02
HORIZON = 20
HOST_SCORE = 20.0
GUESS_LOSS = 2.3
HOST_PARAMS = 200
SPACE = ActionSpace(
    SlotConfig.of_count(NUM_SLOTS),
    LifecycleRules(min_training_epochs=2, min_prune_age=3, embargo_epochs=2),
    tuple(sorted(int(blueprint) for blueprint in PARAMS)),
    BLUEPRINT_NAMES,
)


@dataclass(slots=True)
class TableBody:
    """Replacement for a growing network: it has no modules, and its seeds exist only in the slot table."""

    table: SlotTable
    rules: LifecycleRules = SPACE.rules
    action_space: ActionSpace = SPACE

    def germinate(self, slot: int, blueprint: int, style: int) -> int:
        return PARAMS[BlueprintAction(blueprint)]

    def remove(self, slot: int) -> None:
        """Do nothing, since no module is attached for the seed."""

    def is_finite(self, slot: int) -> bool:
        return True

    def sync(self) -> None:
        """Do nothing, since there are no modules to update from the slot table."""


class LifecycleOracle(Oracle):
    """Base class of oracles with a slot table, in which ``gains`` gives the contribution of every seed."""

    horizon = HORIZON

    def __init__(self, rng_seed: int, env_indices: Sequence[int]) -> None:
        super().__init__(rng_seed, env_indices)
        self.table = SlotTable.empty(self.num_envs, NUM_SLOTS)
        self._bodies = [TableBody(self.table.row(env)) for env in range(self.num_envs)]
        self._observer = Observer(self.num_envs, self.table.num_slots, self.table.num_slots)
        self._rewards = RewardFunction(FAMILIES["paired"], SCALE)

    def start(self) -> None:
        self.table.assign(SlotTable.empty(self.num_envs, NUM_SLOTS))
        self._observer.reset()
        self._numbers = count()
        self._facts = self._measured(0, self._everywhere(HOST_SCORE), LifecycleOp.WAIT, True)
        self._rewards.begin(self._inputs())

    def observe(self) -> Observation:
        return self._observer.observe(self._facts, self.table, SPACE)

    def rewards(self, actions: Actions) -> Rewards:
        succeeded = self._act(actions)
        self.train()
        epoch = self.step_number + 1
        for body in self._bodies:
            actuator.tick(body)
        self._measure_seeds()
        for body in self._bodies:
            actuator.advance(body)
            if epoch == HORIZON:
                actuator.commit(body)
        score = np.clip(HOST_SCORE + self.gains().sum(axis=1) + self._noise(), 0.0, 100.0)
        self._facts = self._measured(epoch, score, actions[:, Head.OP], succeeded)
        return total(self._rewards.reward_terms(self._inputs()))

    def _act(self, actions: Actions) -> NDArray[np.bool_]:
        alpha = self.table.alpha[np.arange(self.num_envs), actions[:, Head.SLOT]]
        canonical = canonicalise(actions, alpha)
        legal = legal_slots_by_op(self.table, SPACE.rules)
        numbered = zip(self._bodies, canonical, self._numbers, legal, strict=False)
        return np.array([actuator.apply_action(*one).succeeded for one in numbered])

    def _noise(self, *shape: int) -> NDArray[np.float64]:
        return np.stack([rng.normal(0.0, NOISE, shape) for rng in self.rngs])

    def _measure_seeds(self) -> None:
        """Record normal gradients of every live seed, and a noisy contribution of every blended seed."""
        gains, noise = self.gains(), self._noise(self.table.num_slots)
        for env, slot in np.argwhere(self.table.live):
            self.table.record_gradients(
                env, slot, GradientStatistics(1.0, 1.0, vanishing=False, exploding=False), ratio=1.0
            )
        for env, slot in np.argwhere(self.table.in_forward):
            self.table.record_contribution(env, slot, gains[env, slot] + noise[env, slot], NOISE)

    def _everywhere(self, value: Any) -> NDArray[Any]:
        return np.full(self.num_envs, value)

    def _measured(self, epoch: int, score: NDArray[np.float64], op: Any, succeeded: Any) -> EpochFacts:
        grown = (self.table.seed_params * self.table.occupied).sum(axis=1)
        loss = GUESS_LOSS * (1.0 - score / 100.0)
        return EpochFacts(
            epoch=self._everywhere(epoch),
            max_epochs=self._everywhere(HORIZON),
            train_loss=loss,
            train_score=score,
            val_loss=loss,
            val_score=score,
            params=HOST_PARAMS + grown,
            grown_params=grown,
            param_budget=self._everywhere(20 * HOST_PARAMS),
            host_gradient_norm=self._everywhere(1.0),
            last_op=self._everywhere(op),
            last_success=self._everywhere(succeeded),
            ended=self._everywhere(epoch == HORIZON),
            rolled_back=self._everywhere(False),
            minibatches=self._everywhere(epoch),
            minibatches_left=self._everywhere(np.nan),
            candidate_cost=self._everywhere(np.nan),
            cost=self._everywhere(np.nan),
            races=(None,) * self.num_envs,
        )

    def _inputs(self) -> RewardInputs:
        return RewardInputs(self._facts, self.table, self._everywhere(HOST_SCORE), GUESS_LOSS, RENT)

    def train(self) -> None:
        """Update the hidden state of the oracle for one epoch, before the contributions are measured."""

    @abstractmethod
    def gains(self) -> NDArray[np.float64]:
        """Return the true contribution ``[env, slot]`` of every seed, in points of score."""


def _payoff(points: float, blueprint: BlueprintAction) -> float:
    """Compute the return of an episode that commits one seed with a contribution of ``points``."""
    return SCALE * (points / 100.0 - RENT * PARAMS[blueprint] / 1000.0)


WORTH = {
    BlueprintAction.CONV_LIGHT: (8.0, 15.0, 5.0),
    BlueprintAction.NORM: (1.0, 1.0, 1.0),
    BlueprintAction.DEPTHWISE: (4.0, 6.0, 12.0),
    BlueprintAction.CONV_SMALL: (-2.0, 2.0, 1.0),
    BlueprintAction.CONV_HEAVY: (20.0, 10.0, 9.0),
}
"""Contribution of a seed by blueprint, in points of score; one value for each of the three slots."""


class Lifecycle(LifecycleOracle):
    """Oracle with a best blueprint per slot; seeds have their full contribution from the eighth epoch on."""

    style_factor = np.array([1.0, 0.7, 1.0, 0.85])
    ripe_age = 8
    optimum = sum(max(_payoff(points[slot], b) for b, points in WORTH.items()) for slot in range(3))

    def gains(self) -> NDArray[np.float64]:
        table = self.table
        # The last row of ``worth``, index -1, is the zero contribution of an empty slot.
        worth = np.zeros((len(BLUEPRINT_NAMES) + 1, table.num_slots))
        for blueprint, points in WORTH.items():
            worth[blueprint] = points
        ripeness = np.minimum(table.age / self.ripe_age, 1.0)
        value = worth[table.blueprint, np.arange(table.num_slots)] * self.style_factor[table.style]
        return value * ripeness * table.alpha * table.in_forward


class Scaffold(LifecycleOracle):
    """Oracle in which a seed in slot 2 contributes only after training with a scaffold, a seed in slot 0.

    The contribution is 30 points if a scaffold was in the forward pass during stage TRAINING of the seed in
    slot 2. The scaffold lowers the score by 10 points while it is in the forward pass.
    """

    scaffold, building = 0, 2
    cost, pay = 10.0, 30.0
    optimum = _payoff(pay, BlueprintAction.NORM)

    def start(self) -> None:
        super().start()
        self.supported = np.zeros(self.num_envs, dtype=np.bool_)

    def train(self) -> None:
        occupied, stage = self.table.occupied, self.table.stage
        training = stage[:, self.building] == Stage.TRAINING
        in_forward = self.table.in_forward[:, self.scaffold]
        self.supported = (self.supported & occupied[:, self.building]) | (training & in_forward)

    def gains(self) -> NDArray[np.float64]:
        weight = self.table.alpha * self.table.in_forward
        gains = np.zeros(self.table.stage.shape)
        gains[:, self.scaffold] = -self.cost
        gains[:, self.building] = self.pay * self.supported
        return gains * weight
