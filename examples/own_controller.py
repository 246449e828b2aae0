"""Write your own controller, which decides what to plant, where and when, and use it in ``esper.grow``.

python examples/own_controller.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.leyline import ActionSpace, EpochFacts, SlotTable, Stage, report_slots
from esper.leyline.signals import Decisions
from esper.tolaria.tasks.digits import load_digits


class FromTheEnd:
    """Plant a light convolution in the last free slot every third epoch; prune seeds that do not help."""

    name = "from_the_end"

    def __init__(self, space: ActionSpace) -> None:
        self.space = space

    def reset(self, episode: int) -> None:
        """Do nothing: this controller has no state."""

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        """Return one action after every epoch. Arrays have one row per network, here one."""
        slots = report_slots(table, 0, self.space)
        for slot in slots:
            if slot.stage is Stage.HOLDING and slot.age >= 2:
                op = "fossilize" if slot.counterfactual_contribution > 0 else "prune"
                return Decisions(self.space.action(op, slot=slot.slot_id))
        free = [slot.slot_id for slot in slots if slot.stage is Stage.DORMANT]
        if free and facts.epoch[0] % 3 == 0:
            return Decisions(self.space.action("germinate", slot=free[-1], blueprint="conv_light"))
        return Decisions(self.space.action("wait"))


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
