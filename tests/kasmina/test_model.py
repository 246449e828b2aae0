import copy
import gc
import pickle
import weakref
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from esper.kasmina import CNNHost, MorphogeneticModel
from esper.leyline import LifecycleOp, LifecycleRules, SlotTable, Stage, Style
from esper.leyline.errors import HostError
from tests.contracts.matrix import IMAGES, SLOT, Case, Kind, batch, begin, germinate, loss, planted, restart
from tests.kasmina.living import act, epoch

host_kinds = pytest.mark.parametrize("kind", IMAGES)


def full_host(blocks: int, table: SlotTable | None = None) -> MorphogeneticModel:
    """A chain of ``blocks`` with a trained-looking seed blended into every slot."""
    restart(blocks)
    host = CNNHost([4, 8] * (blocks // 2) + [4] * (blocks % 2), kernel=3, input_shape=(2, 8, 8), classes=4)
    model = MorphogeneticModel(host, LifecycleRules(min_training_epochs=0), table=table)
    model.bind_optimiser(torch.optim.SGD(host.parameters(), lr=0.1))
    names = ("conv_light", "norm", "conv_small", "depthwise", "conv_heavy")
    for slot in range(blocks):
        assert germinate(model, names[slot % 5], slot % 4, slot).succeeded
        model.table.alpha[0, slot] = 1.0 / (slot + 1)
    with torch.no_grad():
        for weight in model.slots.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    model.sync()
    return model


# --- segments ---------------------------------------------------------------------------------------


def test_alphas_given_to_a_pass_replace_the_tables() -> None:
    model = full_host(3).eval()
    x = torch.randn(4, 2, 8, 8)
    alphas = model.live_alphas
    alphas[1] = None
    model.table.stage[0, 1] = Stage.PRUNED
    found = model(x, alphas)
    model.sync()
    assert torch.equal(model(x), found)
    assert model.blended == [0, 2]
    with pytest.raises(ValueError, match="shorter"):
        model(x, model.live_alphas[:2])


class OperationCounter(TorchDispatchMode):
    """Counts everything that torch is asked to do, the backward included."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(module: nn.Module) -> int:
    x, y = batch(0)
    module.train()
    with OperationCounter() as counter:
        loss(module(x), y).backward()
    return counter.count


@host_kinds
def test_empty_slots_dispatch_no_operation(kind: Kind) -> None:
    trial = planted(Case("conv_light", Style.LINEAR_ADD, kind, 4))
    wanted = operations(nn.Sequential(*begin(kind, 4).model.host.segments))
    assert operations(trial.model) > wanted > 20, "an incubating seed is heard"
    trial.model.table.age[0, SLOT] = 99
    assert act(trial, LifecycleOp.PRUNE, SLOT).succeeded
    assert operations(trial.model) == wanted


def test_no_pass_leaves_a_slot_engaged_not_even_one_that_fails() -> None:
    trial = planted(Case("conv_light", Style.LINEAR_ADD, "images", 4), training_epochs=0)
    for images, outcome in (
        (batch(0)[0], nullcontext()),
        (torch.zeros(2, 7, 4, 4), pytest.raises(RuntimeError)),
    ):
        with outcome:
            trial.model(images)
        assert not any(trial.model.slot(index).engaged for index in range(2))


def test_a_host_says_what_it_needs() -> None:
    with pytest.raises(HostError, match=r"a CNN host needs positive block widths; found \(4, 0\)"):
        CNNHost((4, 0), kernel=3, input_shape=(1, 8, 8), classes=2)
    with pytest.raises(HostError, match=r"must be odd, to keep the size; found 2"):
        CNNHost((4,), kernel=2, input_shape=(1, 8, 8), classes=2)


# --- the table's mirror -------------------------------------------------------------------------------


@host_kinds
def test_the_model_follows_the_table(kind: Kind) -> None:
    trial = begin(kind, 4)
    germinate(trial.model, "norm", 0, slot=0)
    assert (trial.model.incubating, trial.model.blended) == ([0], [])
    assert trial.model.live_alphas == [None, None]
    trial.place(Stage.BLENDING, 0.25)
    assert (trial.model.incubating, trial.model.blended) == ([], [0])
    weight, other = trial.model.live_alphas
    assert other is None
    assert weight is trial.model.slot(0).alpha
    assert weight.item() == 0.25


@host_kinds
def test_alphas_and_seeds_follow_the_model_to_another_type(kind: Kind) -> None:
    trial = planted(Case("conv_heavy", 1, kind, 4), training_epochs=0)
    trial.model.double().eval()
    assert [a.dtype for a in trial.model.live_alphas if a is not None] == [torch.float64]
    x, y = batch(0)
    assert trial.model(x.double()).dtype == torch.float64
    trial = begin(kind, 4)
    trial.model.double()
    germinate(trial.model, "conv_heavy", Style.GATED_GATE)
    assert {p.dtype for p in trial.model.parameters()} == {torch.float64}
    assert epoch(trial, x.double(), y).broken == []
    trial.place(Stage.BLENDING, 0.5)
    assert not epoch(trial, x.double(), y).skipped


def test_the_count_separates_host_and_seeds() -> None:
    trial = begin("images", 4)
    # 3×3 convolutions 2→4 and 4→4 with bias, two norms, a linear 4→4
    host = (2 * 4 * 9 + 4) + 8 + (4 * 4 * 9 + 4) + 8 + (4 * 4 + 4)
    assert trial.model.count_parameters() == (host, 0)
    germinate(trial.model, "conv_light", Style.GATED_GATE)
    grown = (4 * 4 * 9 + 4) + 4  # a 3×3 convolution with bias, a gate without
    assert trial.model.count_parameters() == (host, grown)
    assert trial.model.table.seed_params[0, SLOT] == grown
    assert len(trial.model.host_parameters()) == 10


# --- removal ------------------------------------------------------------------------------------------


def test_nothing_keeps_a_pruned_seed_in_memory_and_the_next_one_starts_afresh() -> None:
    trial = planted(Case("conv_heavy", Style.GATED_GATE, "images_batch", 4), training_epochs=0)
    first = trial.seed_weights["seed.one.0.weight"].detach().clone()
    trial.train(2)
    slot = trial.model.slot(SLOT)
    relics = [weakref.ref(part) for part in (slot.seed, slot.gate, slot.optimiser) if part is not None]
    trial.model.table.age[0, SLOT] = 99
    assert act(trial, LifecycleOp.PRUNE, SLOT).succeeded
    assert (slot.alpha.item(), slot.stochastic) == (0.0, False)
    gc.collect()
    assert [relic() for relic in relics] == [None, None, None]
    trial.train(1, first=2)
    trial.model.table.clear(0, SLOT)
    assert germinate(trial.model, "conv_heavy", Style.GATED_GATE).succeeded
    assert not torch.equal(first, trial.seed_weights["seed.one.0.weight"]), "another draw"
    assert slot.optimiser is not None
    assert not slot.optimiser.state


# --- state --------------------------------------------------------------------------------------------


@host_kinds
def test_a_state_undoes_whatever_grew_or_went_since(kind: Kind) -> None:
    trial = begin(kind, 4, training_epochs=0)
    germinate(trial.model, "conv_heavy", 3, slot=0)
    trial.train(2)
    kept, outputs = trial.model.state(), trial.outputs()
    trial.model.table.age[0, 0] = 99
    act(trial, LifecycleOp.PRUNE, 0)
    germinate(trial.model, "norm", 0, slot=1)
    trial.train(2, first=2)
    trial.model.load_state(kept)
    assert trial.model.slot(1).seed is None
    assert all(map(torch.equal, trial.outputs(), outputs))
    trial.train(1, first=4)
    trial.model.load_state(kept)
    assert all(map(torch.equal, trial.outputs(), outputs)), "a state can be returned to twice"


def test_seeds_of_a_state_need_an_optimiser_and_a_slot_that_is_engaged_but_empty_says_so() -> None:
    kept = planted(Case("conv_light", 0, "images", 4)).model.state()
    model = MorphogeneticModel(CNNHost((4, 4), kernel=3, input_shape=(2, 6, 6), classes=4))
    with pytest.raises(RuntimeError, match=r"needs bind_optimiser\(host_optimiser\) first"):
        model.load_state(kept)
    trial = begin("images", 4)
    trial.place(Stage.BLENDING, 1.0)
    with pytest.raises(RuntimeError, match="slot r0c0 is engaged but empty"):
        trial.model(batch(0)[0])


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_the_copy_of_a_row_of_a_bigger_table_is_independent(how: str) -> None:
    table = SlotTable.empty(3, 3)
    model = full_host(3, table=table.row(1))
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    for name, array in twin.table.arrays().items():
        np.testing.assert_array_equal(array, model.table.arrays()[name])
        assert array.shape == (1, 3)
        assert not np.shares_memory(array, table.arrays()[name])
    x = torch.randn(4, 2, 8, 8)
    wanted = model(x)
    twin.table.alpha[...] = 0.0
    twin.sync()
    assert not torch.equal(twin(x), wanted)
    assert torch.equal(model(x), wanted)
    assert table.alpha[1].tolist() == [1.0, 0.5, pytest.approx(1 / 3)]
    assert twin.slot(0).alpha is twin.live_alphas[0]
