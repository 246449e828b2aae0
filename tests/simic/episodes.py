"""Recorded episodes of ``GrowthEnv`` under a reward family, and expected values of its potentials."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline import EpochFacts, LifecycleOp, LifecycleRules, SlotTable, Stage
from esper.simic.config import TrainingConfig
from esper.simic.rewards.families import FamilyName, RewardLog
from esper.simic.training.policy_env import GrowthEnv
from esper.simic.training.rollout import ActionStreams
from esper.tamiyo.policy.features import Observation
from esper.tolaria.env import EpisodeReport
from esper.tolaria.tasks.spec import TaskSpec
from esper.tolaria.twin import run_without_growth
from tests.simic.oracles.trial import uniform_actions
from tests.tolaria.building import WAIT, IntArray, action, plant, tiny_task

RENT, SCALE = 0.5, 5.0
AT_ONCE = LifecycleRules(min_training_epochs=0, min_prune_age=1, embargo_epochs=1)


class Episode(NamedTuple):
    """Record of one episode in two environments; every array is ``[step, env]``."""

    rewards: NDArray[np.float64]
    terms: dict[str, NDArray[np.float64]]
    log: RewardLog
    facts: list[EpochFacts]
    """``EpochFacts`` after each epoch; entry 0 has those of the untrained host."""
    tables: list[SlotTable]
    reports: list[EpisodeReport]
    guess_losses: list[float]
    """Loss of predicting the class frequencies, for each environment."""


def task_with(rules: LifecycleRules = AT_ONCE, horizon: int = 8, **changes: Any) -> TaskSpec:
    return tiny_task(rules=rules, horizon=horizon, batches_per_epoch=2, **changes)


def growth(task: TaskSpec, family: FamilyName) -> GrowthEnv:
    config = TrainingConfig(reward_family=family, rent=RENT, reward_scale=SCALE)
    return GrowthEnv(task, config, rng_seed=3, env_indices=range(2))


def play(env: GrowthEnv, script: Sequence[IntArray] | None = None, rng_seed: int = 0) -> Episode:
    """Run one episode with the actions ``script`` in the first environment and WAIT in the second.

    Without a script, actions are random in every environment.

    Random actions never prune in the first environment, so that some seeds can be fossilized.
    """
    facts: list[EpochFacts] = []
    tables: list[SlotTable] = []
    observe = env._observe

    def watched(now: EpochFacts) -> Observation:
        facts.append(now)
        tables.append(env.vector.table.copy())
        return observe(now)

    env._observe = watched  # type: ignore[method-assign]
    observation = env.reset()
    streams = ActionStreams(rng_seed, env.env_indices)
    rewards = []
    for number in range(env.horizon):
        if script is None:
            observation.masks.slot_by_op[0, LifecycleOp.PRUNE] = False
            actions = uniform_actions(observation.masks, streams.draw()).numpy()
        else:
            actions = np.stack([script[number] if number < len(script) else WAIT, WAIT])
        step = env.step(actions)
        observation = step.observation
        rewards.append(step.reward)
    log = env.reward_log
    terms = {name: np.array([step[name] for step in log.terms]) for name in log.terms[0]}
    guesses = [guess_loss(one.host.splits.train.y.numpy()) for one in env.vector.envs]
    return Episode(np.array(rewards), terms, log, facts, tables, env.reports, guesses)


def guess_loss(answers: NDArray[np.int64]) -> float:
    """Return the loss of predicting the class frequencies p: the entropy −Σ p·ln p."""
    _, counts = np.unique(answers, return_counts=True)
    return -sum(count / answers.size * math.log(count / answers.size) for count in counts)


def played(
    family: FamilyName,
    script: Sequence[IntArray] | None = None,
    task: TaskSpec | None = None,
    rng_seed: int = 0,
) -> Episode:
    return play(growth(task or task_with(), family), script, rng_seed)


@cache
def busy(family: FamilyName) -> Episode:
    """Return a recorded episode in which one seed is fossilized and two seeds are pruned."""
    return played(family, BUSY)


@cache
def idle(family: FamilyName) -> Episode:
    """Return a recorded episode with WAIT at every step."""
    return played(family, [])


BUSY = [
    plant(1),
    plant(0),
    action(LifecycleOp.PRUNE, 0),
    WAIT,
    action(LifecycleOp.FOSSILIZE, 1),
    plant(2),
    action(LifecycleOp.PRUNE, 2),
]


@cache
def twin_scores_again(horizon: int, env: int) -> tuple[float, ...]:
    """Return the do-nothing twin's scores by epoch, computed without the cache of scores."""
    return run_without_growth(task_with(horizon=horizon), rng_seed=3, env=env).val_scores


def points_won(episode: Episode, epoch: int) -> list[float]:
    horizon = len(episode.facts) - 1
    twins = [twin_scores_again(horizon, env)[epoch] for env in range(2)]
    return (episode.facts[epoch].val_score - twins).tolist()


def points_contributed(episode: Episode, epoch: int) -> list[float]:
    blended = np.isin(episode.tables[epoch].stage, (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED))
    return [
        sum(value for value in row[counts] if not math.isnan(value))
        for row, counts in zip(episode.tables[epoch].contribution, blended, strict=True)
    ]


def state_worth(family: FamilyName, episode: Episode, epoch: int) -> dict[str, list[float]]:
    """Return the value that each potential of the reward family must have, in points of score."""
    facts = episode.facts[epoch]
    rent = [-RENT * params / 10 for params in facts.grown_params]
    if family == "paired":
        return {"lead": points_won(episode, epoch), "rent": rent}
    if family == "contribution":
        return {"contribution": points_contributed(episode, epoch), "rent": rent}
    if family == "loss":
        return {"loss": (-100 * facts.val_loss / episode.guess_losses).tolist(), "rent": rent}
    if family == "log_loss":
        return {"log_loss": (-100 * np.log(facts.val_loss / episode.guess_losses)).tolist(), "rent": rent}
    over = epoch == len(episode.facts) - 1
    return {"score": facts.val_score.tolist() if over else [0.0] * 2, "rent": rent if over else [0.0] * 2}
