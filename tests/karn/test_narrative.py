"""Narratives (text summaries) of episodes; expected sentences are derived by hand from telemetry rows."""

from typing import Any

import pytest
from msgspec.structs import replace

from esper.karn.narrative import narrate, policy_output
from esper.leyline import BlueprintAction, LifecycleOp, Stage
from esper.leyline.rows import DecisionRow, EpisodeRow, Row, SeedRow, TransitionRow
from tests.karn import fake_run

EPISODE: dict[str, Any] = {"env": 3, "episode": 7}
RUN = fake_run.run_row()


def decision(epoch: int, op: LifecycleOp, slot: int = 0, **columns: Any) -> DecisionRow:
    """Return a decision row of a successful action; action heads without a given value are 0 and unused."""
    named = {
        "action": [op, slot, 0, 0, 0, 0, 0, 0],
        "read": [True, op is not LifecycleOp.WAIT] + [False] * 6,
        **columns,
    }
    return replace(fake_run.decision_row(0), **EPISODE, epoch=epoch, **named)


def move(epoch: int, origin: Stage, target: Stage, **columns: Any) -> TransitionRow:
    row = fake_run.transition_row(0, 1, origin, target, "mechanical", "")
    named = {"seed": 0, "blueprint": BlueprintAction.CONV_LIGHT, **columns}
    return replace(row, **EPISODE, epoch=epoch, **named)


def germination(epoch: int = 4, **columns: Any) -> TransitionRow:
    named = {"cause": "policy", "reason": "germinated"} | columns
    return move(epoch, Stage.DORMANT, Stage.GERMINATED, **named)


def measured(epoch: int, contribution: float | None, error: float | None) -> SeedRow:
    row = replace(fake_run.seed_row(0, 4), **EPISODE, epoch=epoch, slot=1)
    return replace(row, contribution=contribution, contribution_error=error)


def ended(**columns: Any) -> EpisodeRow:
    named = {"epoch": 20, "val_score": 61.55, "twin_val_score": 22.05, "params": 1398, **columns}
    return replace(fake_run.episode_row(), **(EPISODE | named))


def sentences(*rows: Row) -> list[str]:
    return [str(note) for note in narrate(RUN, rows)]


def test_narrative_sentence_about_a_seed_has_its_final_state_and_the_policy_probabilities() -> None:
    rows = (
        decision(4, LifecycleOp.GERMINATE, 1, op_probs=[0.09, 0.83, 0.05, 0.0, 0.03, 0.0]),
        germination(4),
        move(4, Stage.GERMINATED, Stage.TRAINING),
        measured(9, 1.0, 0.1),
        measured(10, 6.14, 0.81),
        decision(11, LifecycleOp.FOSSILIZE, 1, op_probs=[0.41, 0.0, 0.1, 0.0, 0.49, 0.0]),
        move(11, Stage.HOLDING, Stage.FOSSILIZED, cause="policy", reason="fossilized"),
    )
    assert sentences(*rows) == [
        "epoch 4: conv_light germinated in r0c1 (policy 0.83, next best WAIT 0.09);"
        " contribution +6.1 ± 0.8 points; fossilized at 11 (policy 0.49, next best WAIT 0.41)"
    ]


def test_narrative_shows_a_contribution_of_zero_as_zero_and_not_as_unknown() -> None:
    (sentence,) = sentences(germination(2), measured(5, 0.0, 0.0))
    assert "contribution +0.0 ± 0.0 points" in sentence


@pytest.mark.parametrize(
    ("last", "end", "stage"),
    [
        (
            move(9, Stage.BLENDING, Stage.PRUNED, cause="governor", reason="non-finite loss"),
            "pruned by the governor at 9: non-finite loss",
            Stage.PRUNED,
        ),
        (move(9, Stage.BLENDING, Stage.PRUNED, cause="policy", reason="pruned"), "pruned at 9", Stage.PRUNED),
        (
            move(20, Stage.BLENDING, Stage.PRUNED, reason="not held at the horizon"),
            "removed at horizon",
            Stage.PRUNED,
        ),
        (
            move(20, Stage.HOLDING, Stage.FOSSILIZED, reason="horizon commits"),
            "fossilized at 20: horizon commits",
            Stage.FOSSILIZED,
        ),
        (move(6, Stage.TRAINING, Stage.BLENDING), "still blending after 6", Stage.BLENDING),
        (move(4, Stage.DORMANT, Stage.GERMINATED), "still germinated after 4", Stage.GERMINATED),
    ],
)
def test_narrative_has_a_different_text_for_each_final_state_of_a_seed(
    last: TransitionRow, end: str, stage: Stage
) -> None:
    (note,) = narrate(RUN, [germination(), last])
    assert str(note) == f"epoch 4: conv_light germinated in r0c1; contribution –; {end}"
    assert note.stage is stage


def test_narrative_sentence_about_a_refused_action_has_the_gate_and_the_failed_checks() -> None:
    row = decision(
        8,
        LifecycleOp.GERMINATE,
        2,
        action=[LifecycleOp.GERMINATE, 2, BlueprintAction.NORM, 1, 0, 2, 0, 0],
        read=[True] * 6 + [False] * 2,
        succeeded=False,
        refused_by="legality",
        failed_checks=["slot_empty", "not_embargoed"],
    )
    assert sentences(row) == [
        "epoch 8: GERMINATE in r0c2 (blueprint norm, style linear_multiply, tempo fast, target full)"
        " was refused by legality: slot_empty, not_embargoed"
    ]


def test_narrative_has_separate_sentences_for_a_refused_policy_action_and_a_user_action_in_one_step() -> None:
    germinate = decision(4, LifecycleOp.GERMINATE, 1, op_probs=[0.2, 0.8, 0, 0, 0, 0])
    fossilize = decision(11, LifecycleOp.FOSSILIZE, 1, op_probs=[0.1, 0, 0, 0, 0.9, 0])
    rows = (
        replace(germinate, succeeded=False, refused_by="G0"),
        germination(4, cause="user"),
        replace(fossilize, succeeded=False, refused_by="G5"),
        move(11, Stage.HOLDING, Stage.FOSSILIZED, cause="user", reason="kept by hand"),
    )
    assert sentences(*rows) == [
        "epoch 4: conv_light germinated in r0c1; contribution –; fossilized by the user at 11: kept by hand",
        "epoch 4: GERMINATE in r0c1 was refused by G0 (policy 0.80, next best WAIT 0.20)",
        "epoch 11: FOSSILIZE in r0c1 was refused by G5 (policy 0.90, next best WAIT 0.10)",
    ]


def test_narrative_sentence_about_a_decision_names_the_blueprint_that_was_in_the_slot_at_that_epoch() -> None:
    rows = (
        germination(1),
        move(5, Stage.BLENDING, Stage.PRUNED, cause="policy", reason="pruned"),
        germination(9, seed=1, blueprint=BlueprintAction.NORM),
        decision(
            3,
            LifecycleOp.SET_ALPHA_TARGET,
            1,
            action=[LifecycleOp.SET_ALPHA_TARGET, 1, 0, 0, 1, 1, 1, 1],
            read=[True, True, False, False, False, True, True, True],
        ),
        decision(12, LifecycleOp.PRUNE, 1, op_probs=[0.5, 0.0, 0.2, 0.3, 0.0, 0.0]),
        decision(13, LifecycleOp.WAIT),
    )
    assert [s for s in sentences(*rows) if "germinated" not in s] == [
        "epoch 3: conv_light in r0c1 got a new alpha: target seventy, speed fast, curve cosine",
        "epoch 12: norm in r0c1 began to fade out (policy 0.30; WAIT was likelier, 0.50)",
    ]


def test_narrative_mentions_a_governor_alert_when_raised_and_not_when_cleared() -> None:
    raised = replace(fake_run.alert_row(), **EPISODE, epoch=5, value=7.654321)
    rows = (germination(4), raised, replace(raised, event="cleared"))
    assert sentences(*rows)[1:] == ["epoch 5: collapse (7.65, limit 2.25); rolled back to epoch 3"]
    unknown = replace(raised, value=None, limit=None)
    assert sentences(germination(4), unknown)[1:] == ["epoch 5: collapse; rolled back to epoch 3"]


@pytest.mark.parametrize(("twin", "against"), [(22.05, " (+39.5 against the twin)"), (None, "")])
def test_last_sentence_of_a_narrative_describes_the_end_of_the_episode(
    twin: float | None, against: str
) -> None:
    rows = (ended(twin_val_score=twin), germination(4), move(20, Stage.HOLDING, Stage.FOSSILIZED))
    assert sentences(*rows)[-1] == (
        f"epoch 20: the horizon ended the episode: 61.5 on validation{against}, 60.2 on test,"
        " 1,398 parameters"
    )


def test_narrative_of_an_episode_without_events_is_empty() -> None:
    epoch = replace(fake_run.epoch_row(1), **EPISODE)
    assert narrate(RUN, []) == []
    assert narrate(RUN, [epoch, decision(0, LifecycleOp.WAIT)]) == []


@pytest.mark.parametrize(
    ("probabilities", "words"),
    [
        (None, ""),
        ([0.0, 1.0, 0.0, 0.0, 0.0, 0.0], " (policy 1.00)"),
        ([0.0, None, 0.0, 0.0, 0.0, 0.25], " (policy –, next best ADVANCE 0.25)"),
    ],
)
def test_narrative_shows_a_dash_for_one_unknown_policy_probability_and_nothing_if_all_are_unknown(
    probabilities: list[float | None] | None, words: str
) -> None:
    assert policy_output(decision(1, LifecycleOp.GERMINATE, op_probs=probabilities), RUN) == words
