"""Invariants of lifecycle, counters and network hold in episodes of random actions."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.leyline import (
    HEADS_OF_OP,
    LEGAL_MOVES,
    NUM_OPS,
    OP_WAIT,
    AlphaTarget,
    EnvFacts,
    Head,
    LifecycleOp,
    LifecycleRules,
    SlotTable,
    Stage,
    derive_seed,
    head_sizes,
    legal_slots_by_op,
)
from esper.leyline.rows import DecisionRow, TransitionRow
from esper.leyline.slot_table import NEVER, IntArray
from esper.leyline.stages import IN_FORWARD
from esper.tolaria.env import MorphEnv
from tests.tolaria.building import SMALL_RULES, WAIT, ListSink, stages_of, started, tiny_task

WIDTHS = (2, 4, 3, 2, 4, 2, 3, 4)
HORIZON = 25
OP_WEIGHTS = np.array([3.0, 2.0, 1.0, 0.5, 2.0, 3.0])
"""Probability weights of random ops; with uniform weights few seeds would reach stage HOLDING."""
RULES = {
    "small": SMALL_RULES,
    "moved by hand": replace(SMALL_RULES, auto_forward=False),
    "strict": replace(SMALL_RULES, strict_fossilize=True, min_contribution=1.0),
    "short watch": replace(SMALL_RULES, min_prune_age=8, fossil_watch_epochs=3),
    "two seeds": replace(SMALL_RULES, max_seeds=2, embargo_epochs=1),
    "no incubation, no embargo": LifecycleRules(min_training_epochs=0, min_prune_age=1, embargo_epochs=0),
}


def random_indices(rng: np.random.Generator, num_slots: int) -> IntArray:
    """Return an action whose heads have uniformly random values, legal or not."""
    return rng.integers(head_sizes(num_slots))


def random_legal(rng: np.random.Generator, env: MorphEnv) -> IntArray:
    """Return an action with a random legal op and a legal slot; its other action heads are random."""
    legal = legal_slots_by_op(env.table, env.model.rules)[0]
    action = WAIT.copy()
    weight = OP_WEIGHTS * legal.any(axis=1)
    action[Head.OP] = op = rng.choice(NUM_OPS, p=weight / weight.sum())
    read = np.flatnonzero(HEADS_OF_OP[op])[2:]
    action[read] = random_indices(rng, env.table.num_slots)[read]
    action[Head.SLOT] = rng.choice(np.flatnonzero(legal[op]))
    if rng.random() < 0.9:
        action[Head.BLUEPRINT] = rng.choice(env.action_space.blueprints)
    if rng.random() < 0.5:
        action[Head.ALPHA_TARGET] = AlphaTarget.FULL
    return action


class WatchedEpisode:
    """Episode that checks the invariants in every step, by comparing the slot table before and after."""

    def __init__(self, num_slots: int, rules: LifecycleRules, rng_seed: int) -> None:
        task = tiny_task(WIDTHS[:num_slots], rules=rules, horizon=HORIZON)
        self.env, self.sink = started(task, rng_seed=rng_seed)
        self.rules = rules
        self.pruned_at: dict[int, int] = {}
        self.succeeded: Counter[int] = Counter()
        self.refused: Counter[str] = Counter()

    def step(self, action: IntArray) -> None:
        env, known = self.env, len(self.sink.rows)
        before = env.table.copy()
        legal = legal_slots_by_op(before, self.rules)[0]
        assert legal.any(axis=1)[OP_WAIT], "waiting is always legal"
        facts = env.step(action)
        fresh = ListSink()
        fresh.rows = self.sink.rows[known:]
        [decision] = fresh.of(DecisionRow)
        moves = fresh.of(TransitionRow)
        self._check_decision(decision, legal, before, moves)
        self._check_moves(moves, before)
        op, slot = decision.action[Head.OP], decision.action[Head.SLOT]
        acted_on = slot if decision.succeeded and op != OP_WAIT else None
        self._check_counters(moves, before, facts, acted_on)
        self._check_embargo(moves)
        self._check_model(facts)

    def _check_decision(
        self, decision: DecisionRow, legal: np.ndarray, before: SlotTable, moves: list[TransitionRow]
    ) -> None:
        op, slot = decision.action[Head.OP], decision.action[Head.SLOT]
        if not legal[op, slot]:
            assert decision.refused_by == "legality"
        else:
            assert decision.refused_by in (None, "G0", "G2", "G3", "G5")
        assert decision.succeeded == (decision.refused_by is None) == (not decision.failed_checks)
        if not decision.succeeded:
            assert not [move for move in moves if move.cause == "policy"]
            self.refused[str(decision.refused_by)] += 1
        self.succeeded[op] += decision.succeeded
        others = np.delete(legal.any(axis=1), OP_WAIT)
        assert decision.forced == (not others.any())

    def _check_moves(self, moves: list[TransitionRow], before: SlotTable) -> None:
        at = before.stage[0].tolist()
        for move in moves:
            assert Stage(move.to_stage) in LEGAL_MOVES[Stage(move.from_stage)]
            assert at[move.slot] == move.from_stage, "the rows contain every move"
            assert move.cause in ("policy", "mechanical")
            at[move.slot] = move.to_stage
        assert at == self.env.table.stage[0].tolist()

    def _check_counters(
        self, moves: list[TransitionRow], before: SlotTable, facts: EnvFacts, acted_on: int | None
    ) -> None:
        table = self.env.table
        for slot in range(table.num_slots):
            own = [move for move in moves if move.slot == slot]
            acted = [move for move in own if move.epoch < facts.epoch]
            settled = [move for move in own if move.epoch == facts.epoch]
            trained = Stage(acted[-1].to_stage if acted else int(before.stage[0, slot]))

            in_stage = 1 if acted else int(before.epochs_in_stage[0, slot]) + 1
            assert table.epochs_in_stage[0, slot] == (0 if settled else in_stage)
            if not table.occupied[0, slot]:
                assert (table.age[0, slot], table.seed_id[0, slot]) == (0, -1)
                assert table.epochs_since_measured[0, slot] == NEVER
                continue
            newborn = table.seed_id[0, slot] != before.seed_id[0, slot]
            assert table.age[0, slot] == (1 if newborn else int(before.age[0, slot]) + 1)
            old_fossil = trained is Stage.FOSSILIZED and in_stage > self.rules.fossil_watch_epochs
            if IN_FORWARD[trained] and not old_fossil:
                assert table.epochs_since_measured[0, slot] == 0
            elif old_fossil:
                # Fossils older than ``fossil_watch_epochs`` are not measured, not even at the commit.
                assert table.epochs_since_measured[0, slot] == before.epochs_since_measured[0, slot] + 1
            else:
                assert table.epochs_since_measured[0, slot] == NEVER
            if before.ramping[0, slot] and slot != acted_on:
                assert table.ramp_elapsed[0, slot] == before.ramp_elapsed[0, slot] + 1

    def _check_embargo(self, moves: list[TransitionRow]) -> None:
        for move in moves:
            if move.to_stage == Stage.PRUNED:
                self.pruned_at[move.slot] = move.epoch
            elif move.to_stage == Stage.DORMANT:
                assert move.epoch - self.pruned_at.pop(move.slot) == self.rules.embargo_epochs + 1

    def _check_model(self, facts: EnvFacts) -> None:
        env, table = self.env, self.env.table
        for index in range(table.num_slots):
            slot, occupied = env.model.slot(index), bool(table.occupied[0, index])
            assert (slot.seed is not None) == occupied
            if slot.graft is not None:
                group = env.model.groups.own_group(index)["params"]
                assert [id(p) for p in group] == [id(p) for p in slot.parameters()]
                assert slot.graft.alpha.item() == np.float32(table.alpha[0, index])
            assert sum(p.numel() for p in slot.parameters()) == table.seed_params[0, index]
            assert all(bool(torch.isfinite(p).all()) for p in slot.parameters())
        assert len(env.host.optimiser.param_groups) == 1 + table.occupied.sum(), "one group for each seed"
        stages = stages_of(env)
        assert env.model.blended == np.flatnonzero(table.in_forward[0]).tolist()
        assert env.model.incubating == [i for i, stage in enumerate(stages) if stage is Stage.TRAINING]
        assert set(env.host.meter.state()["spent"]) == set(np.flatnonzero(table.occupied[0]).tolist())

        full = np.isin(table.stage, (Stage.HOLDING, Stage.FOSSILIZED))
        assert (table.alpha[full] == 1.0).all()
        assert (table.alpha[~table.in_forward] == 0.0).all()
        assert ((table.alpha >= 0.0) & (table.alpha <= 1.0)).all()
        assert not (table.ramping & full).any()
        if self.rules.max_seeds:
            assert table.occupied.sum() <= self.rules.max_seeds
        assert facts.grown_params == table.seed_params.sum()
        assert np.isfinite([facts.val_loss, facts.train_loss, facts.host_gradient_norm]).all()
        if facts.ended:
            assert not table.live.any()


def random_episode(num_slots: int, rules_name: str, name: str, legal_share: float) -> WatchedEpisode:
    rng = np.random.default_rng(derive_seed(0, name, num_slots, rules_name))
    episode = WatchedEpisode(num_slots, RULES[rules_name], rng_seed=int(rng.integers(1000)))
    while not episode.env.ended:
        biased = rng.random() < legal_share
        episode.step(random_legal(rng, episode.env) if biased else random_indices(rng, num_slots))
    return episode


@pytest.mark.parametrize(
    ("num_slots", "rules_name", "met"),
    [
        (3, "moved by hand", {LifecycleOp.ADVANCE, "G2", "G3"}),
        (4, "strict", {"G5", "legality"}),
        (3, "strict", {"G0"}),
        (4, "short watch", {LifecycleOp.FOSSILIZE, LifecycleOp.SET_ALPHA_TARGET}),
        (3, "two seeds", {LifecycleOp.WAIT}),
        (8, "no incubation, no embargo", {LifecycleOp.PRUNE}),
        (1, "small", set()),
    ],
)
def test_lifecycle_invariants_hold_in_episodes_of_mostly_legal_actions(
    num_slots: int, rules_name: str, met: set[LifecycleOp | str]
) -> None:
    episode = random_episode(num_slots, rules_name, "first", legal_share=0.9)
    assert sum(episode.succeeded.values()) + sum(episode.refused.values()) == HORIZON
    seen = {LifecycleOp(op) for op in episode.succeeded} | set(episode.refused)
    assert met <= seen, seen


@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_lifecycle_invariants_hold_in_episodes_of_arbitrary_actions(num_slots: int) -> None:
    episode = random_episode(num_slots, "no incubation, no embargo", "arbitrary", legal_share=0.0)
    assert episode.refused["legality"] > 0
