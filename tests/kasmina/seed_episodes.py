"""Helpers that train a seed from epoch to epoch as an environment does, and a seed with dropout."""

from torch import Tensor, nn

from esper.kasmina import lifecycle
from esper.kasmina.actuator import Outcome, apply_action, settle
from esper.leyline import GradientStatistics, LifecycleOp, Stage
from esper.tolaria.minibatch import Learner, MinibatchResult
from tests.contracts.matrix import CLIP, Trial, germinate, loss
from tests.tolaria.building import action


class DropoutSeed(nn.Sequential):
    """Seed with dropout and a 1×1 convolution with zero weights."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Dropout(0.5), zero(nn.Conv2d(width, width, 1)))


def zero(layer: nn.Conv2d) -> nn.Conv2d:
    """Return ``layer`` with weight and bias set to 0."""
    nn.init.zeros_(layer.weight)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


def act(trial: Trial, op: LifecycleOp, slot: int, **heads: int) -> Outcome:
    """Apply an action to a slot of a network; action heads that are not given have their canonical value."""
    return apply_action(trial.model, action(op, slot, **heads), seed_id=0)


def epoch(trial: Trial, x: Tensor, y: Tensor) -> MinibatchResult:
    """Run an epoch of one minibatch: train, advance alpha ramps, record gradients, make automatic stage
    changes."""
    trial.model.train()
    result = Learner(trial.model, trial.optimiser, loss, clip=CLIP).run(x, y, measure=True)
    table = trial.model.table
    lifecycle.tick(table, 0)
    for slot, norms in result.seeds.items():
        table.record_gradients(
            0, slot, GradientStatistics(float(norms.norm()), 1.0, vanishing=False, exploding=False), ratio=1.0
        )
    settle(trial.model, lifecycle.advance(table, 0, trial.model.rules))
    return result


def grow(trial: Trial, slot: int, blueprint: str, style: int, x: Tensor, y: Tensor) -> list[Stage]:
    """Train a seed from germination to fossilization and return its stage in each epoch."""
    assert germinate(trial.model, blueprint, style, slot).succeeded
    table = trial.model.table
    stages = []
    while table.stage[0, slot] != Stage.HOLDING:
        stages.append(Stage(int(table.stage[0, slot])))
        assert not epoch(trial, x, y).skipped
    table.record_contribution(0, slot, 1.0, 0.1)
    assert act(trial, LifecycleOp.FOSSILIZE, slot).succeeded
    assert not epoch(trial, x, y).skipped
    return [*stages, Stage(int(table.stage[0, slot]))]
