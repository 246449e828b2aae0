"""Episodes with a compute budget: minibatches per step, charged FLOPs, learning rates, scores at budget
marks.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.kasmina.compute import FlopMeter
from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.optimizer_groups import wsd_factor
from esper.leyline.errors import EsperError, HostError
from esper.leyline.factored_actions import CANONICAL_ACTION, OP_GERMINATE, Head
from esper.leyline.rows import DecisionRow
from esper.leyline.signals import Decisions
from esper.leyline.slot_table import legal_slots_by_op
from esper.leyline.stages import Stage
from esper.tolaria.budget_marks import MARKS, branches
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks import task_named
from esper.tolaria.tasks.text import split_text
from tests.study.building import few
from tests.tolaria.building import ListSink

WAIT = np.array(CANONICAL_ACTION)
TEXT = b"".join(b"%d %d\n" % (n, n * n) for n in range(8000))


TASK = replace(
    task_named("pycode_scaling"),
    load=lambda generator: few(split_text(TEXT, 64, generator, validation=16)),
    batch_size=4,
    budget=5 * 10**9,
    horizon=20,
    warmup=4,
)
"""Task with 250 MFLOP per step; a minibatch costs 32.5, 58.7 or 84.9 MFLOP with one, two or three layers.
"""


def plant(slot: int) -> np.ndarray:
    """Return the action that plants a copy of the last block at ``slot``."""
    action = WAIT.copy()
    action[Head.OP], action[Head.SLOT], action[Head.BLUEPRINT] = OP_GERMINATE, slot, 1
    return action


class Plan:
    """Controller that plants a copy of the last block at each of the given steps, in the order of slots."""

    name = "plan"

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def reset(self, episode: int) -> None:
        pass

    def decide(self, facts, table):
        step = int(facts.epoch[0])
        return Decisions((plant(self.steps.index(step)) if step in self.steps else WAIT)[None])


def run(task, *steps: int) -> MorphEnv:
    """Run an episode that plants a copy of the last block at each of ``steps``, in the order of slots."""
    env = MorphEnv(task, rng_seed=3)
    env.reset()
    while not env.ended:
        env.step(plant(steps.index(env.epoch)) if env.epoch in steps else WAIT)
    return env


@pytest.fixture(scope="module")
def grown() -> MorphEnv:
    return run(TASK, 2, 5)


@pytest.mark.parametrize("trunk", [1, 3])
def test_episode_without_growth_leaves_less_of_its_budget_than_one_minibatch_costs(trunk):
    env = run(TASK.with_trunk(trunk))
    left = TASK.budget - env.host.meter.ledger.charged
    assert 0 <= left < env.host.meter.minibatch(TASK.batch_size)


def test_episode_with_growth_leaves_less_than_one_minibatch_costs_and_is_charged_for_counterfactuals(grown):
    ledger = grown.host.meter.ledger
    left = TASK.budget - ledger.charged
    assert 0 <= left < grown.host.meter.minibatch(TASK.batch_size)
    assert ledger.counterfactual > 0
    assert ledger.charged == ledger.forward + ledger.backward + ledger.incubation + ledger.counterfactual
    assert list(grown.table.stage[0, :3]) == [Stage.FOSSILIZED, Stage.FOSSILIZED, Stage.DORMANT]


def test_environment_with_half_the_budget_reports_the_number_of_minibatches_it_can_still_pay_for():
    half, copies = replace(TASK.instances, budget_shares=(0.5,)), replace(TASK.rules, blueprints=("stack",))
    env = MorphEnv(replace(TASK, instances=half, rules=copies), rng_seed=0)
    # A minibatch costs 32.5 MFLOP of the budget of 2,500 MFLOP; a copy of the block adds 26.2 MFLOP per
    # minibatch.
    assert env.reset().minibatches_left == pytest.approx(76.9, abs=0.1)
    assert env.step(WAIT).candidate_cost == pytest.approx(26.2 / 32.5, abs=0.002)
    # The first of 20 steps trains three minibatches. The second step, with a seed, trains two minibatches of
    # 58.7 MFLOP each.
    assert env.host.meter.ledger.charged == pytest.approx(3 * 32.5e6, rel=0.002)
    left = (2500 - 3 * 32.5 - 2 * 58.7) / 58.7
    assert env.step(plant(0)).minibatches_left == pytest.approx(left, rel=0.01)
    report = env.run_out()
    charged = sum(report.flops.values()) - report.flops["validation"]
    assert 2.4e9 < charged <= 2.5e9


def test_step_of_a_budgeted_episode_has_fewer_minibatches_after_growth():
    env = MorphEnv(TASK, rng_seed=3)
    env.reset()
    counts = []
    for action in (WAIT, plant(0), plant(1)):
        before = env.host.state()["batches"][0]
        env.step(action)
        counts.append(env.host.state()["batches"][0] - before)
    # Step 1 trains 7 minibatches for 7 · 32.5 = 227.5 of 250 MFLOP and leaves 22.5. Step 2 trains 4
    # minibatches for 4 · 58.7 = 234.9 MFLOP and leaves 37.6; the first measurement of the seed then costs
    # 8.4. Step 3 has 250 + 37.6 − 8.4 = 279 MFLOP and trains 3 minibatches for 3 · 84.9 = 254.7.
    assert counts == [7, 4, 3]


def test_smallest_budget_mark_of_fashion_scaling_allows_200_minibatches_of_the_largest_host():
    task = task_named("fashion_scaling")
    largest = task.with_trunk(1 + task.num_slots).instances.draw(torch.Generator())
    meter = FlopMeter(MorphogeneticModel(task.build_host(largest), task.rules), torch.zeros(1, 14, 14))
    assert MARKS[0] * task.budget >= 200 * meter.minibatch(task.batch_size)


def test_new_seed_in_a_budgeted_episode_has_full_alpha_and_its_tempo_is_ignored():
    sink = ListSink()
    env = MorphEnv(TASK, rng_seed=3, sink=sink)
    env.reset()
    action = plant(0)
    action[Head.TEMPO] = 2
    env.step(action)
    assert env.table.alpha[0, 0] == 1.0
    assert env.table.measured[0, 0]
    env.recorder.emit_last_action()
    [decision] = sink.of(DecisionRow)
    assert decision.action[Head.TEMPO] == CANONICAL_ACTION[Head.TEMPO]


def test_germination_is_illegal_in_the_learning_rate_decay_of_a_budgeted_episode():
    env = MorphEnv(TASK, rng_seed=3)
    env.reset()
    for _ in range(15):
        env.step(WAIT)
    assert legal_slots_by_op(env.table, TASK.rules)[0, OP_GERMINATE].any()
    env.step(WAIT)
    assert env.epoch == 16
    assert not legal_slots_by_op(env.table, TASK.rules)[0, OP_GERMINATE].any()


def test_warmup_stable_decay_factor_rises_stays_at_one_and_falls_to_zero():
    # The learning-rate factor is 1/5, 2/5, 3/5, 4/5 in a warmup of four minibatches, then 1, and decays
    # linearly in the last fifth.
    assert [wsd_factor(0.1, n, 4) for n in (0, 1, 3, 4, 99)] == [0.2, 0.4, 0.8, 1.0, 1.0]
    assert [wsd_factor(p, 99, 4) for p in (0.8, 0.9, 1.0)] == pytest.approx([1.0, 0.5, 0.0])


def test_learning_rate_of_a_new_seed_has_its_own_warmup_in_a_budgeted_episode():
    env = MorphEnv(TASK, rng_seed=3)
    env.reset()
    for action in (WAIT, WAIT, WAIT, plant(0)):
        env.step(action)
    assert env.host.optimiser.param_groups[0]["lr"] == 4e-3
    # The first three steps train 23 minibatches, before the seed is planted. In the fourth step the seed
    # trains for 4 of the 32 minibatches of its warmup.
    assert env.model.groups.own_group(0)["lr"] == pytest.approx(4e-3 * 4 / 33)


def test_network_at_a_budget_mark_has_the_test_loss_and_flops_of_an_episode_with_that_budget():
    marks = (0.25, 0.5, 1.0)
    found = branches(TASK, Plan(2, 5), rng_seed=3, marks=marks)
    reports = {branch.mark: branch.report for branch in found}
    assert list(reports) == list(marks)
    for mark, steps in ((0.25, (2,)), (0.5, (2, 5)), (1.0, (2, 5))):
        alone = run(TASK.until(mark), *steps).finish()
        assert alone.test_loss == reports[mark].test_loss
        assert alone.flops == reports[mark].flops


def test_flop_budget_below_one_minibatch_per_step_is_refused():
    with pytest.raises(
        HostError, match=r"budget of 100,000,000 FLOP .* 20 steps 5,000,000, .* give 650,117,120"
    ):
        MorphEnv(replace(TASK, budget=10**8), rng_seed=0).reset()


def test_budget_mark_that_is_not_a_whole_number_of_steps_is_refused():
    for share in (0.3001, 0.0, 1.5):
        with pytest.raises(HostError, match=rf"up to {share:g} of its 20"):
            TASK.until(share)
    with pytest.raises(EsperError, match=r"0\.8 of the mark"):
        next(branches(TASK, None, rng_seed=0, marks=(0.1,)))


def test_budgeted_episode_restored_from_its_state_continues_bit_for_bit():
    one, other = MorphEnv(TASK, rng_seed=3), MorphEnv(TASK, rng_seed=3)
    one.reset()
    other.reset()
    for action in (WAIT, plant(0), WAIT):
        one.step(action)
    other.load_state(one.state())
    for env in (one, other):
        while not env.ended:
            env.step(WAIT)
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert one.host.meter.ledger == other.host.meter.ledger
