"""What a run comes to, in plain sentences and a few large numbers; all of them are the outcome's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from esper.karn import notation, outcome
from esper.karn.outcome import Comparison, Result
from esper.karn.questions.episodes import is_training, unfinished_episode
from esper.karn.questions.progress import progress
from esper.karn.run import Run
from esper.karn.statistics import Estimate
from esper.leyline.events import UpdateRow


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
    rows = outcome.final_rows(run)
    episodes = outcome.result(rows)
    evaluation = outcome.best_evaluation(run) if is_training(run) else None
    sentences = [how_far_text(run)]
    if episodes is None:
        return Conclusion(_unfinished(run), sentences, [])
    if is_training(run):
        number = rows[0].iteration or 0
        headline = _trained_headline(evaluation, episodes, number)
        sentences += _course_sentences(run, number)
        facts = [*_evaluation_facts(evaluation), _score_fact(episodes, f"validation, iteration {number}")]
    else:
        many = f" in the mean of {episodes.episodes} episodes" if episodes.episodes > 1 else ""
        headline = f"It reached {episodes.val_score} on validation{many}{_against_twins(episodes)}"
        test = Fact("test", str(episodes.test_score), "read once, at the end")
        facts = [_score_fact(episodes, "validation"), test]
    sentences += map(comparison_text, comparisons)
    return Conclusion(headline, sentences, facts + _cost_facts(run, episodes, comparisons))


# --- how far --------------------------------------------------------------------------------------


def how_far_text(run: Run) -> str:
    """How far a run is, as a sentence."""
    found = progress(run)
    if not found.done:
        none = {"running": f"Still running: no {found.unit} is done yet."}
        return none.get(found.state, f"Stopped before its first {found.unit} was done.")
    begin = "Still running:" if found.state == "running" else found.state.capitalize()
    of = "" if found.total is None else f" of {notation.count(found.total)}"
    return f"{begin} after {found.unit} {notation.count(found.done)}{of}."


def _unfinished(run: Run) -> str:
    """What is known before the first episode is over, or an episode of a training's iteration lasted."""
    if is_training(run):
        if outcome.broken_episodes(run):
            return f"Every episode of iteration {progress(run).done} broke down, so there is no result."
        return "No iteration is done, so there is no result."
    going = unfinished_episode(run)
    if going is None:
        return "No episode is finished, so there is no result."
    lead = notation.difference(going.val_score, going.twin_score)
    against = "" if lead is None else f", {over(lead)} its twin that does not grow"
    score = notation.points(going.val_score)
    return f"After epoch {going.epoch} of {run.row.horizon} the score is {score}{against}."


# --- what it reached ------------------------------------------------------------------------------


def _trained_headline(evaluation: UpdateRow | None, episodes: Result, number: int) -> str:
    """The best evaluation, beside the last iteration, whose episodes have twins."""
    if evaluation is None:
        return f"The {_iteration_text(number, episodes)}"
    score = notation.points(evaluation.evaluation_score)
    return (
        f"The best policy, that of iteration {evaluation.iteration}, scored {score} in its evaluation;"
        f" the {_iteration_text(number, episodes)}"
    )


def _course_sentences(run: Run, number: int) -> list[str]:
    """The first iteration for contrast, and what the numbers of the last one leave out."""
    sentences = []
    first = outcome.result(outcome.episodes_of_iteration(run, 1)) if number > 1 else None
    if first is not None:
        sentences.append(f"The {_iteration_text(1, first)}")
    if broken := outcome.broken_episodes(run):
        are = "is" if broken == 1 else "are"
        episodes = _counted(broken, "episode").capitalize()
        sentences.append(f"{episodes} of iteration {number} broke down and {are} not counted.")
    return sentences


def _iteration_text(number: int, episodes: Result) -> str:
    """How the episodes of an iteration compare with their twins: a sentence without its first word."""
    return (
        f"{_counted(episodes.episodes, 'episode')} of iteration {number} reached"
        f" {episodes.val_score} on validation{_against_twins(episodes)}"
    )


def _against_twins(episodes: Result) -> str:
    """The end of a sentence."""
    if episodes.lead is None:
        return "; no twin is known to compare with."
    twins = "their twins" if episodes.episodes > 1 else "its twin"
    return f", {over(episodes.lead.mean, episodes.lead.margin)} {twins} that did not grow."


def comparison_text(found: Comparison) -> str:
    """How a run compares with another one, as a sentence."""
    name = found.run.row.name
    if found.result is None:
        return f"Against {name}: it has no finished episode. {how_far_text(found.run)}"
    if found.val_score is None or found.test_score is None:
        return (
            f"Against {name} ({found.result.val_score} on validation): episodes cannot be paired,"
            f" since {found.unpaired}."
        )
    pairs = _counted(found.pairs, "episode")
    return (
        f"Against {name}, in {pairs} begun alike:"
        f" {gain_text(found.val_score)} points on validation, {gain_text(found.test_score)} on test."
    )


# --- the large numbers ----------------------------------------------------------------------------


def _evaluation_facts(evaluation: UpdateRow | None) -> list[Fact]:
    if evaluation is None:
        return []
    reward = notation.gain(evaluation.evaluation_return, 2)
    note = f"return {reward}, iteration {evaluation.iteration}; no twin recorded"
    return [Fact("best evaluation", notation.points(evaluation.evaluation_score), note)]


def _score_fact(episodes: Result, name: str) -> Fact:
    twin = "no twin" if episodes.twin_score is None else f"twin {notation.points(episodes.twin_score.mean)}"
    lead = "" if episodes.lead is None else f", {gain_text(episodes.lead)}"
    return Fact(name, str(episodes.val_score), twin + lead)


def _cost_facts(run: Run, episodes: Result, comparisons: Sequence[Comparison]) -> list[Fact]:
    prediction = episodes.host_flops_per_sample, episodes.flops_per_sample
    against = _against_compute(episodes, comparisons)
    return [
        _growth_fact("parameters", episodes.host_params, episodes.params, notation.count),
        _growth_fact("compute for a prediction", *prediction, notation.flop),
        Fact("compute of an episode", notation.flop(round(episodes.flops.mean)), against),
        Fact("time", _seconds(progress(run).seconds), f"{_seconds(episodes.seconds.mean)} an episode"),
    ]


def _growth_fact(name: str, host: Estimate, grown: Estimate, text: Callable[[int], str]) -> Fact:
    """Times the host's."""
    change = f"{text(round(host.mean))} → {text(round(grown.mean))}"
    return Fact(name, notation.factor(grown.mean, host.mean), change)


def _against_compute(episodes: Result, comparisons: Sequence[Comparison]) -> str:
    """Times that of the first run it is compared with."""
    for found in comparisons:
        if found.result is not None:
            factor = notation.factor(episodes.flops.mean, found.result.flops.mean)
            return f"{factor} that of {found.run.row.name}"
    return "training and measuring"


# --- numbers in sentences -------------------------------------------------------------------------


def gain_text(value: Estimate) -> str:
    """A mean difference with its interval, where it has one."""
    return notation.gain_with_error(value.mean, value.margin)


def over(lead: float, spread: float | None = None) -> str:
    """A difference in words: so many points above or below."""
    size = notation.points(abs(lead)) + ("" if spread is None else f" ± {notation.points(spread)}")
    if float(notation.points(lead)) == 0:
        return f"{size} points from" if spread is not None else "level with"
    return f"{size} points {'above' if lead > 0 else 'below'}"


def _seconds(value: float | None) -> str:
    if value is None or value >= 60:
        return notation.clock(value)
    return notation.duration(1000 * value)


def _counted(number: int, thing: str) -> str:
    return f"one {thing}" if number == 1 else f"{number:,} {thing}s"
