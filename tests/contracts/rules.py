"""The rules of the contract: each takes one cell of the matrix and raises where it is broken."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator

import torch

from esper.leyline import Stage
from esper.leyline.rules import IncubationMode
from tests.contracts.matrix import (
    SLOT,
    UPSTREAM,
    Case,
    Trial,
    assert_same,
    batch,
    begin,
    loss,
    planted,
    twin_after,
)

INCUBATIONS: tuple[IncubationMode, ...] = ("shadow", "straight_through")
RNG_SEEDS = range(5)
"""Initialisations that a blueprint must be alive under."""


def keeps_the_output_at_birth(case: Case) -> None:
    """Bit-identical before and after germination, in both modes, waiting, incubating and blended."""
    before = begin(case.kind, case.width).outputs()
    waiting = planted(case, auto_forward=False)
    incubating = [planted(case, incubation=mode) for mode in INCUBATIONS]
    blending = planted(case, training_epochs=0)
    stages = [Stage(int(t.model.table.stage[0, SLOT])) for t in (waiting, *incubating, blending)]
    assert stages == [Stage.GERMINATED, Stage.TRAINING, Stage.TRAINING, Stage.BLENDING]
    assert blending.model.table.alpha[0, SLOT] > 0.0
    for trial in (waiting, *incubating, blending):
        for found, wanted in zip(trial.outputs(), before, strict=True):
            assert torch.equal(found, wanted)


def leaves_the_host_alone_while_incubating(case: Case) -> None:
    """After 5 steps the host is what it would be without the seed, and the seed has moved."""
    for mode in INCUBATIONS:
        trial = planted(case, incubation=mode)
        born = {name: weight.detach().clone() for name, weight in trial.seed_weights.items()}
        facts = trial.train(5)
        assert_same(trial.snapshot(), twin_after(case.kind, case.width, 5))
        assert not any(f.broken or f.skipped for f in facts)
        still = [name for name, weight in trial.seed_weights.items() if torch.equal(weight, born[name])]
        assert not still, f"{mode}: never moved: {still}"


def is_alive(case: Case) -> None:
    """At the second backward every tensor of seed and gate has a gradient worth the name."""
    for rng_seed in RNG_SEEDS:
        incubating = planted(case, rng_seed=rng_seed)
        blending = planted(case, rng_seed=rng_seed, training_epochs=0)
        blending.place(Stage.BLENDING, 0.5)
        for trial in (incubating, blending):
            trial.train(1)
            norms = {name: weight.norm().item() for name, weight in trial.seed_weights.items()}
            trial.train(1, first=1)
            for name, weight in trial.seed_weights.items():
                assert weight.grad is not None, f"{name} has no gradient"
                least = 1e-6 * norms[name] + 1e-8
                assert weight.grad.norm().item() >= least, f"{name} is dead (rng seed {rng_seed})"


def lets_the_gradient_pass_upstream(case: Case) -> None:
    """The host before the slot learns at every alpha, in every stage that takes part in the forward."""
    trial = planted(case, training_epochs=0)
    trial.train(3)
    x, y = batch(3)
    for stage in (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED):
        for alpha in (0.0, 0.5, 1.0):
            trial.place(stage, alpha)
            trial.model.zero_grad()
            loss(trial.model(x), y).backward()
            for name, weight in trial.model.host.named_parameters():
                if name.startswith(UPSTREAM[case.kind]):
                    assert weight.grad is not None, name
                    norm = weight.grad.norm().item()
                    assert 1e-6 < norm < math.inf, f"{name} at {stage.name} {alpha}: {norm}"


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
            facts = trial.train(2, first=1)
            assert_same(trial.snapshot(), twin_after(case.kind, case.width, 3))
            assert [f.broken for f in facts] == [[SLOT], [SLOT]], f"{mode}: {value} in {name}"
            assert not any(f.skipped for f in facts)


def survives_being_copied(case: Case) -> None:
    """State round trip, deepcopy and pickle continue as the original does, bit for bit."""
    for training_epochs in (2, 0):
        trial = planted(case, training_epochs=training_epochs)
        trial.train(2)
        copies = list(_copies(case, trial, training_epochs))
        outputs = trial.outputs()
        trial.train(3, first=2)
        host, seed = trial.snapshot(), trial.seed_snapshot()
        for other in copies:
            for found, wanted in zip(other.outputs(), outputs, strict=True):
                assert torch.equal(found, wanted)
            other.train(3, first=2)
            assert_same(other.snapshot(), host)
            assert_same(other.seed_snapshot(), seed)


def _copies(case: Case, trial: Trial, training_epochs: int) -> Iterator[Trial]:
    yield copy.deepcopy(trial)
    yield pickle.loads(pickle.dumps(trial))
    fresh = begin(case.kind, case.width, rng_seed=1, training_epochs=training_epochs)
    fresh.model.load_state(trial.model.state())
    fresh.optimiser.load_state_dict(copy.deepcopy(trial.optimiser.state_dict()))
    yield fresh


RULES: tuple[Callable[[Case], None], ...] = (
    keeps_the_output_at_birth,
    leaves_the_host_alone_while_incubating,
    is_alive,
    lets_the_gradient_pass_upstream,
    keeps_what_is_not_finite_from_the_host,
    survives_being_copied,
)
