"""Plans in a user's network: seeds that are worth less than their error do not become permanent."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import esper
from esper.growth import Grown, Growth
from esper.growth.batch_training import recalibrate
from esper.leyline import ActionSpace, Head, LifecycleOp, SlotTable, Stage
from esper.tamiyo import PeriodicController, parse_plan
from esper.tamiyo.controllers import TRIAL_EPOCHS
from tests.growth.models import mlp
from tests.growth.test_training_settings import X, loader, network
from tests.leyline.building import facts_of, put, space_of


@pytest.mark.parametrize(
    ("contribution", "error", "epochs", "op"),
    [
        (0.3, 0.2, 1, LifecycleOp.FOSSILIZE),
        (0.1, 0.2, 1, LifecycleOp.WAIT),
        (0.1, 0.2, TRIAL_EPOCHS, LifecycleOp.PRUNE),
        (-0.3, 0.2, TRIAL_EPOCHS, LifecycleOp.PRUNE),
        (0.0, 0.0, 1, LifecycleOp.WAIT),  # A seed that did not learn.
        (0.0, 0.0, TRIAL_EPOCHS, LifecycleOp.PRUNE),
        (0.1, np.nan, 1, LifecycleOp.FOSSILIZE),  # A metric of one number has no error.
        (0.0, np.nan, 1, LifecycleOp.WAIT),
        (np.nan, np.nan, TRIAL_EPOCHS, LifecycleOp.WAIT),
    ],
)
def test_plan_keeps_a_seed_that_is_worth_more_than_its_error_and_prunes_others_after_their_trial(
    contribution: float, error: float, epochs: int, op: LifecycleOp
) -> None:
    space, table = space_of(), SlotTable.empty(1, 3)
    plan = parse_plan("norm@r0c0:99", space)
    measured = {"contribution": contribution, "contribution_error": error, "epochs_since_measured": 0}
    put(table, 1, Stage.HOLDING, alpha=1.0, alpha_target=1.0, age=9, epochs_in_stage=epochs, **measured)
    controller = PeriodicController(space, plan, keeps_all=False)
    action = controller.decide(facts_of(8), table).actions[0]
    assert action[: Head.SLOT + 1].tolist() == [op, 0 if op == LifecycleOp.WAIT else 1]
    if not np.isnan(contribution):
        keeping = PeriodicController(space, plan, keeps_all=True)
        assert keeping.decide(facts_of(8), table).actions[0, Head.OP] == LifecycleOp.FOSSILIZE


def with_dead_seed(controller: str, **settings: Any) -> Grown:
    """Grow with an optimiser that changes no weight, so that no seed learns."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    known = {"loss": cross_entropy, "optimizer": optimizer, "show": lambda _: None} | settings
    return esper.grow(net, loader(16), loader(50), controller=controller, **known)


@pytest.mark.filterwarnings("ignore:.*did not change. no gradient or no optimiser step reached it")
@pytest.mark.parametrize("length", [{"epochs": 4}, {"budget": 60_000}])
def test_seed_of_a_plan_that_did_not_learn_is_removed_at_the_end_unless_the_plan_says_keep(
    length: dict[str, Any],
) -> None:
    grown = with_dead_seed("mlp@0:1", **length)
    kinds = [event.kind for event in grown.events]
    assert (kinds.count("germinated"), kinds.count("pruned"), kinds.count("fossilized")) == (1, 1, 0)
    assert list(grown.net.state_dict()) == list(network().state_dict())
    assert grown.epochs[-1].params == 58

    kept = with_dead_seed("keep:mlp@0:1", **length)
    kinds = [event.kind for event in kept.events]
    assert (kinds.count("pruned"), kinds.count("fossilized")) == (0, 1)
    assert sum(p.numel() for p in kept.net.parameters()) == 618


def test_end_trials_measures_the_other_seeds_again_after_each_removal() -> None:
    # Each seed alone gives the whole metric: with both on, neither contributes; with one left, it does.
    torch.manual_seed(0)
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    growth = Growth(
        net, optimizer, sample=torch.zeros(2, 5), mode="max", slots=["0", "2"], controller="mlp@0:9"
    )
    growth.germinate("0", "mlp")
    growth.germinate("2", "mlp")

    def one_is_enough() -> list[float]:
        alphas = [slot.held.alpha.item() for slot in growth.network.slots if slot.graft is not None]
        return [max(alphas, default=0.0) + offset for offset in (0.0, 0.5)]

    growth.measure(one_is_enough)
    events = growth.end_trials(one_is_enough)
    assert [event.kind for event in events] == ["pruned", "measured"]
    assert events[1].contribution == 1.0
    assert [report.stage.name for report in growth.reports()].count("DORMANT") == 0
    assert growth.end_trials(one_is_enough) == []


def test_end_trials_removes_nothing_under_another_controller() -> None:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    growth = Growth(net, optimizer, sample=torch.zeros(2, 5), mode="max", slots="0", controller=None)
    growth.germinate("0", "mlp")
    assert growth.end_trials(lambda: 0.0) == []
    assert growth.network.slots[0].graft is not None


def test_recalibrate_replaces_batch_norm_statistics_by_those_of_the_training_data() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    net[1].running_mean.fill_(7.0)
    recalibrate(net, loader(100))
    torch.testing.assert_close(net[1].running_mean, net[0](X).mean(dim=0))
    assert net.training
    assert net[1].momentum == 0.1


@pytest.mark.filterwarnings("ignore:.*did not change. no gradient or no optimiser step reached it")
def test_last_validation_loss_is_that_of_the_network_without_the_removed_seed() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    frozen = torch.optim.SGD(net.parameters(), lr=0.0)
    known = {"loss": cross_entropy, "optimizer": frozen, "show": lambda _: None, "controller": "mlp@0:1"}
    grown = esper.grow(net, loader(20), loader(50), epochs=3, **known)
    losses = [cross_entropy(grown.net.eval()(x), y).item() for x, y in loader(50)]
    assert [event.kind for event in grown.events].count("pruned") == 1
    assert grown.epochs[-1].val_loss == pytest.approx(sum(losses) / 2)
    # Statistics are means over all training batches, and no moving average.
    torch.testing.assert_close(grown.net[1].running_mean, grown.net[0](X).mean(dim=0))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("keep:", "empty entry in schedule ''"),
        ("keep:mpl@0:1", "unknown blueprint 'mpl'; did you mean mlp"),
        ("keep:mlp@0:0", "plan 'keep:mlp@0:0' plants at step 0"),
        ("kept:mlp@0:1", "unknown blueprint 'kept:mlp'"),
    ],
)
def test_misspelt_plans_with_keep_are_refused(plan: str, words: str) -> None:
    with pytest.raises(esper.leyline.errors.EsperError, match=words):
        with_dead_seed(plan, epochs=3)


def test_grow_with_a_plan_of_side_modules_runs_no_trials_of_blocks_and_hidden_units() -> None:
    def grown(controller: Any) -> tuple[int, torch.Tensor]:
        net, calls = network(), list[object]()
        net.register_forward_hook(lambda *_: calls.append(None))
        known = {"loss": cross_entropy, "epochs": 2, "controller": controller, "show": lambda _: None}
        grown = esper.grow(net, loader(16), loader(50), **known)
        return len(calls), torch.cat([p.detach().flatten() for p in grown.net.parameters()])

    def same_plan(space: ActionSpace) -> PeriodicController:
        return PeriodicController(space, parse_plan("mlp_small@0:1", space), keeps_all=False)

    (few, weights), (many, others) = grown("mlp_small@0:1"), grown(same_plan)
    assert few < many
    assert torch.equal(weights, others)
    assert grown(None)[0] < grown("off")[0]
