"""``esper.grow``: returned network, resuming, budgets, refusals, learning rates and the compute ledger."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.leyline.errors import EsperError

PLAN = "mlp@0:2"


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))


def loader(count: int) -> DataLoader:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return DataLoader(TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long()), batch_size=16, shuffle=count > 100)


def grow(net: nn.Module, **settings):
    return esper.grow(net, loader(128), loader(64), loss=nn.functional.cross_entropy, **settings)


def test_grow_returns_a_plain_network_with_the_planned_seed_that_can_be_saved(tmp_path):
    lines: list[str] = []
    grown = grow(network(), epochs=5, controller=PLAN, show=lines.append)

    assert type(grown.net) is nn.Sequential
    assert "epoch 2: mlp in 0 was planted" in "\n".join(lines)
    assert lines[1].splitlines()[0].endswith(", 58 parameters"), "the losses are those before it was planted"
    assert [epoch.params for epoch in grown.epochs] == [58, 58, 618, 618, 618, 618]
    assert "58 → 618" in grown.summary()

    grown.save(tmp_path / "mine.pt")
    again = esper.load(tmp_path / "mine.pt", base=network())
    x = torch.randn(3, 4)
    assert torch.equal(again.eval()(x), grown.net.eval()(x))
    with pytest.raises(EsperError, match="holds a Sequential, and base is a Linear"):
        esper.load(tmp_path / "mine.pt", base=nn.Linear(4, 2))


def test_grow_resumed_from_a_checkpoint_ends_with_the_weights_of_an_uninterrupted_training(tmp_path):
    whole = grow(network(), epochs=5, controller=PLAN, show=lambda _: None)

    class StoppedError(Exception):
        pass

    def stop(line: str) -> None:
        if line.startswith("epoch 4"):
            raise StoppedError

    with pytest.raises(StoppedError):
        grow(network(), epochs=5, controller=PLAN, show=stop, out=tmp_path / "run")
    torch.manual_seed(99)
    resumed = grow(
        network(), epochs=5, controller=PLAN, show=lambda _: None, out=tmp_path / "run", resume=True
    )

    assert resumed.epochs[1:] == whole.epochs[1:]
    assert all(
        torch.equal(a, b) for a, b in zip(resumed.net.parameters(), whole.net.parameters(), strict=True)
    )


def test_grow_with_a_flop_budget_ends_within_one_minibatch_of_the_budget():
    # Training FLOPs of a minibatch are 4,608: 2 · (4 · 8 + 8 · 2) per sample and forward pass, times 3, times
    # 16 samples.
    grown = grow(network(), budget=50_000, controller=None, show=lambda _: None)

    assert grown.epochs[-1].flops == 11 * 4_608


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "say how long to train, once"),
        ({"epochs": 1, "budget": 1e6}, "say how long to train, once"),
        ({"epochs": 1, "resume": True}, "name it with out="),
        ({"epochs": 1, "out": "."}, "is not overwritten"),
        ({"epochs": 0}, "^epochs is 0; it must be a number above 0$"),
        ({"epochs": -1}, "^epochs is -1; it must be"),
        ({"epochs": "3"}, "^epochs is '3'; it must be"),
        ({"budget": float("nan")}, "^budget is nan; it must be"),
        ({"budget": float("inf")}, "^budget is inf; it must be"),
        ({"epochs": 2, "controller": "mlp@0:2"}, "plants after epoch 2 of 2, when no training is left"),
        ({"epochs": 2, "controller": "mpl@0:1"}, "unknown blueprint 'mpl'; did you mean mlp"),
        ({"epochs": 2, "controller": "atuo"}, "^controller is 'atuo'; pass 'auto', heuristic, counting,"),
        ({"epochs": 2, "optimizer": torch.optim.SGD}, "^optimizer is the class SGD; pass one torch.optim"),
        ({"epochs": 2, "slots": [0]}, r"^slots is \[0\]; name submodules of Sequential by text, as '0'"),
        ({"epochs": 2, "slots": None}, "^slots is None; name submodules"),
        ({"epochs": 2, "max_params": "9"}, "^max_params is '9'; it must be a whole number, 0 or more$"),
    ],
)
def test_grow_refuses_invalid_arguments_and_the_network_can_be_grown_afterwards(settings, words):
    net = network()
    with pytest.raises(EsperError, match=words):
        grow(net, **settings)
    assert list(net.state_dict()) == list(network().state_dict())
    grow(net, epochs=1, controller=None, show=lambda _: None)


def test_grow_refuses_a_data_set_as_loader_and_dict_batches_without_a_sample_input():
    data = TensorDataset(torch.randn(64, 4), torch.arange(64) % 2)
    loss = nn.functional.cross_entropy
    with pytest.raises(EsperError, match="train_loader is a TensorDataset, which holds samples; pass a Data"):
        esper.grow(network(), data, data, loss=loss, epochs=1)
    batches = [{"x": x, "y": y} for x, y in DataLoader(data, batch_size=16)]
    known = {"epochs": 3, "controller": PLAN, "show": lambda _: None}
    dicts = {"loss": lambda net, batch: loss(net(batch["x"]), batch["y"])}
    with pytest.raises(EsperError, match="Say with sample= how it is called"):
        esper.grow(network(), batches, batches, **dicts, **known)
    grown = esper.grow(network(), batches, batches, sample=data.tensors[0][:2], **dicts, **known)
    assert [event.kind for event in grown.events].count("germinated") == 1


def test_interrupted_grow_leaves_a_plain_network_with_its_seed_and_restores_the_learning_rate():
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def stop(line: str) -> None:
        if line.startswith("epoch 4"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grow(net, epochs=4, controller=PLAN, optimizer=optimizer, show=stop)

    assert not [name for name in net.state_dict() if "esper" in name]
    assert sum(p.numel() for p in net.parameters()) == 618
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_grow_starts_at_the_optimisers_current_learning_rate_and_restores_it_at_the_end():
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.25)
    optimizer.step()
    scheduler.step()
    rates = []
    optimizer.register_step_post_hook(lambda own, *_: rates.append(own.param_groups[0]["lr"]))
    grow(net, epochs=5, controller=PLAN, optimizer=optimizer, show=lambda _: None)

    # An epoch has eight minibatches; the learning rate falls in the last of five epochs.
    assert rates[:32] == [0.125] * 32
    assert rates[-1] < 0.125
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["initial_lr"]) == (0.125, 0.5)
    grow(net := network(), epochs=1, optimizer=(own := torch.optim.SGD(net.parameters(), lr=0.5)), show=str)
    assert "initial_lr" not in own.param_groups[0]


def test_summary_of_grow_reports_seed_parameters_that_were_merged_into_weights():
    # A lora seed of rank 8 in a slot of width 8 has 2 · 8 · 8 parameters.
    summary = grow(network(), epochs=3, controller="lora@0:1", show=lambda _: None).summary()

    assert "58 → 186, 58 since linear seeds became part of weights" in summary


def test_repr_of_the_result_is_one_short_line_without_weights():
    grown = grow(network(), epochs=1, controller=None, show=lambda _: None)
    assert repr(grown) == f"Grown(Sequential, 58 parameters, validation loss {grown.epochs[-1].val_loss:.4g})"


def test_load_refuses_a_file_that_esper_did_not_save(tmp_path):
    torch.save(network(), tmp_path / "net.pt")
    with pytest.raises(EsperError, match="is no network that this version of Esper saved"):
        esper.load(tmp_path / "net.pt", base=network())


def test_contributions_measured_by_grow_in_a_network_with_batch_norm_are_calibrated():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    grown = grow(net, epochs=3, controller="mlp@0:1", show=lambda _: None)

    measured = [event for event in grown.events if event.kind == "measured"]
    assert measured
    assert not any("uncalibrated" in str(event) for event in measured)


def test_grow_raises_an_error_if_the_training_loss_is_nan_in_the_first_epoch():
    with pytest.raises(EsperError, match="the training loss is not finite in epoch 1"):
        esper.grow(
            network(), loader(128), loader(64), loss=lambda y, t: y.sum() * float("nan"), epochs=1, show=print
        )


def test_compute_ledger_of_grow_has_flops_by_purpose_and_seconds_by_phase():
    grown = grow(network(), epochs=3, controller="mlp@0:1", show=lambda _: None)

    ledger, flops = grown.ledger, grown.ledger.flops()
    # The forward pass of the network costs 96 FLOPs per sample. The seed has two branches with layers of 8 x
    # 16 and 16 x 8 weights, which cost 1,024 more FLOPs.
    assert flops["forward"] == 128 * (96 + 2 * (96 + 1_024))
    assert flops["backward"] == 2 * flops["forward"]
    # The network is validated on 64 samples after every epoch. Counterfactuals (validation without the seed)
    # are charged after epoch 2; those after the last epoch are not charged.
    assert flops["validation"] == 64 * (96 + 2 * (96 + 1_024))
    assert flops["counterfactual"] == 64 * (96 + 1_024)
    assert (flops["incubation"], flops["race"]) == (0, 0)
    purposes = ("forward", "backward", "incubation", "validation", "counterfactual", "race")
    assert ledger.total == sum(flops[name] for name in purposes)
    assert grown.epochs[-1].flops == ledger.charged == ledger.total - flops["validation"]
    assert set(ledger.seconds) == {"train", "measure"}
    assert all(seconds > 0 for seconds in ledger.seconds.values())


def test_networks_grow_in_several_threads_at_once():
    def one(_: int) -> int:
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        # All threads draw from one random generator, so contributions differ; keep: makes any seed permanent.
        grown = grow(net, epochs=2, controller="keep:mlp@0:1", show=lambda _: None)
        return sum(p.numel() for p in grown.net.parameters())

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(one, range(8))) == [618] * 8
