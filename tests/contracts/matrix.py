"""The contract matrix: hosts with a seed in place, in every combination that a blueprint must survive.

A user's own blueprint goes through the same cells in a few lines::

    @pytest.mark.parametrize("case", contract("feature_map", ["my_block"]))
    def test_my_block(case):
        keeps_the_contract(case)

with both names from tests.contracts.rules.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.kasmina import Host, MorphogeneticModel, register_blueprint
from esper.kasmina.actuator import Outcome, apply_action
from esper.kasmina.blueprints import Topology, blueprint_named, unregister_blueprint
from esper.kasmina.network import slot_streams
from esper.leyline import BLEND_IDS, BlueprintAction, LifecycleRules, Stage
from esper.leyline.rules import IncubationMode
from esper.tolaria.minibatch import Readings, train_batch
from tests.contracts.hosts import CLASSES, HOSTS, INPUT_SHAPE, INPUTS, TOKENS, VOCABULARY, Kind
from tests.tolaria.building import plant

IMAGES: tuple[Kind, ...] = ("images", "images_batch")
"""For tests that need no more than feature maps."""
BATCH = 8
CLIP = 1.0
SLOT = 0
"""Where the seed goes: host parameters lie on both sides of it."""


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the matrix."""

    blueprint: str
    style: int
    kind: Kind
    width: int

    def __str__(self) -> str:
        return f"{self.blueprint}-{BLEND_IDS[self.style]}-{self.kind}-{self.width}"


@contextmanager
def registered(
    name: str, build: Callable[[int], nn.Module], topology: Topology = "feature_map", multiple_of: int = 1
) -> Iterator[None]:
    """A blueprint that is known inside the block only."""
    register_blueprint(name, topology=topology, multiple_of=multiple_of)(build)
    try:
        yield
    finally:
        unregister_blueprint(name, topology)


def build_host(kind: Kind, width: int) -> Host:
    """An untrained host whose slots are all ``width`` wide."""
    return HOSTS[kind].build(width)


@dataclass(slots=True)
class Trial:
    """A model in training: with its host's optimiser, all that a run consists of."""

    model: MorphogeneticModel
    optimiser: Optimizer

    @property
    def seed_weights(self) -> dict[str, Tensor]:
        return dict(self.model.slot(SLOT).named_parameters())

    def train(self, steps: int, first: int = 0) -> list[Readings]:
        """Train on the batches from number ``first`` on; random draws depend on that number alone."""
        self.model.train()
        facts = []
        for number in range(first, first + steps):
            restart(number)
            x, y = batch(number, self.model.host.topology)
            facts.append(train_batch(self.model, self.optimiser, x, y, loss, clip=CLIP))
        return facts

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Eval and train mode, on one batch; statistics and random state are as before afterwards."""
        x, _ = batch(99, self.model.host.topology)
        kept = {name: value.clone() for name, value in self.model.host.state_dict().items()}
        position = torch.get_rng_state()
        restart(99)
        with torch.no_grad():
            self.model.eval()
            evaluated = self.model(x)
            self.model.train()
            trained = self.model(x)
        torch.set_rng_state(position)
        self.model.host.load_state_dict(kept)
        return evaluated, trained

    def place(self, stage: Stage, alpha: float) -> None:
        """Put the seed into ``stage`` at ``alpha``, also where the lifecycle would not leave it."""
        table = self.model.table
        table.stage[0, SLOT] = stage
        table.alpha[0, SLOT] = alpha
        self.model.sync()

    def snapshot(self) -> dict[str, Tensor]:
        """Every tensor that the host's training consists of, torch's random state among them."""
        host = self.model.host.state_dict()
        found = {f"host.{name}": value.clone() for name, value in host.items()}
        found |= _optimiser_tensors("optimiser", self.optimiser)
        return found | {"random state": torch.get_rng_state()}

    def seed_snapshot(self) -> dict[str, Tensor]:
        """Every tensor of the seed: weights, optimiser state, random stream."""
        slot = self.model.slot(SLOT)
        found = {f"seed.{name}": value.clone() for name, value in slot.state_dict().items()}
        if slot.optimiser is not None:
            found |= _optimiser_tensors("seed optimiser", slot.optimiser)
        return found | {"stream": slot.stream.get_state()}


def _optimiser_tensors(prefix: str, optimiser: Optimizer) -> dict[str, Tensor]:
    return {
        f"{prefix}.{index}.{name}": value.clone()
        for index, entry in optimiser.state_dict()["state"].items()
        for name, value in entry.items()
        if isinstance(value, Tensor)
    }


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Bit for bit, naming every tensor that differs."""
    assert found.keys() == wanted.keys()
    differing = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
    assert not differing, f"differ: {', '.join(differing)}"


def restart(rng_seed: int) -> None:
    """Seed torch's global stream; ``torch.manual_seed`` would spend 2 ms on devices that are not there."""
    torch.default_generator.manual_seed(rng_seed)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over the batch, and over the tokens where there are any."""
    if output.ndim == 3:
        output, target = output.flatten(0, 1), target.flatten()
    return F.cross_entropy(output, target)


@cache
def batch(number: int, topology: Topology = "feature_map") -> tuple[Tensor, Tensor]:
    """Inputs and targets of one minibatch, related so that there is a slope.

    Images and features have a pattern per class under noise; the class of a token is its sum with the one
    before.
    """
    generator = torch.Generator().manual_seed(number)
    if topology == "tokens":
        x = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)
        return x, (x + x.roll(1, dims=1)) % CLASSES
    shape = (INPUTS,) if topology == "features" else INPUT_SHAPE
    patterns = torch.randn(CLASSES, *shape, generator=torch.Generator().manual_seed(0))
    y = torch.randint(CLASSES, (BATCH,), generator=generator)
    return patterns[y] + 0.5 * torch.randn(BATCH, *shape, generator=generator), y


def begin(
    kind: Kind,
    width: int,
    *,
    incubation: IncubationMode = "shadow",
    training_epochs: int = 2,
    auto_forward: bool = True,
    rng_seed: int = 0,
) -> Trial:
    """An untrained host with empty slots and the optimiser of its training."""
    restart(rng_seed)
    host = build_host(kind, width)
    rules = LifecycleRules(
        min_training_epochs=training_epochs, incubation=incubation, auto_forward=auto_forward
    )
    model = MorphogeneticModel(host, rules, streams=slot_streams(rng_seed))
    optimiser = torch.optim.SGD(host.parameters(), lr=0.1, momentum=0.9)
    model.bind_optimiser(optimiser)
    return Trial(model, optimiser)


def germinate(model: MorphogeneticModel, blueprint: str, style: int, slot: int = SLOT) -> Outcome:
    """Plant a seed as a controller would."""
    index = blueprint_named(blueprint, model.host.topology).index
    return apply_action(model, plant(slot, BlueprintAction(index), style=style), seed_id=0)


def planted(case: Case, **settings: Any) -> Trial:
    """An untrained host with the seed of ``case`` just germinated; ``settings`` as for ``begin``."""
    trial = begin(case.kind, case.width, **settings)
    outcome = germinate(trial.model, case.blueprint, case.style)
    assert outcome.succeeded, outcome
    return trial


@cache
def twin_after(kind: Kind, width: int, steps: int) -> dict[str, Tensor]:
    """What the same host is after ``steps`` when nothing was ever planted."""
    twin = begin(kind, width)
    twin.train(steps)
    return twin.snapshot()


@cache
def bare_names(kind: Kind, width: int) -> set[str]:
    """What the same host's tensors are called, with nothing planted."""
    return set(begin(kind, width).model.state_dict())


@cache
def twin_outputs(kind: Kind, width: int) -> tuple[Tensor, Tensor]:
    """What the same host computes, untrained and with nothing planted."""
    return begin(kind, width).outputs()
