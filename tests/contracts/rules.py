"""Contract between a seed and its host, checked in four short episodes.

``check_contract`` runs all episodes for one blueprint, style and host, and raises if a rule is broken. An
episode checks many rules in sequence, because building a network takes longer than checking a rule.
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
from torch import Tensor, nn

from esper.kasmina import harvest, lifecycle, load
from esper.kasmina.actuator import settle
from esper.kasmina.blueprint_check import (
    RNG_SEEDS,
    dead_at_the_second_backward,
    dead_tensors,
    sees_later_tokens,
    tensor_norms,
)
from esper.kasmina.blueprints import Topology, specs_for
from esper.kasmina.network_file import save
from esper.kasmina.slot import RESERVED, slots_of
from esper.leyline import STYLE_OPERATORS, Stage, Style
from esper.tolaria.minibatch import MinibatchResult
from tests.contracts.hosts import HOSTS, Kind
from tests.contracts.matrix import (
    SLOT,
    Case,
    Trial,
    assert_same,
    bare_names,
    batch,
    begin,
    build_host,
    loss,
    planted,
    twin_after,
    twin_outputs,
)

WIDTHS = (4, 8, 16, 32)
KINDS_OF: dict[Topology, tuple[Kind, ...]] = {
    topology: tuple(name for name, kind in HOSTS.items() if kind.topology == topology)
    for topology in ("feature_map", "tokens", "features")
}
UPSTREAM = ("segments.0.", "embed.", "first.")
"""Prefixes of parameter names; they select the host parameters upstream of the first slot."""


@dataclass(slots=True)
class Episode:
    """Network with one seed, and the number of minibatches on which it was trained so far."""

    case: Case
    trial: Trial
    trained: int = 0

    def train(self, steps: int) -> list[MinibatchResult]:
        results = self.trial.train(steps, first=self.trained)
        self.trained += steps
        return results


# --- episodes ---------------------------------------------------------------------------------


def check_contract(case: Case, *, alive: bool = True, born_at_zero: bool = True) -> None:
    """Check all rules for a seed and its host, for one blueprint, blend style and kind of host.

    Args:
        case: Blueprint, blend style, kind of host and width.
        alive: Whether all tensors of the seed must have gradients at the second backward pass.
        born_at_zero: Whether a new seed must leave the output unchanged; False for copies of blocks.
    """
    check_incubation(case, alive=alive)
    check_blending(case, alive=alive, born_at_zero=born_at_zero)
    check_incubation_lowers_the_loss(case)
    # Blend styles with the same operator differ only in their ramp, so one of them suffices.
    if alive and case.style == STYLE_OPERATORS.index(STYLE_OPERATORS[case.style]):
        check_alive_for_other_rng_seeds(case)


def check_incubation(case: Case, *, alive: bool = True) -> None:
    """Incubate a seed, make the seed non-finite and prune it; check that the host never changes."""
    trial = planted(case)
    episode = Episode(case, trial)
    for stage in (Stage.GERMINATED, Stage.TRAINING):
        trial.place(stage, 0.0)
        assert_output_unchanged(episode)
    born = {name: weight.detach().clone() for name, weight in trial.seed_weights.items()}
    assert_alive(episode, "incubating", required=alive)
    assert_copies_continue_equally(episode)
    assert_host_unchanged(episode)
    assert_every_weight_moved(episode, born)
    assert_non_finite_seed_is_harmless(episode)
    assert_prune_leaves_nothing(episode)
    episode.train(1)
    assert_host_unchanged(episode)


def check_blending(case: Case, *, alive: bool = True, born_at_zero: bool = True) -> None:
    """Blend, fossilize, harvest, save, load and finally prune a seed; check the rules that apply in each
    stage."""
    trial = planted(case, training_epochs=0)
    episode = Episode(case, trial)
    assert trial.model.table.stage[0, SLOT] == Stage.BLENDING
    assert trial.model.table.alpha[0, SLOT] > 0.0
    if born_at_zero:
        assert_output_unchanged(episode)
    trial.place(Stage.BLENDING, 0.5)
    assert_alive(episode, "blended", required=alive)
    assert_copies_continue_equally(episode)
    assert_gradient_reaches_the_host_upstream(episode)
    trial.place(Stage.FOSSILIZED, 1.0)
    assert_plain_copies_compute_the_same(episode)
    if trial.topology == "tokens":
        assert_later_tokens_are_hidden(episode)
    trial.place(Stage.HOLDING, 1.0)
    assert_prune_leaves_nothing(episode)


def check_incubation_lowers_the_loss(case: Case) -> None:
    """Incubate a seed on a host with learning rate 0; check that the blended seed lowers the loss."""
    trial = planted(case)
    trial.optimiser.param_groups[0]["lr"] = 0.0
    for module in trial.model.modules():
        if isinstance(module, nn.Dropout):
            # Dropout is off in this check, because losses with different dropout masks are not comparable.
            module.p = 0.0
    for _ in range(3):
        trial.train(1)
    x, y = batch(0, trial.topology)
    with torch.no_grad():
        without = loss(trial.model(x), y)
        trial.place(Stage.BLENDING, 1.0)
        assert loss(trial.model(x), y) < without


def check_alive_for_other_rng_seeds(case: Case) -> None:
    """Check that all tensors of a seed have gradients for initial weights of other rng seeds, both while the
    seed incubates and when it is blended."""
    kinds = KINDS_OF[HOSTS[case.kind].topology]
    # To save time, each host of a topology is tested with only some of the rng seeds for initial weights.
    # The other checks of the contract use initial weights of rng seed 0 only.
    for rng_seed in RNG_SEEDS[1:][kinds.index(case.kind) :: len(kinds)]:
        trial = planted(case, rng_seed=rng_seed)
        born = trial.state()
        for stage in (Stage.TRAINING, Stage.BLENDING):
            if stage is Stage.BLENDING:
                # Restoring the saved network with its new seed is faster than planting the seed again.
                trial.load_state(born)
            dead = dead_at_the_second_backward(trial.model, *batch(0, trial.topology), stage)
            assert not dead, f"dead ({stage.name}, rng seed {rng_seed}): {', '.join(dead)}"


# --- rules ------------------------------------------------------------------------------------


def assert_output_unchanged(episode: Episode) -> None:
    """Check that a new seed leaves the outputs of the host unchanged, in eval and train mode."""
    wanted = twin_outputs(episode.case.kind, episode.case.width)
    stage = Stage(int(episode.trial.model.table.stage[0, SLOT])).name
    assert all(map(torch.equal, episode.trial.outputs(), wanted)), f"a new seed changes the output in {stage}"


def assert_alive(episode: Episode, how: str, *, required: bool = True) -> None:
    """Check that at the second backward pass every tensor of seed and gate has a gradient norm above a
    minimum.
    """
    slot = episode.trial.model.slot(SLOT)
    episode.train(1)
    norms = tensor_norms(slot)
    episode.train(1)
    dead = dead_tensors(slot, norms)
    assert not (required and dead), f"dead ({how}): {', '.join(dead)}"


def assert_host_unchanged(episode: Episode) -> None:
    """Check that weights, buffers, optimiser and random state of the host equal those of a host without
    seed."""
    assert_same(episode.trial.snapshot(), twin_after(episode.case.kind, episode.case.width, episode.trained))


def assert_every_weight_moved(episode: Episode, born: dict[str, Tensor]) -> None:
    """Check that training changed every tensor of the incubating seed."""
    still = [name for name, weight in episode.trial.seed_weights.items() if torch.equal(weight, born[name])]
    assert not still, f"never moved: {', '.join(still)}"


def assert_non_finite_seed_is_harmless(episode: Episode) -> None:
    """Check that a non-finite weight of an incubating seed is reported and does not change the host."""
    names = list(episode.trial.seed_weights)
    for name, value in ((names[0], math.nan), (names[0], math.inf), (names[-1], math.inf)):
        weight = episode.trial.seed_weights[name]
        first = (0,) * weight.ndim
        before = weight.detach()[first].clone()
        with torch.no_grad():
            weight[first] = value
        [result] = episode.train(1)
        with torch.no_grad():
            weight[first] = before
        assert (result.broken, result.skipped) == ([SLOT], False), f"{value} in {name}"
        assert_host_unchanged(episode)


def assert_prune_leaves_nothing(episode: Episode) -> None:
    """Check that network and optimiser contain no tensor, parameter group or hook of a pruned seed."""
    trial = episode.trial
    model, slot = trial.model, trial.model.slot(SLOT)
    settle(model, lifecycle.prune(model.table, 0, SLOT, model.rules))
    assert set(model.state_dict()) == bare_names(episode.case.kind, episode.case.width)
    host = {id(parameter) for parameter in model.host_parameters()}
    assert {id(parameter) for parameter in model.parameters()} == host
    assert {id(p) for group in trial.optimiser.param_groups for p in group["params"]} == host
    assert len(trial.optimiser.param_groups) == 1
    assert {id(parameter) for parameter in trial.optimiser.state} <= host
    assert (slot.graft, slot.handle) == (None, None)
    assert not slot.place.module._forward_hooks
    assert model.seed_parameters(SLOT) == []
    assert (model.incubating, model.blended) == ([], [])


def assert_copies_continue_equally(episode: Episode) -> None:
    """Check that pickled, deep-copied and reloaded networks train bit-equal to the original."""
    copies = list(_copies(episode))
    [result] = episode.train(1)
    host, seed = episode.trial.snapshot(), episode.trial.seed_snapshot()
    for other in copies:
        [found] = other.train(1)
        assert torch.equal(found.output, result.output)
        assert_same(other.trial.snapshot(), host)
        assert_same(other.trial.seed_snapshot(), seed)


def _copies(episode: Episode) -> Iterator[Episode]:
    # Networks with a blended seed are pickled here; the harvest test makes deep copies of them.
    yield copy.deepcopy(episode) if episode.trial.model.incubating else pickle.loads(pickle.dumps(episode))
    other = begin(episode.case.kind, episode.case.width, rng_seed=1)
    other.load_state(episode.trial.state())
    yield Episode(episode.case, other, episode.trained)


def assert_gradient_reaches_the_host_upstream(episode: Episode) -> None:
    """Check that gradients pass through a slot with a blended seed to the host's parameters before the
    slot."""
    trial = episode.trial
    x, y = batch(2, trial.topology)
    for stage, alpha in (
        (Stage.BLENDING, 0.0),
        (Stage.BLENDING, 0.5),
        (Stage.HOLDING, 1.0),
        (Stage.FOSSILIZED, 1.0),
    ):
        trial.place(stage, alpha)
        trial.model.zero_grad()
        loss(trial.model(x), y).backward()
        upstream = {
            name: weight
            for name, weight in trial.model.host.named_parameters()
            if name.startswith(UPSTREAM) and RESERVED not in name.split(".")
        }
        assert upstream
        for name, weight in upstream.items():
            assert weight.grad is not None, name
            norm = weight.grad.norm().item()
            assert 1e-6 < norm < math.inf, f"{name} at {stage.name} {alpha}: {norm}"


def assert_plain_copies_compute_the_same(episode: Episode) -> None:
    """Check that the harvested module and the module loaded from a file have the outputs of the network."""
    model = episode.trial.model
    x, _ = batch(3, episode.trial.topology)
    plain = [harvest(model)]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "network.pt"
        save(model.host, file)
        plain.append(load(file, base=build_host(episode.case.kind, episode.case.width)))
    with torch.no_grad():
        wanted = model.eval()(x)
        with model.taking_part(model.without(SLOT)):
            assert not torch.equal(wanted, model(x)), "the fossil changes nothing"
        for module in plain:
            assert type(module) is type(model.host)
            assert not slots_of(module)
            assert torch.equal(module.eval()(x), wanted)


def assert_later_tokens_are_hidden(episode: Episode) -> None:
    """Check that no output of the trained network depends on a later token."""
    x, _ = batch(2, "tokens")
    assert not sees_later_tokens(episode.trial.model.eval(), x)


# --- the matrix -------------------------------------------------------------------------------


def contract(
    topology: Topology, blueprints: Iterable[str] | None = None, *, widths: Sequence[int] = WIDTHS
) -> list[Any]:
    """Return pytest parameters named "case", one for every blueprint with every blend style and host.

    Args:
        topology: Kind of features at the slots, such as ``feature_map`` or ``tokens``.
        blueprints: Names of blueprints; by default, all blueprints of side modules whose output is zero at
            birth.
        widths: Numbers of features at the slots of the hosts. The widths are distributed over the test cases,
            so that each width occurs with each blueprint, style and host.
    """
    import pytest

    side_modules = [spec.name for spec in specs_for(topology) if not (spec.copies or spec.widens)]
    names = side_modules if blueprints is None else list(blueprints)
    cases = [
        Case(name, style, kind, widths[(style + j + k) % len(widths)])
        for (j, name), style, (k, kind) in product(enumerate(names), Style, enumerate(KINDS_OF[topology]))
    ]
    # Test cases with the same host are adjacent, because they share a cached training of the host without
    # seed.
    return [
        pytest.param(case, id=str(case)) for case in sorted(cases, key=lambda case: (case.kind, case.width))
    ]
