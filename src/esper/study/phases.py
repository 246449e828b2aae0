"""Phases of a study on one task.

1. Selection, by validation loss on selection rng seeds: the plan of ``schedule``, the learning rate of every
   arm, and the best static size at each mark.
2. Evaluation of all arms with the reported rng seeds.
3. Training of the grown networks from scratch, for ``static_final``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from esper.kasmina.schedules import DECAY_SHARE
from esper.study.one_run import MarkResult, RunResult, StudyRun
from esper.study.study_config import StudyConfig, arms_of, sizes_of, space_of
from esper.tamiyo.plan_search import GENERATIONS, propose

RunAll = Callable[[Sequence[StudyRun]], list[RunResult]]
"""Function from runs to their results, in order; finished runs are not repeated."""
MarkResults = Sequence[MarkResult | None]
"""Results of a run at each mark; None if the host diverged."""
FROM_SCRATCH = "static_final:"
STACK = "stack/"
"""Prefix that marks a seed as a copy of a block, in the text of a plan."""


@dataclass(frozen=True, slots=True)
class TaskResults:
    """Results of a study on one task."""

    arms: dict[str, list[list[MarkResults]]]
    """Results by arm as ``[training][rng seed][mark]``; None if the host diverged."""
    factors: dict[str, tuple[float, ...]]
    """Chosen factors on the learning rate, by study arm."""
    reference: list[str]
    """Best static arm at each mark on selection rng seeds; empty without static arms."""
    static: frozenset[str]
    """Names of the static arms."""
    plans: dict[str, str]
    """Plans that the search found for the ``schedule`` arms, by arm."""


class StudyPhases:
    """Phases of a study on one task, executed in order."""

    def __init__(self, config: StudyConfig, task: str, run_all: RunAll) -> None:
        self._config, self._name, self._run_all = config, task, run_all
        self._task = config.task(task)
        self._sizes = sizes_of(self._task)
        self._factors: dict[str, float] = {}
        self._plan: str | None = None

    def run(self) -> TaskResults:
        """Execute all phases and return their results."""
        arms = arms_of(self._config, self._task)
        texts = [text for own in arms.values() for text in own]
        if "schedule" in texts:
            self._plan = self._search_plan()
        whats = [what for text in texts for what in self._rated(text)]
        if any(map(_is_from_scratch, texts)):
            whats += [f"static:{size}" for size in self._sizes]
        curves = self._choose_factors(list(dict.fromkeys(whats)))
        static = {texts[0]: name for name, texts in arms.items() if _is_static(texts[0])}
        reference = [
            static[min(static, key=lambda what: curves[what][mark])]
            for mark in range(len(self._config.marks) if static else 0)
        ]
        found = self._evaluate(arms)
        factors = {name: self._factors_of(texts[0]) for name, texts in arms.items()}
        plans = {name: self._plan for name, texts in arms.items() if self._plan and texts == ("schedule",)}
        return TaskResults(found, factors, reference, frozenset(static.values()), plans)

    def _what(self, text: str) -> str:
        """Return the run text of an arm: ``off`` for a static size, the plan that was found for
        ``schedule``.
        """
        if text == "off" and self._sizes:
            return f"static:{self._sizes[0]}"
        return f"periodic:{self._plan}" if text == "schedule" else text

    # --- selection ----------------------------------------------------------------------------

    def _rated(self, text: str) -> list[str]:
        """Return the run texts whose learning rates an arm uses; no text for ``static_final``."""
        kind, _, argument = text.partition(":")
        if kind == "sweep":
            return [f"static:{size}" for size in self._sizes]
        if kind == "static_final":
            return []
        return [f"ppo:{argument}" if kind == "shuffled" else self._what(text)]

    def _choose_factors(self, whats: Sequence[str]) -> dict[str, list[float]]:
        """Choose a learning rate for each run text; return the mean validation loss at every mark with the
        chosen rate.
        """
        factors = self._config.learning_rate_factors
        trials = [
            (what, factor) for what in whats for factor in factors if len(factors) > 1 or _is_static(what)
        ]
        losses = self._validation_losses(trials)
        for what in whats:
            self._factors[what] = min(factors, key=lambda f: fmean(losses.get((what, f), [0.0])))
        return {what: losses[what, f] for what, f in self._factors.items() if (what, f) in losses}

    def _validation_losses(self, trials: Sequence[tuple[str, float]]) -> dict[tuple[str, float], list[float]]:
        """Return mean validation losses ``[mark]`` over selection rng seeds; infinite if a host diverged."""
        runs = {
            (what, factor): [StudyRun(self._name, what, (factor,), seed) for seed in self._config.selection]
            for what, factor in trials
        }
        results = self._results(chain.from_iterable(runs.values()))
        return {
            trial: [
                fmean(map(_val_loss, column)) for column in zip(*(results[run] for run in own), strict=True)
            ]
            for trial, own in runs.items()
        }

    def _results(self, runs: Iterable[StudyRun]) -> dict[StudyRun, MarkResults]:
        """Return the results of the given runs; a run may be listed more than once."""
        wanted = list(dict.fromkeys(runs))
        nothing: MarkResults = [None] * len(self._config.marks)
        return {
            run: result.answers or nothing for run, result in zip(wanted, self._run_all(wanted), strict=True)
        }

    def _search_plan(self) -> str:
        """Return the best plan of a search limited by ``schedule_episodes``, on all selection rng seeds."""
        config, space = self._config, space_of(self._task)
        factor = config.learning_rate_factors[len(config.learning_rate_factors) // 2]
        last = round((1.0 - DECAY_SHARE) * self._task.horizon)
        left = max(config.schedule_episodes // config.selection_rng_seeds, 1)
        known: dict[str, float] = {}
        for generation in range(GENERATIONS, 0, -1):
            count = -(-left // generation)
            plans = propose(known, count, space, last) if count else []
            losses = self._validation_losses([(f"periodic:{plan}", factor) for plan in plans])
            known |= {plan: fmean(losses[f"periodic:{plan}", factor]) for plan in plans}
            left -= count
        return min(known, key=lambda plan: known[plan])

    # --- evaluation ---------------------------------------------------------------------------

    def _evaluate(self, arms: Mapping[str, tuple[str, ...]]) -> dict[str, list[list[MarkResults]]]:
        scratch = {name: texts[0] for name, texts in arms.items() if _is_from_scratch(texts[0])}
        runs = {
            name: [
                [StudyRun(self._name, what, self._factors_of(what), seed) for seed in self._config.evaluation]
                for what in map(self._what, texts)
            ]
            for name, texts in arms.items()
            if name not in scratch
        }
        results = self._results(run for own in runs.values() for row in own for run in row)
        found = {name: [[results[run] for run in row] for row in own] for name, own in runs.items()}
        for name, text in scratch.items():
            grown = text.removeprefix(FROM_SCRATCH)
            whats = map(self._what, arms[grown])
            found[name] = [self._from_scratch(w, f) for w, f in zip(whats, found[grown], strict=True)]
        return {name: found[name] for name in arms}

    def _from_scratch(self, what: str, grown: list[MarkResults]) -> list[MarkResults]:
        """Return the results ``[rng seed][mark]`` of the grown networks if they are trained from scratch."""
        runs = [
            [None if answer is None else self._whole(answer.seeds, what, rng_seed) for answer in answers]
            for rng_seed, answers in zip(self._config.evaluation, grown, strict=True)
        ]
        results = self._results(run for row in runs for run in row if run is not None)
        return [[None if run is None else results[run][mark] for mark, run in enumerate(row)] for row in runs]

    def _whole(self, seeds: str, grown: str, rng_seed: int) -> StudyRun:
        """Return the run that trains a grown network from scratch: a static size if all seeds are copies of
        blocks.
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
