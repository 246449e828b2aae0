"""Incubating seeds train on a shadow branch and leave host and random state unchanged."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina import Host, MorphogeneticModel
from esper.kasmina.graft import shadow_size
from esper.kasmina.incubation import shadow_loss
from esper.kasmina.network import slot_streams
from esper.kasmina.sites import find_sites
from esper.leyline import LifecycleRules, Stage, Style
from esper.tolaria.minibatch import Learner
from tests.contracts.hosts import CLASSES, TOKENS, VOCABULARY
from tests.contracts.matrix import (
    CLIP,
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
    loss,
    planted,
    registered,
    restart,
    twin_after,
)
from tests.kasmina.seed_episodes import DropoutSeed, zero

host_kinds = pytest.mark.parametrize("kind", IMAGES)
SEGMENTED: tuple[Kind, ...] = ("images", "images_batch")


class FunctionalDropoutSeed(nn.Module):
    """Seed that draws random numbers without a dropout module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.last = zero(nn.Conv2d(width, width, 1))

    def forward(self, h: Tensor) -> Tensor:
        return self.last(F.dropout(h, 0.5, self.training))


dropout_seeds = pytest.mark.parametrize("build", [DropoutSeed, FunctionalDropoutSeed])
Build = Callable[[int], nn.Module]


# --- the sub-batch --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "kept"), [(1, 1), (16, 16), (32, 32), (33, 32), (128, 32), (129, 33), (200, 50), (1000, 250)]
)
def test_incubating_seed_trains_on_a_quarter_of_the_batch_but_at_least_32_samples(
    samples: int, kept: int
) -> None:
    assert shadow_size(samples) == kept


def test_training_pass_stores_detached_features_for_incubation_for_a_quarter_of_the_batch() -> None:
    trial = planted(Case("conv_light", 0, "images", 4))
    x = torch.randn(200, *INPUT_SHAPE)
    restart(0)
    trial.model.train()(x)
    kept = trial.model.captured(SLOT)
    # Resetting the random state gives the host's dropout the same mask as in the first forward pass.
    restart(0)
    assert torch.equal(kept, trial.model.host.segments[0](x)[:50])
    assert not kept.requires_grad
    with pytest.raises(RuntimeError, match="no pass has kept features for slot r0c1"):
        trial.model.captured(1)


class InPlace(Host):
    """Host that overwrites the features at its slot in place."""

    topology = "features"
    feature_shapes = ((8,),)

    def __init__(self) -> None:
        super().__init__()
        last = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, CLASSES))
        self.segments = nn.ModuleList([nn.Linear(6, 8), last])


def test_features_stored_for_incubation_are_not_overwritten_by_an_in_place_activation_downstream() -> None:
    model = MorphogeneticModel(InPlace(), LifecycleRules(2))
    model.bind_optimiser(torch.optim.SGD(model.host.parameters(), lr=0.1))
    germinate(model, "mlp", Style.LINEAR_ADD)
    x, _ = batch(0, "features")
    model.train()(x)
    assert (model.captured(SLOT) < 0).any()
    assert torch.equal(model.captured(SLOT), model.host.segments[0](x))


@pytest.mark.parametrize("kind", SEGMENTED)
def test_forward_pass_in_eval_mode_stores_no_features_for_incubation(kind: Kind) -> None:
    trial = planted(Case("conv_light", 0, kind, 4))
    trial.model.eval()(batch(0)[0])
    with pytest.raises(RuntimeError, match="no pass has kept features"):
        trial.model.captured(SLOT)


# --- non-finite seeds -------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@host_kinds
def test_incubating_seed_with_non_finite_batch_norm_statistics_is_reported(kind: Kind, bad: float) -> None:
    class Normalised(nn.Sequential):
        def __init__(self, width: int) -> None:
            super().__init__(nn.BatchNorm2d(width), zero(nn.Conv2d(width, width, 1)))

    with registered("normalised", Normalised):
        trial = planted(Case("normalised", 0, kind, 4))
    slot = trial.model.slot(SLOT)
    assert trial.model.is_finite(SLOT)
    for name, buffer in slot.named_buffers():
        if name.endswith("running_var"):
            buffer[0] = bad
    assert not trial.model.is_finite(SLOT), "in evaluation it would return NaN"
    assert trial.train(1)[0].broken == [SLOT]


@host_kinds
def test_overflowing_gradient_of_an_incubating_seed_leaves_the_host_unchanged(kind: Kind) -> None:
    trial = planted(Case("conv_small", 0, kind, 4))
    with torch.no_grad():
        # Output and loss of this seed stay small, but the squared gradient of its first layer exceeds the
        # range of float32.
        trial.seed_weights["seed.one.0.weight"].fill_(1e-22)
        trial.seed_weights["seed.one.0.bias"].zero_()
        trial.seed_weights["seed.one.2.weight"].fill_(1e22)
    [result] = trial.train(1)
    assert (result.broken, result.skipped) == ([SLOT], False)
    assert_same(trial.snapshot(), twin_after(kind, 4, 1))


# --- random numbers -----------------------------------------------------------------------------------


@dropout_seeds
@host_kinds
def test_dropout_of_a_seed_draws_from_the_random_stream_of_its_slot(kind: Kind, build: Build) -> None:
    with registered("dropping", build):
        trial = planted(Case("dropping", 0, kind, 4), training_epochs=0)
        incubating = planted(Case("dropping", 0, kind, 4))
        incubating.train(3)
        assert_same(incubating.snapshot(), twin_after(kind, 4, 3))
    stream = trial.model.slot(SLOT).stream
    assert stream is not None
    position = stream.get_state()
    trial.train(3)
    wanted = twin_after(kind, 4, 3)["random state"]
    assert torch.equal(torch.get_rng_state(), wanted), "the host draws as without a seed"
    assert not torch.equal(stream.get_state(), position)
    position = stream.get_state()
    trial.model.eval()(batch(0)[0])
    assert torch.equal(stream.get_state(), position), "nothing is drawn in evaluation"


@host_kinds
def test_incubating_seed_does_not_change_the_random_draws_of_a_blended_seed_downstream(kind: Kind) -> None:
    """Train a network with an incubating seed upstream of a blended seed with dropout; both run on the shadow
    branch."""

    def trained(with_neighbour: bool) -> Trial:
        trial = begin(kind, 4, training_epochs=0)
        germinate(trial.model, "dropping", 0, slot=1)
        trial.model.rules = begin(kind, 4).model.rules
        if with_neighbour:
            germinate(trial.model, "conv_light", 0, slot=0)
            assert (trial.model.incubating, trial.model.blended) == ([0], [1])
        trial.train(4)
        return trial

    with registered("dropping", DropoutSeed):
        accompanied = trained(True)
        after = accompanied.snapshot()
        alone = trained(False)
    assert_same(after, alone.snapshot())
    found, wanted = (t.model.slot(1) for t in (accompanied, alone))
    assert_same(found.state_dict(), wanted.state_dict())
    assert found.stream is not None
    assert wanted.stream is not None
    assert torch.equal(found.stream.get_state(), wanted.stream.get_state())


def test_initial_weights_of_a_seed_are_drawn_from_the_random_stream_of_its_slot() -> None:
    trials = [begin("images", 8) for _ in range(2)]
    for number, trial in enumerate(trials):
        restart(number)
        before = torch.get_rng_state()
        germinate(trial.model, "conv_heavy", 3)
        assert torch.equal(torch.get_rng_state(), before)
    first, second = (trial.seed_snapshot() for trial in trials)
    assert_same(first, second)
    own = trials[0].seed_weights["seed.one.0.weight"]
    germinate(trials[0].model, "conv_heavy", 3, slot=1)
    other = dict(trials[0].model.slot(1).named_parameters())["graft.seed.one.0.weight"]
    assert not torch.equal(other, own)


# --- shared weights ---------------------------------------------------------------------------------


class Tied(Host):
    """Host whose embedding is also its output layer and whose middle layer runs twice per forward pass."""

    topology = "tokens"
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


class PlainTied(nn.Module):
    """Network of a user, whose embedding is also its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8))
        self.again, self.head = nn.Linear(8, 8), nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.first[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(torch.tanh(self.again(self.first(x)))))


def tied(build: Callable[[], nn.Module]) -> Trial:
    restart(0)
    host = build()
    sites = None if isinstance(host, Host) else find_sites(host, "first", batch(0, "tokens")[0])
    model = MorphogeneticModel(host, LifecycleRules(2), sites=sites)
    optimiser = torch.optim.SGD(model.host.parameters(), lr=0.1, momentum=0.9)
    model.bind_optimiser(optimiser)
    return Trial(model, optimiser)


@pytest.mark.parametrize("build", [Tied, PlainTied])
def test_shared_weights_of_a_host_are_unchanged_by_incubation_and_stay_shared(
    build: Callable[[], nn.Module],
) -> None:
    trial, twin = tied(build), tied(build)
    germinate(trial.model, "mlp", 0)
    before = dict(trial.model.host.named_parameters(remove_duplicate=False))
    trial.train(3)
    found = trial.snapshot()
    twin.train(3)
    assert_same(found, twin.snapshot())
    after = dict(trial.model.host.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


# --- incubation in networks of users ----------------------------------------------------------------


class Recurrent(nn.Module):
    """Network with batch norm, dropout, a GRU, a skip connection, and a buffer that changes in training."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(INPUT_SHAPE[0], 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.drop = nn.Dropout(0.3)
        self.recur = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(16, CLASSES)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        h = self.drop(self.encode(x)).flatten(2).transpose(1, 2)
        states, _ = self.recur(h)
        return self.head(torch.cat([states[:, -1], h.mean(dim=1)], dim=1))


def replayed(optimiser_kind: type[torch.optim.Optimizer]) -> Trial:
    restart(5)
    net = Recurrent()
    sites = find_sites(net, ["encode", "recur"], batch(0)[0])
    model = MorphogeneticModel(net, LifecycleRules(9), sites=sites, streams=slot_streams(5))
    optimiser = optimiser_kind(net.parameters(), lr=0.01)
    model.bind_optimiser(optimiser)
    return Trial(model, optimiser)


@pytest.mark.parametrize("optimiser_kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize(("slot", "blueprint"), [(0, "conv_small"), (1, "attention")])
def test_incubation_in_a_users_network_trains_the_seed_and_leaves_the_rest_of_the_network_bit_equal(
    slot: int, blueprint: str, optimiser_kind: type[torch.optim.Optimizer]
) -> None:
    trial, twin = replayed(optimiser_kind), replayed(optimiser_kind)
    assert trial.model.segments is None
    assert germinate(trial.model, blueprint, Style.GATED_GATE, slot).succeeded
    born = [weight.detach().clone() for weight in trial.model.slot(slot).parameters()]
    results = trial.train(5)
    found = trial.snapshot()
    wanted = twin.train(5)
    assert_same(found, twin.snapshot())
    assert all(torch.equal(a.output, b.output) for a, b in zip(results, wanted, strict=True))
    assert all(len(result.shadow_losses) == 1 for result in results)
    assert trial.model.host.steps == 5, "the replayed pass changes no buffer"
    learned = trial.model.slot(slot).parameters()
    assert all(not torch.equal(now, before) for now, before in zip(learned, born, strict=True))


def test_seed_incubated_in_a_users_network_lowers_the_loss_once_it_is_blended_in() -> None:
    trial = replayed(torch.optim.SGD)
    germinate(trial.model, "conv_small", Style.LINEAR_ADD, SLOT)
    trial.optimiser.param_groups[0]["lr"] = 0.0
    x, y = batch(0)
    for module in trial.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    trial.model.train()
    for _ in range(20):
        Learner(trial.model, trial.optimiser, loss, clip=CLIP).run(x, y)
    with torch.no_grad():
        without = loss(trial.model(x), y)
        trial.place(Stage.BLENDING, 1.0)
        assert loss(trial.model(x), y) < without


def test_shadow_branch_in_a_users_network_runs_on_only_a_quarter_of_a_batch_of_200() -> None:
    trial = replayed(torch.optim.SGD)
    germinate(trial.model, "conv_small", 0, SLOT)
    x, y = torch.randn(200, *INPUT_SHAPE), torch.randint(CLASSES, (200,))
    sizes: list[int] = []
    trial.model.host.encode.register_forward_hook(lambda _module, args, _output: sizes.append(len(args[0])))
    shadow_loss(trial.model.train(), SLOT, x, y, loss).backward()
    assert sizes == [50]
