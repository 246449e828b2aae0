import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import CNNHost, WrappedHost
from esper.leyline.errors import HostError, UnknownNameError
from tests.contracts.matrix import assert_same
from tests.kasmina.awkward import ResNet, UNet, images


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.shared(x))


@pytest.mark.parametrize(
    ("net", "slot", "error", "sentence"),
    [
        (
            ResNet(),
            "layer3.0",
            UnknownNameError,
            r"unknown submodule of ResNet for a slot 'layer3\.0'; did you mean"
            r" layer[12]\.0 or layer[12]\.0.*\? Allowed: relu, conv1.*"
            r" Patterns such as layer\?\.0 work too\.",
        ),
        (ResNet(), "blocks.*", UnknownNameError, r"unknown submodule of ResNet for a slot 'blocks\.\*'"),
        (UNet(), "down1", HostError, r"\(Down\) returns tuple; a slot needs one tensor \[batch, channels,"),
        (ResNet(), "fc", HostError, r"returns torch\.float32 of shape \(16, 4\), which is no feature_map;"),
        (
            UNet(),
            "labels",
            HostError,
            r"of shape \(16, 1, 8, 8\), which is no feature_map; a slot needs floats",
        ),
        (
            ResNet(),
            "relu",
            HostError,
            r"submodule 'relu' \(ReLU\) runs 9 times in one forward; a slot needs a",
        ),
        (Twice(), "shared", HostError, r"submodule 'shared' \(Conv2d\) runs 2 times in one forward"),
        (ResNet(), "aux", HostError, r"submodule 'aux' \(Conv2d\) runs 0 times in one forward"),
    ],
)
def test_a_place_that_cannot_carry_a_slot_is_refused(
    net: nn.Module, slot: str, error: type[Exception], sentence: str
) -> None:
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(error, match=sentence):
        WrappedHost(net, [slot], images("resnet")[0])
    assert_same(net.state_dict(), before)
    assert not any(module._forward_hooks for module in net.modules())


def test_a_probe_that_fails_puts_everything_back() -> None:
    net = ResNet()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(RuntimeError, match="channels"):
        WrappedHost(net, ["layer1.0"], torch.zeros(2, 5, 8, 8))
    assert_same(net.state_dict(), before)
    assert not any(module._forward_hooks for module in net.modules())
    with pytest.raises(HostError, match=r"no slot was named; the submodules of ResNet are relu, conv1"):
        WrappedHost(net, [], images("resnet")[0])


def test_the_segmented_host_says_what_it_needs() -> None:
    with pytest.raises(HostError, match=r"a CNN host needs positive block widths; found \(4, 0\)"):
        CNNHost((4, 0), kernel=3, input_shape=(1, 8, 8), classes=2)
    with pytest.raises(HostError, match=r"must be odd, to keep the size; found 2"):
        CNNHost((4,), kernel=2, input_shape=(1, 8, 8), classes=2)
