"""Runs, learning rates and network sizes that a study chooses, for made-up losses."""

from collections.abc import Callable, Sequence
from typing import Any

from esper.study.one_run import MarkResult, RunResult, StudyRun
from esper.study.phases import StudyPhases, TaskResults
from tests.study.building import NAME, study

FLOPS = {
    "forward": 1,
    "backward": 2,
    "incubation": 0,
    "validation": 0,
    "counterfactual": 0,
    "pruned_seeds": 0,
}
Losses = Callable[[StudyRun], Sequence[float] | None]
"""Function from a study run to its validation losses at half and full budget; None for divergence."""


class Made:
    """Stub that returns made-up results of study runs; the test loss is the validation loss plus 100."""

    def __init__(
        self,
        losses: Losses,
        seeds: Callable[[StudyRun], tuple[str, ...]] | None = None,
        cut_short: Callable[[StudyRun], bool] = lambda run: False,
        marks: tuple[float, ...] = (0.5, 1.0),
    ) -> None:
        self.losses, self.cut_short, self.asked = losses, cut_short, list[StudyRun]()
        self.marks, self.seeds = marks, seeds or (lambda run: ("",) * len(marks))

    def __call__(self, runs: Sequence[StudyRun]) -> dict[StudyRun, RunResult]:
        self.asked += runs
        return {run: RunResult(run, self._answers(run)) for run in runs}

    def _answers(self, run: StudyRun) -> list[MarkResult] | None:
        losses = self.losses(run)
        if losses is None:
            return None
        return [
            MarkResult(mark, loss, 100 + loss, 50.0, 7, seeds, FLOPS, 3, 1, self.cut_short(run))
            for mark, loss, seeds in zip(self.marks, losses, self.seeds(run), strict=True)
        ]


def phases(made: Made, **settings: Any) -> TaskResults:
    return StudyPhases(study(**settings), NAME, made).run()


def test_learning_rates_are_chosen_on_selection_rng_seeds():
    # Networks of size 1 have the lowest loss at half the learning rate, sizes 2 and 3 at twice the learning
    # rate.
    best = {"static:1": 0.5, "static:2": 2.0, "static:3": 2.0}
    at_best = {"static:1": (3.0, 3.0), "static:2": (4.0, 2.5), "static:3": (5.0, 2.0)}

    def losses(run: StudyRun) -> Sequence[float]:
        worse = 0.0 if run.factors == (best[run.what],) else 10.0
        if run.rng_seed >= 2_000_000:
            # Losses of reported rng seeds must not affect the selection of learning rates.
            worse = -run.rng_seed
        return [loss + worse for loss in at_best[run.what]]

    made = Made(losses)
    found = phases(made, learning_rate_factors=[0.5, 1.0, 2.0], selection_rng_seeds=2)
    assert found.factors == {"static:1": (0.5,), "static:2": (2.0,), "static:3": (2.0,)}
    chosen, reported = made.asked[:18], made.asked[18:]
    assert {run.rng_seed for run in chosen} == {1_000_000, 1_000_001}
    # As the reference, all sizes are reported with all learning rates; the arms are among these runs.
    assert reported[:18] == [
        StudyRun(NAME, what, (factor,), rng_seed)
        for what in best
        for factor in (0.5, 1.0, 2.0)
        for rng_seed in (2_000_000, 2_000_001)
    ]
    assert set(reported[18:]) < set(reported[:18])
    assert list(found.reference)[:2] == ["static:1 × 0.5", "static:1 × 1"]
    assert [answer.val_loss for answer in found.reference["static:2 × 2"][0]] == [-1_999_996.0, -1_999_997.5]
    assert found.arms["static:2"][0] == found.reference["static:2 × 2"]


def test_a_learning_rate_at_which_a_host_diverges_or_rolls_back_is_not_chosen():
    made = Made(lambda run: None if run.factors == (2.0,) else (1.0, 1.0))
    breaking = Made(lambda run: (1.0 / run.factors[0],) * 2, cut_short=lambda run: run.factors == (2.0,))
    for losses in (made, breaking):
        found = phases(losses, arms=["static:2"], learning_rate_factors=[2.0, 1.0])
        assert found.factors == {"static:2": (1.0,)}


def test_study_results_of_a_run_that_diverged_are_none():
    made = Made(lambda run: None if run.rng_seed == 2_000_001 else (1.0, 1.0))
    found = phases(made, arms=["static:2"])
    ((first, second),) = found.arms["static:2"]
    assert [answer.test_loss for answer in first if answer] == [101.0, 101.0]
    assert second == [None, None]


def test_arm_off_runs_the_smallest_network_and_a_clock_runs_its_plan():
    made = Made(lambda run: (1.0, run.factors[0] * (1 if run.what == "static:1" else -1)))
    found = phases(made, arms=["off", "clock:4"], learning_rate_factors=[1.0, 2.0], rng_seeds=1)
    assert [(run.what, run.factors) for run in made.asked[-2:]] == [
        ("static:1", (1.0,)), ("periodic:stack@r0c0:1,stack@r0c1:5", (2.0,)),
    ]  # fmt: skip
    assert found.plans == {"clock:4": "stack@r0c0:1,stack@r0c1:5"}
    assert found.static == frozenset()
    assert found.reference == {}


def test_computed_arms_read_the_static_runs_with_their_selected_learning_rates_and_add_no_run():
    # Losses are 10 / size at the learning rate that is selected, and larger at the other.
    marks = (0.1, 0.2, 0.5, 1.0)
    made = Made(lambda run: (10.0 / int(run.what[-1]) * run.factors[0],) * 4, marks=marks)
    arms = ["static:1", "static:3", "halving", "extrapolated"]
    found = phases(made, arms=arms, learning_rate_factors=[2.0, 1.0], rng_seeds=1, marks=list(marks))
    [[halving]], [[extrapolated]] = found.arms["halving"], found.arms["extrapolated"]
    # With two sizes halving decides after half a training, and a training has at least half of the mark.
    assert [answer and answer.val_loss for answer in halving] == [None, None, 10.0 / 3, 10.0 / 3]
    assert [answer and answer.val_loss for answer in extrapolated] == [None, None, None, 10.0 / 3]
    assert {answer.seconds for answer in halving[2:]} == {None}
    assert {run.what for run in made.asked} == {"static:1", "static:3"}
    assert found.factors["halving"] == ()


def test_computed_arms_have_no_result_if_all_sizes_diverged():
    made = Made(lambda run: None)
    found = phases(made, arms=["static:1", "static:3", "halving", "extrapolated"], rng_seeds=1)
    assert found.arms["halving"] == found.arms["extrapolated"] == [[[None, None]]]


def test_arm_static_final_trains_the_grown_network_of_every_budget_mark_from_scratch():
    """At the first budget mark the grown network has two blocks; at the last mark it also has a LoRA seed."""
    stack, both = "stack/linear_add@r0c0:0", "stack/linear_add@r0c0:0,lora/linear_add@r0c1:1"
    values = {"static:2": (4.0, 4.5), f"whole:{both}": (5.0, 5.5)}
    made = Made(lambda run: values.get(run.what, (1.0, 1.0)), lambda run: (stack, both))
    arms = {"grown": "random", "scratch": "static_final:grown"}
    found = phases(made, arms=arms, rng_seeds=1)
    [[[half, end]]] = found.arms["scratch"]
    assert (half.val_loss, end.val_loss) == (4.0, 5.5)
    assert {run.what for run in made.asked if run.rng_seed == 2_000_000} == {"random", *values}


def test_arm_of_several_trained_policies_has_one_list_of_results_per_policy():
    made = Made(lambda run: (1.0, 1.0) if run.what.endswith("a") else (2.0, 2.0))
    found = phases(made, arms={"ppo": ["ppo:a", "ppo:b"], "shuffled": ["shuffled:a", "shuffled:b"]})
    for name in ("ppo", "shuffled"):
        ends = [[answers[-1].val_loss for answers in training] for training in found.arms[name]]
        assert ends == [[1.0, 1.0], [2.0, 2.0]]


def test_arm_schedule_is_the_best_plan_found_within_the_allowed_number_of_episodes():
    """The made-up loss is lowest for plans with two seeds and an early first seed."""

    def losses(run: StudyRun) -> Sequence[float]:
        entries = run.what.removeprefix("periodic:").split(",")
        loss = int(entries[0].rpartition(":")[2]) - 100.0 * (len(entries) == 2)
        return [loss, loss]

    made = Made(losses)
    found = phases(made, arms=["schedule"], schedule_episodes=40, selection_rng_seeds=2, rng_seeds=1)
    tried = list(dict.fromkeys(run.what for run in made.asked if run.rng_seed < 2_000_000))
    assert len(tried) == 20
    assert found.plans["schedule"] == min(tried, key=lambda what: losses(StudyRun("", what, (), 0))[0])[9:]
    assert made.asked[-1].what == f"periodic:{found.plans['schedule']}"
    first, last = (
        [losses(StudyRun("", what, (), 0))[0] for what in part] for part in (tried[:5], tried[-5:])
    )
    assert sum(last) < sum(first)
