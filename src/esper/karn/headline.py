"""Conclusion of a run: headline, a few sentences and key numbers, derived from its final scores and costs."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from esper.karn import notation, run_result
from esper.karn.metric import SCORE, metric_of
from esper.karn.questions.episode_selection import LASTED, unfinished_episode
from esper.karn.run import Run
from esper.karn.run_result import Comparison, Result
from esper.karn.runs import progress
from esper.leyline.rows import EpisodeRow, UpdateRow


class Fact(NamedTuple):
    """Key number of a run as text, with its name and a note, such as the score of the twin without growth."""

    name: str
    value: str
    note: str


class Conclusion(NamedTuple):
    """Headline, further sentences and key numbers of a run."""

    headline: str
    sentences: list[str]
    facts: list[Fact]


def conclude(run: Run, comparisons: Sequence[Comparison] = ()) -> Conclusion:
    """Return headline, sentences and key numbers of a run, compared with other runs if any are given."""
    rows = run_result.final_rows(run)
    episodes = run_result.result(run, rows)
    evaluation = run_result.best_evaluation(run) if run.is_training else None
    sentences = [how_far_text(run)]
    if episodes is None:
        return Conclusion(_unfinished(run), sentences, [])
    if run.is_training:
        number = rows[0].iteration or 0
        headline = _trained_headline(evaluation, episodes, number)
        sentences += _contrast_sentences(run, number)
        facts = [*_evaluation_facts(evaluation), _score_fact(episodes, f"validation, iteration {number}")]
    else:
        many = f" in the mean of {len(rows)} episodes" if len(rows) > 1 else ""
        headline = f"It reached {_reached(episodes)}{many}{_against_twins(episodes)}"
        facts = [_score_fact(episodes, "validation")]
        if (tested := episodes.estimate("test_score")) is not None:
            facts.append(Fact("test", str(tested), "read once, at the end"))
    sentences += map(comparison_text, comparisons)
    purpose = "training and measuring" if "counterfactual" in rows[0].flops else "training"
    return Conclusion(headline, sentences, facts + _cost_facts(run, episodes, comparisons, purpose))


# --- progress ---------------------------------------------------------------------------------------


def how_far_text(run: Run) -> str:
    """Return a sentence on the progress of a run, such as "Finished after epoch 20 of 20." """
    found = progress(run)
    if not found.done:
        none = {"running": f"Still running: no {found.unit} is done yet."}
        return none.get(found.state, f"Stopped before its first {found.unit} was done.")
    begin = "Still running:" if found.state == "running" else found.state.capitalize()
    of = "" if found.total is None else f" of {notation.count(found.total)}"
    return f"{begin} after {found.unit} {notation.count(found.done)}{of}."


def _unfinished(run: Run) -> str:
    """Return the headline of a run that has no final scores: no episode finished, or all episodes of a policy
    training's last iteration broke down.
    """
    if run.is_training:
        if run_result.broken_episodes(run):
            return f"Every episode of iteration {progress(run).done} broke down, so there is no result."
        return "No iteration is done, so there is no result."
    going = unfinished_episode(run)
    if going is None:
        return "No episode is finished, so there is no result."
    metric = metric_of(run.row)
    score = getattr(going, metric.column)
    lead = metric.lead(score, going.twin_score)
    against = "" if lead is None else f", {over(lead)} its twin that does not grow"
    of = "" if run.row.horizon is None else f" of {run.row.horizon}"
    return f"After epoch {going.epoch}{of} the {metric.name} is {metric.text(score)}{against}."


# --- result -----------------------------------------------------------------------------------------


def _trained_headline(evaluation: UpdateRow | None, episodes: Result, number: int) -> str:
    """Return the headline of a policy training: its best evaluation, and the scores of its last iteration
    compared with the twins (hosts without growth).
    """
    last = _iteration_text(number, episodes)
    if evaluation is None:
        return f"The {last}"
    score = notation.points(evaluation.evaluation_score)
    best = f"The best policy, that of iteration {evaluation.iteration}, scored {score} in its evaluation"
    return f"{best}; the {last}"


def _contrast_sentences(run: Run, number: int) -> list[str]:
    """Return sentences on the first iteration of a policy training, and on the episodes that broke down in
    its last iteration.
    """
    sentences = []
    begun = run.rows(EpisodeRow, f"{LASTED} AND iteration = 1") if number > 1 else []
    if (first := run_result.result(run, begun)) is not None:
        sentences.append(f"The {_iteration_text(1, first)}")
    if broken := run_result.broken_episodes(run):
        are = "is" if broken == 1 else "are"
        episodes = _counted(broken, "episode").capitalize()
        sentences.append(f"{episodes} of iteration {number} broke down and {are} not counted.")
    return sentences


def _iteration_text(number: int, episodes: Result) -> str:
    """Return a sentence that compares the scores of an iteration with those of the twins (hosts without
    growth); the caller adds "The" or "the" at its start.
    """
    return (
        f"{_counted(len(episodes.rows), 'episode')} of iteration {number} reached"
        f" {_reached(episodes)}{_against_twins(episodes)}"
    )


def _reached(episodes: Result) -> str:
    metric = episodes.metric
    name = "" if metric is SCORE else f"a {metric.name} of "
    return f"{name}{metric.estimate(episodes.validation)} on validation"


def _against_twins(episodes: Result) -> str:
    """Return the comparison of scores with those of the twins (hosts without growth), as the end of a
    sentence.
    """
    if episodes.lead is None:
        return "; no twin is known to compare with."
    twins = "their twins" if len(episodes.rows) > 1 else "its twin"
    return f", {over(episodes.lead.mean, episodes.lead.margin)} {twins} that did not grow."


def comparison_text(found: Comparison) -> str:
    """Return a sentence that compares the scores of a run with those of another run."""
    name = found.run.row.name
    if found.result is None:
        return f"Against {name}: it has no finished episode. {how_far_text(found.run)}"
    metric = found.result.metric
    if found.validation is None:
        return (
            f"Against {name} ({_reached(found.result)}): episodes cannot be paired, since {found.unpaired}."
        )
    pairs = _counted(found.pairs, "episode")
    test = "" if found.test_score is None else f", {SCORE.difference(found.test_score)} on test"
    return (
        f"Against {name}, in {pairs} begun alike:"
        f" {metric.difference(found.validation)}{metric.unit} on validation{test}."
    )


# --- key figures ------------------------------------------------------------------------------------


def _evaluation_facts(evaluation: UpdateRow | None) -> list[Fact]:
    if evaluation is None:
        return []
    reward = notation.gain(evaluation.evaluation_return, 2)
    note = f"return {reward}, iteration {evaluation.iteration}; no twin recorded"
    return [Fact("best evaluation", notation.points(evaluation.evaluation_score), note)]


def _score_fact(episodes: Result, name: str) -> Fact:
    metric, twins = episodes.metric, episodes.estimate("twin_val_score")
    twin = "no twin" if twins is None else f"twin {metric.text(twins.mean)}"
    lead = "" if episodes.lead is None else f", {metric.difference(episodes.lead)}"
    return Fact(name, metric.estimate(episodes.validation), twin + lead)


def _cost_facts(run: Run, episodes: Result, comparisons: Sequence[Comparison], purpose: str) -> list[Fact]:
    finished = [(one.run.row.name, one.result.flops) for one in comparisons if one.result is not None]
    if finished:
        name, flops = finished[0]
        purpose = f"{notation.factor(episodes.flops, flops)} that of {name}"
    return [
        _growth_fact("parameters", episodes, "params", notation.count),
        _growth_fact("compute for a prediction", episodes, "flops_per_sample", notation.flop),
        Fact("compute of an episode", notation.flop(episodes.flops), purpose),
        Fact("time", _seconds(progress(run).seconds), f"{_seconds(episodes.mean('seconds'))} an episode"),
    ]


def _growth_fact(name: str, episodes: Result, column: str, text: Callable[[int], str]) -> Fact:
    """Return a key number: the size of the grown network as a multiple of the host's size."""
    host, grown = episodes.mean(f"host_{column}"), episodes.mean(column)
    return Fact(name, notation.factor(grown, host), f"{text(round(host))} → {text(round(grown))}")


# --- number formats ---------------------------------------------------------------------------------


def over(lead: float, spread: float | None = None) -> str:
    """Return a difference of scores in words, such as "1.2 points above"."""
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
