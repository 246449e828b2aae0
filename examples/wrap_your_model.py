"""Grow a model of your own, in a training loop of your own.

    .venv/bin/python examples/wrap_your_model.py

A small residual network learns the embedded digits. It is wrapped, not changed: two of its
submodules get a slot behind them. One seed is germinated into each, incubates, is blended in, is
measured, and becomes permanent. What comes out is the plain class again.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper import MorphogeneticModel, harvest, wrap
from esper.kasmina import lifecycle
from esper.leyline import BLUEPRINT_IDS, CANONICAL_ACTION, Head, LifecycleOp, LifecycleRules, Stage, Tempo
from esper.tolaria.actuator import Outcome, advance, apply_action, settle, tick
from esper.tolaria.counterfactual import measure
from esper.tolaria.data import BatchCursor, Samples
from esper.tolaria.epoch import BatchFacts, train_batch
from esper.tolaria.objective import CLASSIFICATION
from esper.tolaria.slot_measurements import record_training, record_worth
from esper.tolaria.tasks.digits import load_digits

EPOCHS, BATCHES, BATCH_SIZE = 14, 16, 64


# --- the model: nothing in it knows Esper ---------------------------------------------------------


class Block(nn.Module):
    """Two convolutions beside a skip; the in-place ReLU is no obstacle."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # With BatchNorm the running statistics would be those of the network with its seeds on, and a
        # seed that is switched off to be measured would look better than it is.
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(1, width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(1, width),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.relu(h + self.layers(h))


class TinyResNet(nn.Module):
    """Narrow, so that there is something to gain."""

    def __init__(self, width: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.layer1 = Block(width)
        self.pool = nn.MaxPool2d(2)
        self.layer2 = Block(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer2(self.pool(self.layer1(self.stem(x))))
        return self.head(h.mean(dim=(2, 3)))


# --- the decisions --------------------------------------------------------------------------------


def germinate(model: MorphogeneticModel, slot: int, blueprint: str, seed_id: int) -> Outcome:
    """Plant a seed that is to be blended in over three epochs, to full alpha."""
    action = CANONICAL_ACTION.copy()
    action[Head.OP], action[Head.SLOT] = LifecycleOp.GERMINATE, slot
    action[Head.BLUEPRINT], action[Head.TEMPO] = BLUEPRINT_IDS.index(blueprint), Tempo.FAST
    return apply_action(model, action, seed_id)


def fossilize(model: MorphogeneticModel, slot: int) -> Outcome:
    """Make a held seed permanent."""
    action = CANONICAL_ACTION.copy()
    action[Head.OP], action[Head.SLOT] = LifecycleOp.FOSSILIZE, slot
    return apply_action(model, action, seed_id=-1)


# --- the loop -------------------------------------------------------------------------------------


def train_epoch(
    model: MorphogeneticModel, optimiser: torch.optim.Optimizer, data: Samples, cursor: BatchCursor
) -> BatchFacts:
    """Host and seeds learn together; the last minibatch also looks at the seeds' gradients."""
    model.train()
    for number in range(BATCHES):
        chosen = cursor.next()
        last = number == BATCHES - 1
        x, y = data.x[chosen], data.y[chosen]
        facts = train_batch(model, optimiser, x, y, F.cross_entropy, clip=5.0, measure=last)
        for slot in facts.broken:  # no longer finite while incubating; the host has not noticed
            settle(model, lifecycle.prune(model.table, 0, slot, model.rules, cause="user", reason="broken"))
    return facts


def end_epoch(model: MorphogeneticModel, facts: BatchFacts, validation: Samples) -> float:
    """Tick, record, measure, advance, in this order; returns the validation score."""
    tick(model)
    record_training(model.table, facts)
    result = measure(model, validation.x, validation.y, model.blended, CLASSIFICATION)
    record_worth(model.table, result)
    advance(model)
    return result.score


def describe(model: MorphogeneticModel, slot: int) -> str:
    table, at = model.table, (0, slot)
    text = f"{model.slot_config.slot_ids[slot]} {Stage(int(table.stage[at])).name.lower()}"
    if np.isnan(table.contribution[at]):
        return text
    return f"{text} {table.contribution[at]:+.1f} ± {table.contribution_error[at]:.1f}"


def live(grow: bool) -> tuple[nn.Module, float]:
    """Train one network, with or without seeds; returns the plain module and its test accuracy."""
    torch.manual_seed(0)
    network = TinyResNet()
    splits = load_digits(torch.Generator().manual_seed(0))
    cursor = BatchCursor(len(splits.train), BATCH_SIZE, torch.Generator().manual_seed(0))

    model = wrap(network, ["layer?"], sample=splits.train.x[:2], rules=LifecycleRules(min_training_epochs=2))
    optimiser = torch.optim.AdamW(network.parameters(), lr=0.01)
    model.bind_optimiser(optimiser)

    slots = range(model.slot_config.num_slots)
    for epoch in range(EPOCHS):
        if grow and epoch in slots:
            germinate(model, slot=epoch, blueprint="conv_heavy", seed_id=epoch)
        facts = train_epoch(model, optimiser, splits.train, cursor)
        score = end_epoch(model, facts, splits.validation)
        print(f"epoch {epoch + 1:>2}  score {score:5.1f}  " + ", ".join(describe(model, s) for s in slots))
        for slot in slots:
            if model.table.stage[0, slot] == Stage.HOLDING and model.table.contribution[0, slot] > 0:
                fossilize(model, slot)

    grown = harvest(model).eval()
    splits.test.unlock()
    test = splits.test.read()
    with torch.inference_mode():
        return grown, CLASSIFICATION.sample_scores(grown(test.x), test.y).mean().item()


def main() -> None:
    torch.set_num_threads(1)
    print("without growth")
    plain, plain_score = live(grow=False)
    print("\nwith growth")
    grown, grown_score = live(grow=True)
    print(f"\nlayer1 of the harvested {type(grown).__name__}:\n{grown.layer1}\n")
    for name, network, score in (("plain", plain, plain_score), ("grown", grown, grown_score)):
        print(f"{name}: test {score:.1f}, {sum(p.numel() for p in network.parameters()):,} parameters")


if __name__ == "__main__":
    main()
