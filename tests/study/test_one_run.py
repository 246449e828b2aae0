"""Study runs of every kind of arm: losses at the budget marks, and equal compute."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from esper.leyline.errors import DivergedError, EsperError
from esper.study.one_run import MarkResult, RunResult, StudyRun, check_spent, do_run
from esper.tamiyo import PeriodicController, parse_plan
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic
from esper.tamiyo.policy.checkpoint import save_policy
from esper.tamiyo.policy.features import feature_names
from esper.tolaria.episode import run_episode
from esper.tolaria.tasks import TASKS
from esper.tolaria.vector import SerialVector
from tests.study.building import NAME, TASK, study

GROWN = "periodic:stack@r0c0:1,lora@r0c1:2"
WHOLE = "whole:stack/linear_add@r0c0:0,lora/linear_add@r0c1:1"
DUE = {0.5: 0.75e9, 1.0: 1.5e9}


def run(what: str, *, factors: tuple[float, ...] = (1.0,), rng_seed: int = 2_000_000) -> list[MarkResult]:
    line = do_run(study(), StudyRun(NAME, what, factors, rng_seed))
    assert line.answers is not None
    return line.answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[MarkResult]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, NAME, TASK)
        policy = tmp_path_factory.mktemp("policy")
        save_policy(FactoredRecurrentActorCritic(len(feature_names(2)), 2, hidden_dim=8), policy)
        found = {what: run(what) for what in ("static:1", "static:3", "random", "counting", GROWN, WHOLE)}
        found |= {f"{kind}": run(f"{kind}:{policy}") for kind in ("ppo", "shuffled")}
        return found


def test_every_study_arm_spends_the_budget_within_one_per_cent_or_one_minibatch(answers):
    for what, found in answers.items():
        assert [answer.mark for answer in found] == [0.5, 1.0]
        for answer in found:
            most = max(0.01 * DUE[answer.mark], answer.minibatch)
            assert DUE[answer.mark] - most <= answer.charged <= DUE[answer.mark] + most, what


def test_recorded_minibatch_cost_of_a_study_run_is_that_of_the_final_network(answers):
    # A minibatch costs 16.3 MFLOP for a network of one block and 13.1 MFLOP more for each further block.
    costs = {what: found[-1].minibatch / 1e6 for what, found in answers.items()}
    assert costs["static:1"] == pytest.approx(16.3, abs=0.1)
    assert costs["static:3"] == pytest.approx(42.5, abs=0.1)


def test_only_grown_networks_are_charged_for_the_compute_of_counterfactuals(answers):
    assert answers[GROWN][-1].flops["counterfactual"] > 0
    assert answers["static:3"][-1].flops["counterfactual"] == 0
    assert answers["static:3"][-1].flops["validation"] > 0
    assert answers[WHOLE][-1].flops["counterfactual"] == 0


def test_network_trained_from_scratch_starts_with_all_seeds_of_the_grown_network(answers):
    (_, grown), (first, whole) = answers[GROWN], answers[WHOLE]
    assert grown.seeds == whole.seeds == first.seeds == WHOLE.removeprefix("whole:")
    assert grown.params == whole.params == first.params
    assert whole.test_loss != grown.test_loss


def test_study_run_with_a_single_budget_mark_has_the_test_loss_and_compute_of_an_ordinary_episode(answers):
    """The growth plan plants no seed in the last fifth of the budget, where growth is disabled."""
    line = do_run(study(marks=[1.0]), StudyRun(NAME, GROWN, (1.0,), 2_000_000))
    vector = SerialVector(TASK, rng_seed=2_000_000)
    vector.reset(0)
    plan = parse_plan(GROWN.removeprefix("periodic:"), vector.action_space)
    (report,) = run_episode(vector, PeriodicController(vector.action_space, plan))
    (answer,) = line.answers
    assert answer.test_loss == report.test_loss == answers[GROWN][-1].test_loss
    assert answer.flops == report.flops


def untimed(results: list[MarkResult]) -> list[MarkResult]:
    return [msgspec.structs.replace(result, seconds=None) for result in results]


def test_cpu_seconds_of_a_study_run_rise_from_mark_to_mark(answers):
    for what, (half, end) in answers.items():
        assert 0.0 < half.seconds < end.seconds, what


def test_repeated_study_run_has_the_same_losses_and_another_learning_rate_changes_them(answers):
    assert untimed(run("static:1")) == untimed(answers["static:1"])
    assert run("static:1", factors=(0.5,))[-1].test_loss != answers["static:1"][-1].test_loss


def test_study_run_cut_short_by_rollbacks_reports_its_last_good_network_at_later_marks(monkeypatch):
    first, last = run("static:1", factors=(1e30,))
    assert first.cut_short
    assert last.cut_short
    assert (first.test_loss, first.charged) == (last.test_loss, last.charged)
    assert last.charged < 0.75e9


def test_study_run_whose_host_diverges_has_no_results(monkeypatch):
    def diverging(generator):
        raise DivergedError("a loss that is not finite")

    monkeypatch.setitem(TASKS, NAME, replace(TASK, load=diverging))
    asked = StudyRun(NAME, "static:1", (1.0,), 0)
    assert do_run(study(), asked) == RunResult(asked, None)


def test_study_arm_that_spends_less_compute_than_the_budget_raises_an_error(answers):
    """An arm with 750 MFLOP may spend one minibatch (16.3 MFLOP) less than this, but not two minibatches
    less."""
    first = answers["static:1"][0]

    def spending(charged: int, *, cut_short: bool = False) -> MarkResult:
        flops = {**first.flops, "backward": charged - first.flops["forward"]}
        return msgspec.structs.replace(first, flops=flops, cut_short=cut_short)

    asked = StudyRun(NAME, "static:1", (1.0,), 0)
    check_spent(asked, spending(735_000_000))
    check_spent(asked, spending(500_000_000, cut_short=True))
    with pytest.raises(
        EsperError, match=r"'static:1' on tiny_scaling with rng seed 0 spent 718,000,000 FLOP"
    ):
        check_spent(asked, spending(718_000_000))


def test_study_run_of_a_policy_whose_folder_has_no_checkpoint_raises_an_error(tmp_path: Path):
    with pytest.raises(EsperError, match="holds no checkpoint"):
        do_run(study(), StudyRun(NAME, f"shuffled:{tmp_path}", (1.0,), 0))
