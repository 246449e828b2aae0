"""The rows of episodes that a policy learns from: kept while they are lived, completed as they are paid."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from esper.leyline.events import DecisionRow, EpisodeRow, Row
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.rewards.families import Ledger
from esper.tamiyo.policy.controller import policy_outputs
from esper.tolaria.recording import known


class EpisodeRecorder:
    """The sink of one environment."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget everything: the environment is reset."""
        self.rows: list[Row] = []
        self.completed = 0
        """How many of the rows are complete."""
        self.born = 0
        """The step at which the present episode began."""

    def emit(self, row: Row) -> None:
        self.rows.append(row)


def complete(
    recorders: Sequence[EpisodeRecorder],
    buffer: TamiyoRolloutBuffer,
    ledgers: Sequence[Ledger],
    sizes: Sequence[int],
) -> list[Row]:
    """The rows of the last step of ``buffer``, one environment after the other.

    A decision is given what was policy_output of it and paid for it, an episode that ended what it was paid in all.
    """
    step = buffer.length - 1
    known_of = policy_outputs(
        buffer.masks[:, step],
        buffer.log_probs[:, step],
        buffer.op_probs[:, step],
        buffer.values[:, step],
        sizes,
    )
    rows: list[Row] = []
    for env, (recorder, policy_output) in enumerate(zip(recorders, known_of, strict=True)):
        came = recorder.rows[recorder.completed :]
        for row in came:
            if isinstance(row, DecisionRow):
                row.masked, row.op_probs = policy_output.masked, list(map(known, policy_output.op_probs))
                row.log_probs, row.value = (
                    list(map(known, policy_output.log_probs)),
                    known(policy_output.value),
                )
                row.reward = known(float(buffer.rewards[env, step]))
                row.reward_terms = {term: known(amounts[env]) for term, amounts in ledgers[step].items()}
            elif isinstance(row, EpisodeRow):
                lived = slice(recorder.born, step + 1)
                row.total_reward = known(float(buffer.rewards[env, lived].sum()))
                row.reward_terms = {
                    term: known(np.array([ledger[term][env] for ledger in ledgers[lived]]).sum())
                    for term in ledgers[step]
                }
                recorder.born = step + 1
        recorder.completed = len(recorder.rows)
        rows += came
    return rows
