"""The contract matrix: hosts with a seed in place, in every combination that a blueprint must survive.

A user's own blueprint goes through the same cells in a few lines::

    @pytest.mark.parametrize("case", blueprint_cases(["my_block"]))
    @pytest.mark.parametrize("rule", RULES)  # from tests.contracts.rules
    def test_my_block_keeps_the_contract(rule, case):
        rule(case)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.kasmina import CNNHost, Host, MorphogeneticModel, WrappedHost, register_blueprint
from esper.kasmina.blueprints import blueprint_named, specs_for, unregister_blueprint
from esper.kasmina.model import slot_streams
from esper.leyline import BLEND_IDS, CANONICAL_ACTION, Head, LifecycleRules, Op, Stage, Tempo
from esper.leyline.rules import IncubationMode
from esper.tolaria.actuator import Outcome, apply_action
from esper.tolaria.epoch import BatchFacts, train_batch

Kind = Literal["segmented", "wrapped"]

KINDS: tuple[Kind, ...] = ("segmented", "wrapped")
WIDTHS = (4, 8, 16)
CLASSES = 4
INPUT_SHAPE = (2, 6, 6)
BATCH = 16
CLIP = 1.0
SLOT = 0
"""Where the seed goes: host parameters lie on both sides of it."""
UPSTREAM = {"segmented": "segments.0.", "wrapped": "module.stem."}
"""What the names of the host's parameters before the slot begin with."""


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the matrix."""

    blueprint: str
    style: int
    kind: Kind
    width: int

    def __str__(self) -> str:
        return f"{self.blueprint}-{BLEND_IDS[self.style]}-{self.kind}-{self.width}"


def blueprint_cases(
    blueprints: Iterable[str] | None = None,
    *,
    styles: Sequence[int] = range(len(BLEND_IDS)),
    kinds: Sequence[Kind] = KINDS,
    widths: Sequence[int] = WIDTHS,
) -> list[Any]:
    """Values for ``pytest.mark.parametrize``; by default every blueprint registered for feature maps."""
    import pytest

    names = [spec.name for spec in specs_for("feature_map")] if blueprints is None else blueprints
    cases = (Case(*cell) for cell in product(names, styles, kinds, widths))
    return [pytest.param(case, id=str(case)) for case in cases]


@contextmanager
def registered(name: str, build: Callable[[int], nn.Module]) -> Iterator[None]:
    """A blueprint for feature maps that is known inside the block only."""
    register_blueprint(name, topology="feature_map")(build)
    try:
        yield
    finally:
        unregister_blueprint(name, "feature_map")


class PlainNet(nn.Module):
    """A module that knows nothing of slots, with statistics and random draws on both sides of one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = _stage(INPUT_SHAPE[0], width)
        self.pool = nn.MaxPool2d(2)
        self.body = _stage(width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(self.pool(self.stem(x)))
        return self.head(h.mean(dim=(2, 3)))


def _stage(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
    )


def build_host(kind: Kind, width: int) -> Host:
    """An untrained host whose slots are all ``width`` wide."""
    if kind == "segmented":
        return CNNHost((width, width), kernel=3, input_shape=INPUT_SHAPE, classes=CLASSES)
    return WrappedHost(PlainNet(width), ["stem", "body"], torch.zeros(2, *INPUT_SHAPE))


@dataclass(slots=True)
class Trial:
    """A model in training: with its host's optimiser, all that a run consists of."""

    model: MorphogeneticModel
    optimiser: Optimizer

    @property
    def seed_weights(self) -> dict[str, Tensor]:
        return dict(self.model.slot(SLOT).named_parameters())

    def train(self, steps: int, first: int = 0) -> list[BatchFacts]:
        """Train on the batches from number ``first`` on; random draws depend on that number alone."""
        self.model.train()
        facts = []
        for number in range(first, first + steps):
            restart(number)
            x, y = batch(number)
            facts.append(train_batch(self.model, self.optimiser, x, y, loss, clip=CLIP))
        return facts

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Eval and train mode, on one batch; statistics and random state are as before afterwards."""
        x, _ = batch(99)
        kept = {name: value.clone() for name, value in self.model.host.state_dict().items()}
        position = torch.get_rng_state()
        restart(99)
        with torch.no_grad():
            self.model.eval()
            judged = self.model(x)
            self.model.train()
            trained = self.model(x)
        torch.set_rng_state(position)
        self.model.host.load_state_dict(kept)
        return judged, trained

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
    return F.cross_entropy(output, target)


@cache
def batch(number: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one minibatch: a pattern per class under noise, so that there is a slope."""
    patterns = torch.randn(CLASSES, *INPUT_SHAPE, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(number)
    y = torch.randint(CLASSES, (BATCH,), generator=generator)
    return patterns[y] + 0.5 * torch.randn(BATCH, *INPUT_SHAPE, generator=generator), y


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
    """Plant a seed as a decision maker would."""
    action = CANONICAL_ACTION.copy()
    action[Head.OP] = Op.GERMINATE
    action[Head.SLOT] = slot
    action[Head.BLUEPRINT] = blueprint_named(blueprint, model.host.topology).index
    action[Head.STYLE] = style
    action[Head.TEMPO] = Tempo.FAST
    return apply_action(model, action, seed_id=0)


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
