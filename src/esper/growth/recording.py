"""Rows of a user's network that grows: the tables of any run, with what a user's loop knows of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from math import isfinite, nan
from typing import Any

import numpy as np

from esper.growth.body import GrowingBody
from esper.growth.events import Narrator
from esper.leyline import HEAD_NAMES, OP_NAMES, OP_WAIT, STAGE_NAMES, Controller, EnvFacts, Head, StageMove
from esper.leyline.factored_actions import IntArray, heads_read
from esper.leyline.legality import legal_slots_by_op
from esper.leyline.protocols import EventSink
from esper.leyline.rows import SCHEMA_VERSION, CounterfactualRow, EpisodeRow, Row, RunRow, known
from esper.provenance import git_revision, hardware, versions
from esper.tolaria import recording
from esper.tolaria.actuator import Outcome
from esper.tolaria.recording import Decision, Place


class Recorder:
    """Makes rows of what happens to one body, for a sink where there is one.

    The metric is a loss. Scores of 0 to 100, a twin, a test part and rewards are unknown here.
    """

    def __init__(self, body: GrowingBody, narrator: Narrator, controller: Controller | None) -> None:
        self._body, self._narrator, self._controller = body, narrator, controller
        self.sink: EventSink | None = None
        self._op_counts = [0] * len(OP_NAMES)
        self._refused = 0
        self._began = self._trained = time.perf_counter()
        self._train_loss = self._learning_rate = nan
        self._asked: Decision | None = None

    def describe(self, name: str, config: Mapping[str, Any], device: str) -> RunRow:
        """The row of the run itself; ``config`` is how ``grow`` was called."""
        space, net = self._body.action_space, self._body.net
        return RunRow(
            schema_version=SCHEMA_VERSION,
            name=name,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            task=type(net).__name__,
            controller="none" if self._controller is None else self._controller.name,
            rng_seed=None,
            config=dict(config) | {"episodes": 1},
            data_hash=None,
            git_revision=git_revision(),
            versions=versions(),
            hardware=hardware(),
            host_params=self._params() - self._body.grown_params(),
            slots=list(space.slot_config.slot_ids),
            ops=list(OP_NAMES),
            heads=list(HEAD_NAMES),
            blueprints=list(space.blueprint_names),
            stages=list(STAGE_NAMES),
            head_choices=[list(names) for names in space.choice_names],
            horizon=config["epochs"],
            metric="val_loss",
            iterations=None,
            envs=1,
            devices=[device],
        )

    # --- an epoch -------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Training begins."""
        self._began = time.perf_counter()

    def end_training(self, train_loss: float, learning_rate: float) -> None:
        """Measuring begins."""
        self._trained = time.perf_counter()
        self._train_loss, self._learning_rate = train_loss, learning_rate

    def measured(self, loss: float, contributions: Mapping[int, float]) -> None:
        """The network with all seeds, and with each of the measured slots off.

        By differences: under BatchNorm both sides of one have statistics of their own.
        """
        every, place = self._body.table.in_forward[0].tolist(), self._place()._asdict()
        found = [(every, loss)] if contributions else []
        for off, value in contributions.items():
            found.append(([on and slot != off for slot, on in enumerate(every)], loss + value))
        self._emit(
            CounterfactualRow(**place, on=on, score=None, loss=value)
            for on, value in found
            if isfinite(value)
        )

    def ended(self, facts: EnvFacts) -> None:
        """An epoch, and the seeds after it."""
        spans = {"train": self._trained - self._began, "measure": time.perf_counter() - self._trained}
        row = recording.epoch_row(
            self._place(),
            replace(facts, train_loss=self._train_loss, val_score=nan),
            spans,
            twin_score=None,
            learning_rate=self._learning_rate,
            skipped_batches=0,
            skipped_steps=0,
        )
        self._emit([row, *recording.seed_rows(self._place(), self._body.table)])

    # --- decisions ------------------------------------------------------------------------------------

    def asked(self, action: IntArray) -> None:
        """A decision is about to be carried out: what is legal is known now."""
        table = self._body.table
        legal = legal_slots_by_op(table, self._body.rules)[0]
        self._asked = Decision(
            place=self._place(),
            action=action,
            read=heads_read(action[None], table.alpha[0, [action[Head.SLOT]]])[0],
            forced=not np.delete(legal.any(axis=1), OP_WAIT).any(),
            outcome=Outcome(False, ()),
        )

    def decided(self, outcome: Outcome) -> None:
        """The decision that was asked for, and what came of it."""
        assert self._asked is not None
        self._op_counts[self._asked.action[Head.OP]] += 1
        self._refused += not outcome.succeeded
        self._emit([recording.decision_row(self._asked._replace(outcome=outcome))])

    def moved(self, moves: Sequence[StageMove]) -> None:
        """Stages that changed."""
        self._emit(recording.transition_rows(self._place(), moves, None))

    # --- the end --------------------------------------------------------------------------------------

    def finished(self, **columns: Any) -> None:
        """The whole training, as one episode; ``columns`` are those that only ``grow`` knows."""
        self._emit(
            [
                EpisodeRow(
                    **self._place()._asdict(),
                    **known(columns),
                    val_score=None,
                    test_score=None,
                    twin_val_score=None,
                    best_val_score=None,
                    host_params=self._params() - self._body.grown_params(),
                    params=self._params(),
                    op_counts=self._op_counts,
                    refused=self._refused,
                    rollbacks=0,
                )
            ]
        )

    def state(self) -> dict[str, Any]:
        return {"op_counts": list(self._op_counts), "refused": self._refused}

    def load_state(self, state: dict[str, Any]) -> None:
        self._op_counts, self._refused = list(state["op_counts"]), state["refused"]

    def _params(self) -> int:
        return sum(p.numel() for p in self._body.net.parameters())

    def _place(self) -> Place:
        """A user's network is one environment with one episode."""
        return Place(0, 0, 0, None, self._narrator.epoch)

    def _emit(self, rows: Iterable[Row]) -> None:
        if self.sink is not None:
            for row in rows:
                self.sink.emit(row)
