"""The phases of a study on one task: what to run next, given what is known.

First choose, on selection rng seeds and by validation loss: the learning rate of every arm, the plan of
``schedule``, and the static size that is best at each mark. Then run all arms with the reported rng seeds.
Then what hangs on their results: networks as they were grown, from scratch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from esper.kasmina.optim import DECAY_SHARE
from esper.leyline.lifecycle_rules import ActionSpace
from esper.study.config import Arm, StudyConfig, arms_of, sizes_of
from esper.study.running import Answer, Line, Run
from esper.tamiyo.plan_search import GENERATIONS, propose

RunAll = Callable[[Sequence[Run]], list[Line]]
"""Runs to their lines, in order; those that are done already are not done again."""
STACK = "stack/"
"""How a seed that is a copy of a block begins in a plan."""


@dataclass(frozen=True, slots=True)
class Found:
    """One task's results."""

    arms: dict[str, list[list[list[Answer | None]]]]
    """By name ``[training][rng seed][mark]``; None: the host diverged."""
    factors: dict[str, tuple[float, ...]]
    """Learning rates that were chosen, by arm."""
    reference: list[str]
    """The static arm that was best at each mark on selection rng seeds; none if there is no static arm."""
    static: frozenset[str]
    """Names of the static arms."""
    plans: dict[str, str]
    """What was found for arms that search, by name."""


class Conductor:
    """Asks for the runs of one task."""

    def __init__(self, config: StudyConfig, task: str, space: ActionSpace, run_all: RunAll) -> None:
        self._config, self._name, self._space, self._run_all = config, task, space, run_all
        self._task = config.task(task)
        self._sizes = sizes_of(self._task)
        self._factors: dict[str, float] = {}
        self._plan: str | None = None

    def conduct(self) -> Found:
        """All phases."""
        members = {text for texts in self._config.arms.values() for text in texts}
        if "schedule" in members:
            self._plan = self._search_plan()
        arms = arms_of(self._config, self._task)
        curves = self._choose_factors(self._to_choose(arms.values()))
        static = {texts[0]: name for name, texts in arms.items() if _is_static(texts[0])}
        reference = [
            static[min(static, key=lambda what: curves[what][mark])]
            for mark in range(len(self._config.marks) if static else 0)
        ]
        found = self._evaluate(arms)
        factors = {name: self._factors_of(self._what(texts[0])) for name, texts in arms.items()}
        plans = {name: self._plan for name, texts in arms.items() if self._plan and texts == ("schedule",)}
        return Found(found, factors, reference, frozenset(static.values()), plans)

    def _what(self, text: str) -> str:
        """What an arm's text asks to run; an arm in which nobody acts is a static size."""
        if text == "off" and self._sizes:
            return f"static:{self._sizes[0]}"
        return f"periodic:{self._plan}" if text == "schedule" else text

    # --- choosing -----------------------------------------------------------------------------

    def _to_choose(self, arms: Iterable[tuple[str, ...]]) -> list[str]:
        """What needs a learning rate of its own."""
        found: list[str] = []
        for text in (text for texts in arms for text in texts):
            kind, argument = Arm.of(text)
            if kind in ("sweep", "static_final"):
                found += [f"static:{size}" for size in self._sizes]
            else:
                found.append(f"ppo:{argument}" if kind == "shuffled" else self._what(text))
        return list(dict.fromkeys(found))

    def _choose_factors(self, whats: Sequence[str]) -> dict[str, list[float]]:
        """Choose the rate of each, and return its mean validation loss at every mark with that rate."""
        factors = self._config.learning_rate_factors
        trials = [
            (what, factor) for what in whats for factor in factors if len(factors) > 1 or _is_static(what)
        ]
        losses = self._validation_losses(trials)
        for what in whats:
            self._factors[what] = min(factors, key=lambda f: fmean(losses.get((what, f), [0.0])))
        return {what: losses[what, f] for what, f in self._factors.items() if (what, f) in losses}

    def _validation_losses(self, trials: Sequence[tuple[str, float]]) -> dict[tuple[str, float], list[float]]:
        """Mean validation loss ``[mark]`` over the selection rng seeds; infinite if a host broke down."""
        rng_seeds = self._config.selection
        runs = [Run(self._name, what, (f,), rng_seed) for what, f in trials for rng_seed in rng_seeds]
        lines = self._run_all(runs)
        found = {}
        for number, trial in enumerate(trials):
            own = lines[number * len(rng_seeds) : (number + 1) * len(rng_seeds)]
            rows = [[_val_loss(answer) for answer in self._answers(line)] for line in own]
            found[trial] = [fmean(column) for column in zip(*rows, strict=True)]
        return found

    def _search_plan(self) -> str:
        """The best of as many plans as the episodes allow, each tried with all selection rng seeds."""
        config = self._config
        factor = config.learning_rate_factors[len(config.learning_rate_factors) // 2]
        last = round((1.0 - DECAY_SHARE) * self._task.horizon)
        left = max(config.schedule_episodes // config.selection_rng_seeds, 1)
        known: dict[str, float] = {}
        for generation in range(GENERATIONS, 0, -1):
            count = -(-left // generation)
            plans = propose(known, count, self._space, last) if count else []
            losses = self._validation_losses([(f"periodic:{plan}", factor) for plan in plans])
            known |= {plan: fmean(losses[f"periodic:{plan}", factor]) for plan in plans}
            left -= count
        return min(known, key=lambda plan: known[plan])

    # --- evaluating ---------------------------------------------------------------------------

    def _evaluate(self, arms: Mapping[str, tuple[str, ...]]) -> dict[str, list[list[list[Answer | None]]]]:
        scratch = {
            name: Arm.of(texts[0]).argument for name, texts in arms.items() if _is_from_scratch(texts[0])
        }
        rng_seeds = self._config.evaluation
        asked = [
            (name, Run(self._name, what, self._factors_of(what), rng_seed))
            for name, texts in arms.items()
            if name not in scratch
            for what in map(self._what, texts)
            for rng_seed in rng_seeds
        ]
        lines = self._run_all([run for _, run in asked])
        found: dict[str, list[list[list[Answer | None]]]] = {name: [] for name in arms}
        for number, ((name, _), line) in enumerate(zip(asked, lines, strict=True)):
            if number % len(rng_seeds) == 0:
                found[name].append([])
            found[name][-1].append(self._answers(line))
        for name, grown in scratch.items():
            whats = [self._what(text) for text in arms[grown]]
            found[name] = [self._from_scratch(w, f) for w, f in zip(whats, found[grown], strict=True)]
        return found

    def _from_scratch(self, what: str, grown: list[list[Answer | None]]) -> list[list[Answer | None]]:
        """``[rng seed][mark]``: what each network that was grown comes to if it is whole from the start."""
        runs = [
            [None if answer is None else self._whole(answer.seeds, what, rng_seed) for answer in answers]
            for rng_seed, answers in zip(self._config.evaluation, grown, strict=True)
        ]
        wanted = list(dict.fromkeys(run for row in runs for run in row if run is not None))
        lines = dict(zip(wanted, self._run_all(wanted), strict=True))
        return [
            [None if run is None else self._answers(lines[run])[mark] for mark, run in enumerate(row)]
            for row in runs
        ]

    def _whole(self, seeds: str, grown: str, rng_seed: int) -> Run:
        """A static size where nothing but blocks was copied; else with the rate of what grew it."""
        names = seeds.split(",") if seeds else []
        if self._sizes and all(name.startswith(STACK) for name in names):
            what = f"static:{self._sizes[0] + len(names)}"
            return Run(self._name, what, self._factors_of(what), rng_seed)
        what = f"whole:{seeds}" if seeds else "off"
        return Run(self._name, what, self._factors_of(grown), rng_seed)

    def _factors_of(self, what: str) -> tuple[float, ...]:
        kind, _, argument = what.partition(":")
        if kind == "sweep":
            return tuple(self._factors[f"static:{size}"] for size in self._sizes)
        if kind == "static_final":
            return ()
        return (self._factors[f"ppo:{argument}" if kind == "shuffled" else what],)

    def _answers(self, line: Line) -> list[Answer | None]:
        return [None] * len(self._config.marks) if line.answers is None else list(line.answers)


def _val_loss(answer: Answer | None) -> float:
    return float("inf") if answer is None or answer.cut_short else answer.val_loss


def _is_static(what: str) -> bool:
    return what.startswith("static:")


def _is_from_scratch(text: str) -> bool:
    return text.startswith("static_final:")
