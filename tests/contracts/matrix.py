"""Helpers of the contract tests: a host in training with one seed, and snapshots of its tensors.

Example of a test that checks a user's blueprint like the built-in blueprints::

    @pytest.mark.parametrize("case", contract("feature_map", ["my_block"]))
    def test_my_block_keeps_the_contract(case):
        check_contract(case)

The functions ``contract`` and ``check_contract`` are in tests.contracts.rules.
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

from esper.kasmina import MorphogeneticModel, register_blueprint
from esper.kasmina.actuator import Outcome, apply_action
from esper.kasmina.blueprints import Topology, blueprint_named, unregister_blueprint
from esper.kasmina.network import slot_streams
from esper.kasmina.slot import RESERVED
from esper.leyline import BLEND_IDS, BlueprintAction, LifecycleRules, Stage
from esper.tolaria.minibatch import Learner, MinibatchResult
from tests.contracts.hosts import CLASSES, HOSTS, INPUT_SHAPE, INPUTS, TOKENS, VOCABULARY, Kind
from tests.tolaria.building import plant

IMAGES: tuple[Kind, ...] = ("images", "images_batch", "plain_images")
"""Kinds of hosts whose slots have feature maps."""
BATCH = 8
CLIP = 1.0
SLOT = 0
"""Index of the slot in which the tests plant a seed; the host has parameters before and after this slot."""


@dataclass(frozen=True, slots=True)
class Case:
    """Parameters of one contract test: a blueprint, a blend style, a kind of host and its width."""

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
    """Register a blueprint for the duration of a ``with`` block."""
    register_blueprint(name, topology=topology, multiple_of=multiple_of)(build)
    try:
        yield
    finally:
        unregister_blueprint(name, topology)


def build_host(kind: Kind, width: int) -> nn.Module:
    """Return an untrained host whose slots all have ``width`` features."""
    return HOSTS[kind].build(width)


@dataclass(slots=True)
class Trial:
    """Network with slots, and the optimiser that trains its host and seeds."""

    model: MorphogeneticModel
    optimiser: Optimizer

    @property
    def topology(self) -> Topology:
        return self.model.sites[SLOT].topology

    @property
    def seed_weights(self) -> dict[str, Tensor]:
        """Parameters of the seed and its gate, by parameter name."""
        graft = self.model.slot(SLOT).graft
        assert graft is not None
        return dict(graft.named_parameters())

    def train(self, steps: int, first: int = 0) -> list[MinibatchResult]:
        """Train on ``steps`` batches, starting with batch ``first``; the number of a batch sets the random
        state."""
        self.model.train()
        results = []
        for number in range(first, first + steps):
            restart(number)
            x, y = batch(number, self.topology)
            results.append(Learner(self.model, self.optimiser, loss, clip=CLIP).run(x, y))
        return results

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Return the outputs for one batch in eval and train mode; restore buffers and random state."""
        x, _ = batch(99, self.topology)
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
        """Set stage and alpha of the seed directly, even to combinations that cannot occur in a lifecycle."""
        table = self.model.table
        table.stage[0, SLOT] = stage
        table.alpha[0, SLOT] = alpha
        self.model.sync()

    def state(self) -> dict[str, Any]:
        """Return the state of network and optimiser."""
        assert self.model.groups is not None
        return {"model": self.model.state(), "groups": self.model.groups.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a state of network and optimiser that was saved from the same host."""
        assert self.model.groups is not None
        self.model.load_state(state["model"])
        self.model.groups.load_state(state["groups"], self.model.seed_parameters)

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of the host's weights, buffers and optimiser state, and of torch's random state."""
        host = self.model.host
        found = {f"host.{name}": value.clone() for name, value in host.state_dict().items()}
        parameters = {f"optimiser.{name}": weight for name, weight in host.named_parameters()}
        found |= self._optimiser_tensors(parameters)
        own = {name: value for name, value in found.items() if RESERVED not in name.split(".")}
        return own | {"random state": torch.get_rng_state()}

    def seed_snapshot(self) -> dict[str, Tensor]:
        """Return copies of the seed's weights, buffers and optimiser state, and the slot's random stream."""
        slot = self.model.slot(SLOT)
        assert slot.stream is not None
        found = {f"seed.{name}": value.clone() for name, value in slot.state_dict().items()}
        parameters = {f"seed optimiser.{name}": weight for name, weight in slot.named_parameters()}
        return found | self._optimiser_tensors(parameters) | {"stream": slot.stream.get_state()}

    def _optimiser_tensors(self, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        return {
            f"{name}.{entry}": value.clone()
            for name, parameter in parameters.items()
            for entry, value in self.optimiser.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Assert that two snapshots are bit-equal; the error message names every tensor that differs."""
    assert found.keys() == wanted.keys()
    differing = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
    assert not differing, f"differ: {', '.join(differing)}"


def restart(rng_seed: int) -> None:
    """Seed torch's CPU generator; ``torch.manual_seed`` takes 2 ms longer because it looks for GPUs."""
    torch.default_generator.manual_seed(rng_seed)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy over all samples of the batch, or over all tokens of its sequences."""
    if output.ndim == 3:
        output, target = output.flatten(0, 1), target.flatten()
    return F.cross_entropy(output, target)


@cache
def batch(number: int, topology: Topology = "feature_map") -> tuple[Tensor, Tensor]:
    """Return inputs and targets of one minibatch; the targets can be predicted from the inputs.

    Images and features are a pattern per class plus noise. The target of a token is the sum of its number and
    that of the previous token, modulo the number of classes.
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
    kind: Kind, width: int, *, training_epochs: int = 2, auto_forward: bool = True, rng_seed: int = 0
) -> Trial:
    """Return an untrained host with empty slots and its optimiser."""
    restart(rng_seed)
    host = build_host(kind, width)
    rules = LifecycleRules(min_training_epochs=training_epochs, auto_forward=auto_forward)
    model = MorphogeneticModel(host, rules, sites=HOSTS[kind].sites(host), streams=slot_streams(rng_seed))
    optimiser = torch.optim.SGD(host.parameters(), lr=0.1, momentum=0.9)
    model.bind_optimiser(optimiser)
    return Trial(model, optimiser)


def germinate(model: MorphogeneticModel, blueprint: str, style: int, slot: int = SLOT) -> Outcome:
    """Plant a seed by a GERMINATE action, as a controller does."""
    index = blueprint_named(blueprint, model.sites[slot].topology).index
    return apply_action(model, plant(slot, BlueprintAction(index), style=style), seed_id=0)


def planted(case: Case, **settings: Any) -> Trial:
    """Return an untrained host with a new seed as ``case`` describes; ``settings`` are passed to
    ``begin``."""
    trial = begin(case.kind, case.width, **settings)
    outcome = germinate(trial.model, case.blueprint, case.style)
    assert outcome.succeeded, outcome
    return trial


@cache
def twin_after(kind: Kind, width: int, steps: int) -> dict[str, Tensor]:
    """Return the snapshot of a host without seeds after training on ``steps`` minibatches."""
    twin = begin(kind, width)
    twin.train(steps)
    return twin.snapshot()


@cache
def bare_names(kind: Kind, width: int) -> set[str]:
    """Return the state-dict keys of a host without seeds."""
    return set(begin(kind, width).model.state_dict())


@cache
def twin_outputs(kind: Kind, width: int) -> tuple[Tensor, Tensor]:
    """Return the outputs of an untrained host without seeds."""
    return begin(kind, width).outputs()
