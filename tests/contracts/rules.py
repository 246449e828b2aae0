"""The rules of the contract: each takes one cell of the matrix and raises where it is broken."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from esper.kasmina import CNNHost, harvest, lifecycle, load_committed, save_committed
from esper.kasmina.blueprints import Topology, specs_for
from esper.kasmina.contract import RNG_SEEDS, dead_tensors, sees_later_tokens, tensor_norms
from esper.kasmina.hosts import TransformerHost
from esper.kasmina.optim import set_rate
from esper.leyline import Stage, Style
from esper.leyline.rules import IncubationMode
from esper.tolaria.actuator import settle
from tests.contracts.hosts import HOSTS, Kind
from tests.contracts.matrix import (
    SLOT,
    Case,
    Trial,
    assert_same,
    batch,
    begin,
    loss,
    planted,
    twin_after,
    twin_outputs,
)

INCUBATIONS: tuple[IncubationMode, ...] = ("shadow", "straight_through")


# --- what depends on the width ----------------------------------------------------------------


def keeps_the_output_at_birth(case: Case) -> None:
    """Bit-identical before and after germination, in both modes, waiting, incubating and blended."""
    wanted = twin_outputs(case.kind, case.width)
    waiting = planted(case, auto_forward=False)
    assert waiting.model.table.stage[0, SLOT] == Stage.GERMINATED
    assert all(map(torch.equal, waiting.outputs(), wanted))
    waiting.place(Stage.TRAINING, 0.0)
    for mode in INCUBATIONS:
        waiting.model.rules = replace(waiting.model.rules, incubation=mode)
        assert all(map(torch.equal, waiting.outputs(), wanted)), mode
    blending = planted(case, training_epochs=0)
    assert blending.model.table.stage[0, SLOT] == Stage.BLENDING
    assert blending.model.table.alpha[0, SLOT] > 0.0
    assert all(map(torch.equal, blending.outputs(), wanted))


def leaves_the_host_alone_while_incubating(case: Case) -> None:
    """After 3 steps the host is what it would be without the seed, and the seed has moved."""
    for mode in INCUBATIONS:
        trial = planted(case, incubation=mode)
        born = {name: weight.detach().clone() for name, weight in trial.seed_weights.items()}
        facts = trial.train(3)
        assert_same(trial.snapshot(), twin_after(case.kind, case.width, 3))
        assert not any(f.broken or f.skipped for f in facts)
        still = [name for name, weight in trial.seed_weights.items() if torch.equal(weight, born[name])]
        assert not still, f"{mode}: never moved: {still}"


def is_alive(case: Case) -> None:
    """At the second backward every tensor of seed and gate has a gradient worth the name."""
    for rng_seed in RNG_SEEDS:
        trial = planted(case, rng_seed=rng_seed)
        born = trial.model.state()
        _assert_alive(trial, f"incubating, rng seed {rng_seed}")
        trial.model.load_state(born)  # cheaper than planting once more
        trial.optimiser.state.clear()
        trial.place(Stage.BLENDING, 0.5)
        _assert_alive(trial, f"blended, rng seed {rng_seed}")


def _assert_alive(trial: Trial, how: str) -> None:
    slot = trial.model.slot(SLOT)
    trial.train(1)
    norms = tensor_norms(slot)
    trial.train(1, first=1)
    dead = dead_tensors(slot, norms)
    assert not dead, f"dead ({how}): {', '.join(dead)}"


def lets_the_gradient_pass_upstream(case: Case) -> None:
    """The host before the slot learns at every alpha, in every stage that takes part in the forward."""
    trial = planted(case, training_epochs=0)
    trial.train(2)
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
            if name.startswith(HOSTS[case.kind].upstream):
                assert weight.grad is not None, name
                norm = weight.grad.norm().item()
                assert 1e-6 < norm < math.inf, f"{name} at {stage.name} {alpha}: {norm}"


def hides_later_tokens(case: Case) -> None:
    """No output depends on a later token, not by a bit, once the seed has learned something."""
    trial = planted(case, training_epochs=0)
    trial.place(Stage.HOLDING, 1.0)
    trial.train(2)
    x, _ = batch(2, "tokens")
    assert not sees_later_tokens(trial.model.eval(), x)


# --- what does not ----------------------------------------------------------------------------


def learns_while_incubating(case: Case) -> None:
    """A seed that has only listened to a host at rest lowers its loss when it is blended in."""
    trial = planted(case)
    set_rate(trial.optimiser, 0.0)
    for _ in range(8):
        trial.train(1)
    x, y = batch(0, trial.model.host.topology)
    trial.model.eval()
    with torch.no_grad():
        without = loss(trial.model(x), y)
        trial.place(Stage.BLENDING, 1.0)
        assert loss(trial.model(x), y) < without


def keeps_what_is_not_finite_from_the_host(case: Case) -> None:
    """An incubating seed may break anywhere: the host does not notice, and the seed is reported."""
    names = list(planted(case).seed_weights)
    for mode in INCUBATIONS:
        for name, value in ((names[0], math.nan), (names[0], math.inf), (names[-1], math.inf)):
            trial = planted(case, incubation=mode)
            trial.train(1)
            with torch.no_grad():
                weight = trial.seed_weights[name]
                weight[(0,) * weight.ndim] = value
            [facts] = trial.train(1, first=1)
            assert_same(trial.snapshot(), twin_after(case.kind, case.width, 2))
            assert (facts.broken, facts.skipped) == ([SLOT], False), f"{mode}: {value} in {name}"


def leaves_nothing_behind(case: Case) -> None:
    """After a prune there is no trace: neither in the model nor in the training that follows."""
    bare = begin(case.kind, case.width)
    for training_epochs in (2, 0):
        trial = planted(case, training_epochs=training_epochs)
        trial.train(2)
        model, slot = trial.model, trial.model.slot(SLOT)
        settle(model, lifecycle.prune(model.table, 0, SLOT, model.rules))
        assert list(model.state_dict()) == list(bare.model.state_dict())
        assert len(list(model.parameters())) == len(model.host_parameters())
        assert (slot.seed, slot.gate, slot.optimiser, slot.features) == (None, None, None, None)
        assert model.seed_parameters(SLOT) == []
        assert (model.incubating, model.blended) == ([], [])
        if training_epochs:
            trial.train(1, first=2)
            assert_same(trial.snapshot(), twin_after(case.kind, case.width, 3))


def survives_being_copied(case: Case) -> None:
    """State round trip, deepcopy and pickle continue as the original does, bit for bit."""
    for training_epochs in (2, 0):
        trial = planted(case, training_epochs=training_epochs)
        trial.train(2)
        copies = list(_copies(case, trial, training_epochs))
        outputs = trial.outputs()
        trial.train(1, first=2)
        host, seed = trial.snapshot(), trial.seed_snapshot()
        for other in copies:
            for found, wanted in zip(other.outputs(), outputs, strict=True):
                assert torch.equal(found, wanted)
            other.train(1, first=2)
            assert_same(other.snapshot(), host)
            assert_same(other.seed_snapshot(), seed)


def _copies(case: Case, trial: Trial, training_epochs: int) -> Iterator[Trial]:
    yield copy.deepcopy(trial)
    yield pickle.loads(pickle.dumps(trial))
    fresh = begin(case.kind, case.width, rng_seed=1, training_epochs=training_epochs)
    fresh.model.load_state(trial.model.state())
    fresh.optimiser.load_state_dict(copy.deepcopy(trial.optimiser.state_dict()))
    yield fresh


def is_harvested_as_it_lives(case: Case) -> None:
    """The plain module computes what the model computes, and so does its file where there is one."""
    trial = planted(case, training_epochs=0)
    trial.train(2)
    trial.place(Stage.FOSSILIZED, 1.0)
    x, _ = batch(3, trial.model.host.topology)
    plain = [harvest(trial.model)]
    if isinstance(trial.model.host, CNNHost | TransformerHost):
        with TemporaryDirectory() as directory:
            save_committed(trial.model, Path(directory))
            plain.append(load_committed(directory))
    with torch.no_grad():
        wanted = trial.model.eval()(x)
        assert not torch.equal(wanted, trial.model(x, [None, None])), "the fossil changes nothing"
        for module in plain:
            assert torch.equal(module.eval()(x), wanted)


# --- the matrix -------------------------------------------------------------------------------

WIDTHS = (4, 8, 16, 32)
HOSTS_AT: dict[Topology, dict[int, tuple[Kind, Kind]]] = {
    "feature_map": {
        4: ("segmented", "wrapped"),
        8: ("segmented_batch", "wrapped_group"),
        16: ("segmented", "wrapped"),
        32: ("segmented_batch", "wrapped_group"),
    },
    "tokens": dict.fromkeys(WIDTHS, ("segmented_tokens", "wrapped_tokens")),
}
"""One host in segments and one wrapped at every width; group and batch norm by turns."""
OPERATORS = (Style.LINEAR_ADD, Style.LINEAR_MULTIPLY, Style.GATED_GATE)
"""A style for each operator: the other one has another ramp, which the module does not know of."""
BOTH: tuple[Topology, ...] = ("feature_map", "tokens")


class Rule(NamedTuple):
    """A rule, and the cells that can make a difference to it."""

    check: Callable[[Case], None]
    styles: Sequence[Style] = OPERATORS
    widths: Sequence[int] = WIDTHS
    topologies: Sequence[Topology] = BOTH


ONE_WIDTH = WIDTHS[:1]
RULES = (
    Rule(keeps_the_output_at_birth, styles=tuple(Style)),
    Rule(leaves_the_host_alone_while_incubating),
    Rule(is_alive),
    Rule(lets_the_gradient_pass_upstream),
    Rule(hides_later_tokens, topologies=("tokens",)),
    Rule(learns_while_incubating, widths=ONE_WIDTH),
    Rule(keeps_what_is_not_finite_from_the_host, widths=ONE_WIDTH),
    Rule(leaves_nothing_behind, widths=ONE_WIDTH),
    Rule(survives_being_copied, widths=ONE_WIDTH),
    Rule(is_harvested_as_it_lives, widths=ONE_WIDTH),
)


def contract(
    topology: Topology,
    blueprints: Iterable[str] | None = None,
    *,
    without: Sequence[Callable[[Case], None]] = (),
    widths: Sequence[int] = WIDTHS,
) -> list[Any]:
    """Values of ("check", "case") for ``pytest.mark.parametrize``; by default every registered blueprint."""
    import pytest

    names = [spec.name for spec in specs_for(topology)] if blueprints is None else list(blueprints)
    cells = []
    for rule in RULES:
        if topology not in rule.topologies or rule.check in without:
            continue
        for name, style, width in product(names, rule.styles, rule.widths):
            cells += [
                (rule.check, Case(name, style, kind, width))
                for kind in HOSTS_AT[topology][width]
                if width in widths
            ]
    return [pytest.param(check, case, id=f"{check.__name__}-{case}") for check, case in cells]
