"""Scores with seeds switched off: sharing part of the forward pass among configurations changes neither
scores nor state."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import Host, MorphogeneticModel
from esper.kasmina.blueprints import blueprint_named
from esper.kasmina.configurations import outputs_by_replay
from esper.kasmina.contributions import BoolArray, Contributions, Scorer, evaluating, measure, score_samples
from esper.kasmina.hosts import CNNHost, ResidualHost, TransformerHost
from esper.leyline import Stage, Style
from esper.tolaria.tasks.spec import CLASSIFICATION, NEXT_TOKEN, Measure, Objective
from tests.contracts.hosts import Kind
from tests.contracts.matrix import IMAGES, Case, Trial, assert_same, batch, planted, restart

SAMPLES = 24


def active_seeds(model: MorphogeneticModel) -> list[bool]:
    """Return for each slot whether its seed takes part in the forward pass."""
    return [slot.graft is not None and slot.graft.participation.active for slot in model.slots]


def cnn() -> Host:
    return CNNHost((4, 8, 8, 4, 8), kernel=3, input_shape=(1, 8, 8), classes=10)


def residual() -> Host:
    return ResidualHost(8, blocks=1, slots=3, input_shape=(1, 8, 8), classes=10)


def gpt() -> Host:
    return TransformerHost(vocabulary=12, context=5, width=8, layers=3)


def grown(build: Callable[[], Host], seeds: int) -> MorphogeneticModel:
    """Return a host with blended seeds in its first ``seeds`` slots; the weights of the seeds are
    perturbed."""
    restart(0)
    model = MorphogeneticModel(build())
    model.bind_optimiser(torch.optim.SGD(model.host.parameters(), lr=0.1))
    for slot in range(seeds):
        topology = model.sites[slot].topology
        name = "attention" if slot == 1 else "mlp" if topology == "tokens" else "conv_heavy"
        spec = blueprint_named(name, topology)
        model.germinate(slot, spec.index, (Style.LINEAR_ADD, Style.GATED_GATE)[slot % 2])
        model.table.stage[0, slot], model.table.alpha[0, slot] = Stage.BLENDING, 1.0 / (slot + 1)
        with torch.no_grad():
            for weight in model.slot(slot).parameters():
                weight.add_(0.5 * torch.randn_like(weight))
    model.sync()
    return model


def samples(model: MorphogeneticModel) -> tuple[Tensor, Tensor, Objective]:
    """Return inputs, targets and objective (loss and score) for a host."""
    restart(1)
    if isinstance(model.host, TransformerHost):
        x = torch.randint(12, (SAMPLES, 5))
        return x, x.roll(-1, dims=1), NEXT_TOKEN
    return torch.randn(SAMPLES, 1, 8, 8), torch.randint(10, (SAMPLES,)), CLASSIFICATION


def replay_scorer(model: MorphogeneticModel, x: Tensor, y: Tensor, score: Measure, loss: Measure) -> Scorer:
    """Return a scorer of on/off configurations of seeds that runs a whole forward pass per configuration."""

    def scorer(slots: Sequence[int], configurations: BoolArray) -> Tensor:
        with evaluating(model):
            outputs = [found.output for found in outputs_by_replay(model, x, slots, configurations)]
        return torch.stack(
            [torch.stack([metric(output, y) for output in outputs]) for metric in (score, loss)]
        )

    return scorer


@pytest.mark.parametrize(
    ("build", "seeds"), [(cnn, 1), (cnn, 3), (cnn, 4), (cnn, 5), (residual, 3), (gpt, 3)]
)
def test_sharing_parts_of_the_forward_pass_among_on_off_configurations_does_not_change_their_scores(
    build: Callable[[], Host], seeds: int
) -> None:
    model = grown(build, seeds)
    x, y, objective = samples(model)

    def scores(output: Tensor, target: Tensor) -> Tensor:
        # Negative losses are used as scores, because accuracies of different outputs may be equal.
        return -objective.sample_losses(output, target)

    slots = tuple(range(seeds))
    shared, replayed = (
        measure(slots, scorer(model, x, y, scores, objective.sample_losses), generator=generator(0))
        for scorer in (score_samples, replay_scorer)
    )
    for name in ("configurations", "scores", "losses", "contribution", "error", "shapley", "interactions"):
        found, wanted = getattr(shared, name), getattr(replayed, name)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5, err_msg=name)
    assert_different(shared, seeds)


def assert_different(found: Contributions, seeds: int) -> None:
    """Check that every seed changes the scores, so that the test would detect a scorer that ignores seeds."""
    assert len(np.unique(found.scores)) == len(found.configurations)
    assert len(found.configurations) == 2**seeds or seeds > 4
    assert (found.error > 1e-3).all()


def generator(rng_seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(rng_seed)


# --- state of the scored network ----------------------------------------------------------------------


def scored(trial: Trial, slots: tuple[int, ...]) -> Contributions:
    """Measure the contributions of the seeds in ``slots``, with recomputed statistics if the network has
    batch norm."""
    x, y = batch(5)
    has_batch_norm = any(isinstance(module, nn.BatchNorm2d) for module in trial.model.modules())
    scorer = score_samples(
        trial.model,
        x,
        y,
        CLASSIFICATION.sample_scores,
        CLASSIFICATION.sample_losses,
        batch(6)[0] if has_batch_norm else None,
    )
    return measure(slots, scorer)


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("training", [True, False])
def test_score_samples_restores_the_training_mode_of_every_submodule(kind: Kind, training: bool) -> None:
    trial = planted(Case("conv_light", 0, kind, 4), training_epochs=0)
    trial.train(1)
    model = trial.model.train(training)
    modules = list(model.modules())
    # Users may set frozen layers to eval mode in a network in train mode or, for MC dropout, dropout layers
    # to train mode in a network in eval mode.
    for module in modules[1::2]:
        module.training = not training
    wanted = [module.training for module in modules]
    assert len(set(wanted)) == 2
    scored(trial, (0,))
    assert [module.training for module in modules] == wanted


@pytest.mark.parametrize("kind", IMAGES)
def test_score_samples_restores_the_training_mode_of_every_submodule_after_an_error(kind: Kind) -> None:
    trial = planted(Case("conv_light", 0, kind, 4), training_epochs=0)
    modules = list(trial.model.train().modules())
    modules[-1].training = False
    wanted = [module.training for module in modules]

    def failing(output: Tensor, target: Tensor) -> Tensor:
        raise ZeroDivisionError

    x, y = batch(5)
    scorer = score_samples(trial.model, x, y, failing, CLASSIFICATION.sample_losses, batch(6)[0])
    with pytest.raises(ZeroDivisionError):
        measure((0,), scorer)
    assert [module.training for module in modules] == wanted
    assert active_seeds(trial.model) == [True, False]


@pytest.mark.parametrize("kind", IMAGES)
def test_score_samples_runs_in_eval_mode_and_leaves_weights_buffers_and_random_state_unchanged(
    kind: Kind,
) -> None:
    trial = planted(Case("conv_light", 0, kind, 4), training_epochs=0)
    trial.train(2)
    before = trial.snapshot() | trial.seed_snapshot()
    first = scored(trial, (0,))
    assert_same(trial.snapshot() | trial.seed_snapshot(), before)
    again = scored(trial, (0,))
    np.testing.assert_array_equal(again.losses, first.losses, "dropout is off")


@pytest.mark.parametrize("kind", ["images_batch", "plain_images"])
def test_output_of_a_sample_with_recomputed_batch_norm_statistics_does_not_depend_on_its_batch(
    kind: Kind,
) -> None:
    trial = planted(Case("conv_light", 0, kind, 4), training_epochs=0)
    trial.train(2)
    (x, _), (calibration, _) = batch(5), batch(6)
    configurations = np.array([[False], [True]])

    def outputs(inputs: Tensor) -> list[Tensor]:
        found = outputs_by_replay(trial.model.eval(), inputs, (0,), configurations, calibration)
        return [each.output for each in found]

    for whole, first, last in zip(outputs(x), outputs(x[:3]), outputs(x[3:]), strict=True):
        torch.testing.assert_close(whole, torch.cat([first, last]))
