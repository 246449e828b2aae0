"""What a run comes to, in plain sentences and a few large numbers; all of them are the outcome's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from esper.karn import notation
from esper.karn.outcome import (
    Comparison,
    Evaluation,
    Result,
    Standing,
    best_evaluation,
    broken_lives,
    judged_lives,
    lives_of_round,
    result,
    standing,
)
from esper.karn.questions.lives import is_training
from esper.karn.run import Run
from esper.karn.statistics import Estimate
from esper.leyline.events import EpochRow, round_of


@dataclass(frozen=True, slots=True)
class Fact:
    """One large number, what it is and what it is to be compared with."""

    name: str
    value: str
    note: str


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What a reader should know who reads no further."""

    headline: str
    sentences: list[str]
    facts: list[Fact]


def conclude(run: Run, comparisons: Sequence[Comparison] = ()) -> Conclusion:
    """What is to be said of a run, and how it compares with others."""
    reached, rows = standing(run), judged_lives(run)
    lives = result(rows)
    evaluation = best_evaluation(run) if is_training(run) else None
    sentences = [standing_text(reached)]
    if lives is None:
        return Conclusion(_unfinished(run, reached), sentences, [])
    if is_training(run):
        number = round_of(rows[0].episode)
        headline = _trained_headline(evaluation, lives, number)
        sentences += _course_sentences(run, number)
        facts = [*_evaluation_facts(evaluation), _score_fact(lives, f"validation, round {number}")]
    else:
        headline = _grown_headline(lives)
        test = Fact("test", score_text(lives.test_score), "read once, at the end")
        facts = [_score_fact(lives, "validation"), test]
    sentences += [_cost_sentence(lives), *map(comparison_text, comparisons)]
    return Conclusion(headline, sentences, facts + _cost_facts(lives, reached, comparisons))


# --- how far --------------------------------------------------------------------------------------


def standing_text(reached: Standing) -> str:
    """How far a run is, as a sentence."""
    if reached.rounds is not None:
        return _rounds_text(reached)
    planned = f" of {reached.planned_lives}" if reached.planned_lives is not None else ""
    if reached.progress.state == "finished":
        return f"Finished: {_counted(reached.lives, 'life', 'lives')} of {reached.horizon} epochs."
    where = None
    if reached.life is not None:
        where = f"epoch {reached.epoch} of {reached.horizon} in life {reached.lives + 1}{planned}"
    elif reached.lives:
        where = f"life {reached.lives}{planned}"
    if reached.progress.state == "running":
        return f"Still running: after {where}." if where else "Still running: no epoch is done yet."
    return f"Stopped after {where}." if where else "Stopped before its first epoch was done."


def _rounds_text(reached: Standing) -> str:
    done = f"round {reached.rounds} of {reached.progress.total}"
    if reached.progress.state == "finished":
        return f"Finished: {_counted(reached.rounds or 0, 'round', 'rounds')}, {reached.lives:,} lives."
    if reached.progress.state == "running":
        return f"Still running: after {done}." if reached.rounds else "Still running: no round is done yet."
    return f"Stopped after {done}." if reached.rounds else "Stopped before its first round was done."


def _unfinished(run: Run, reached: Standing) -> str:
    """What is known before the first life is over, or a life of a training's round lasted."""
    if is_training(run):
        if broken_lives(run):
            return f"Every life of round {reached.rounds} broke down, so there is no result."
        return "No round is done, so there is no result."
    if reached.life is not None:
        rows = run.rows(EpochRow, "env = ? AND episode = ? AND epoch = ?", [*reached.life, reached.epoch])
        for row in rows:
            lead = notation.difference(row.val_score, row.twin_score)
            against = "" if lead is None else f", {over(lead)} its twin that does not grow"
            score = notation.points(row.val_score)
            return f"After epoch {row.epoch} of {run.row.horizon} the score is {score}{against}."
    return "No life is finished, so there is no result."


# --- what it reached ------------------------------------------------------------------------------


def _grown_headline(lives: Result) -> str:
    many = f" in the mean of {lives.lives} lives" if lives.lives > 1 else ""
    reached = f"It reached {score_text(lives.val_score)} on validation{many}"
    if lives.lead is None:
        return f"{reached}; no twin is known to compare it with."
    return f"{reached}, {over(lives.lead.mean, margin(lives.lead))} {_twins(lives)}."


def _trained_headline(evaluation: Evaluation | None, lives: Result, number: int) -> str:
    """The evaluation, whose lives have no twins in the rows, beside the last round, whose lives have."""
    if evaluation is None:
        return f"The {_round_text(number, lives)}"
    return (
        f"The best policy, that of round {evaluation.round}, scored {notation.points(evaluation.score)}"
        f" in its evaluation; the {_round_text(number, lives)}"
    )


def _course_sentences(run: Run, number: int) -> list[str]:
    """The first round for contrast, and what the numbers of the last one leave out."""
    sentences = []
    first = result(lives_of_round(run, 1)) if number > 1 else None
    if first is not None:
        sentences.append(f"The {_round_text(1, first)}")
    if broken := broken_lives(run):
        are = "is" if broken == 1 else "are"
        lives = _counted(broken, "life", "lives").capitalize()
        sentences.append(f"{lives} of round {number} broke down and {are} not counted.")
    return sentences


def _round_text(number: int, lives: Result) -> str:
    """How the lives of a round compare with their twins, from the second word of a sentence to its end."""
    reached = (
        f"{_counted(lives.lives, 'life', 'lives')} of round {number} reached"
        f" {score_text(lives.val_score)} on validation"
    )
    if lives.lead is None:
        return f"{reached}; no twins are known."
    return f"{reached}, {over(lives.lead.mean, margin(lives.lead))} {_twins(lives)}."


def _twins(lives: Result) -> str:
    return "their twins that did not grow" if lives.lives > 1 else "its twin that did not grow"


def _cost_sentence(lives: Result) -> str:
    return (
        f"The cost: {notation.factor(lives.params.mean, lives.host_params.mean)} the host's parameters"
        f" ({_whole(lives.host_params)} → {_whole(lives.params)}),"
        f" {notation.factor(lives.flops_per_sample.mean, lives.host_flops_per_sample.mean)} its compute for"
        f" a prediction, {_flop(lives.flops)} and {_seconds(lives.seconds.mean)} for a whole life."
    )


def comparison_text(found: Comparison) -> str:
    """How a run compares with another one, as a sentence."""
    name = found.run.row.name
    if found.result is None:
        return f"Against {name}: it has no finished life. {standing_text(found.standing)}"
    if found.val_score is None or found.test_score is None:
        return (
            f"Against {name} ({score_text(found.result.val_score)} on validation): lives cannot be paired,"
            f" since {found.unpaired}."
        )
    pairs = _counted(found.pairs, "life", "lives")
    return (
        f"Against {name}, in {pairs} begun alike:"
        f" {gain_text(found.val_score)} points on validation, {gain_text(found.test_score)} on test."
    )


# --- the large numbers ----------------------------------------------------------------------------


def _evaluation_facts(evaluation: Evaluation | None) -> list[Fact]:
    if evaluation is None:
        return []
    note = f"return {notation.gain(evaluation.mean_return, 2)}, round {evaluation.round}; no twin recorded"
    return [Fact("best evaluation", notation.points(evaluation.score), note)]


def _score_fact(lives: Result, name: str) -> Fact:
    twin = "no twin" if lives.twin_score is None else f"twin {notation.points(lives.twin_score.mean)}"
    lead = "" if lives.lead is None else f", {gain_text(lives.lead)}"
    return Fact(name, score_text(lives.val_score), twin + lead)


def _cost_facts(lives: Result, reached: Standing, comparisons: Sequence[Comparison]) -> list[Fact]:
    return [
        Fact(
            "parameters",
            notation.factor(lives.params.mean, lives.host_params.mean),
            f"{_whole(lives.host_params)} → {_whole(lives.params)}",
        ),
        Fact(
            "compute for a prediction",
            notation.factor(lives.flops_per_sample.mean, lives.host_flops_per_sample.mean),
            f"{_flop(lives.host_flops_per_sample)} → {_flop(lives.flops_per_sample)}",
        ),
        Fact("compute of a life", _flop(lives.flops), _against_compute(lives, comparisons)),
        Fact("time", _seconds(reached.progress.seconds), f"{_seconds(lives.seconds.mean)} a life"),
    ]


def _against_compute(lives: Result, comparisons: Sequence[Comparison]) -> str:
    """Times that of the first run it is compared with."""
    for found in comparisons:
        if found.result is not None:
            return (
                f"{notation.factor(lives.flops.mean, found.result.flops.mean)} that of {found.run.row.name}"
            )
    return "training and measuring"


# --- numbers in sentences -------------------------------------------------------------------------


def margin(value: Estimate) -> float | None:
    """Half of the 95 % interval; None for a single value."""
    return None if math.isnan(value.half_width) else value.half_width


def score_text(value: Estimate) -> str:
    """A mean score with its interval, where it has one."""
    spread = margin(value)
    shown = notation.points(value.mean)
    return shown if spread is None else f"{shown} ± {notation.points(spread)}"


def gain_text(value: Estimate) -> str:
    """A mean difference with its interval, where it has one."""
    return notation.gain_with_error(value.mean, margin(value))


def over(lead: float, spread: float | None = None) -> str:
    """A difference in words: so many points above or below."""
    size = notation.points(abs(lead)) + ("" if spread is None else f" ± {notation.points(spread)}")
    if float(notation.points(lead)) == 0:
        return f"{size} points from" if spread is not None else "level with"
    return f"{size} points {'above' if lead > 0 else 'below'}"


def _whole(value: Estimate) -> str:
    return notation.count(round(value.mean))


def _flop(value: Estimate) -> str:
    return notation.flop(round(value.mean))


def _seconds(value: float | None) -> str:
    if value is None or value >= 60:
        return notation.clock(value)
    return notation.duration(1000 * value)


def _counted(number: int, one: str, many: str) -> str:
    return f"one {one}" if number == 1 else f"{number:,} {many}"
