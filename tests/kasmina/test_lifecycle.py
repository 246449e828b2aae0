"""Lifecycle of one slot: stages, alpha ramps, embargo, counters and refused stage changes."""

from collections.abc import Callable

import numpy as np
import pytest

from esper.kasmina import lifecycle
from esper.kasmina.lifecycle import Germination, IllegalMoveError
from esper.leyline import (
    LEGAL_MOVES,
    AlphaCurve,
    GradientStatistics,
    LifecycleRules,
    SlotTable,
    Stage,
    StageMove,
    Style,
)

RULES = LifecycleRules(min_training_epochs=2, min_prune_age=3, embargo_epochs=2)
FAST = Germination(seed_id=0, blueprint=1, style=Style.LINEAR_ADD, target=1.0, ramp_epochs=3, seed_params=9)
WORTHY = lifecycle.GateVerdict("G5", ("contribution_measured",), ())

Epoch = tuple[str, float]
T, H, E, R, D = ("TRAINING", 0.0), ("HOLDING", 1.0), ("EMBARGOED", 0.0), ("RESETTING", 0.0), ("DORMANT", 0.0)


def B(alpha: float) -> Epoch:  # noqa: N802  an entry of a timeline, as T and H
    return "BLENDING", pytest.approx(alpha)


class Episode:
    """Episode of one slot without a network; ``run`` returns stage and alpha of each epoch."""

    def __init__(self, rules: LifecycleRules = RULES, seed: Germination = FAST) -> None:
        self.rules = rules
        self.table = SlotTable.empty(1, 1)
        self.moves = lifecycle.germinate(self.table, 0, 0, seed, rules)

    def run(self, epochs: int) -> list[Epoch]:
        seen = []
        for _ in range(epochs):
            seen.append((Stage(int(self.table.stage[0, 0])).name, float(self.table.alpha[0, 0])))
            lifecycle.tick(self.table, 0)
            self._record_healthy_gradients()
            self.moves += lifecycle.advance(self.table, 0, self.rules)
        return seen

    def _record_healthy_gradients(self) -> None:
        if self.table.occupied[0, 0]:
            self.table.record_gradients(
                0, 0, GradientStatistics(1.0, 1.0, vanishing=False, exploding=False), ratio=1.0
            )

    def prune(self, epochs: int = 0, curve: AlphaCurve = AlphaCurve.LINEAR) -> None:
        self.moves += lifecycle.prune(self.table, 0, 0, self.rules, epochs=epochs, curve=curve)

    def send(self, target: float, epochs: int, curve: AlphaCurve = AlphaCurve.LINEAR) -> None:
        self.moves += lifecycle.set_alpha_target(self.table, 0, 0, target=target, epochs=epochs, curve=curve)

    def advance(self) -> bool:
        moves, verdict = lifecycle.enter_next_stage(self.table, 0, 0, self.rules, "policy")
        self.moves += moves
        return verdict.ok

    def fossilize(self) -> None:
        self.moves += lifecycle.fossilize(self.table, 0, 0, WORTHY)


# --- timelines: one entry per trained epoch ------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "seed", "epochs"),
    [
        (RULES, FAST, [T, T, B(1 / 3), B(2 / 3), B(1.0), H, H]),
        (LifecycleRules(min_training_epochs=0), FAST, [B(1 / 3), B(2 / 3), B(1.0), H]),
        (RULES, FAST._replace(ramp_epochs=5), [T, T, *map(B, (0.2, 0.4, 0.6, 0.8, 1.0)), H]),
        (RULES, FAST._replace(ramp_epochs=8), [T, T, *(B(i / 8) for i in range(1, 9)), H]),
        # Alpha after 1/3 of a sigmoid ramp of steepness 12, with the logistic function σ: (σ(−2) − σ(−6)) /
        # (σ(6) − σ(−6)) = 0.116731 / 0.995055.
        (RULES, FAST._replace(style=Style.SIGMOID_ADD), [T, T, B(0.1173104), B(0.8826896), B(1.0), H]),
        (RULES, FAST._replace(target=0.5), [T, T, B(1 / 6), B(1 / 3), *[B(0.5)] * 8]),
    ],
    ids=["default", "no incubation", "tempo 5", "tempo 8", "sigmoid style", "target below 1"],
)
def test_seed_moves_through_its_stages_automatically_without_actions(
    rules: LifecycleRules, seed: Germination, epochs: list[Epoch]
) -> None:
    assert Episode(rules, seed).run(len(epochs)) == epochs


def test_new_alpha_target_starts_an_alpha_ramp_in_stages_blending_and_holding() -> None:
    episode = Episode(seed=FAST._replace(target=0.7))
    episode.run(6)
    episode.send(1.0, epochs=3)
    assert episode.run(4) == [B(0.8), B(0.9), B(1.0), H]
    episode.send(0.5, epochs=5)
    assert episode.run(7) == [B(0.9), B(0.8), B(0.7), B(0.6), B(0.5), B(0.5), B(0.5)]
    episode.send(1.0, epochs=0)
    assert episode.run(2) == [B(1.0), H], (
        "an INSTANT ramp ends in its first epoch, and the seed is held after it"
    )


def test_alpha_target_equal_to_the_current_alpha_starts_no_ramp() -> None:
    for target in (1.0, 0.5):
        episode = Episode(seed=FAST._replace(target=target))
        before = episode.run(6)[-1]
        episode.send(target, epochs=5)
        assert not episode.table.ramping.any()
        assert episode.run(2) == [before] * 2


@pytest.mark.parametrize(
    ("seed", "age", "epochs", "after"),
    [
        *((FAST, age, 0, [E, E, R, D, D]) for age in (0, 1, 3, 4, 6)),
        (FAST, 6, 3, [B(2 / 3), B(1 / 3), B(0.0), E, E, R, D, D]),
        # An incubating seed has alpha 0, so a prune with a ramp removes the seed at once.
        (FAST, 1, 8, [E, E, R, D]),
        # This test case prunes a seed in the middle of its first ramp, at alpha 1/2.
        (FAST._replace(ramp_epochs=8), 5, 5, [B(0.4), B(0.3), B(0.2), B(0.1), B(0.0), E]),
    ],
)
def test_prune_removes_a_seed_at_once_or_after_an_alpha_ramp_to_0(
    seed: Germination, age: int, epochs: int, after: list[Epoch]
) -> None:
    episode = Episode(seed=seed)
    episode.run(age)
    episode.prune(epochs=epochs)
    assert episode.run(len(after)) == after


@pytest.mark.parametrize("embargo", [0, 1, 2, 5])
def test_pruned_slot_is_closed_for_the_embargo_epochs_and_one_more_epoch_of_resetting(embargo: int) -> None:
    rules = LifecycleRules(min_training_epochs=0, embargo_epochs=embargo)
    by_action = Episode(rules)
    by_action.run(2)
    by_action.prune()
    by_ramp = Episode(rules)
    by_ramp.run(5)
    by_ramp.prune(epochs=3)
    assert by_ramp.run(3)[-1] == B(0.0)
    for episode in (by_action, by_ramp):
        closed = [stage for stage, _ in episode.run(10) if stage != "DORMANT"]
        assert closed == ["EMBARGOED"] * embargo + ["RESETTING"]


def test_seed_stays_in_its_stage_until_an_advance_action_if_auto_forward_is_off() -> None:
    rules = LifecycleRules(min_training_epochs=2, auto_forward=False)
    episode = Episode(rules)
    assert episode.run(2) == [("GERMINATED", 0.0)] * 2
    assert episode.advance()
    assert not episode.advance(), "G2 refuses: no epoch of incubation yet"
    assert episode.run(3) == [T, T, T]
    assert episode.advance()
    assert not episode.advance(), "G3 refuses: the ramp has not ended"
    assert episode.run(5) == [B(1 / 3), B(2 / 3), B(1.0), B(1.0), B(1.0)]
    assert episode.advance()
    assert episode.run(1) == [H]
    assert [move.cause for move in episode.moves] == ["policy"] * 4


def test_incubation_continues_beyond_its_minimum_length_until_gradients_are_measured() -> None:
    episode = Episode()
    for _ in range(4):
        lifecycle.tick(episode.table, 0)
        assert lifecycle.advance(episode.table, 0, RULES) == [], "gradients were never measured"
    assert episode.run(1) == [T]
    assert episode.run(1) == [B(1 / 3)]


# --- moves and counters ---------------------------------------------------------------------------


def test_every_legal_stage_change_and_no_other_occurs_in_test_episodes() -> None:
    held = Episode()
    held.run(6)
    held.send(0.5, epochs=0)
    held.run(1)
    held.prune(epochs=3)
    held.run(8)
    fossil = Episode()
    fossil.run(6)
    fossil.fossilize()
    seen = held.moves + fossil.moves
    manual = LifecycleRules(min_training_epochs=2, embargo_epochs=0, auto_forward=False)
    for rules, epochs in ((manual, 0), (RULES, 1), (RULES, 6)):
        pruned = Episode(rules)
        pruned.run(epochs)
        pruned.prune()
        seen += pruned.moves
    made = {(move.origin, move.target) for move in seen}
    legal = {(origin, target) for origin, targets in LEGAL_MOVES.items() for target in targets}
    assert made == legal - {(Stage.UNKNOWN, Stage.DORMANT)}


LIVE = {Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING}
VERBS: dict[str, tuple[Callable[[Episode], None], set[Stage]]] = {
    "germinate": (lambda s: lifecycle.germinate(s.table, 0, 0, FAST, RULES), {Stage.DORMANT}),
    "fossilize": (lambda s: s.fossilize(), {Stage.HOLDING}),
    "prune": (lambda s: s.prune(), LIVE),
    "prune by ramp": (lambda s: s.prune(epochs=5), LIVE),
    "set alpha": (lambda s: s.send(0.5, epochs=3), {Stage.BLENDING, Stage.HOLDING}),
}


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("verb", VERBS)
def test_illegal_stage_change_is_refused_and_leaves_the_slot_table_unchanged(verb: str, stage: Stage) -> None:
    act, allowed = VERBS[verb]
    episode = Episode()
    episode.table.stage[0, 0] = stage
    episode.table.alpha[0, 0] = episode.table.in_forward[0, 0]
    before = episode.table.copy()
    if stage in allowed:
        act(episode)
        return
    with pytest.raises(IllegalMoveError, match=rf"slot 0 of environment 0 .*{stage.name}"):
        act(episode)
    for name, array in episode.table.arrays().items():
        np.testing.assert_array_equal(array, before.arrays()[name], err_msg=name)


def test_error_of_a_refused_fossilization_names_the_gate_and_a_fossil_never_changes_its_stage() -> None:
    episode = Episode()
    episode.run(6)
    refused = lifecycle.GateVerdict("G5", (), ("contribution_measured",))
    with pytest.raises(IllegalMoveError, match=r"refused by G5: \('contribution_measured',\)"):
        lifecycle.fossilize(episode.table, 0, 0, refused)
    assert episode.run(1) == [H]
    episode.fossilize()
    assert episode.run(9) == [("FOSSILIZED", 1.0)] * 9


def test_record_of_a_stage_change_contains_seed_stages_cause_gate_age_and_contribution() -> None:
    episode = Episode(seed=FAST._replace(seed_id=4, blueprint=7))
    episode.run(6)
    episode.table.record_contribution(0, 0, 2.5, 0.5)
    episode.prune()
    assert [(m.origin.name, m.target.name, m.cause) for m in episode.moves] == [
        ("DORMANT", "GERMINATED", "policy"),
        ("GERMINATED", "TRAINING", "mechanical"),
        ("TRAINING", "BLENDING", "mechanical"),
        ("BLENDING", "HOLDING", "mechanical"),
        ("HOLDING", "PRUNED", "policy"),
        ("PRUNED", "EMBARGOED", "mechanical"),
    ]
    seed, stages, cause = (0, 0, 4, 7), (Stage.HOLDING, Stage.PRUNED), ("policy", "pruned", None)
    assert episode.moves[4] == StageMove(*seed, *stages, *cause, age=6, contribution=2.5)
    verdicts = [move.verdict.gate if move.verdict else None for move in episode.moves]
    assert verdicts == [None, "G1", "G2", "G3", None, None]


def test_age_of_a_seed_counts_epochs_and_epochs_in_stage_restart_at_each_stage_change() -> None:
    table = SlotTable.empty(1, 4)
    table.stage[0] = [Stage.TRAINING, Stage.FOSSILIZED, Stage.EMBARGOED, Stage.DORMANT]
    table.epochs_since_measured[0] = [-1, 3, -1, -1]
    lifecycle.tick(table, 0)
    lifecycle.tick(table, 0)
    assert table.epochs_in_stage.tolist() == [[2, 2, 2, 2]]
    assert table.age.tolist() == [[2, 2, 0, 0]], "only slots with a seed have an age"
    assert table.epochs_since_measured.tolist() == [[-1, 5, -1, -1]], (
        "a seed that was never measured stays so"
    )
    episode = Episode()
    episode.run(3)
    assert (episode.table.age[0, 0], episode.table.epochs_in_stage[0, 0]) == (3, 1)


def test_stage_change_changes_only_the_slot_table_entries_of_its_slot_and_environment() -> None:
    table = SlotTable.empty(2, 2)
    lifecycle.germinate(table, 1, 0, FAST, LifecycleRules(min_training_epochs=0))
    for _ in range(3):
        lifecycle.tick(table, 1)
        lifecycle.advance(table, 1, RULES)
    assert table.stage.tolist() == [[Stage.DORMANT] * 2, [Stage.HOLDING, Stage.DORMANT]]
    assert table.epochs_in_stage.tolist() == [[0, 0], [0, 3]]


def test_slot_table_after_prune_and_embargo_equals_an_empty_slot_table() -> None:
    episode = Episode()
    episode.run(6)
    episode.table.record_contribution(0, 0, 2.0, 1.0)
    episode.prune()
    episode.run(3)
    blank = SlotTable.empty(1, 1)
    for name, array in episode.table.arrays().items():
        np.testing.assert_array_equal(array, blank.arrays()[name], err_msg=name)
