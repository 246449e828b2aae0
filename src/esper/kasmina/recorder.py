"""Rows of telemetry about one network that grows: decisions, stage changes, epochs, seeds, episodes,
alerts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from esper.kasmina.actuator import Outcome
from esper.kasmina.contributions import Contributions
from esper.kasmina.recovery import Intervention
from esper.leyline import EnvFacts, EventSink, PolicyOutput, Reward, SlotTable, freshness, rows
from esper.leyline.factored_actions import NUM_OPS, OP_WAIT, BoolArray, FloatArray, Head, IntArray, heads_read

PHASES: Final = ("act", "train", "measure", "rest")


class RowKey(NamedTuple):
    """First columns of every row about an episode."""

    env: int
    episode: int
    attempt: int
    iteration: int | None
    epoch: int


def _columns(row: type[rows.Row], place: RowKey, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a telemetry row of type ``row``: all entries of ``place``, and the row's columns
    that are in ``source``. Non-finite values of ``source`` become None."""
    known_here = {name: rows.known(source[name]) for name in row.__struct_fields__ if name in source}
    return known_here | place._asdict()


def counterfactual_rows(
    place: RowKey, result: Contributions, in_forward: BoolArray
) -> Iterator[rows.CounterfactualRow]:
    """Yield one telemetry row per on/off configuration, or none if no seed was switched off; ``in_forward``
    marks the slots with a blended seed."""
    if not result.slots:
        return
    for configuration, score, loss in zip(result.configurations, result.scores, result.losses, strict=True):
        on = in_forward.copy()
        on[list(result.slots)] = configuration
        yield rows.CounterfactualRow(
            **place._asdict(), on=on.tolist(), score=rows.known(float(score)), loss=float(loss)
        )


class Recorder:
    """Counts the decisions about one network, and sends telemetry rows about the network to a sink.

    Args:
        table: Slot table of the network, with one row.
        key: Function that returns the first columns of the next row.
    """

    def __init__(self, table: SlotTable, key: Callable[[], RowKey]) -> None:
        self.sink: EventSink | None = None
        self._table = table
        self._key = key
        self.op_counts = [0] * NUM_OPS
        self.refused = 0
        self._decision: rows.DecisionRow | None = None

    def emit(self, emitted: Iterable[rows.Row]) -> None:
        """Send telemetry rows to the sink, if there is one."""
        if self.sink is not None:
            for row in emitted:
                self.sink.emit(row)

    def decided(self, action: IntArray, alpha: FloatArray, legal: BoolArray, outcome: Outcome) -> None:
        """Count a decision by its op, and build its telemetry row.

        Args:
            action: Canonical action, one index per head, ``[head]``.
            alpha: Alpha of the action's slot before the action, ``[1]``.
            legal: Mask ``[op, slot]`` of the actions that were legal.
            outcome: Result of executing the action.
        """
        self.op_counts[int(action[Head.OP])] += 1
        self.refused += not outcome.succeeded
        self._decision = rows.DecisionRow(
            **self._key()._asdict(),
            action=action.tolist(),
            read=heads_read(action[None], alpha)[0].tolist(),
            forced=not np.delete(legal.any(axis=1), OP_WAIT).any(),
            succeeded=outcome.succeeded,
            refused_by=outcome.refused_by,
            failed_checks=list(outcome.failed_checks),
        )

    def emit_last_action(self, policy: PolicyOutput | None = None, reward: Reward | None = None) -> None:
        """Emit the telemetry row of the last decision, with the policy's output and the reward if given."""
        if self._decision is not None:
            columns = {} if policy is None else rows.known(policy._asdict())
            if reward is not None:
                columns |= {
                    "reward": rows.known(reward.total),
                    "reward_terms": rows.known(dict(reward.terms)),
                }
            self.emit([msgspec.structs.replace(self._decision, **columns)])

    def moves(self, moves: Sequence[rows.StageMove], score: float | None) -> None:
        """Emit one telemetry row per stage change; ``score`` is the last validation score."""
        if self.sink is None:
            return
        for move in moves:
            row = rows.TransitionRow(
                **self._key()._asdict(),
                slot=move.slot,
                seed=move.seed_id,
                blueprint=move.blueprint,
                from_stage=int(move.origin),
                to_stage=int(move.target),
                cause=move.cause,
                reason=move.reason,
                gate=move.verdict.gate if move.verdict else None,
                passed=list(move.verdict.passed) if move.verdict else [],
                score=score,
                contribution=rows.known(move.contribution),
                age=move.age,
            )
            self.emit([row])

    def interventions(self, interventions: Iterable[Intervention], score: float | None) -> None:
        """Emit the telemetry rows of the governor's interventions: stage changes, and one alert per
        intervention."""
        for each in interventions:
            self.moves(each.moves, score)
            key = self._key()
            row = rows.AlertRow(
                **key._asdict(),
                rule=each.alarm.kind,
                event="raised",
                severity="error",
                scope=f"environment {key.env}",
                value=rows.known(each.alarm.loss),
                limit=rows.known(each.alarm.limit),
                hint=f"the governor {each.answer}",
            )
            self.emit([row])

    def epoch(
        self, facts: EnvFacts, measured: Contributions, seconds: Mapping[str, float], **columns: Any
    ) -> None:
        """Emit the telemetry rows of an epoch: one per on/off configuration, one for the epoch, and one per
        seed.

        Args:
            facts: Measurements of the network after the epoch.
            measured: Scores of on/off configurations of the seeds.
            seconds: Seconds spent in each phase of the step, such as ``train`` and ``measure``.
            columns: All other columns of the epoch's row.
        """
        if self.sink is None:
            return
        key, spans = self._key(), {phase: 1000 * span for phase, span in seconds.items()}
        self.emit(counterfactual_rows(key, measured, self._table.in_forward[0]))
        columns |= {"ms": sum(spans.values()), "phase_ms": spans}
        self.emit([rows.EpochRow(**_columns(rows.EpochRow, key, asdict(facts)), **columns)])
        for slot in np.flatnonzero(self._table.occupied[0]).tolist():
            values = {name: column[0, slot].item() for name, column in self._table.arrays().items()}
            values |= {"slot": slot, "seed": values["seed_id"], "params": values["seed_params"]}
            values["freshness"] = freshness(values["epochs_since_measured"])
            self.emit([rows.SeedRow(**_columns(rows.SeedRow, key, values))])

    def episode(self, known_columns: Mapping[str, Any], reward: Reward | None = None) -> None:
        """Emit the telemetry row of the episode; ``reward`` is the undiscounted return of the episode."""
        row = rows.EpisodeRow(
            **_columns(rows.EpisodeRow, self._key(), dict(known_columns) | self.state()),
            total_reward=None if reward is None else rows.known(reward.total),
            reward_terms=None if reward is None else rows.known(dict(reward.terms)),
        )
        self.emit([row])

    def state(self) -> dict[str, Any]:
        return {"op_counts": list(self.op_counts), "refused": self.refused}

    def load_state(self, state: dict[str, Any]) -> None:
        self.op_counts, self.refused = list(state["op_counts"]), state["refused"]
