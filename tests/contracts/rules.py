"""The contract: what a seed owes its host, in every episode that it may lead.

``keeps_the_contract`` takes one cell of the matrix through all of them and raises where a rule is broken.
An episode serves many rules one after the other: building a model costs more than looking at it.
"""

import copy
import math
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from esper.kasmina.optim import set_rate
from torch import Tensor, nn

from esper.kasmina import CNNHost, harvest, lifecycle, load_committed, save_committed
from esper.kasmina.actuator import settle
from esper.kasmina.blueprint_check import (
    RNG_SEEDS,
    dead_at_the_second_backward,
    dead_tensors,
    sees_later_tokens,
    tensor_norms,
)
from esper.kasmina.blueprints import Topology, specs_for
from esper.kasmina.hosts import TransformerHost
from esper.leyline import STYLE_OPERATORS, Stage, Style
from esper.leyline.rules import IncubationMode
from esper.tolaria.minibatch import Readings
from tests.contracts.hosts import Kind
from tests.contracts.matrix import (
    SLOT,
    Case,
    Trial,
    assert_same,
    bare_names,
    batch,
    begin,
    loss,
    planted,
    twin_after,
    twin_outputs,
)

WIDTHS = (4, 8, 16, 32)
KINDS_OF: dict[Topology, tuple[Kind, ...]] = {
    "feature_map": ("images", "images_batch"),
    "tokens": ("tokens",),
    "features": ("features",),
}
OTHER_RNG_SEEDS: dict[Kind, Sequence[int]] = {
    "images": RNG_SEEDS[1:3],
    "images_batch": RNG_SEEDS[3:],
    "tokens": RNG_SEEDS[1:],
    "features": RNG_SEEDS[1:],
}
"""Initialisations beside the first, which every rule is tried with; two hosts for images share them."""


@dataclass(slots=True)
class Episode:
    """A seed, and how many minibatches it has seen."""

    case: Case
    trial: Trial
    trained: int = 0

    def train(self, steps: int) -> list[Readings]:
        facts = self.trial.train(steps, first=self.trained)
        self.trained += steps
        return facts


# --- the episodes --------------------------------------------------------------------------------


def keeps_the_contract(case: Case, *, alive: bool = True, born_at_zero: bool = True) -> None:
    """Every rule in one cell; ``alive=False`` for a seed that starts too slowly for the rule of episode."""
    incubates(case, "shadow", alive=alive)
    incubates(case, "straight_through", alive=alive)
    takes_part(case, alive=alive, born_at_zero=born_at_zero)
    learns_while_incubating(case)
    # Two styles with one operator differ in a ramp that the module does not know of.
    if alive and case.style == STYLE_OPERATORS.index(STYLE_OPERATORS[case.style]):
        is_alive_however_it_starts(case)


def incubates(case: Case, mode: IncubationMode, *, alive: bool = True) -> None:
    """A seed that listens, breaks and is pruned; the host never notices."""
    trial = planted(case, incubation=mode)
    episode = Episode(case, trial)
    for stage in (Stage.GERMINATED, Stage.TRAINING):
        trial.place(stage, 0.0)
        keeps_the_output(episode)
    born = {name: weight.detach().clone() for name, weight in trial.seed_weights.items()}
    comes_alive(episode, f"incubating, {mode}", demanded=alive)
    if mode == "shadow":
        continues_from_copies(episode)
    leaves_the_host_alone(episode)
    moved_with_every_weight(episode, born)
    breaks_unnoticed(episode)
    leaves_nothing_behind(episode)
    episode.train(1)
    leaves_the_host_alone(episode)


def takes_part(case: Case, *, alive: bool = True, born_at_zero: bool = True) -> None:
    """A seed that is blended from the start, becomes a fossil and is harvested; its like is pruned."""
    trial = planted(case, training_epochs=0)
    episode = Episode(case, trial)
    assert trial.model.table.stage[0, SLOT] == Stage.BLENDING
    assert trial.model.table.alpha[0, SLOT] > 0.0
    if born_at_zero:
        keeps_the_output(episode)
    trial.place(Stage.BLENDING, 0.5)
    comes_alive(episode, "blended", demanded=alive)
    continues_from_copies(episode)
    lets_the_gradient_pass_upstream(episode)
    trial.place(Stage.FOSSILIZED, 1.0)
    is_harvested_as_it_episodes(episode)
    if trial.model.host.topology == "tokens":
        hides_later_tokens(episode)
    trial.place(Stage.HOLDING, 1.0)
    leaves_nothing_behind(episode)


def learns_while_incubating(case: Case) -> None:
    """A seed that has only listened to a host at rest lowers the loss that it learned on when blended in."""
    trial = planted(case)
    set_rate(trial.optimiser, 0.0)
    for module in trial.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # what a mask takes away is no measure of what was learned
    for _ in range(3):
        trial.train(1)
    x, y = batch(0, trial.model.host.topology)
    with torch.no_grad():
        without = loss(trial.model(x), y)
        trial.place(Stage.BLENDING, 1.0)
        assert loss(trial.model(x), y) < without


def is_alive_however_it_starts(case: Case) -> None:
    """The rule of episode for other initialisations of host and seed, incubating and blended."""
    for rng_seed in OTHER_RNG_SEEDS[case.kind]:
        model = planted(case, rng_seed=rng_seed).model
        born = model.state()
        for stage in (Stage.TRAINING, Stage.BLENDING):
            if stage is Stage.BLENDING:
                model.load_state(born)  # cheaper than planting once more
            dead = dead_at_the_second_backward(model, *batch(0, model.host.topology), stage)
            assert not dead, f"dead ({stage.name}, rng seed {rng_seed}): {', '.join(dead)}"


# --- the rules --------------------------------------------------------------------------------


def keeps_the_output(episode: Episode) -> None:
    """Bit-identical to the host without the seed, in eval and in train mode."""
    wanted = twin_outputs(episode.case.kind, episode.case.width)
    stage = Stage(int(episode.trial.model.table.stage[0, SLOT])).name
    assert all(map(torch.equal, episode.trial.outputs(), wanted)), f"a new seed changes the output in {stage}"


def comes_alive(episode: Episode, how: str, *, demanded: bool = True) -> None:
    """At the second backward every tensor of seed and gate has a gradient worth the name."""
    slot = episode.trial.model.slot(SLOT)
    episode.train(1)
    norms = tensor_norms(slot)
    episode.train(1)
    dead = dead_tensors(slot, norms)
    assert not (demanded and dead), f"dead ({how}): {', '.join(dead)}"


def leaves_the_host_alone(episode: Episode) -> None:
    """The host is what it would be had nothing been planted: weights, statistics, optimiser, random state."""
    assert_same(episode.trial.snapshot(), twin_after(episode.case.kind, episode.case.width, episode.trained))


def moved_with_every_weight(episode: Episode, born: dict[str, Tensor]) -> None:
    still = [name for name, weight in episode.trial.seed_weights.items() if torch.equal(weight, born[name])]
    assert not still, f"never moved: {', '.join(still)}"


def breaks_unnoticed(episode: Episode) -> None:
    """An incubating seed may break anywhere: the host does not notice, and the seed is reported."""
    names = list(episode.trial.seed_weights)
    for name, value in ((names[0], math.nan), (names[0], math.inf), (names[-1], math.inf)):
        weight = episode.trial.seed_weights[name]
        first = (0,) * weight.ndim
        whole = weight.detach()[first].clone()
        with torch.no_grad():
            weight[first] = value
        [facts] = episode.train(1)
        with torch.no_grad():
            weight[first] = whole
        assert (facts.broken, facts.skipped) == ([SLOT], False), f"{value} in {name}"
        leaves_the_host_alone(episode)


def leaves_nothing_behind(episode: Episode) -> None:
    """After a prune there is no trace of the seed in the model."""
    model, slot = episode.trial.model, episode.trial.model.slot(SLOT)
    settle(model, lifecycle.prune(model.table, 0, SLOT, model.rules))
    assert set(model.state_dict()) == bare_names(episode.case.kind, episode.case.width)
    assert len(list(model.parameters())) == len(model.host_parameters())
    assert (slot.seed, slot.gate, slot.optimiser, slot.features) == (None, None, None, None)
    assert model.seed_parameters(SLOT) == []
    assert (model.incubating, model.blended) == ([], [])


def continues_from_copies(episode: Episode) -> None:
    """State round trip, and deepcopy or pickle, continue as the original does, bit for bit."""
    copies = list(_copies(episode))
    [facts] = episode.train(1)
    host, seed = episode.trial.snapshot(), episode.trial.seed_snapshot()
    for other in copies:
        [found] = other.train(1)
        assert torch.equal(found.output, facts.output)
        assert_same(other.trial.snapshot(), host)
        assert_same(other.trial.seed_snapshot(), seed)


def _copies(episode: Episode) -> Iterator[Episode]:
    # A deepcopy of a blended seed is what a harvest begins with.
    yield copy.deepcopy(episode) if episode.trial.model.incubating else pickle.loads(pickle.dumps(episode))
    fresh = begin(
        episode.case.kind, episode.case.width, rng_seed=1, incubation=episode.trial.model.rules.incubation
    )
    fresh.model.load_state(episode.trial.model.state())
    fresh.optimiser.load_state_dict(copy.deepcopy(episode.trial.optimiser.state_dict()))
    yield Episode(episode.case, fresh, episode.trained)


def lets_the_gradient_pass_upstream(episode: Episode) -> None:
    """The host before the slot learns at every alpha, in every stage that takes part in the forward."""
    trial = episode.trial
    x, y = batch(2, trial.model.host.topology)
    for stage, alpha in (
        (Stage.BLENDING, 0.0),
        (Stage.BLENDING, 0.5),
        (Stage.HOLDING, 1.0),
        (Stage.FOSSILIZED, 1.0),
    ):
        trial.place(stage, alpha)
        trial.model.zero_grad()
        loss(trial.model(x), y).backward()
        for name, weight in trial.model.host.named_parameters():
            if name.startswith("segments.0."):
                assert weight.grad is not None, name
                norm = weight.grad.norm().item()
                assert 1e-6 < norm < math.inf, f"{name} at {stage.name} {alpha}: {norm}"


def is_harvested_as_it_episodes(episode: Episode) -> None:
    """The plain module computes what the model computes, and so does its file where there is one."""
    model = episode.trial.model
    x, _ = batch(3, model.host.topology)
    plain = [harvest(model)]
    if isinstance(model.host, CNNHost | TransformerHost):
        with TemporaryDirectory() as folder:
            save_committed(model, Path(folder))
            plain.append(load_committed(folder))
    with torch.no_grad():
        wanted = model.eval()(x)
        assert not torch.equal(wanted, model(x, [None, None])), "the fossil changes nothing"
        for module in plain:
            assert torch.equal(module.eval()(x), wanted)


def hides_later_tokens(episode: Episode) -> None:
    """No output depends on a later token, not by a bit, once the seed has learned something."""
    x, _ = batch(2, "tokens")
    assert not sees_later_tokens(episode.trial.model.eval(), x)


# --- the matrix -------------------------------------------------------------------------------


def contract(
    topology: Topology, blueprints: Iterable[str] | None = None, *, widths: Sequence[int] = WIDTHS
) -> list[Any]:
    """Values of "case" for ``pytest.mark.parametrize``; by default every blueprint that begins at zero.

    Every blueprint with every style; hosts and widths alternate so that every two of blueprint, style, host
    and width meet.
    """
    import pytest

    born_at_zero = [spec.name for spec in specs_for(topology) if not spec.copies]
    names = born_at_zero if blueprints is None else list(blueprints)
    kinds = KINDS_OF[topology]
    cases = [
        Case(name, style, kinds[(style + j) % len(kinds)], widths[(style + j + j // 2) % len(widths)])
        for (j, name), style in product(enumerate(names), Style)
    ]
    # Neighbours share a host: what its twin computes is kept.
    return [
        pytest.param(case, id=str(case)) for case in sorted(cases, key=lambda case: (case.kind, case.width))
    ]
