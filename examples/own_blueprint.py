"""Register your own blueprints, plant one in the impaired digits host and compare it with no growth.

    python examples/own_blueprint.py

A blueprint takes the width of a slot and returns a module that keeps the shape of its input and
returns exactly zero at birth. Germination checks both; ``check_blueprint`` also checks that every
weight learns and, on tokens, that no output depends on a later token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper import check_blueprint, register_blueprint
from esper.kasmina import Mirrored
from esper.run.arm import run_one_episode
from esper.run.run_config import run_config


@register_blueprint("cross", topology="feature_map")
class Cross(Mirrored):
    """5×1 and 1×5 convolutions: a wide receptive field with few parameters.

    ``Mirrored`` adds a second branch that cancels the first at birth.
    """

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Conv2d(width, width, (5, 1), padding=(2, 0)), nn.Conv2d(width, width, (1, 5), padding=(0, 2))
        )


@register_blueprint("remember", topology="tokens")
class Remember(Mirrored):
    """A causal depthwise convolution over three tokens, then a linear map of the features."""

    def __init__(self, width: int) -> None:
        super().__init__(Recent(width), nn.Linear(width, width))


class Recent(nn.Conv1d):
    """Causal depthwise convolution of ``[batch, tokens, width]`` over the last three tokens."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, 3, groups=width)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(F.pad(h.transpose(1, 2), (2, 0))).transpose(1, 2)


PLAN = "cross/fast@r0c0:0,cross/fast@r0c1:1,cross/fast@r0c2:2"


def main() -> None:
    torch.set_num_threads(1)
    for width in (2, 4, 8):
        check_blueprint("cross", topology="feature_map", width=width)
    check_blueprint("remember", topology="tokens", width=32)
    common = {"task": "digits_impaired", "rng_seed": 0}
    off = run_one_episode(run_config(controller="off", **common))
    grown = run_one_episode(run_config(controller="periodic", plan=PLAN, **common))
    for arm, report in (("off", off), ("cross", grown)):
        print(f"{arm:<6} test {report.test_score:5.1f}  parameters {report.params:>5,}")


if __name__ == "__main__":
    main()
