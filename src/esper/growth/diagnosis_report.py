"""Report of a diagnosis: candidate rows, verdict, and output as text, HTML and JSON."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, NamedTuple

from torch import Tensor, nn

from esper.growth.race_runners import CostUnit, Paired, Probe
from esper.karn.notation import UNKNOWN, aligned, count, flop, significant
from esper.leyline.errors import HostError

Verdict = Literal["grow", "train longer first", "nowhere", "unclear"]

ERRORS: Final = 2.0
"""Number of standard errors by which the loss must decrease for the decrease to count."""
LEAST_PER_THOUSAND: Final = 0.04
"""Fraction of the loss by which the loss must decrease for each 1,000 training steps of the control, for the
decrease to count; a certain decrease may be smaller."""
CERTAIN: Final = 4.0
"""Number of standard errors above which a decrease of the loss is certain."""
LEAST_CERTAIN: Final = 0.003
"""Fraction of the loss by which the loss must decrease for a certain decrease to count."""
BEYOND_CONTROL: Final = 0.5
"""Smallest gain of a seed, as a fraction of the gain of longer training, for the verdict *grow*."""
OVERFITTING: Final = 0.2
"""A network overfits if its training loss is below its validation loss by this fraction of the latter."""


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """Candidate of a diagnosis: a blueprint at a site. A negative change of the validation loss is an
    improvement.
    """

    place: str
    blueprint: str
    parameters: int
    flops: int
    """Forward FLOPs that the seed adds per sample."""
    first_order: float
    """Slope of the validation loss along the normalised training gradient of the candidate's new seed."""
    change: Paired | None = None
    """Validation loss with the trained candidate minus that of the diagnosed network; None if the candidate
    was not trained."""
    beyond: Paired | None = None
    """Validation loss with the trained candidate minus that of the diagnosed network or of the network
    trained longer, whichever is lower."""
    steps: int = 0
    cost: float | None = None
    """Compute that the candidate adds to a training step, as a fraction of a step of the network, in the unit
    ``Diagnosis.cost``; None if the candidate did not start."""

    @property
    def gain_per_thousand(self) -> float | None:
        """Decrease of the validation loss per 1,000 parameters of the seed."""
        return None if self.change is None else -self.change.mean / self.parameters * 1000


class Realised(NamedTuple):
    """Change of the validation loss that was measured after growth, and the change that the diagnosis
    predicted."""

    place: str
    blueprint: str
    predicted: Paired | None
    realised: Paired

    def __str__(self) -> str:
        predicted, realised = shown(self.predicted), shown(self.realised)
        return f"{self.blueprint} at {self.place}: predicted {predicted}, realised {realised}"


def decide(
    loss: float, rows: Sequence[CandidateRow], control: Paired | None, steps: int
) -> tuple[Verdict, CandidateRow | None, str]:
    """Return the verdict of a diagnosis, the recommended candidate, and the reason for the verdict.

    The recommended candidate is the best of the candidates that trained for the most steps. The loss with the
    recommended candidate must be below the loss of the diagnosed network and below that of the control, by
    more than ``ERRORS`` standard errors and by more than a threshold: the fraction ``LEAST_PER_THOUSAND`` of
    the loss, in proportion to the training ``steps`` of the control, or ``LEAST_CERTAIN`` of it if the
    decrease is more than ``CERTAIN`` standard errors. If longer training also lowers the loss, the gain of
    the seed must be at least the share ``BEYOND_CONTROL`` of the gain of longer training.
    """
    ran = [(-row.steps, row.change.mean, row) for row in rows if row.change and row.beyond]
    if not ran:
        return "unclear", None, "no candidate could be trained within the limit: allow more steps or minutes"
    best = min(ran, key=lambda each: each[:2])[2]
    assert best.change is not None
    assert best.beyond is not None
    least = LEAST_PER_THOUSAND * steps / 1000 * abs(loss)

    def counts(change: Paired) -> bool:
        """Return whether the loss decreases by enough; False if the standard error is unknown."""
        gain, error = -change.mean, change.error
        is_certain = gain > CERTAIN * error and gain > LEAST_CERTAIN * abs(loss)
        return is_certain or (gain > ERRORS * error and gain > least)

    longer = -control.mean if control is not None and counts(control) else 0.0
    is_better = counts(best.change) and counts(best.beyond)
    if is_better and -best.beyond.mean >= BEYOND_CONTROL * longer:
        return "grow", best, "a seed there lowers the validation loss by more than training longer does"
    if longer:
        return "train longer first", None, "training longer lowers the loss, and no seed by clearly more"
    if any(_could_be_clear(change, least) for change in (best.beyond, control) if change):
        return "unclear", None, "the error is too large to tell: allow more validation data"
    return (
        "nowhere",
        None,
        f"neither a seed nor training longer lowers the validation loss by {significant(least)} in {steps}"
        " steps; slower gains need more steps to be seen",
    )


def _could_be_clear(change: Paired, least: float) -> bool:
    return math.isnan(change.error) or (ERRORS * change.error > least and -change.mean > least)


@dataclass
class Diagnosis:
    """Result of a diagnosis: verdict, recommended site and candidates; ``print`` and notebooks show the
    result as text and table."""

    network: str
    verdict: Verdict
    place: str | None
    """Name of the recommended site; None unless the verdict is *grow*."""
    blueprint: str | None
    reason: str
    val_loss: float
    train_loss: float
    rows: list[CandidateRow]
    """Candidates of the diagnosis, best first; candidates that were not trained are last."""
    control: Paired | None
    """Change of the validation loss when the network trains longer without a seed, at the same compute as a
    candidate."""
    control_steps: int
    seconds: float
    flops: float
    """FLOPs that the diagnosis used."""
    cost: CostUnit = "flops"
    """Unit in which the compute that candidates add to a training step was weighed."""
    cut_short: bool = False
    """Whether the limit of steps or minutes ended the diagnosis before all candidates had been compared."""
    realised: list[Realised] = field(default_factory=list)
    sample: Any = field(default=None, repr=False)
    """Input that the network was called with in the diagnosis."""
    probe: Probe | None = field(default=None, repr=False)
    base: Tensor | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        best = "" if self.place is None else f", {self.blueprint} at {self.place}"
        return f"Diagnosis({self.network}: {self.verdict}{best}; {len(self.rows)} candidates)"

    @property
    def fit(self) -> str:
        """Text that states whether the network overfits or underfits."""
        if self.val_loss - self.train_loss > OVERFITTING * abs(self.val_loss):
            return "overfits: the training loss is far below the validation loss"
        if self.verdict in {"grow", "train longer first"}:
            return "underfits: training and validation loss can both fall"
        return "no sign of overfitting"

    def compare(self, net: nn.Module, place: str | None = None, blueprint: str | None = None) -> Realised:
        """Measure the validation loss of a network that was grown and trained; store the change of the loss
        beside the predicted change.

        Without ``place`` and ``blueprint``, the network is assumed to contain the recommended seed.
        """
        place, blueprint = place or self.place or "", blueprint or self.blueprint or ""
        assert self.probe is not None
        assert self.base is not None
        row = next((r for r in self.rows if (r.place, r.blueprint) == (place, blueprint)), None)
        realised = self.probe.paired(self.probe.losses(net), self.base)
        self.realised.append(Realised(place, blueprint, row.change if row else None, realised))
        return self.realised[-1]

    def plant(self, net: nn.Module, place: str | None = None, blueprint: str | None = None) -> nn.Module:
        """Plant the recommended seed, or the given one, permanently; return ``net``, ready to be trained.

        Args:
            net: The network that was diagnosed, or a copy of it.
            place: Name of the submodule after which the seed is planted; the recommended site unless given.
            blueprint: Name of the seed's blueprint; the recommended blueprint unless given.

        Raises:
            HostError: The diagnosis recommends no seed, and ``place`` or ``blueprint`` is missing.
        """
        from esper.growth.diagnose import plant  # noqa: PLC0415  diagnose.py imports this module

        place, blueprint = place or self.place, blueprint or self.blueprint
        if place is None or blueprint is None:
            raise HostError(
                f"the diagnosis is '{self.verdict}'; name place and blueprint of the seed to plant"
            )
        return plant(net, place, blueprint, sample=self.sample)

    def json(self) -> str:
        """Return the diagnosis as one JSON object; unknown values are null."""
        left_out = {"probe", "base", "rows", "sample"}
        shown = {k: v for k, v in vars(self).items() if k not in left_out}
        shown |= {"fit": self.fit, "rows": [_plain(row) for row in self.rows]}
        shown["control"] = _paired(self.control)
        shown["realised"] = [
            {**each._asdict(), "predicted": _paired(each.predicted), "realised": _paired(each.realised)}
            for each in self.realised
        ]
        return json.dumps(shown, allow_nan=False)

    def __str__(self) -> str:
        return "\n".join([*self._sentences(), "", aligned(self._table(), left=2)])

    def _repr_html_(self) -> str:
        sentences = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in self._sentences())
        first, *rest = ["".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in self._table()]
        body = "".join(f"<tr>{line}</tr>" for line in rest)
        head = first.replace("td>", "th>")
        return f"{sentences}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _sentences(self) -> list[str]:
        named = f": {self.blueprint} at {self.place}" if self.place else ""
        return [
            f"{self.network}: {self.verdict}{named}",
            f"{self.reason}.",
            self._tested(),
            f"validation loss {significant(self.val_loss)}, training loss {significant(self.train_loss)};"
            f" {self.fit}.",
            *(f"{each}." for each in self.realised),
        ]

    def _tested(self) -> str:
        """Return the sentence that names what was tested."""
        trained = [row for row in self.rows if row.steps]
        blueprints = ", ".join(sorted({row.blueprint for row in self.rows}))
        places = len({row.place for row in self.rows})
        cut = " It was cut short by its limit." if self.cut_short else ""
        return (
            f"tested: {blueprints}; places: {places}; trained: {len(trained)} of {len(self.rows)}; weighed by"
            f" {'FLOPs' if self.cost == 'flops' else 'seconds'}.{cut}"
        )

    def _table(self) -> list[tuple[str, ...]]:
        control = ("(train longer)", "", shown(self.control), *("",) * 6, count(self.control_steps))
        rows = [tuple(cell(row) for cell in COLUMNS.values()) for row in self.rows]
        return [tuple(COLUMNS), control, *rows]


COLUMNS: Final[dict[str, Callable[[CandidateRow], str]]] = {
    "place": lambda row: row.place,
    "blueprint": lambda row: row.blueprint,
    "change of loss": lambda row: shown(row.change),
    "beyond training longer": lambda row: shown(row.beyond),
    "parameters": lambda row: count(row.parameters),
    "compute": lambda row: flop(row.flops),
    "added to a step": lambda row: UNKNOWN if row.cost is None else f"{row.cost:.0%}",
    "gain / 1,000 parameters": lambda row: significant(row.gain_per_thousand),
    "first order": lambda row: significant(row.first_order),
    "steps": lambda row: count(row.steps),
}
"""Columns of the candidate table: heading, and function that formats the cell of a candidate."""


def shown(change: Paired | None) -> str:
    """Format a change of the loss with as many decimals as its standard error justifies."""
    if change is None:
        return UNKNOWN
    scale = change.error if change.error > 0 else abs(change.mean)
    decimals = 3 if not scale or math.isnan(scale) else min(8, max(0, 1 - math.floor(math.log10(scale))))
    error = "" if math.isnan(change.error) else f" ± {change.error:.{decimals}f}"
    return f"{change.mean:+.{decimals}f}{error}"


def _plain(row: CandidateRow) -> dict[str, Any]:
    shown = asdict(row) | {"gain_per_thousand": row.gain_per_thousand}
    return shown | {"change": _paired(row.change), "beyond": _paired(row.beyond)}


def _paired(change: Paired | None) -> dict[str, float | None] | None:
    if change is None:
        return None
    return {"mean": change.mean, "error": None if math.isnan(change.error) else change.error}
