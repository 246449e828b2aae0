"""The rows of lives that a policy learns from: kept while they are lived, completed when they are paid."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from esper.leyline.events import AlertRow, DecisionRow, EpisodeRow, LifeRow, Row
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.rewards.books import Books
from esper.tamiyo.policy.decider import thoughts
from esper.tolaria.recording import known


class LifeRecorder:
    """The sink of one environment; siblings live as one environment and are told apart here."""

    def __init__(self, env: int) -> None:
        self._env = env
        self.rows: list[Row] = []

    def emit(self, row: Row) -> None:
        if isinstance(row, LifeRow | AlertRow):
            row.env = self._env
        self.rows.append(row)


def complete(
    recorded: Sequence[Sequence[Row]], buffer: TamiyoRolloutBuffer, books: Books, sizes: Sequence[int]
) -> list[Row]:
    """All rows, one environment after the other, with what was thought of each decision and paid for it."""
    rows: list[Row] = []
    for env, lived in enumerate(recorded):
        known_of = thoughts(
            buffer.masks[env], buffer.log_probs[env], buffer.op_probs[env], buffer.values[env], sizes
        )
        paid = {term: np.array([ledger[term][env] for ledger in books.ledgers]) for term in books.ledgers[0]}
        step = born = 0
        for row in lived:
            if isinstance(row, DecisionRow):
                thought = known_of[step]
                row.masked, row.op_probs = thought.masked, list(map(known, thought.op_probs))
                row.log_probs, row.value = list(map(known, thought.log_probs)), known(thought.value)
                row.reward = known(float(buffer.rewards[env, step]))
                row.reward_terms = {term: known(amounts[step]) for term, amounts in paid.items()}
                step += 1
            elif isinstance(row, EpisodeRow):
                row.total_reward = known(float(buffer.rewards[env, born:step].sum()))
                row.reward_terms = {term: known(amounts[born:step].sum()) for term, amounts in paid.items()}
                born = step
        rows += lived
    return rows
