"""Copies of blocks that are inserted into the containers of a user's network."""

import copy
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growth.growth import Growth
from esper.leyline.errors import EsperError, HostError
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks import module_task
from tests.growth.interrupts import interrupted
from tests.growth.models import WORDS, NamedBlock, OneBlock, ResNet
from tests.tolaria.building import WAIT, plant

TOKENS = torch.randint(WORDS, (4, 6), generator=torch.Generator().manual_seed(0))


def language_loss(output: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def trained(blocks: int = 1) -> tuple[OneBlock, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = OneBlock(blocks)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(3):
        step(net, optimizer)
    return net, optimizer


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    language_loss(net(TOKENS), TOKENS).backward()
    optimizer.step()


def growing(net: nn.Module, optimizer: Any = None, sample: Any = TOKENS, **settings: Any) -> Growth:
    return Growth(net, optimizer, sample=sample, controller=None, mode="max", **settings)


def evaluate(net: nn.Module) -> Callable[[], list[float]]:
    return lambda: [-language_loss(net(each), each).item() for each in TOKENS.split(1)]


def test_auto_slots_are_the_blocks_of_a_network_with_a_single_block() -> None:
    net, optimizer = trained()
    assert growing(net, optimizer).slots == ("blocks.0",)


def test_blocks_of_a_user_are_renewed_only_on_request_and_wholly_or_not_at_all() -> None:
    def planted(renew: float, line: int = -1) -> tuple[dict[str, Tensor], int]:
        net, optimizer = trained(blocks=2)
        growth = Growth(net, optimizer, sample=TOKENS, mode="min", slots=["blocks.1"], controller=None)
        with suppress(KeyboardInterrupt), interrupted(line, signalled=False) as lines:
            growth.germinate("blocks.1", "stack", zero=True, renew=renew)
        return {name: p.detach().clone() for name, p in net.named_parameters()}, lines[0]

    before = dict(trained(blocks=2)[0].named_parameters())
    kept, count = planted(1.0)
    assert all(torch.equal(value, kept[name]) for name, value in before.items())
    renewed, count = planted(0.6)
    changed = {name for name, value in before.items() if not torch.equal(value, renewed[name])}
    assert changed == {n for n, p in before.items() if n.startswith("blocks.") and p.ndim > 1}
    for line in range(count - 60, count, 7):
        left, _ = planted(0.6, line)
        assert len(left) in (len(before), len(renewed))
        expected = renewed if len(left) == len(renewed) else before
        assert all(torch.equal(value, left[name]) for name, value in expected.items())


def test_block_with_zeroed_output_projections_leaves_outputs_bit_equal_and_then_learns() -> None:
    net, optimizer = trained()
    before, growth = net(TOKENS), growing(net, optimizer)
    growth.germinate("blocks.0", "stack", zero=True)
    assert torch.equal(net(TOKENS), before)
    zero = {name for name, p in net.blocks[1].named_parameters() if not p.any()}
    assert zero == {"out.weight", "out.bias", "down.weight", "down.bias"}
    copied, new = net.blocks[0].up.weight, net.blocks[1].up.weight
    assert torch.equal(optimizer.state[copied]["exp_avg"], optimizer.state[new]["exp_avg"])
    assert net.blocks[1].down.weight not in optimizer.state
    start = copy.deepcopy(net.blocks[1].state_dict())
    step(net, optimizer)
    step(net, optimizer)
    assert all(not torch.equal(value, start[name]) for name, value in net.blocks[1].state_dict().items())


def test_copied_block_is_counted_numbered_and_part_of_the_network() -> None:
    net, optimizer = trained(2)
    growth = growing(net, optimizer)
    growth.germinate("blocks.0", "stack")
    assert net.n_layer == len(net.blocks) == 3
    assert [block.layer_idx for block in net.blocks] == [0, 1, 2]
    names = [name for name, _ in net.named_parameters()]
    assert names == [name for name, _ in OneBlock(3).named_parameters()]
    assert len(optimizer.param_groups[0]["params"]) == len(names)
    assert growth.network.grown_params() == sum(p.numel() for p in net.blocks[1].parameters())
    growth.prune("blocks.0")
    assert net.n_layer == len(net.blocks) == 2
    assert [block.layer_idx for block in net.blocks] == [0, 1]
    assert len(optimizer.param_groups[0]["params"]) == len(list(net.parameters()))


def test_copy_with_fresh_moments_has_no_optimiser_state() -> None:
    net, optimizer = trained()
    growing(net, optimizer).germinate("blocks.0", "stack", moments=False)
    assert not any(p in optimizer.state for p in net.blocks[1].parameters())


def test_alpha_blends_a_block_by_a_hook_that_disappears_at_alpha_one() -> None:
    net, optimizer = trained()
    old, growth = net(TOKENS), growing(net, optimizer)
    growth.germinate("blocks.0", "stack")
    full = net(TOKENS)
    assert not torch.equal(full, old)
    assert not net.blocks[1]._forward_hooks
    growth.set_alpha("blocks.0", 0.0)
    assert torch.equal(net(TOKENS), old)
    growth.set_alpha("blocks.0", 0.5)
    h = net.embed(TOKENS)
    first, _ = net.blocks[0](h, scale=net.scale)
    second, _ = NamedBlock.forward(net.blocks[1], first, scale=net.scale)
    assert torch.equal(net(TOKENS), net.head(net.norm(first + 0.5 * (second - first))))
    growth.set_alpha("blocks.0", 1.0)
    assert torch.equal(net(TOKENS), full)
    assert not net.blocks[1]._forward_hooks


def test_contribution_of_a_block_is_the_change_of_the_metric_without_it() -> None:
    net, optimizer = trained()
    old = sum(evaluate(net)()) / len(TOKENS)
    growth = growing(net, optimizer)
    growth.germinate("blocks.0", "stack")
    [event] = [e for e in growth.measure(evaluate(net)) if e.kind == "measured"]
    new = sum(evaluate(net)()) / len(TOKENS)
    assert event.contribution == pytest.approx(new - old)
    assert not net.blocks[1]._forward_hooks


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_finished_network_equals_the_trained_one_in_a_process_without_esper(tmp_path, alpha) -> None:
    net, optimizer = trained()
    growth = growing(net, optimizer)
    growth.germinate("blocks.0", "stack", alpha=alpha)
    step(net, optimizer)
    wanted = net.eval()(TOKENS)
    during = copy.deepcopy(net.state_dict())
    assert growth.finish() is net
    assert torch.equal(net(TOKENS), wanted)
    assert bool(net.blocks[1]._forward_hooks) is (alpha < 1.0)
    if alpha == 1.0:
        net.load_state_dict(during)  # A state dict kept during growth also loads afterwards.
        assert torch.equal(net(TOKENS), wanted)
    torch.save({"net": net, "x": TOKENS, "wanted": wanted}, tmp_path / "net.pt")
    code = (
        "import sys, torch; d = torch.load(sys.argv[1], weights_only=False);"
        " assert torch.equal(d['net'](d['x']), d['wanted']);"
        " assert not [m for m in sys.modules if m.startswith('esper')]"
    )
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code, tmp_path / "net.pt"], check=True, env=path)


def test_saved_network_with_a_block_loads_into_a_new_network(tmp_path) -> None:
    net, optimizer = trained()
    growth = growing(net, optimizer)
    growth.germinate("blocks.0", "stack")
    step(net, optimizer)
    growth.save(tmp_path / "grown.pt")
    loaded = esper.load(tmp_path / "grown.pt", base=OneBlock())
    assert torch.equal(loaded.eval()(TOKENS), net.eval()(TOKENS))
    assert loaded.n_layer == 2


def test_state_of_growth_then_of_network_resume_in_a_new_network() -> None:
    net, optimizer = trained()
    growth = growing(net, optimizer)
    growth.germinate("blocks.0", "stack")
    state, weights = growth.state_dict(), copy.deepcopy(net.state_dict())
    torch.manual_seed(5)
    other = OneBlock()
    second = torch.optim.AdamW(other.parameters(), lr=1e-2)
    again = growing(other, second)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(HostError, match="the state has 2 blocks in 'blocks', and this network has 1; call"):
        other.load_state_dict(weights)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    again.load_state_dict(state)
    other.load_state_dict(weights)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(net, optimizer)
    step(other, second)
    assert torch.equal(net(TOKENS), other(TOKENS))


def test_state_with_more_blocks_is_refused_if_the_network_is_a_sequential_inside_another_module() -> None:
    torch.manual_seed(0)
    net, x = ResNet().layer1, torch.randn(2, 4, 8, 8)
    whole = nn.ModuleDict({"net": net})
    growth = growing(net, None, x, slots="1")
    growth.germinate("1", "stack")
    weights = copy.deepcopy(whole.state_dict())
    growth.prune("1")
    with pytest.raises(HostError, match="the state has 3 blocks in 'net', and this network has 2; call"):
        whole.load_state_dict(weights)


def test_followed_average_receives_and_loses_the_block() -> None:
    net, optimizer = trained()
    average = AveragedModel(net)
    growth = growing(net, optimizer, follow=[average])
    growth.germinate("blocks.0", "stack")
    assert average.module.n_layer == 2
    average.update_parameters(net)
    assert torch.equal(average(TOKENS), net(TOKENS))
    growth.set_alpha("blocks.0", 0.5)
    growth.prune("blocks.0")
    assert average.module.n_layer == len(average.module.blocks) == 1


def test_copy_of_a_copied_block_has_no_slot_and_no_hook() -> None:
    net, optimizer = trained(2)
    growth = growing(net, optimizer)
    growth.germinate("blocks.0", "stack", alpha=0.5)
    growth.germinate("blocks.1", "stack")
    assert [len(block._forward_hooks) for block in net.blocks] == [0, 1, 0, 0]
    assert "esper_slot" not in dict(net.blocks[1].named_children())
    assert net.n_layer == 4


def test_block_of_a_residual_network_starts_without_effect() -> None:
    torch.manual_seed(0)
    net, x = ResNet().eval(), torch.randn(4, 1, 8, 8)
    before = net(x)
    growth = growing(net, None, x, slots="layer2")
    growth.germinate("layer2", "stack", zero=True)
    assert torch.equal(net(x), before)
    assert len(net.layer2) == 3


def test_failed_germination_leaves_network_counts_and_optimiser_unchanged() -> None:
    net, optimizer = trained()
    growth = growing(net, optimizer, max_params=10)
    keys, held = list(net.state_dict()), list(optimizer.param_groups[0]["params"])
    with pytest.raises(EsperError, match="of max_params=10"):
        growth.germinate("blocks.0", "stack")
    with pytest.raises(EsperError, match="style gated_gate cannot blend a block of the network"):
        growth.germinate("blocks.0", "stack", style="gated_gate")
    assert (net.n_layer, net.blocks[0].layer_idx) == (1, 0)
    assert list(net.state_dict()) == keys
    assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], held, strict=True))


def test_incubating_block_learns_without_changing_the_output() -> None:
    net, optimizer = trained()
    old, growth = net(TOKENS), growing(net, optimizer, incubation_epochs=2)
    growth.germinate("blocks.0", "stack")
    assert torch.equal(net(TOKENS), old)
    optimizer.zero_grad()
    growth.incubate(lambda: language_loss(net(TOKENS), TOKENS))
    assert all(p.grad is not None for p in net.blocks[1].parameters())
    assert all(p.grad is None for p in net.blocks[0].parameters())
    assert torch.equal(net(TOKENS), old)


# --- diagnose, grow and environments ------------------------------------------------------------------------


def loader(count: int) -> DataLoader:
    x = torch.randint(WORDS, (count, 6), generator=torch.Generator().manual_seed(count))
    return DataLoader(TensorDataset(x, x), batch_size=16)


def test_diagnose_tries_one_more_block_of_a_network_with_a_single_block() -> None:
    net, optimizer = trained()
    lines: list[str] = []
    diagnosis = esper.diagnose(
        net, loader(128), loader(64), loss=language_loss, optimizer=optimizer, steps=300, show=lines.append
    )
    assert lines[0].startswith("diagnosis of OneBlock: 4 candidates (stack, widen, mlp_small, attention)")
    tested = "tested: attention, mlp_small, stack, widen; places: 1; trained: 4 of 4; weighed by seconds."
    assert tested in str(diagnosis)
    assert diagnosis.cut_short
    assert ("blocks.0", "stack") in {(row.place, row.blueprint) for row in diagnosis.rows}
    assert len(net.blocks) == 1
    grown = esper.plant(copy.deepcopy(net), "blocks.0", "stack", sample=TOKENS)
    assert grown.n_layer == 2
    assert torch.equal(grown.eval()(TOKENS), net.eval()(TOKENS))


def test_grow_plants_a_planned_block_and_resumes_bit_equal_after_a_stop(tmp_path) -> None:
    def grow(**settings: Any) -> Any:
        net, optimizer = trained()
        plan = {"epochs": 4, "controller": "stack@blocks.0:1", "loss": language_loss}
        return esper.grow(net, loader(64), loader(32), optimizer=optimizer, **plan, **settings)

    def stop(line: str) -> None:
        if line.startswith("epoch 2"):
            raise KeyboardInterrupt

    whole = grow(show=lambda _: None)
    assert whole.net.n_layer == 2
    with pytest.raises(KeyboardInterrupt):
        grow(show=stop, out=tmp_path / "run")
    resumed = grow(show=lambda _: None, out=tmp_path / "run", resume=True)
    pairs = zip(resumed.net.parameters(), whole.net.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


class Classifier(OneBlock):
    """Network of one block that returns the scores of three classes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, -1, :3]


def test_environment_of_a_users_task_inserts_a_block_and_continues_from_its_state() -> None:
    x = torch.randint(WORDS, (160, 6), generator=torch.Generator().manual_seed(1))
    sizes = {"batch_size": 16, "batches_per_epoch": 2, "horizon": 6}
    task = module_task(Classifier, x, x[:, 0] % 3, name="blocks", **sizes)
    assert [site.insertion is not None for site in task.sites] == [True]
    one, other = MorphEnv(task, rng_seed=0), MorphEnv(task, rng_seed=0)
    one.reset()
    other.reset()
    stack = one.action_space.blueprint_names.index("stack")
    first = one.step(plant(0, stack))
    assert first.last_success
    assert len(one.model.host.blocks) == 2
    assert one.host.meter.per_sample()[1] > 1.9 * one.host.meter.per_sample()[0] - first.params
    other.load_state(one.state())
    assert len(other.model.host.blocks) == 2
    for _ in range(2):
        assert one.step(WAIT).val_loss == other.step(WAIT).val_loss
    fresh = MorphEnv(task, rng_seed=0)
    fresh.reset()
    one.load_state(fresh.state())
    assert one.model.host.n_layer == 1
