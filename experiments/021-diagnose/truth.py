"""What is true of a pair: its host trained on, without a seed and with one at each place, as growth does."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from pairs import Data, Pair
from torch import nn

from esper.growth.sites import Site, find_sites
from esper.growth.slot import attach
from esper.tolaria.flops import count_part, flop_counter

RNG_SEEDS = 3
CONTROL_LENGTHS = (1.5, 3.0)
"""Steps of a control for one with a seed: the first if that adds up to half the compute, else the second."""
CHANGE, NO_CHANGE = 0.04, 0.02
"""Shares of the loss: from the first on a change is one, below the second it is none."""
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
def loss_on(net: nn.Module, pair: Pair, data: Data) -> float:
    net.eval()
    parts = [
        (pair.loss(net(x), y).item(), len(x)) for x, y in zip(*(d.split(500) for d in data), strict=True)
    ]
    return sum(value * size for value, size in parts) / sum(size for _, size in parts)


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


def _grown(host: nn.Module, pair: Pair, site: Site, rng_seed: int) -> tuple[float, int]:
    net = copy.deepcopy(host)
    torch.manual_seed(rng_seed)
    [slot] = attach(net, [site], pair.train[0][:2])
    graft = slot.germinate(net.get_submodule(site.path), pair.blueprint, like=next(net.parameters()))
    flops = count_part(graft.seed, site.shape[1:]).forward
    train(net, pair, pair.more_steps, 100 + rng_seed, True)
    return loss_on(net, pair, pair.test), flops


def _controls(host: nn.Module, pair: Pair, length: float) -> list[float]:
    losses = []
    for rng_seed in range(RNG_SEEDS):
        net = copy.deepcopy(host)
        torch.manual_seed(rng_seed)
        train(net, pair, int(length * pair.more_steps), 100 + rng_seed, True)
        losses.append(loss_on(net, pair, pair.test))
    return losses


def values(truth: dict[str, Any]) -> dict[str, np.ndarray]:
    """For every place how far the loss of a seed there is below host and control, ``[rng seed]``."""
    controls = {length: np.array(losses) for length, losses in truth["controls"].items()}
    return {
        seed["place"]: np.minimum(controls[str(seed["length"])], truth["host"]) - np.array(seed["losses"])
        for seed in truth["seeds"]
    }


def kind_of(truth: dict[str, Any]) -> tuple[str, str | None]:
    """``place`` with its name, ``longer``, ``nothing``, or ``mixed`` for what is none of these clearly."""
    host, places = truth["host"], values(truth)
    first, second = sorted(places, key=lambda name: -places[name].mean())[:2]
    value = places[first].mean()
    controls = [host - np.array(losses) for losses in truth["controls"].values()]
    longer = max(controls, key=lambda gain: float(gain.mean()))
    helps = longer.mean() >= CHANGE * host and longer.mean() >= CLEAR * _error(longer)
    ahead = places[first] - places[second]
    is_clear = value >= CLEAR * _error(places[first]) and ahead.mean() >= CLEAR * _error(ahead)
    # Three rng seeds alone make some difference of next to nothing seem clear.
    is_best = is_clear and min(value, ahead.mean()) >= CHANGE * host
    if is_best and not (helps and value < 0.5 * longer.mean()):
        return "place", first
    if helps and value < 0.25 * longer.mean():
        return "longer", None
    if longer.mean() < NO_CHANGE * host and value < NO_CHANGE * host:
        return "nothing", None
    return "mixed", None


def _error(sample: np.ndarray) -> float:
    return float(sample.std(ddof=1)) / math.sqrt(len(sample))
