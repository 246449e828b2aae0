"""What is true of a pair: its host trained on, without a seed and with one at each place, as growth does."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from pairs import Data, Pair
from torch import nn

from esper.kasmina.compute import count_part, flop_counter
from esper.kasmina.sites import Site, find_sites
from esper.kasmina.slot import attach

RNG_SEEDS = 3
CONTROL_LENGTHS = (1.5, 3.0)
"""Steps of a control for one with a seed: the first if that adds up to half the compute, else the second."""
CHANGE, NO_CHANGE = 0.04, 0.02
"""Shares of the loss: from the first on a change is one, below the second it is none."""
PARTS = 20
"""Of the test data."""
CLEAR = 2.0
"""Standard errors."""


def train(net: nn.Module, pair: Pair, steps: int, rng_seed: int, decays: bool) -> None:
    """Adam at the pair's rate, which falls to zero over the second half if it ``decays``."""
    optimiser = torch.optim.Adam(net.parameters(), lr=pair.rate, fused=True)
    x, y = pair.train
    generator = torch.Generator().manual_seed(rng_seed)
    net.train()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = pair.rate * (min(1.0, 2 * (1 - step / steps)) if decays else 1.0)
        index = torch.randint(len(x), (pair.batch,), generator=generator)
        optimiser.zero_grad()
        pair.loss(net(x[index]), y[index]).backward()
        optimiser.step()


@torch.no_grad()
def loss_on(net: nn.Module, pair: Pair, data: Data) -> list[float]:
    """Of equal parts of the data, so that the error of a difference can be told."""
    net.eval()
    size = len(data[0]) // PARTS
    parts = zip(*(d[: PARTS * size].split(size) for d in data), strict=True)
    return [round(pair.loss(net(x), y).item(), 6) for x, y in parts]


def host_of(pair: Pair) -> nn.Module:
    torch.manual_seed(0)
    net = pair.build()
    train(net, pair, pair.steps, 0, pair.decays)
    return net


def measure(pair: Pair) -> dict[str, Any]:
    """Losses on the test part: of the host, of the controls by length, of the seed at every place."""
    host = host_of(pair)
    sample = pair.train[0][:2]
    with flop_counter() as counter, torch.no_grad():
        copy.deepcopy(host)(sample)
    per_sample = counter.get_total_flops() / len(sample)
    found: dict[str, Any] = {
        "host": loss_on(host, pair, pair.test),
        "train": loss_on(host, pair, pair.train),
        "seeds": [],
    }
    for site in find_sites(host, list(pair.places), sample):
        grown = [_grown(host, pair, site, rng_seed) for rng_seed in range(RNG_SEEDS)]
        ratio = 1 + grown[0][1] / per_sample
        length = CONTROL_LENGTHS[0] if ratio <= CONTROL_LENGTHS[0] else CONTROL_LENGTHS[1]
        losses = [loss for loss, _ in grown]
        found["seeds"].append({"place": site.name, "losses": losses, "ratio": ratio, "length": length})
    lengths = {seed["length"] for seed in found["seeds"]}
    found["controls"] = {str(length): _controls(host, pair, length) for length in sorted(lengths)}
    return found


def _grown(host: nn.Module, pair: Pair, site: Site, rng_seed: int) -> tuple[list[float], int]:
    net = copy.deepcopy(host)
    torch.manual_seed(rng_seed)
    [slot] = attach(net, [site], pair.train[0][:2])
    graft = slot.germinate(net.get_submodule(site.path), pair.blueprint, like=next(net.parameters()))
    flops = count_part(graft.seed, site.shape[1:]).forward
    train(net, pair, pair.more_steps, 100 + rng_seed, True)
    return loss_on(net, pair, pair.test), flops


def _controls(host: nn.Module, pair: Pair, length: float) -> list[list[float]]:
    losses = []
    for rng_seed in range(RNG_SEEDS):
        net = copy.deepcopy(host)
        torch.manual_seed(rng_seed)
        train(net, pair, int(length * pair.more_steps), 100 + rng_seed, True)
        losses.append(loss_on(net, pair, pair.test))
    return losses


def values(truth: dict[str, Any]) -> dict[str, np.ndarray]:
    """For every place how far the loss of a seed there is below host and control, ``[rng seed, part]``.

    Files of the first two sets of pairs have no parts.
    """
    host = np.array(truth["host"]).reshape(1, -1)
    controls = {length: _table(losses) for length, losses in truth["controls"].items()}
    found = {}
    for seed in truth["seeds"]:
        control = controls[str(seed["length"])]
        found[seed["place"]] = (control if control.mean() < host.mean() else host) - _table(seed["losses"])
    return found


def host_loss(truth: dict[str, Any]) -> float:
    return float(np.mean(truth["host"]))


def longer(truth: dict[str, Any]) -> np.ndarray:
    """How far the better control is below the host, ``[rng seed, part]``."""
    host = np.array(truth["host"]).reshape(1, -1)
    gains = [host - _table(losses) for losses in truth["controls"].values()]
    return max(gains, key=lambda gain: float(gain.mean()))


def kind_of(truth: dict[str, Any]) -> tuple[str, str | None]:
    """``place`` with its name, ``longer``, ``nothing``, or ``mixed`` for what is none of these clearly."""
    host, places, control = host_loss(truth), values(truth), longer(truth)
    first, second = sorted(places, key=lambda name: -places[name].mean())[:2]
    value, gain = places[first].mean(), control.mean()
    ahead = places[first] - places[second]
    helps = gain >= CHANGE * host and gain >= CLEAR * _error(control)
    is_clear = value >= CLEAR * _error(places[first]) and ahead.mean() >= CLEAR * _error(ahead)
    # Three rng seeds alone make some difference of next to nothing seem clear.
    is_best = is_clear and min(value, ahead.mean()) >= CHANGE * host
    if is_best and not (helps and value < 0.5 * gain):
        return "place", first
    if helps and value < 0.25 * gain:
        return "longer", None
    if gain < NO_CHANGE * host and value < NO_CHANGE * host:
        return "nothing", None
    return "mixed", None


def _table(losses: list[Any]) -> np.ndarray:
    return np.array(losses).reshape(len(losses), -1)


def _error(differences: np.ndarray) -> float:
    """Standard error of the mean over rng seeds and over parts of the test data, both of which were drawn."""
    return math.hypot(*(_standard_error(differences.mean(axis)) for axis in (0, 1)))


def _standard_error(sample: np.ndarray) -> float:
    return float(sample.std(ddof=1)) / math.sqrt(len(sample)) if len(sample) > 1 else 0.0
