"""Grow a network in your own training loop, with your scheduler, clipping and metric: three added lines.

python examples/own_loop.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import esper
from esper.tolaria.tasks.digits import load_digits

EPOCHS = 24


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits(torch.Generator().manual_seed(0))
    batches = list(zip(digits.train.x.split(64), digits.train.y.split(64), strict=True))
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(batches))
    sample, plan = digits.train.x[:2], "conv_heavy@0:4"  # without a plan the default controller decides
    growth = esper.Growth(net, optimizer, sample=sample, mode="min", controller=plan)  # 1

    @torch.no_grad()
    def evaluate() -> list[float]:
        """Return one loss per batch, so that contributions have a standard error."""
        net.eval()
        x, y = digits.validation.x.split(60), digits.validation.y.split(60)
        return [F.cross_entropy(net(a), b).item() for a, b in zip(x, y, strict=True)]

    for epoch in range(EPOCHS):
        net.train()
        for x, y in batches:
            F.cross_entropy(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # includes the parameters of seeds
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        for event in growth.end_epoch(evaluate):  # 2
            print(event)
        if epoch % 4 == 3:
            right = (net.eval()(digits.validation.x).argmax(1) == digits.validation.y).float().mean()
            params = sum(p.numel() for p in net.parameters())
            print(f"epoch {epoch + 1}: {right:.1%} right, {params:,} parameters")

    finished = growth.finish()  # 3
    assert finished is net
    assert len(finished) == 8  # the same object with the same layers
    growth.save("net.safetensors")  # esper.load("net.safetensors", base=...) reads it


if __name__ == "__main__":
    main()
