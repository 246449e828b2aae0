"""What a run comes to, in plain sentences and a few large numbers; all of them are the outcome's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from esper.karn import notation
from esper.karn.outcome import (
    Comparison,
    Evaluation,
    Reached,
    Result,
    best_evaluation,
    broken_episodes,
    episodes_of_iteration,
    final_rows,
    how_far,
    result,
)
from esper.karn.questions.episodes import THIS_EPISODE, is_training
from esper.karn.run import Run
from esper.karn.statistics import Estimate
from esper.leyline.events import EpochRow


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
    reached, rows = how_far(run), final_rows(run)
    episodes = result(rows)
    evaluation = best_evaluation(run) if is_training(run) else None
    sentences = [how_far_text(reached)]
    if episodes is None:
        return Conclusion(_unfinished(run, reached), sentences, [])
    if is_training(run):
        number = rows[0].iteration or 0
        headline = _trained_headline(evaluation, episodes, number)
        sentences += _course_sentences(run, number)
        facts = [*_evaluation_facts(evaluation), _score_fact(episodes, f"validation, iteration {number}")]
    else:
        headline = _grown_headline(episodes)
        test = Fact("test", score_text(episodes.test_score), "read once, at the end")
        facts = [_score_fact(episodes, "validation"), test]
    sentences += [_cost_sentence(episodes), *map(comparison_text, comparisons)]
    return Conclusion(headline, sentences, facts + _cost_facts(episodes, reached, comparisons))


# --- how far --------------------------------------------------------------------------------------


def how_far_text(reached: Reached) -> str:
    """How far a run is, as a sentence."""
    if reached.iterations is not None:
        return _iterations_text(reached)
    planned = f" of {reached.planned_episodes}" if reached.planned_episodes is not None else ""
    if reached.progress.state == "finished":
        return f"Finished: {_counted(reached.episodes, 'episode')} of {reached.horizon} epochs."
    where = None
    if reached.episode is not None:
        where = f"epoch {reached.epoch} of {reached.horizon} in episode {reached.episodes + 1}{planned}"
    elif reached.episodes:
        where = f"episode {reached.episodes}{planned}"
    if reached.progress.state == "running":
        return f"Still running: after {where}." if where else "Still running: no epoch is done yet."
    return f"Stopped after {where}." if where else "Stopped before its first epoch was done."


def _iterations_text(reached: Reached) -> str:
    done = f"iteration {reached.iterations} of {reached.progress.total}"
    if reached.progress.state == "finished":
        iterations = _counted(reached.iterations or 0, "iteration")
        return f"Finished: {iterations}, {reached.episodes:,} episodes."
    if reached.progress.state == "running":
        return (
            f"Still running: after {done}."
            if reached.iterations
            else "Still running: no iteration is done yet."
        )
    return f"Stopped after {done}." if reached.iterations else "Stopped before its first iteration was done."


def _unfinished(run: Run, reached: Reached) -> str:
    """What is known before the first episode is over, or an episode of a training's iteration lasted."""
    if is_training(run):
        if broken_episodes(run):
            return f"Every episode of iteration {reached.iterations} broke down, so there is no result."
        return "No iteration is done, so there is no result."
    if reached.episode is not None:
        rows = run.rows(EpochRow, f"{THIS_EPISODE} AND epoch = ?", [*reached.episode, reached.epoch])
        for row in rows:
            lead = notation.difference(row.val_score, row.twin_score)
            against = "" if lead is None else f", {over(lead)} its twin that does not grow"
            score = notation.points(row.val_score)
            return f"After epoch {row.epoch} of {run.row.horizon} the score is {score}{against}."
    return "No episode is finished, so there is no result."


# --- what it reached ------------------------------------------------------------------------------


def _grown_headline(episodes: Result) -> str:
    many = f" in the mean of {episodes.episodes} episodes" if episodes.episodes > 1 else ""
    reached = f"It reached {score_text(episodes.val_score)} on validation{many}"
    if episodes.lead is None:
        return f"{reached}; no twin is known to compare it with."
    return f"{reached}, {over(episodes.lead.mean, margin(episodes.lead))} {_twins(episodes)}."


def _trained_headline(evaluation: Evaluation | None, episodes: Result, number: int) -> str:
    """The best evaluation, beside the last iteration, whose episodes have twins."""
    if evaluation is None:
        return f"The {_iteration_text(number, episodes)}"
    return (
        f"The best policy, that of iteration {evaluation.iteration}, scored"
        f" {notation.points(evaluation.score)} in its evaluation; the {_iteration_text(number, episodes)}"
    )


def _course_sentences(run: Run, number: int) -> list[str]:
    """The first iteration for contrast, and what the numbers of the last one leave out."""
    sentences = []
    first = result(episodes_of_iteration(run, 1)) if number > 1 else None
    if first is not None:
        sentences.append(f"The {_iteration_text(1, first)}")
    if broken := broken_episodes(run):
        are = "is" if broken == 1 else "are"
        episodes = _counted(broken, "episode").capitalize()
        sentences.append(f"{episodes} of iteration {number} broke down and {are} not counted.")
    return sentences


def _iteration_text(number: int, episodes: Result) -> str:
    """How the episodes of an iteration compare with their twins: a sentence without its first word."""
    reached = (
        f"{_counted(episodes.episodes, 'episode')} of iteration {number} reached"
        f" {score_text(episodes.val_score)} on validation"
    )
    if episodes.lead is None:
        return f"{reached}; no twins are known."
    return f"{reached}, {over(episodes.lead.mean, margin(episodes.lead))} {_twins(episodes)}."


def _twins(episodes: Result) -> str:
    return "their twins that did not grow" if episodes.episodes > 1 else "its twin that did not grow"


def _cost_sentence(episodes: Result) -> str:
    return (
        f"The cost: {notation.factor(episodes.params.mean, episodes.host_params.mean)} the host's parameters"
        f" ({_whole(episodes.host_params)} → {_whole(episodes.params)}),"
        f" {notation.factor(episodes.flops_per_sample.mean, episodes.host_flops_per_sample.mean)} its compute"
        f" for a prediction, {_flop(episodes.flops)} and {_seconds(episodes.seconds.mean)} for an"
        " episode."
    )


def comparison_text(found: Comparison) -> str:
    """How a run compares with another one, as a sentence."""
    name = found.run.row.name
    if found.result is None:
        return f"Against {name}: it has no finished episode. {how_far_text(found.reached)}"
    if found.val_score is None or found.test_score is None:
        return (
            f"Against {name} ({score_text(found.result.val_score)} on validation): episodes cannot be paired,"
            f" since {found.unpaired}."
        )
    pairs = _counted(found.pairs, "episode")
    return (
        f"Against {name}, in {pairs} begun alike:"
        f" {gain_text(found.val_score)} points on validation, {gain_text(found.test_score)} on test."
    )


# --- the large numbers ----------------------------------------------------------------------------


def _evaluation_facts(evaluation: Evaluation | None) -> list[Fact]:
    if evaluation is None:
        return []
    reward = notation.gain(evaluation.mean_return, 2)
    note = f"return {reward}, iteration {evaluation.iteration}; no twin recorded"
    return [Fact("best evaluation", notation.points(evaluation.score), note)]


def _score_fact(episodes: Result, name: str) -> Fact:
    twin = "no twin" if episodes.twin_score is None else f"twin {notation.points(episodes.twin_score.mean)}"
    lead = "" if episodes.lead is None else f", {gain_text(episodes.lead)}"
    return Fact(name, score_text(episodes.val_score), twin + lead)


def _cost_facts(episodes: Result, reached: Reached, comparisons: Sequence[Comparison]) -> list[Fact]:
    return [
        Fact(
            "parameters",
            notation.factor(episodes.params.mean, episodes.host_params.mean),
            f"{_whole(episodes.host_params)} → {_whole(episodes.params)}",
        ),
        Fact(
            "compute for a prediction",
            notation.factor(episodes.flops_per_sample.mean, episodes.host_flops_per_sample.mean),
            f"{_flop(episodes.host_flops_per_sample)} → {_flop(episodes.flops_per_sample)}",
        ),
        Fact("compute of an episode", _flop(episodes.flops), _against_compute(episodes, comparisons)),
        Fact("time", _seconds(reached.progress.seconds), f"{_seconds(episodes.seconds.mean)} an episode"),
    ]


def _against_compute(episodes: Result, comparisons: Sequence[Comparison]) -> str:
    """Times that of the first run it is compared with."""
    for found in comparisons:
        if found.result is not None:
            factor = notation.factor(episodes.flops.mean, found.result.flops.mean)
            return f"{factor} that of {found.run.row.name}"
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


def _counted(number: int, thing: str) -> str:
    return f"one {thing}" if number == 1 else f"{number:,} {thing}s"
