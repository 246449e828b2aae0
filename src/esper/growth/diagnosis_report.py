"""Report of a diagnosis: candidate rows, verdict, and output as text, HTML and JSON."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, NamedTuple

from torch import Tensor, nn

from esper.growth.race_runners import Paired, Probe
from esper.karn.notation import UNKNOWN, count, flop, significant
from esper.leyline.errors import HostError

Verdict = Literal["grow", "train longer first", "nowhere", "unclear"]

ERRORS: Final = 2.0
"""Number of standard errors that a change of the loss must exceed."""
LEAST_CHANGE: Final = 0.02
"""Fraction of the loss; smaller changes of the loss are ignored."""
BEYOND_CONTROL: Final = 0.5
"""Smallest gain of a seed, as a fraction of the gain of longer training, for the verdict *grow*."""
OVERFITTING: Final = 0.2
"""A network overfits if its training loss is below its validation loss by this fraction of the latter."""


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """Candidate of a diagnosis: a blueprint at a site. Negative changes of the validation loss are
    improvements.
    """

    place: str
    blueprint: str
    parameters: int
    flops: int
    """Forward FLOPs that the seed adds per sample."""
    first_order: float
    """Slope of the validation loss of a new seed along its normalised training gradient."""
    change: Paired | None = None
    """Change of the validation loss from the diagnosed network; None for a candidate that was not trained."""
    beyond: Paired | None = None
    """Change of the validation loss from the network trained longer with the same compute."""
    steps: int = 0

    @property
    def gain_per_thousand(self) -> float | None:
        """Decrease of the validation loss per 1,000 parameters."""
        return None if self.change is None else -self.change.mean / self.parameters * 1000


class Realised(NamedTuple):
    """Measured change of the validation loss after growth, and the predicted change."""

    place: str
    blueprint: str
    predicted: Paired | None
    realised: Paired

    def __str__(self) -> str:
        predicted, realised = _shown(self.predicted), _shown(self.realised)
        return f"{self.blueprint} at {self.place}: predicted {predicted}, realised {realised}"


def decide(
    loss: float, rows: Sequence[CandidateRow], control: Paired | None
) -> tuple[Verdict, CandidateRow | None, str]:
    """Return the verdict, the recommended row, and the reason.

    The recommended row is the best of the candidates that trained for the most steps. Its loss must be below
    that of the diagnosed network and that of the control, each by more than the standard error and by a
    fraction of the loss. If longer training helps too, the seed must also reach a fraction of that gain.
    """
    ran = [(-row.steps, row.change.mean, row) for row in rows if row.change and row.beyond]
    if not ran:
        return "unclear", None, "there was no time to train a candidate: allow more minutes"
    best = min(ran, key=lambda each: each[:2])[2]
    assert best.change is not None
    assert best.beyond is not None
    least = LEAST_CHANGE * abs(loss)
    longer = -control.mean if control is not None and _is_clear(control, least) else 0.0
    is_better = _is_clear(best.change, least) and _is_clear(best.beyond, least)
    if is_better and -best.beyond.mean >= BEYOND_CONTROL * longer:
        return "grow", best, "a seed there lowers the validation loss by more than training longer does"
    if longer:
        return "train longer first", None, "training longer lowers the loss, and no seed by clearly more"
    if any(_could_be_clear(change, least) for change in (best.beyond, control) if change):
        return "unclear", None, "the error is too large to tell: allow more validation data"
    return "nowhere", None, "neither a seed nor training longer lowers the validation loss by enough to count"


def _is_clear(change: Paired, least: float) -> bool:
    """Return whether a decrease of the loss exceeds error and threshold; False if the error is unknown."""
    return -change.mean > least and -change.mean > ERRORS * change.error


def _could_be_clear(change: Paired, least: float) -> bool:
    return math.isnan(change.error) or (ERRORS * change.error > least and -change.mean > least)


@dataclass
class Diagnosis:
    """Result of a diagnosis: verdict, recommended site and candidates; ``print`` and notebooks show it."""

    network: str
    verdict: Verdict
    place: str | None
    """Recommended site; given for the verdict *grow* only."""
    blueprint: str | None
    reason: str
    val_loss: float
    train_loss: float
    rows: list[CandidateRow]
    """Candidates, best first; candidates that were not trained are last."""
    control: Paired | None
    """Change of the validation loss by training longer with the same compute."""
    control_steps: int
    seconds: float
    flops: float
    """FLOPs that the diagnosis used."""
    realised: list[Realised] = field(default_factory=list)
    sample: Any = field(default=None, repr=False)
    """Input that the network was called with in the diagnosis."""
    probe: Probe | None = field(default=None, repr=False)
    base: Tensor | None = field(default=None, repr=False)

    @property
    def fit(self) -> str:
        """Statement whether the network over- or underfits."""
        if self.val_loss - self.train_loss > OVERFITTING * abs(self.val_loss):
            return "overfits: the training loss is far below the validation loss"
        if self.verdict in {"grow", "train longer first"}:
            return "underfits: training and validation loss can both fall"
        return "no sign of overfitting"

    def compare(self, net: nn.Module, place: str | None = None, blueprint: str | None = None) -> Realised:
        """Measure a network that was grown and trained, and store the result with the predicted change.

        Without names of site and blueprint, the grown seed is the recommended candidate.
        """
        place, blueprint = place or self.place or "", blueprint or self.blueprint or ""
        assert self.probe is not None
        assert self.base is not None
        row = next((r for r in self.rows if (r.place, r.blueprint) == (place, blueprint)), None)
        realised = self.probe.paired(self.probe.losses(net), self.base)
        self.realised.append(Realised(place, blueprint, row.change if row else None, realised))
        return self.realised[-1]

    def plant(self, net: nn.Module, place: str | None = None, blueprint: str | None = None) -> nn.Module:
        """Plant the recommended or another seed permanently; return ``net``, ready to be trained.

        Args:
            net: The network that was diagnosed, or a copy of it.
            place: Name of a submodule; the recommended site unless given.
            blueprint: Name of a blueprint; the recommended blueprint unless given.

        Raises:
            HostError: The diagnosis recommends no seed, and no site and blueprint are given.
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
        widths = [max(len(line[i]) for line in self._table()) for i in range(len(COLUMNS))]
        lines = [
            "  ".join(
                c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in self._table()
        ]
        return "\n".join([*self._sentences(), "", *(line.rstrip() for line in lines)])

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
            f"validation loss {significant(self.val_loss)}, training loss {significant(self.train_loss)};"
            f" {self.fit}.",
            *(f"{each}." for each in self.realised),
        ]

    def _table(self) -> list[tuple[str, ...]]:
        control = ("(train longer)", "", _shown(self.control), "", "", "", "", "", count(self.control_steps))
        rows = [tuple(cell(row) for cell in COLUMNS.values()) for row in self.rows]
        return [tuple(COLUMNS), control, *rows]


COLUMNS: Final[dict[str, Callable[[CandidateRow], str]]] = {
    "place": lambda row: row.place,
    "blueprint": lambda row: row.blueprint,
    "change of loss": lambda row: _shown(row.change),
    "beyond training longer": lambda row: _shown(row.beyond),
    "parameters": lambda row: count(row.parameters),
    "compute": lambda row: flop(row.flops),
    "gain / 1,000 parameters": lambda row: significant(row.gain_per_thousand),
    "first order": lambda row: significant(row.first_order),
    "steps": lambda row: count(row.steps),
}
"""Columns of the candidate table: heading, and function that formats the cell."""


def _shown(change: Paired | None) -> str:
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
