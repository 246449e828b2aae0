import pytest
import torch
from torch import Tensor

from esper.kasmina import WrappedHost, harvest
from tests.contracts.matrix import Trial, loss
from tests.kasmina.awkward import ResNet, UNet, images, wrap
from tests.kasmina.living import grow

kinds = pytest.mark.parametrize("kind", ["resnet", "unet"])


def grown(kind: str) -> tuple[Trial, Tensor]:
    """Fossils at three of five slots, and the images that they grew on."""
    trial = wrap(kind)
    x, y = images(kind)
    for slot, blueprint, style in ((0, "conv_light", 0), (2, "norm", 1), (4, "conv_heavy", 3)):
        grow(trial, slot, blueprint, style, x, y)
    return trial, x


@kinds
def test_harvest_returns_the_users_class_with_hooks_of_its_own_and_the_fossils_built_in(kind: str) -> None:
    trial, x = grown(kind)
    host, calls = trial.model.host, []
    assert isinstance(host, WrappedHost)
    place = host.module.get_submodule(host.submodule_names[1])
    own = place.register_forward_hook(lambda *_: calls.append("heard"))
    plain = harvest(trial.model)
    own.remove()
    assert type(plain) is (ResNet if kind == "resnet" else UNet)
    wanted = trial.model.eval()(x)
    torch.testing.assert_close(plain.eval()(x), wanted, rtol=0, atol=1e-6)
    bare: list[Tensor | None] = [None] * 5
    assert not torch.allclose(trial.model(x, bare), wanted, atol=1e-3), "the fossils matter"
    assert (calls, sum(len(module._forward_hooks) for module in plain.modules())) == (["heard"], 1)
    assert sum(p.numel() for p in plain.parameters()) == sum(trial.model.count_parameters())
    _, y = images(kind)
    loss(plain.train()(x), y).backward()
    fossils = [p for name, p in plain.named_parameters() if ".seed." in name]
    # conv_light: a weight and a bias; norm: a scale; conv_heavy: two branches of two convolutions.
    assert len(fossils) == 2 + 1 + 2 * 2 * 2
    assert all(p.grad is not None and p.grad.isfinite().all() for p in fossils), "and it trains on"
