"""Races in ``esper.grow``: epoch of the first race, compute of races, and seeds planted after a race."""

import math
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growth.grow import Grown
from esper.growth.grow_run import RACE_SHARE
from esper.growth.race_runners import Limit, Runner, adopt
from esper.leyline import (
    CANONICAL_ACTION,
    ActionSpace,
    EpochFacts,
    EsperError,
    RaceCandidate,
    RaceResult,
    SlotTable,
)
from esper.leyline.signals import Decisions
from esper.tamiyo.race_controller import is_worthwhile


def loader(rng_seed: int, samples: int) -> DataLoader[Any]:
    """Return a loader of samples with eight features; the class depends on the size of the first feature."""
    own = torch.Generator().manual_seed(rng_seed)
    x = torch.randn(samples, 8, generator=own)
    return DataLoader(TensorDataset(x, (x[:, 0].abs() > 0.67).long()), batch_size=32, shuffle=samples > 999)


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 2))


def sound() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def grow(net: nn.Module, **given: Any) -> Grown:
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    known = {
        "loss": nn.functional.cross_entropy,
        "optimizer": optimizer,
        "slots": "0",
        "cost": "flops",
        "show": lambda _: None,
    }
    known |= given
    return esper.grow(net, loader(0, 2048), loader(1, 512), **known)


@pytest.fixture(scope="module")
def too_small() -> Grown:
    return grow(linear(), epochs=40)


@pytest.fixture(scope="module")
def sound_pair() -> list[Grown]:
    """Return the results of ``esper.grow`` with races and without races, for the same network and data."""
    return [grow(sound(), epochs=20, controller=controller) for controller in ("auto", None)]


def planted(grown: Grown) -> list[str]:
    return [str(event) for event in grown.events if event.kind == "germinated"]


def test_grow_plants_a_seed_after_the_first_race_if_the_network_is_too_small(too_small: Grown) -> None:
    # An mlp_small seed of width 24 has two branches with 2 · (24 · 24 + 24) parameters each. The first race
    # takes place after a tenth of the 40 epochs.
    assert planted(too_small)[0].startswith("epoch 4: mlp_small in 0")
    assert planted(too_small)[0].endswith("was planted (2,400 parameters)")
    assert too_small.epochs[-1].val_loss < 0.8 * too_small.epochs[4].val_loss
    raced = [event.sentence for event in too_small.events if event.kind == "raced"]
    assert "won a race, +" in raced[0]


def test_grow_plants_no_seed_in_a_large_enough_network_and_the_summary_gives_the_reason(
    sound_pair: list[Grown],
) -> None:
    asked, _ = sound_pair
    assert planted(asked) == []
    assert "it was not planted" in asked.summary()


def test_no_second_race_follows_a_race_whose_best_candidate_ends_behind_the_control(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("esper.growth.grow_run.RACE_SHARE", 0.5)  # Enough compute for both races.
    raced = [str(event) for event in grow(sound(), epochs=20).events if event.kind == "raced"]
    assert len(raced) == 1
    assert "won a race, -" in raced[0]


class Recording:
    """Controller that always waits and records the race results that it receives."""

    name = "recording"
    races: list[RaceResult | None]

    def __init__(self, _space: ActionSpace) -> None:
        Recording.races = []

    def reset(self, _episode: int) -> None: ...

    def decide(self, facts: EpochFacts, _table: SlotTable) -> Decisions:
        Recording.races.append(facts.races[0])
        return Decisions(CANONICAL_ACTION[None].copy())


def test_controller_receives_race_results_if_races_are_on() -> None:
    grown = grow(sound(), epochs=20, controller=Recording, races=True)

    # The first race takes place after a tenth of the epochs and uses most of the compute allowed for races.
    assert [epoch for epoch, race in enumerate(Recording.races, 1) if race is not None] == [2]
    first = Recording.races[1]
    assert first.candidates[0].slot == 0
    # A race measures the loss on a subset of the validation data.
    assert first.loss == pytest.approx(grown.epochs[2].val_loss, rel=0.2)
    assert grown.ledger.race > 0
    assert planted(grown) == []


def test_controller_other_than_auto_and_race_receives_no_race_results_by_default() -> None:
    grown = grow(sound(), epochs=2, controller=Recording)
    assert Recording.races == [None, None]
    assert grown.ledger.race == 0


def test_adopt_copies_weights_and_optimiser_moments_of_the_race_control_to_the_network() -> None:
    net, batch = sound(), (torch.randn(4, 8), torch.tensor([0, 1, 0, 1]))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    control = Runner.continued(net, optimizer)
    for _ in range(2):
        control.step(batch, nn.functional.cross_entropy, 1.0)
    adopt(control, net, optimizer)
    weight = net[0].weight  # type: ignore[index]
    assert torch.equal(weight, control.net[0].weight)  # type: ignore[index]
    assert optimizer.state[weight]["step"].item() == 2
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_adopt_leaves_the_network_unchanged_if_the_race_control_diverged() -> None:
    net = sound()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    control = Runner.continued(net, optimizer)
    control.losses = torch.tensor([float("nan")])
    control.net[0].weight.data.fill_(float("nan"))  # type: ignore[index, union-attr]
    adopt(control, net, optimizer)
    assert bool(torch.isfinite(net[0].weight).all())  # type: ignore[index]


def test_flops_of_races_stay_within_the_share_of_compute_reserved_for_races(sound_pair: list[Grown]) -> None:
    asked, trained = (grown.epochs[-1].flops for grown in sound_pair)
    # In a short training the first race uses nearly all of the compute allowed for races.
    assert 0.9 * RACE_SHARE * trained < asked - trained < RACE_SHARE * trained


def test_flop_budget_of_grow_includes_the_compute_of_races() -> None:
    # Training FLOPs of a minibatch: 2 · (8 · 64 + 64 · 64 + 64 · 2) per sample and forward pass, times 3,
    # times 32 samples.
    minibatch = 3 * 32 * 2 * (8 * 64 + 64 * 64 + 64 * 2)
    asked = grow(sound(), budget=640 * minibatch)
    assert 640 * minibatch <= asked.epochs[-1].flops < 641 * minibatch


def test_blueprint_with_more_than_max_params_is_no_candidate_of_a_race() -> None:
    grown = grow(linear(), epochs=2, max_params=100)
    assert planted(grown) == []
    assert "nothing was raced: every seed has too many parameters" in str(grown.events[0])
    assert grown.events[0].epoch == 0


def test_training_that_is_too_short_for_a_race_states_this_once_before_the_first_epoch() -> None:
    # Two epochs of 2,048 samples in minibatches of 32.
    said: list[str] = []
    grown = grow(linear(), epochs=2, show=said.append)
    found = re.fullmatch(
        r"no race is run: the training has 128 minibatches, and a race needs at least ([\d,]+); train for"
        r" longer, or diagnose the network and plan what to plant",
        said[0],
    )
    assert found is not None
    assert said[1].startswith("epoch 1: ")
    assert [event.kind for event in grown.events] == ["raced"]
    assert grown.ledger.race == 0
    assert said[0] in grown.summary()

    epochs = math.ceil(int(found[1].replace(",", "")) / 64)
    assert all("no race is run" not in str(event) for event in grow(linear(), epochs=epochs).events)
    assert "no race is run" in str(grow(linear(), epochs=epochs - 1).events[0])


def test_flop_budget_that_is_too_small_for_a_race_is_converted_to_minibatches() -> None:
    # FLOPs of a minibatch: 2 · (8 · 24 + 2 · 24 · 24 + 24 · 2) per sample and forward pass, times 3, times 32
    # samples.
    budget = 70 * 3 * 32 * 2 * (8 * 24 + 2 * 24 * 24 + 24 * 2)
    assert "the training has 70 minibatches" in str(grow(linear(), budget=budget).events[0])


def test_loader_without_a_length_leaves_the_race_to_find_out_whether_it_fits() -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter(loader(0, 2048))

    known = {"loss": nn.functional.cross_entropy, "slots": "0", "show": lambda _: None}
    grown = esper.grow(linear(), Stream(), loader(1, 512), epochs=2, **known)
    [event] = grown.events
    assert (event.epoch, event.sentence[:26]) == (1, "no race was run to its end")


def test_forecast_of_races_draws_no_random_numbers() -> None:
    losses = [grow(linear(), epochs=2, races=races).epochs[-1].train_loss for races in (True, False)]
    assert losses[0] == losses[1]


def test_grow_with_races_resumed_from_a_checkpoint_ends_with_the_weights_of_an_uninterrupted_training(
    tmp_path: Any, too_small: Grown
) -> None:
    def stop(line: str) -> None:
        if line.startswith("epoch 6:"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grow(linear(), epochs=40, show=stop, out=tmp_path / "run")
    resumed = grow(linear(), epochs=40, out=tmp_path / "run", resume=True)
    assert resumed.epochs[1:] == too_small.epochs[1:]
    for one, other in zip(resumed.net.parameters(), too_small.net.parameters(), strict=True):
        assert torch.equal(one, other)


def test_run_that_weighs_by_seconds_keeps_the_cost_measured_before_an_interrupt(tmp_path: Any) -> None:
    lines: list[str] = []

    def stop(line: str) -> None:
        lines.append(line)
        if "won a race" in "".join(lines[:-1]):
            raise KeyboardInterrupt

    shared = {"epochs": 40, "cost": "seconds", "out": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        grow(linear(), show=stop, **shared)
    [measured] = re.findall(r"won a race.*seconds per step", "".join(lines))
    resumed = grow(linear(), resume=True, **shared)
    races = [str(event) for event in resumed.events if "won a race" in str(event)]
    assert measured in races[0]
    assert len(resumed.epochs) == 41


def test_run_is_not_resumed_with_another_unit_of_costs(tmp_path: Any) -> None:
    grow(linear(), epochs=1, out=tmp_path / "run")
    with pytest.raises(EsperError, match="was begun with cost='flops', and is to go on with 'seconds'"):
        grow(linear(), epochs=1, cost="seconds", out=tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("lead", "error", "cost", "expected"),
    [
        # At loss 0.5 the winner must lower the loss by 0.005, and by 0.005 for each doubling of the training
        # cost.
        (0.006, 0.002, 0.1, True),
        (0.004, 0.001, 0.1, False),
        (0.006, 0.004, 0.1, False),  # The winner's decrease of the loss is less than two standard errors.
        (0.006, 0.002, 1.0, True),
        (0.009, 0.002, 3.0, False),  # The seed makes training four times as expensive: two doublings.
        (0.011, 0.002, 3.0, True),
        (-0.1, 0.001, 0.0, False),
        (-5.2e-05, 0.0, 0.0, False),
    ],
)
def test_race_winner_is_worthwhile_if_its_gain_exceeds_two_standard_errors_and_the_least_gain_for_its_cost(
    lead: float, error: float, cost: float, expected: bool
) -> None:
    winner = RaceCandidate(slot=0, blueprint=1, lead=lead, error=error, cost=cost)
    assert is_worthwhile(RaceResult((winner,), loss=0.5)) is expected


def test_flop_limit_of_a_race_does_not_depend_on_elapsed_time() -> None:
    limit = Limit(flops=100.0)
    limit.charge(30.0, seconds=1e9)
    assert (limit.left, limit.spent) == (70.0, 30.0)


def test_time_limit_of_a_race_is_converted_to_flops_by_the_measured_seconds_per_flop() -> None:
    limit = Limit(seconds=1000.0)
    limit.charge(10.0, seconds=20.0)  # The measured speed is two seconds per FLOP.
    assert limit.left == pytest.approx(500.0, rel=0.01)
