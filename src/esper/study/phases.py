"""Phases of a study on one task: selection, evaluation, and training of grown networks from initial weights.

The selection phase chooses, by validation loss on selection rng seeds, the plan of the arm ``schedule`` and
the learning rate of every arm. The evaluation phase runs all arms with the reported rng seeds, and static
arms with all learning rates, as the reference in hindsight. For the arms ``static_final``, a last phase
retrains the networks that other arms have grown, from initial weights.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from esper.kasmina.optimizer_groups import DECAY_SHARE
from esper.study.computed_arms import computed_arm
from esper.study.one_run import MarkResult, RunResult, StudyRun
from esper.study.study_config import CLOCK, COMPUTED, StudyConfig, arms_of, clock_plan, sizes_of, space_of
from esper.tamiyo.plan_search import GENERATIONS, propose

RunAll = Callable[[Sequence[StudyRun]], Mapping[StudyRun, RunResult]]
"""Function that executes different runs and returns results by run; runs in the journal are not repeated."""
MarkResults = Sequence[MarkResult | None]
"""Results of a run at each mark of the budget; all are None if the host diverged."""
FROM_SCRATCH = "static_final:"
PLAN = "periodic:"
STACK = "stack/"
"""Prefix of a seed's entry in the text of a plan; it marks a seed that is a copy of a block."""


@dataclass(frozen=True, slots=True)
class TaskResults:
    """Results of all arms of a study on one task."""

    arms: dict[str, list[list[MarkResults]]]
    """Results by arm, as ``[training of a policy][rng seed][mark]``; None if the host diverged."""
    factors: dict[str, tuple[float, ...]]
    """Factors on the learning rate that the selection phase chose, by arm."""
    reference: dict[str, list[MarkResults]]
    """Results of every static size with every learning rate, as ``[rng seed][mark]``; empty without static
    arms.
    """
    static: frozenset[str]
    """Names of the static arms, whose networks do not grow."""
    plans: dict[str, str]
    """Plans of the arms that grow by a plan, such as ``clock`` and ``schedule``."""


class StudyPhases:
    """Selection, evaluation and training from initial weights of all arms of a study on one task, executed in
    this order.
    """

    def __init__(self, config: StudyConfig, task: str, run_all: RunAll) -> None:
        self._config, self._name, self._run_all = config, task, run_all
        self._task = config.task(task)
        self._sizes = sizes_of(self._task)
        self._factors: dict[str, float] = {}
        self._plan: str | None = None

    def run(self) -> TaskResults:
        """Execute all phases of the study and return the results of all arms."""
        arms = arms_of(self._config, self._task)
        texts = [text for own in arms.values() for text in own]
        if "schedule" in texts:
            self._plan = self._search_plan()
        whats = [what for text in texts for what in self._rated(text)]
        if any(map(_is_from_scratch, texts)):
            whats += [f"static:{size}" for size in self._sizes]
        self._choose_factors(list(dict.fromkeys(whats)))
        static = {texts[0]: name for name, texts in arms.items() if _is_static(texts[0])}
        reference = self._reference(list(static))
        found = self._evaluate(arms)
        factors = {name: self._factors_of(texts[0]) for name, texts in arms.items()}
        whole = {name: self._what(texts[0]) for name, texts in arms.items()}
        plans = {name: what.removeprefix(PLAN) for name, what in whole.items() if what.startswith(PLAN)}
        return TaskResults(found, factors, reference, frozenset(static.values()), plans)

    def _what(self, text: str) -> str:
        """Return the text of an arm's runs, such as ``static:3``; ``off`` becomes the smallest static size,
        ``clock`` and ``schedule`` become plans.
        """
        if text == "off" and self._sizes:
            return f"static:{self._sizes[0]}"
        if text.startswith(CLOCK):
            return f"{PLAN}{clock_plan(self._task, text)}"
        return f"{PLAN}{self._plan}" if text == "schedule" else text

    # --- selection ----------------------------------------------------------------------------

    def _rated(self, text: str) -> list[str]:
        """Return the texts of the runs (such as ``static:3``) whose chosen learning rates an arm uses; empty
        for arms that use those of other arms.
        """
        kind, _, argument = text.partition(":")
        if kind in ("static_final", *COMPUTED):
            return []
        return [f"ppo:{argument}" if kind == "shuffled" else self._what(text)]

    def _choose_factors(self, whats: Sequence[str]) -> None:
        """Choose a learning rate for each kind of run."""
        factors = self._config.learning_rate_factors
        losses = self._validation_losses([(what, f) for what in whats for f in factors if len(factors) > 1])
        for what in whats:
            self._factors[what] = min(factors, key=lambda f: losses.get((what, f), 0.0))

    def _validation_losses(self, trials: Sequence[tuple[str, float]]) -> dict[tuple[str, float], float]:
        """Return the validation loss, averaged over marks and selection rng seeds, for each trial (kind of
        run, factor on the learning rate); infinite if a host diverged.
        """
        runs = {
            (what, factor): [StudyRun(self._name, what, (factor,), seed) for seed in self._config.selection]
            for what, factor in trials
        }
        results = self._results(chain.from_iterable(runs.values()))
        return {
            trial: fmean(_val_loss(answer) for run in own for answer in results[run])
            for trial, own in runs.items()
        }

    def _results(self, runs: Iterable[StudyRun]) -> dict[StudyRun, MarkResults]:
        """Return the results of each of ``runs``; a run that is listed twice is executed once."""
        wanted = list(dict.fromkeys(runs))
        found, nothing = self._run_all(wanted), [None] * len(self._config.marks)
        return {run: found[run].answers or nothing for run in wanted}

    def _search_plan(self) -> str:
        """Return the plan with the least validation loss on all selection rng seeds, from a search of
        ``schedule_episodes`` episodes.
        """
        config, space = self._config, space_of(self._task)
        factor = config.learning_rate_factors[len(config.learning_rate_factors) // 2]
        last = round((1.0 - DECAY_SHARE) * self._task.horizon)
        left = max(config.schedule_episodes // config.selection_rng_seeds, 1)
        known: dict[str, float] = {}
        for generation in range(GENERATIONS, 0, -1):
            count = -(-left // generation)
            plans = propose(known, count, space, last) if count else []
            losses = self._validation_losses([(f"{PLAN}{plan}", factor) for plan in plans])
            known |= {plan: losses[f"{PLAN}{plan}", factor] for plan in plans}
            left -= count
        return min(known, key=lambda plan: known[plan])

    # --- evaluation ---------------------------------------------------------------------------

    def _reference(self, static: Sequence[str]) -> dict[str, list[MarkResults]]:
        """Run the static sizes with all learning rates and the reported rng seeds."""
        config = self._config
        runs = {
            f"{what} × {factor:g}": [StudyRun(self._name, what, (factor,), s) for s in config.evaluation]
            for what in static
            for factor in config.learning_rate_factors
        }
        results = self._results(chain.from_iterable(runs.values()))
        return {name: [results[run] for run in own] for name, own in runs.items()}

    def _evaluate(self, arms: Mapping[str, tuple[str, ...]]) -> dict[str, list[list[MarkResults]]]:
        scratch = {name: texts[0] for name, texts in arms.items() if _is_from_scratch(texts[0])}
        computed = {name: texts[0] for name, texts in arms.items() if texts[0] in COMPUTED}
        runs = {
            name: [
                [StudyRun(self._name, what, self._factors_of(what), seed) for seed in self._config.evaluation]
                for what in map(self._what, texts)
            ]
            for name, texts in arms.items()
            if name not in scratch and name not in computed
        }
        results = self._results(run for own in runs.values() for row in own for run in row)
        found = {name: [[results[run] for run in row] for row in own] for name, own in runs.items()}
        for name, text in scratch.items():
            grown = text.removeprefix(FROM_SCRATCH)
            whats = map(self._what, arms[grown])
            found[name] = [self._from_scratch(w, f) for w, f in zip(whats, found[grown], strict=True)]
        static = {
            int(texts[0].partition(":")[2]): found[name][0]
            for name, texts in arms.items()
            if _is_static(texts[0])
        }
        for name, kind in computed.items():
            found[name] = [[self._computed(kind, static, index) for index in range(self._config.rng_seeds)]]
        return {name: found[name] for name in arms}

    def _computed(self, kind: str, static: Mapping[int, Sequence[MarkResults]], index: int) -> MarkResults:
        """Return the results of a computed arm for the rng seed ``index``, without sizes that diverged."""
        found = {size: [answer for answer in own[index] if answer] for size, own in static.items()}
        runs = {size: answers for size, answers in found.items() if answers}
        nothing = [None] * len(self._config.marks)
        return computed_arm(kind, runs, self._config.evaluation[index]) if runs else nothing

    def _from_scratch(self, what: str, grown: list[MarkResults]) -> list[MarkResults]:
        """Retrain the networks that an arm has grown, from initial weights; return the results ``[rng
        seed][mark]``.
        """
        runs = [
            [None if answer is None else self._whole(answer.seeds, what, rng_seed) for answer in answers]
            for rng_seed, answers in zip(self._config.evaluation, grown, strict=True)
        ]
        results = self._results(run for row in runs for run in row if run is not None)
        return [[None if run is None else results[run][mark] for mark, run in enumerate(row)] for row in runs]

    def _whole(self, seeds: str, grown: str, rng_seed: int) -> StudyRun:
        """Return the run that retrains a grown network from initial weights; if all its seeds are copies of
        blocks, this is the run of a static size.
        """
        names = seeds.split(",") if seeds else []
        if self._sizes and all(name.startswith(STACK) for name in names):
            what = f"static:{self._sizes[0] + len(names)}"
            return StudyRun(self._name, what, self._factors_of(what), rng_seed)
        what = f"whole:{seeds}" if seeds else "off"
        return StudyRun(self._name, what, self._factors_of(grown), rng_seed)

    def _factors_of(self, what: str) -> tuple[float, ...]:
        return tuple(self._factors[own] for own in self._rated(what))


def _val_loss(answer: MarkResult | None) -> float:
    return float("inf") if answer is None or answer.cut_short else answer.val_loss


def _is_static(what: str) -> bool:
    return what.startswith("static:")


def _is_from_scratch(text: str) -> bool:
    return text.startswith(FROM_SCRATCH)
