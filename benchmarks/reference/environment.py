"""Environment step in plain PyTorch, with which ``bench_environment_step`` compares the environment step of
Esper.

Tensors have NCHW layout. Every slot has its own optimiser. On/off configurations of the seeds are scored by
one full forward pass per configuration. The plain PyTorch step uses optimisations that need no extra code:
``foreach`` optimisers, in-place activations, inference mode for validation. The plain PyTorch step has no
telemetry rows, gates, random streams or slot tables.
"""

import copy
import math
from collections.abc import Sequence
from itertools import permutations, product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS_PER_GROUP = 8
SNAPSHOT_EVERY = 3
MOMENTUM = 0.9


class Network(nn.Module):
    """CNN of convolution, GroupNorm and ReLU blocks with pooling; a seed (3×3 convolution) can follow each
    block.
    """

    def __init__(self, widths: Sequence[int], channels: int, classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for index, width in enumerate(widths):
            pool = [nn.MaxPool2d(2)] if index else []
            convolution = nn.Conv2d(channels, width, 3, padding=1)
            norm = nn.GroupNorm(width // CHANNELS_PER_GROUP, width)
            self.blocks.append(nn.Sequential(*pool, convolution, norm, nn.ReLU(inplace=True)))
            channels = width
        self.head = nn.Linear(channels, classes)
        self.seeds = nn.ModuleDict()

    def forward(self, x: Tensor, alphas: dict[int, float]) -> Tensor:
        """Return logits, with the seed of each slot in ``alphas`` blended in at its alpha."""
        h = x
        for index, block in enumerate(self.blocks):
            h = block(h)
            if index in alphas:
                h = torch.add(h, self.seeds[str(index)](h), alpha=alphas[index])
        return self.head(h.mean(dim=(2, 3)))


class Recipe(NamedTuple):
    """Hyper-parameters of the training of a host network."""

    rate: float
    clip: float
    horizon: int
    batch_size: int
    minibatches: int


class Measured(NamedTuple):
    """Measurements of one environment step: two losses, and the contribution and Shapley value of each
    seed."""

    train_loss: float
    val_loss: float
    contributions: dict[int, float]
    shapley: dict[int, float]


class Environment:
    """Environment in plain PyTorch: a host with its seeds, data and optimisers."""

    def __init__(
        self,
        network: Network,
        train: tuple[Tensor, Tensor],
        validation: tuple[Tensor, Tensor],
        order: torch.Generator,
        recipe: Recipe,
    ) -> None:
        self.network = network
        self.train, self.validation = train, validation
        self.order, self.pending = order, torch.empty(0, dtype=torch.int64)
        self.recipe = recipe
        self.host_parameters = list(network.parameters())
        self.optimiser = self._new_optimiser(self.host_parameters)
        self.seed_optimisers: dict[int, torch.optim.Optimizer] = {}
        self.born: dict[int, int] = {}
        self.epoch = 0
        self._keep_snapshot()

    def _new_optimiser(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.recipe.rate, momentum=MOMENTUM, foreach=True)

    def plant(self, slot: int) -> None:
        """Plant a seed, a 3×3 convolution with zero weights, behind the block ``slot``."""
        width = self.network.blocks[slot][-2].num_channels
        seed = nn.Conv2d(width, width, 3, padding=1)
        for weight in seed.parameters():
            nn.init.zeros_(weight)
        self.network.seeds[str(slot)] = seed
        self.seed_optimisers[slot] = self._new_optimiser(list(seed.parameters()))
        self.born[slot] = self.epoch

    def step(self, alphas: dict[int, float]) -> Measured:
        """Train one epoch with the seeds at the given alphas, then score every on/off configuration of the
        seeds.
        """
        train_loss = self._train(alphas)
        self.epoch += 1
        losses, scores = self._score(alphas)
        everything = tuple(alphas)
        if self.epoch % SNAPSHOT_EVERY == 0 and math.isfinite(losses[everything]):
            self._keep_snapshot()
        contributions = {
            slot: scores[everything] - scores[tuple(s for s in everything if s != slot)]
            for slot in everything
        }
        return Measured(train_loss, losses[everything], contributions, shapley(everything, scores))

    def _train(self, alphas: dict[int, float]) -> float:
        self.network.train()
        seeds = {slot: list(self.network.seeds[str(slot)].parameters()) for slot in alphas}
        losses = []
        for number in range(self.recipe.minibatches):
            self._set_rates(self.epoch + number / self.recipe.minibatches)
            chosen = self._next_minibatch()
            x, y = self.train[0][chosen], self.train[1][chosen]
            self.optimiser.zero_grad()
            for slot in alphas:
                self.seed_optimisers[slot].zero_grad()
            loss = F.cross_entropy(self.network(x, alphas), y)
            loss.backward()
            norms = [
                nn.utils.clip_grad_norm_(parameters, self.recipe.clip, foreach=True)
                for parameters in (self.host_parameters, *seeds.values())
            ]
            if not torch.isfinite(torch.stack([loss.detach(), *norms])).all():
                continue
            self.optimiser.step()
            for slot in alphas:
                self.seed_optimisers[slot].step()
            losses.append(loss.item())
        return sum(losses) / len(losses)

    def _next_minibatch(self) -> Tensor:
        size = self.recipe.batch_size
        if len(self.pending) < size:
            self.pending = torch.randperm(len(self.train[0]), generator=self.order)
        chosen, self.pending = self.pending[:size], self.pending[size:]
        return chosen

    def _set_rates(self, now: float) -> None:
        for slot, optimiser in {None: self.optimiser, **self.seed_optimisers}.items():
            born = 0 if slot is None else self.born[slot]
            progress = (now - born) / (self.recipe.horizon - born)
            optimiser.param_groups[0]["lr"] = self.recipe.rate * 0.5 * (1.0 + math.cos(math.pi * progress))

    @torch.inference_mode()
    def _score(self, alphas: dict[int, float]) -> tuple[dict[tuple[int, ...], float], ...]:
        """Return validation loss and accuracy (per cent) of every on/off configuration of the seeds; keys are
        the slots whose seeds are on.
        """
        self.network.eval()
        x, y = self.validation
        losses, scores = {}, {}
        for switches in product((False, True), repeat=len(alphas)):
            on = tuple(slot for slot, switch in zip(alphas, switches, strict=True) if switch)
            output = self.network(x, {slot: alphas[slot] for slot in on})
            losses[on] = F.cross_entropy(output, y).item()
            scores[on] = 100.0 * (output.argmax(dim=-1) == y).float().mean().item()
        return losses, scores

    def _keep_snapshot(self) -> None:
        optimisers = [self.optimiser, *self.seed_optimisers.values()]
        self.snapshot = copy.deepcopy(
            [self.network.state_dict(), *(optimiser.state_dict() for optimiser in optimisers)]
        )


def shapley(slots: tuple[int, ...], scores: dict[tuple[int, ...], float]) -> dict[int, float]:
    """Return Shapley values: the mean marginal score of each slot over all orders of the slots."""
    values = dict.fromkeys(slots, 0.0)
    orders = list(permutations(slots))
    for order in orders:
        for position, slot in enumerate(order):
            before = tuple(sorted(order[:position]))
            with_it = tuple(sorted((*before, slot)))
            values[slot] += (scores[with_it] - scores[before]) / len(orders)
    return values
