"""``Mirrored`` seeds have two branches whose initial outputs sum to exactly zero."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import Mirrored
from esper.leyline.errors import BlueprintError
from tests.contracts.matrix import begin, germinate, registered, restart

widths = pytest.mark.parametrize("width", [1, 3, 32])


def mirrored(width: int) -> Mirrored:
    return Mirrored(nn.Conv2d(width, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, width, 3, padding=1))


def normalised(width: int) -> Mirrored:
    """Return a mirrored seed whose branches have separate running statistics."""
    return Mirrored(nn.Conv2d(width, 5, 1, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, width, 1))


def features(width: int, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    return (3 * torch.randn(8, width, 7, 5)).contiguous(memory_format=layout)


@widths
@pytest.mark.parametrize("build", [mirrored, normalised])
def test_output_of_a_new_mirrored_seed_is_exactly_zero_in_train_and_eval_mode_and_both_memory_formats(
    build: Callable[[int], Mirrored], width: int
) -> None:
    restart(width)
    for layout in (torch.contiguous_format, torch.channels_last):
        module = build(width).to(memory_format=layout)
        for training in (True, False, True, False):
            h = features(width, layout)
            assert torch.equal(module.train(training)(h), torch.zeros_like(h))
        assert module.one(h).any(), "a single branch is not zero"


def test_refusal_of_a_mirrored_seed_with_dropout_advises_to_start_the_last_layer_at_zero() -> None:
    one, last = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
    trial = begin("images", 4)
    refusal = pytest.raises(BlueprintError, match="or start its last linear layer at zero")
    with registered("dropping", lambda _: Mirrored(one, nn.Dropout(0.5), last)), refusal:
        germinate(trial.model, "dropping", 0)
