"""A controller of your own: who plants what, where and when, in a loop of your own or in ``esper.grow``.

python examples/own_controller.py
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.leyline import CANONICAL_ACTION, ActionSpace, EpochFacts, Head, LifecycleOp, SlotTable
from esper.leyline import legal_slots_by_op as legal_slots
from esper.leyline.protocols import Decisions
from esper.tolaria.tasks.digits import load_digits


class FromTheEnd:
    """Every third epoch a light convolution into the last free slot; what does no good by then is removed."""

    name = "from_the_end"

    def __init__(self, space: ActionSpace) -> None:
        self.space = space
        self.light = space.blueprint_names.index("conv_light")

    def reset(self, episode: int) -> None:
        """Nothing is remembered: all that it goes by is in the facts and in the table."""

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        """One action, of eight numbers; those not set stay at their defaults. Rows are networks: here one."""
        legal = legal_slots(table, self.space.rules)[0]
        harmful = legal[LifecycleOp.PRUNE] & (table.age[0] >= 2) & (table.contribution[0] < 0)
        good = legal[LifecycleOp.FOSSILIZE] & (table.age[0] >= 2) & (table.contribution[0] > 0)
        free = legal[LifecycleOp.GERMINATE] & (facts.epoch[0] % 3 == 0)
        action = CANONICAL_ACTION.copy()
        for op, slots in (
            (LifecycleOp.PRUNE, harmful),
            (LifecycleOp.FOSSILIZE, good),
            (LifecycleOp.GERMINATE, free),
        ):
            if slots.any():
                action[[Head.OP, Head.SLOT, Head.BLUEPRINT]] = op, np.flatnonzero(slots)[-1], self.light
                break
        return Decisions(action[None])


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits(torch.Generator().manual_seed(0))
    train = DataLoader(TensorDataset(digits.train.x, digits.train.y), batch_size=64, shuffle=True)
    val = DataLoader(TensorDataset(digits.validation.x, digits.validation.y), batch_size=120)
    layers = [nn.Sequential(nn.Conv2d(a, b, 1), nn.ReLU()) for a, b in ((1, 8), (8, 8))]
    net = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10))
    grown = esper.grow(
        net, train, val, loss=F.cross_entropy, epochs=12, slots=["0", "1"], controller=FromTheEnd
    )
    print(grown.summary())


if __name__ == "__main__":
    main()
