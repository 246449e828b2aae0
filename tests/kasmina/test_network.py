"""Network with slots: forward pass with seeds, slot table, dtypes, parameter counts, prunes and saved
states."""

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from esper.kasmina import CNNHost, MorphogeneticModel
from esper.kasmina.sites import find_sites
from esper.leyline import LifecycleOp, LifecycleRules, SlotTable, Stage, Style
from esper.leyline.errors import HostError, UnknownNameError
from tests.contracts.hosts import PlainImages
from tests.contracts.matrix import (
    IMAGES,
    SLOT,
    Case,
    Kind,
    Trial,
    assert_same,
    batch,
    begin,
    build_host,
    germinate,
    loss,
    planted,
    registered,
    restart,
)
from tests.kasmina.seed_episodes import DropoutSeed, act, epoch

host_kinds = pytest.mark.parametrize("kind", IMAGES)


def active_seeds(model: MorphogeneticModel) -> list[bool]:
    """Return for each slot whether its seed takes part in the forward pass."""
    return [slot.graft is not None and slot.graft.participation.active for slot in model.slots]


def full_host(blocks: int, table: SlotTable | None = None) -> MorphogeneticModel:
    """Return a CNN of ``blocks`` blocks with a blended seed, whose weights are perturbed, in every slot."""
    restart(blocks)
    host = CNNHost([4, 8] * (blocks // 2) + [4] * (blocks % 2), kernel=3, input_shape=(2, 8, 8), classes=4)
    model = MorphogeneticModel(host, LifecycleRules(min_training_epochs=0), table=table)
    model.bind_optimiser(torch.optim.SGD(host.parameters(), lr=0.1))
    names = ("conv_light", "norm", "conv_small", "depthwise", "conv_heavy")
    for slot in range(blocks):
        assert germinate(model, names[slot % 5], slot % 4, slot).succeeded
        model.table.alpha[0, slot] = 1.0 / (slot + 1)
    with torch.no_grad():
        for slot in model.slots:
            for weight in slot.parameters():
                weight.add_(torch.randn_like(weight), alpha=0.1)
    model.sync()
    return model


# --- forward passes ---------------------------------------------------------------------------------


def test_output_with_a_seed_switched_off_equals_the_output_after_removal_of_the_seed() -> None:
    model = full_host(3).eval()
    x = torch.randn(4, 2, 8, 8)
    with_all = model(x)
    with model.taking_part(model.without(1)):
        found = model(x)
    assert not torch.equal(found, with_all)
    assert torch.equal(model(x), with_all), "participation is restored"
    with pytest.raises(RuntimeError), model.taking_part(model.without(0, 1, 2)):
        model(torch.zeros(2, 7, 8, 8))
    assert torch.equal(model(x), with_all), "participation is restored after an error"
    with pytest.raises(ValueError, match="shorter"), model.taking_part(model.without()[:2]):
        pass
    model.table.stage[0, 1] = Stage.PRUNED
    model.sync()
    assert torch.equal(model(x), found)
    assert model.blended == [0, 2]


def test_forward_pass_from_the_features_at_a_slot_equals_the_whole_forward_pass() -> None:
    model = full_host(3).eval()
    h = x = torch.randn(4, 2, 8, 8)
    assert model.segments is not None
    with model.taking_part(model.without(0)):
        # The seed of the first slot is off here, because the later call ``model(h, 0)`` blends it in.
        h = model.segments[0](x)
    assert torch.equal(model(h, 0), model(x))


class OperationCounter(TorchDispatchMode):
    """Counter of the operations that torch dispatches in forward and backward passes."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(module: nn.Module) -> int:
    """Return the number of torch operations in a forward and backward pass of ``module``."""
    x, y = batch(0)
    module.train()
    with OperationCounter() as counter:
        loss(module(x), y).backward()
    return counter.count


@host_kinds
def test_empty_slots_add_no_torch_operation_before_germination_and_after_a_prune(kind: Kind) -> None:
    trial = planted(Case("conv_light", Style.LINEAR_ADD, kind, 4))
    wanted = operations(build_host(kind, 4))
    assert operations(begin(kind, 4).model) == wanted > 20
    if trial.model.segments is not None:
        assert operations(trial.model) > wanted, "features are kept for the incubating seed"
    trial.model.table.age[0, SLOT] = 99
    assert act(trial, LifecycleOp.PRUNE, SLOT).succeeded
    assert operations(trial.model) == wanted


def test_cnn_host_refuses_a_block_of_width_0_and_a_kernel_of_even_size() -> None:
    with pytest.raises(HostError, match=r"a CNN host needs positive block widths; found \(4, 0\)"):
        CNNHost((4, 0), kernel=3, input_shape=(1, 8, 8), classes=2)
    with pytest.raises(HostError, match=r"must be odd, to keep the size; found 2"):
        CNNHost((4,), kernel=2, input_shape=(1, 8, 8), classes=2)


# --- agreement with the slot table --------------------------------------------------------------------


@host_kinds
def test_sync_copies_stages_and_alphas_from_the_slot_table_to_the_seeds(kind: Kind) -> None:
    trial = begin(kind, 4)
    germinate(trial.model, "norm", 0, slot=0)
    assert (trial.model.incubating, trial.model.blended) == ([0], [])
    assert active_seeds(trial.model) == [False, False]
    trial.place(Stage.BLENDING, 0.25)
    assert (trial.model.incubating, trial.model.blended) == ([], [0])
    assert active_seeds(trial.model) == [True, False]
    graft = trial.model.slot(0).graft
    assert graft is not None
    assert graft.alpha.item() == 0.25


@host_kinds
def test_seeds_and_alphas_have_the_dtype_of_the_network(kind: Kind) -> None:
    trial = planted(Case("conv_heavy", 1, kind, 4), training_epochs=0)
    trial.model.double().eval()
    graft = trial.model.slot(SLOT).graft
    assert graft is not None
    assert graft.alpha.dtype == torch.float64
    x, y = batch(0)
    assert trial.model(x.double()).dtype == torch.float64
    trial = begin(kind, 4)
    trial.model.double()
    germinate(trial.model, "conv_heavy", Style.GATED_GATE)
    assert {p.dtype for p in trial.model.parameters()} == {torch.float64}
    assert epoch(trial, x.double(), y).broken == []
    trial.place(Stage.BLENDING, 0.5)
    assert not epoch(trial, x.double(), y).skipped


def test_count_parameters_returns_the_parameter_counts_of_host_and_seeds_separately() -> None:
    trial = begin("images", 4)
    # Parameters of the host: 3×3 convolutions 2→4 and 4→4 with bias, two norms and a linear layer 4→4.
    host = (2 * 4 * 9 + 4) + 8 + (4 * 4 * 9 + 4) + 8 + (4 * 4 + 4)
    assert trial.model.count_parameters() == (host, 0)
    germinate(trial.model, "conv_light", Style.GATED_GATE)
    # Parameters of the seed: a 3×3 convolution 4→4 with bias, and a gate of 4 weights without bias.
    grown = (4 * 4 * 9 + 4) + 4
    assert trial.model.count_parameters() == (host, grown)
    assert trial.model.table.seed_params[0, SLOT] == grown
    assert len(trial.model.host_parameters()) == 10


# --- removal ------------------------------------------------------------------------------------------


def test_memory_of_a_pruned_seed_is_freed_and_the_next_seed_has_new_weights_and_no_optimiser_state() -> None:
    trial = planted(Case("conv_heavy", Style.GATED_GATE, "images_batch", 4), training_epochs=0)
    first = trial.seed_weights["seed.one.0.weight"].detach().clone()
    trial.train(2)
    slot = trial.model.slot(SLOT)
    parts = (slot.seed, slot.held.gate, slot.graft, *slot.parameters())
    references = [weakref.ref(part) for part in parts if part is not None]
    del parts
    trial.model.table.age[0, SLOT] = 99
    assert act(trial, LifecycleOp.PRUNE, SLOT).succeeded
    assert slot.graft is None
    gc.collect()
    assert len(references) > 3
    assert all(reference() is None for reference in references)
    trial.train(1, first=2)
    trial.model.table.clear(0, SLOT)
    assert germinate(trial.model, "conv_heavy", Style.GATED_GATE).succeeded
    assert not torch.equal(first, trial.seed_weights["seed.one.0.weight"])
    assert not any(parameter in trial.optimiser.state for parameter in slot.parameters())


# --- state --------------------------------------------------------------------------------------------


@host_kinds
def test_load_state_restores_a_network_although_seeds_were_pruned_and_planted_after_saving(
    kind: Kind,
) -> None:
    trial = begin(kind, 4, training_epochs=0)
    germinate(trial.model, "conv_heavy", 3, slot=0)
    trial.train(2)
    kept, outputs = trial.state(), trial.outputs()
    trial.model.table.age[0, 0] = 99
    act(trial, LifecycleOp.PRUNE, 0)
    germinate(trial.model, "norm", 0, slot=1)
    trial.train(2, first=2)
    trial.load_state(kept)
    assert trial.model.slot(1).seed is None
    assert all(map(torch.equal, trial.outputs(), outputs))
    trial.train(1, first=4)
    trial.load_state(kept)
    assert all(map(torch.equal, trial.outputs(), outputs)), "a state can be loaded twice"


def everything(trial: Trial) -> dict[str, Tensor]:
    """Return copies of all tensors of network, optimiser, slot table and random streams."""
    state = trial.model.state()
    table = {f"table.{name}": value.nan_to_num(-1.0) for name, value in state["table"].items()}
    streams = {f"stream.{index}": slot["stream"] for index, slot in enumerate(state["slots"])}
    return trial.snapshot() | trial.seed_snapshot() | state["host"] | table | streams


def other_width(_: dict[str, Any]) -> dict[str, Any]:
    return planted(Case("conv_light", 0, "plain_images", 8)).model.state()


def other_slots(_: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a network of the same class that has only the first of the two slots."""
    host = PlainImages(4)
    sites = find_sites(host, ["first"], batch(0)[0])
    return MorphogeneticModel(host, sites=sites).state()


def other_slot_names(state: dict[str, Any]) -> dict[str, Any]:
    """Return a network state in which the seed belongs to a submodule that has no slot."""
    moved = {name.replace("first.3", "first.2"): value for name, value in state["host"].items()}
    return state | {"host": moved}


def without_streams(_: dict[str, Any]) -> dict[str, Any]:
    host = PlainImages(4)
    sites = find_sites(host, ["first", "second"], batch(0)[0])
    return MorphogeneticModel(host, sites=sites, streams=lambda _: None).state()


def non_finite_host(state: dict[str, Any]) -> dict[str, Any]:
    state["host"]["head.weight"][0, 0] = torch.nan
    return state


def seed_bias(state: dict[str, Any]) -> str:
    [name] = [name for name in state["host"] if "esper_slot" in name and name.endswith("bias")]
    return name


def non_finite_seed(state: dict[str, Any]) -> dict[str, Any]:
    state["host"][seed_bias(state)][0] = torch.inf
    return state


def missing_seed_weight(state: dict[str, Any]) -> dict[str, Any]:
    del state["host"][seed_bias(state)]
    return state


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (other_width, "the state belongs to another host; different: "),
        (other_slots, "the state belongs to another host; it has 1 slots and this network has 2"),
        (other_slot_names, r"the state belongs to another host; it has a seed at first\.2"),
        (without_streams, "the state belongs to another host; its slot first has no random stream"),
        (non_finite_host, "a state with weights that are not finite cannot be returned to"),
        (non_finite_seed, "a state with weights that are not finite cannot be returned to"),
        (missing_seed_weight, "the state's seed in slot first does not fit its blueprint: .*bias"),
    ],
)
def test_load_state_refuses_states_that_do_not_fit_or_are_not_finite_and_changes_no_tensor(
    change: Any, sentence: str
) -> None:
    trial = planted(Case("conv_light", 0, "plain_images", 4))
    trial.train(2)
    state = trial.model.state()
    trial.train(1, first=2)
    refused = change(state)
    before, seed = everything(trial), trial.model.slot(SLOT).seed
    with pytest.raises(HostError, match=sentence):
        trial.model.load_state(refused)
    assert_same(everything(trial), before)
    assert trial.model.slot(SLOT).seed is seed
    assert trial.model.incubating == [SLOT]


def test_load_state_refuses_a_state_with_an_unregistered_blueprint_and_changes_no_tensor() -> None:
    with registered("mine", DropoutSeed):
        state = planted(Case("mine", 0, "images", 4)).model.state()
    trial = planted(Case("conv_light", 0, "images", 4))
    before = everything(trial)
    with pytest.raises(UnknownNameError, match="unknown blueprint for feature_map hosts 'mine'"):
        trial.model.load_state(state)
    assert_same(everything(trial), before)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_slot_table_of_a_copied_network_shares_no_memory_with_the_table_of_the_original(how: str) -> None:
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
    graft = twin.slot(0).graft
    assert graft is not None
    assert graft.alpha.item() == 0.0
