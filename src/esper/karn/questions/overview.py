"""One run in one line: how far it is, its score beside the twin's, what it grew to, and what is wrong.

The list of runs, the head of a page and the terminal show this answer.
"""

from collections import Counter
from typing import NamedTuple

from esper.karn.metric import Metric, metric_of
from esper.karn.questions.alerts import AlertEntry, alerts
from esper.karn.questions.growth_curves import growth
from esper.karn.questions.progress import RunProgress, progress
from esper.karn.questions.series import Values
from esper.karn.run import Run
from esper.karn.run_result import result
from esper.leyline.events import RunRow, Severity


class Overview(NamedTuple):
    """What is known of a run; None is unknown."""

    row: RunRow
    progress: RunProgress
    score: float | None
    twin: float | None
    params: float | None
    scores: Values
    twins: Values
    """Over the epochs or iterations so far."""
    alerts: tuple[AlertEntry, ...]
    """Those that are open."""

    @property
    def lead(self) -> float | None:
        """The score over the twin's."""
        return self.metric.lead(self.score, self.twin)

    @property
    def metric(self) -> Metric:
        """What score and twin are."""
        return metric_of(self.row)

    @property
    def alert_counts(self) -> dict[Severity, int]:
        """How many alerts of each severity are open."""
        return dict(Counter(entry.severity for entry in self.alerts))


def overview(run: Run) -> Overview:
    """Of a run that goes on, its last epoch or iteration; of one that is over, its result."""
    found, grown, wrong = progress(run), growth(run), alerts(run)
    score, twin, params = _numbers(run, found)
    return Overview(
        row=run.row,
        progress=found,
        score=score,
        twin=twin,
        params=params,
        scores=grown["score"] if grown else (),
        twins=grown["twin"] if grown else (),
        alerts=tuple(entry for entry in wrong.entries if entry.until is None),
    )


def _numbers(run: Run, found: RunProgress) -> tuple[float | None, float | None, float | None]:
    episodes = None if found.state == "running" else result(run)
    if episodes is not None:
        score, twin = (one and one.mean for one in (episodes.validation, episodes.twin_score))
        return score, twin, episodes.params.mean
    if (grown := growth(run, joined=False)) is None:
        return None, None, None
    return grown.last("score"), grown.last("twin"), grown.last("parameters")
