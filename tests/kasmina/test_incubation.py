import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina import Host, MorphogeneticModel
from esper.kasmina.network import shadow_size
from esper.leyline import LifecycleRules, SlotConfig
from esper.leyline.rules import IncubationMode
from tests.contracts.hosts import TOKENS, VOCABULARY
from tests.contracts.matrix import (
    IMAGES,
    INPUT_SHAPE,
    SLOT,
    Case,
    Kind,
    Trial,
    assert_same,
    batch,
    begin,
    germinate,
    planted,
    registered,
    restart,
    twin_after,
)

host_kinds = pytest.mark.parametrize("kind", IMAGES)


def _zero(layer: nn.Conv2d) -> nn.Conv2d:
    nn.init.zeros_(layer.weight)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


class Dropping(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Dropout(0.5), _zero(nn.Conv2d(width, width, 1)))


class DroppingByFunction(nn.Module):
    """No dropout layer to be found among its modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.last = _zero(nn.Conv2d(width, width, 1))

    def forward(self, h: Tensor) -> Tensor:
        return self.last(F.dropout(h, 0.5, self.training))


dropping = pytest.mark.parametrize("build", [Dropping, DroppingByFunction])
Build = Callable[[int], nn.Module]


# --- the sub-batch --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "kept"), [(1, 1), (16, 16), (32, 32), (33, 32), (128, 32), (129, 33), (200, 50), (1000, 250)]
)
def test_a_quarter_of_the_batch_and_at_least_32_samples(samples: int, kept: int) -> None:
    assert shadow_size(samples) == kept


def test_the_features_at_the_slot_are_kept() -> None:
    trial = planted(Case("conv_light", 0, "images", 4))
    x = torch.randn(200, *INPUT_SHAPE)
    restart(0)
    trial.model.train()(x)
    kept = trial.model.captured(SLOT)
    restart(0)  # the host's dropout draws the same mask
    assert torch.equal(kept, trial.model.host.segments[0](x)[:50])
    assert not kept.requires_grad
    with pytest.raises(RuntimeError, match="no pass has kept features for slot r0c1"):
        trial.model.captured(1)


@host_kinds
def test_nobody_listens_in_evaluation(kind: Kind) -> None:
    trial = planted(Case("conv_light", 0, kind, 4))
    trial.model.eval()(batch(0)[0])
    with pytest.raises(RuntimeError, match="no pass has kept features"):
        trial.model.captured(SLOT)


# --- what a seed learns -----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_statistics_of_a_seed_are_found_too(bad: float) -> None:
    class Normalised(nn.Sequential):
        def __init__(self, width: int) -> None:
            super().__init__(nn.BatchNorm2d(width), _zero(nn.Conv2d(width, width, 1)))

    with registered("normalised", Normalised):
        trial = planted(Case("normalised", 0, "images", 4))
    slot = trial.model.slot(SLOT)
    assert slot.is_finite
    for name, buffer in slot.named_buffers():
        if name.endswith("running_var"):
            buffer[0] = bad
    assert not slot.is_finite, "in evaluation it would return NaN"
    assert trial.train(1)[0].broken == [SLOT]


@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
def test_a_seed_whose_gradient_overflows_costs_the_host_nothing(incubation: IncubationMode) -> None:
    trial = planted(Case("conv_small", 0, "images", 4), incubation=incubation)
    with torch.no_grad():
        # The delta stays small, and so does the loss; squares of the first layer's gradient pass 1e38.
        trial.seed_weights["seed.one.0.weight"].fill_(1e-22)
        trial.seed_weights["seed.one.0.bias"].zero_()
        trial.seed_weights["seed.one.2.weight"].fill_(1e22)
    (facts,) = trial.train(1)
    assert (facts.broken, facts.skipped) == ([SLOT], False)
    assert_same(trial.snapshot(), twin_after("images", 4, 1))


# --- whose random numbers -----------------------------------------------------------------------------


@dropping
@host_kinds
def test_dropout_of_a_seed_draws_from_the_slots_own_stream(kind: Kind, build: Build) -> None:
    with registered("dropping", build):
        trial = planted(Case("dropping", 0, kind, 4), training_epochs=0)
        for mode in ("shadow", "straight_through"):
            incubating = planted(Case("dropping", 0, kind, 4), incubation=mode)
            incubating.train(3)
            assert_same(incubating.snapshot(), twin_after(kind, 4, 3))
    stream = trial.model.slot(SLOT).stream
    position = stream.get_state()
    trial.train(3)
    wanted = twin_after(kind, 4, 3)["random state"]
    assert torch.equal(torch.get_rng_state(), wanted), "the host draws as if it were alone"
    assert not torch.equal(stream.get_state(), position)
    position = stream.get_state()
    trial.model.eval()(batch(0)[0])
    assert torch.equal(stream.get_state(), position), "nothing is drawn in evaluation"


@host_kinds
def test_an_incubating_seed_does_not_change_its_neighbours_draws(kind: Kind) -> None:
    """A blended seed with dropout downstream runs in the shadow pass as well."""

    def episode(with_neighbour: bool) -> Trial:
        trial = begin(kind, 4, training_epochs=0)
        germinate(trial.model, "dropping", 0, slot=1)
        trial.model.rules = begin(kind, 4).model.rules
        if with_neighbour:
            germinate(trial.model, "conv_light", 0, slot=0)
            assert (trial.model.incubating, trial.model.blended) == ([0], [1])
        trial.train(4)
        return trial

    with registered("dropping", Dropping):
        accompanied, alone = episode(True), episode(False)
    assert_same(accompanied.snapshot(), alone.snapshot())
    found, wanted = (t.model.slot(1) for t in (accompanied, alone))
    assert_same(found.state_dict(), wanted.state_dict())
    assert torch.equal(found.stream.get_state(), wanted.stream.get_state())


def test_a_seeds_initialisation_comes_from_its_slots_stream() -> None:
    trials = [begin("images", 8) for _ in range(2)]
    for number, trial in enumerate(trials):
        restart(number)
        before = torch.get_rng_state()
        germinate(trial.model, "conv_heavy", 3)
        assert torch.equal(torch.get_rng_state(), before)
    first, second = (trial.seed_snapshot() for trial in trials)
    assert_same(first, second)
    germinate(trials[0].model, "conv_heavy", 3, slot=1)
    other = dict(trials[0].model.slot(1).named_parameters())
    assert not torch.equal(other["seed.one.0.weight"], first["seed.seed.one.0.weight"])


class Tied(Host):
    """An embedding that is the output layer too, and a layer that runs twice."""

    topology = "tokens"
    slot_config = SlotConfig.of_count(1)
    feature_shapes = ((TOKENS, 8),)

    def __init__(self) -> None:
        super().__init__()
        embed, again, head = (
            nn.Embedding(VOCABULARY, 8),
            nn.Linear(8, 8),
            nn.Linear(8, VOCABULARY, bias=False),
        )
        head.weight = embed.weight
        self.segments = nn.ModuleList(
            [nn.Sequential(embed, nn.Linear(8, 8)), nn.Sequential(again, nn.Tanh(), again, head)]
        )


def tied() -> Trial:
    restart(0)
    model = MorphogeneticModel(Tied(), LifecycleRules(2))
    optimiser = torch.optim.SGD(model.host.parameters(), lr=0.1, momentum=0.9)
    model.bind_optimiser(optimiser)
    return Trial(model, optimiser)


def test_what_a_host_shares_is_left_alone_and_stays_shared() -> None:
    trial, twin = tied(), tied()
    germinate(trial.model, "mlp", 0)
    names = [name for name, _ in trial.model.host.named_parameters()]
    trial.train(3)
    twin.train(3)
    assert_same(trial.snapshot(), twin.snapshot())
    first, last = trial.model.host.segments
    assert last[-1].weight is first[0].weight
    assert [name for name, _ in trial.model.host.named_parameters()] == names
