"""Scores of on/off configurations of seeds, and contributions, Shapley values and interactions."""

from collections.abc import Iterable
from itertools import permutations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina import MorphogeneticModel, configurations
from esper.kasmina.configurations import ConfigurationOutput, outputs_by_prefix
from esper.kasmina.contributions import attribute, record_contributions
from esper.kasmina.hosts import TransformerHost
from esper.leyline import BlueprintAction, SlotTable, Stage, Style
from esper.tolaria.tasks.spec import CLASSIFICATION, NEXT_TOKEN
from tests.tolaria.building import boolean_rows, cnn, digits, every_choice, grown_model, measured_on, practise

SEEDS = (
    *(BlueprintAction.CONV_HEAVY, BlueprintAction.DEPTHWISE),
    *(BlueprintAction.NORM, BlueprintAction.CONV_SMALL),
)
STYLES = (Style.GATED_GATE, Style.LINEAR_ADD, Style.LINEAR_MULTIPLY, Style.SIGMOID_ADD)
UNKNOWN = float("nan")


@torch.no_grad()
def plain_output(model: MorphogeneticModel, x: Tensor, off: set[int]) -> Tensor:
    """Return the output of the network in eval mode, with the seeds of the slots ``off`` switched off."""
    with model.eval().taking_part(model.without(*off)):
        return model(x)


def sample_scores(model: MorphogeneticModel, x: Tensor, y: Tensor, off: set[int]) -> NDArray[np.float64]:
    return CLASSIFICATION.sample_scores(plain_output(model, x, off), y).double().numpy()


def joined(outputs: Iterable[ConfigurationOutput], count: int) -> list[Tensor]:
    """Join the outputs of each on/off configuration; check that all samples occur once and in order."""
    parts: list[list[Tensor]] = [[] for _ in range(count)]
    reached = [0] * count
    for row, samples, output in outputs:
        assert samples.start == reached[row]
        assert len(output) == samples.stop - samples.start
        reached[row] = samples.stop
        parts[row].append(output)
    return [torch.cat(part) for part in parts]


def assert_prefix_tree_equals_plain_forward(model: MorphogeneticModel, slots: tuple[int, ...]) -> None:
    x, _ = digits(40)
    model.eval()
    choices = every_choice(len(slots))
    outputs = joined(outputs_by_prefix(model, x, slots, choices), len(choices))
    for output, on in zip(outputs, choices, strict=True):
        off = {slot for slot, flag in zip(slots, on, strict=True) if not flag}
        assert (output - plain_output(model, x, off)).abs().max() <= 1e-6
    # Outputs must differ between configurations, so that the test would detect a scorer that ignores seeds.
    assert (outputs[0] - outputs[-1]).abs().max() > 1e-3


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_output_of_every_on_off_configuration_equals_that_of_a_separate_forward_pass(count: int) -> None:
    host = cnn((2, 4, 8, 8)[:count])
    model, _ = grown_model(dict(enumerate(SEEDS[:count])), host=host, styles=STYLES)
    assert_prefix_tree_equals_plain_forward(model, tuple(range(count)))


@pytest.mark.parametrize("slots", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_seeds_that_are_not_measured_stay_on_in_every_on_off_configuration(slots: tuple[int, ...]) -> None:
    # The first three of five slots have a seed; the last two are empty.
    seeds = dict(enumerate(SEEDS[:3]))
    model, _ = grown_model(seeds, host=cnn((2, 4, 8, 8, 8)), styles=STYLES, stage=Stage.FOSSILIZED)
    assert_prefix_tree_equals_plain_forward(model, slots)


def test_measuring_a_host_without_seeds_gives_one_score_and_no_contributions() -> None:
    model, _ = grown_model({})
    x, y = digits(100)
    measured = measured_on(model, x, y, ())
    assert (measured.slots, measured.contribution.size) == ((), 0)
    assert measured.scores.tolist() == [sample_scores(model, x, y, set()).mean()]


def test_measured_scores_and_losses_of_on_off_configurations_equal_those_of_separate_forward_passes() -> None:
    model, _ = grown_model(dict(enumerate(SEEDS[:3])))
    x, y = digits(200)
    measured = measured_on(model, x, y, (2, 0))
    assert measured.slots == (0, 2), "slots are sorted, whatever the order of the request"
    expected = [sample_scores(model, x, y, off).mean() for off in ({0, 2}, {0}, {2}, set())]
    np.testing.assert_allclose(measured.scores, expected)
    assert measured.score == expected[-1]
    losses = [CLASSIFICATION.loss(plain_output(model, x, off), y) for off in ({0, 2}, set())]
    np.testing.assert_allclose(measured.losses[[0, 3]], losses, rtol=1e-5)


def test_six_seeds_are_measured_by_switching_each_off_and_by_sampled_orders_of_switching_on() -> None:
    count, host = 6, cnn((2, 4, 4, 4, 4, 4))
    model, optimiser = grown_model(dict.fromkeys(range(count), BlueprintAction.CONV_LIGHT), host=host)
    practise(model, optimiser)
    x, y = digits(200)
    slots = tuple(range(count))
    measured = measured_on(model, x, y, slots, generator=torch.Generator().manual_seed(0))

    full = sample_scores(model, x, y, set())
    alone_off = [sample_scores(model, x, y, {slot}) for slot in slots]
    np.testing.assert_allclose(measured.contribution, [(full - off).mean() for off in alone_off])
    # Every sampled order leads from all seeds off to all seeds on, so the score gains of an order add up to
    # the total gain.
    gain = full.mean() - sample_scores(model, x, y, set(slots)).mean()
    assert measured.shapley.sum() == pytest.approx(gain)
    assert len(measured.configurations) <= count + 8 * (count - 1) + 2, (
        "leave-one-out, eight orders, none and all"
    )

    by_row = dict(zip(boolean_rows(measured.configurations), measured.scores, strict=True))
    for row, score in by_row.items():
        off = {slot for slot, on in enumerate(row) if not on}
        assert score == pytest.approx(sample_scores(model, x, y, off).mean())
    again = measured_on(model, x, y, slots, generator=torch.Generator().manual_seed(0))
    np.testing.assert_array_equal(again.shapley, measured.shapley)
    before = torch.get_rng_state()
    unsampled = measured_on(model, x, y, slots)
    assert len(unsampled.configurations) == 7, "six configurations with one seed off, and one with all on"
    assert np.isnan(unsampled.shapley).all()
    np.testing.assert_array_equal(unsampled.contribution, measured.contribution)
    assert torch.equal(torch.get_rng_state(), before)


def test_shapley_values_and_interactions_are_nan_if_seeds_are_only_switched_off_one_at_a_time() -> None:
    model, _ = grown_model(dict(enumerate(SEEDS[:2])))
    x, y = digits(200)
    measured = measured_on(model, x, y, (0, 1), only_contributions=True)
    assert boolean_rows(measured.configurations) == [(False, True), (True, False), (True, True)]
    full = sample_scores(model, x, y, set())
    differences = [full - sample_scores(model, x, y, {slot}) for slot in (0, 1)]
    np.testing.assert_allclose(measured.contribution, [d.mean() for d in differences])
    assert (measured.contribution != 0).all()
    for unknown in (measured.shapley, measured.interaction_sums(), measured.strongest_boosts()):
        np.testing.assert_array_equal(unknown, [UNKNOWN, UNKNOWN])


def test_contributions_shapley_values_and_interaction_of_two_seeds_equal_values_computed_by_hand() -> None:
    # Mean scores of the configurations: no seed 10, second seed only 20, first seed only 40, both seeds 80.
    scores = np.array([[10.0, 10.0], [10.0, 30.0], [40.0, 40.0], [70.0, 90.0]])
    game = attribute((0, 2), every_choice(2), scores, np.zeros(4), [(0, 1), (1, 0)])
    assert game.contribution.tolist() == [80.0 - 20.0, 80.0 - 40.0]
    # Switching off the first seed lowers the scores of the two samples by 60 and 60; switching off the second
    # seed lowers them by 30 and 50. These score differences have standard deviations 0 and √200; the standard
    # error is the standard deviation divided by √2.
    np.testing.assert_allclose(game.error, [0.0, 10.0])
    # Shapley value of the first seed: mean of 40 − 10 (first seed alone) and 80 − 20 (added to the second).
    # Shapley value of the second seed: mean of 20 − 10 (second seed alone) and 80 − 40 (added to the first).
    assert game.shapley.tolist() == [45.0, 25.0]
    # Interaction of the two seeds: their joint gain exceeds the sum of separate gains by 80 − 20 − 40 + 10 =
    # 30.
    np.testing.assert_array_equal(game.interactions, [[UNKNOWN, 30.0], [30.0, UNKNOWN]])
    assert game.interaction_sums().tolist() == [30.0, 30.0]
    assert game.strongest_boosts().tolist() == [30.0, 30.0]
    assert (game.score, game.slots) == (80.0, (0, 2))


def test_contributions_shapley_values_and_interactions_of_three_seeds_equal_values_computed_by_hand() -> None:
    # The score without seeds is 5, and the seeds raise it by 1, 2 and 4. Seeds 1 and 2 together raise the
    # score by 12 more than the sum of their separate gains; seeds 2 and 3 together by 6 less than that sum.
    choices = every_choice(3)
    value = 5.0 + choices @ [1.0, 2.0, 4.0] + 12.0 * choices[:, :2].all(1) - 6.0 * choices[:, 1:].all(1)
    orders = list(permutations(range(3)))
    game = attribute((0, 1, 2), choices, np.column_stack([value, value]), np.zeros(8), orders)
    # The Shapley value of a seed is its gain alone plus half of the extra gain of each pair with it: 1 + 6, 2
    # + 6 − 3 and 4 − 3. The sum of the Shapley values is the total gain 18 − 5.
    np.testing.assert_allclose(game.shapley, [7.0, 5.0, 1.0])
    assert game.score - game.scores[0] == 13.0
    assert game.contribution.tolist() == [13.0, 8.0, -2.0]
    expected = [[UNKNOWN, 12.0, 0.0], [12.0, UNKNOWN, -6.0], [0.0, -6.0, UNKNOWN]]
    np.testing.assert_array_equal(game.interactions, expected)
    assert game.interaction_sums().tolist() == [12.0, 6.0, -6.0]
    assert game.strongest_boosts().tolist() == [12.0, 12.0, 0.0]


def test_interactions_of_a_single_seed_are_nan() -> None:
    game = attribute((1,), every_choice(1), np.array([[0.0, 50.0], [100.0, 50.0]]), np.zeros(2), [(0,)])
    assert (game.contribution.tolist(), game.shapley.tolist()) == ([50.0], [50.0])
    for unknown in (game.interaction_sums(), game.strongest_boosts()):
        np.testing.assert_array_equal(unknown, [UNKNOWN])


def test_interaction_sum_of_a_seed_is_nan_if_one_of_its_pairs_was_not_measured() -> None:
    # The configuration with first and third seed off is not measured, so the interaction of these two seeds
    # is unknown.
    choices = every_choice(3)[[0, 1, 3, 4, 5, 6, 7]]
    value = np.array([0.0, 3.0, 4.0, 1.0, 6.0, 5.0, 9.0])
    game = attribute((0, 1, 2), choices, np.column_stack([value, value]), np.zeros(7), [])
    # Interaction of the first and second seed: 9 − 4 − 6 + 3 = 2; of the second and third seed: 9 − 6 − 5 + 1
    # = −1.
    np.testing.assert_array_equal(game.interaction_sums(), [UNKNOWN, 2.0 - 1.0, UNKNOWN])
    np.testing.assert_array_equal(game.strongest_boosts(), [UNKNOWN, 2.0, UNKNOWN])


# --- batches of samples and configurations ---------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "batched", "answered"),
    [(1, 2**18, 1), (3 * 512, 2**18, 1), (2**17, 0, 2**15), (3 * 512, 0, 2 * 32), (2**17, 0, 1)],
)
def test_scores_of_on_off_configurations_do_not_depend_on_how_samples_are_divided_into_batches(
    monkeypatch: pytest.MonkeyPatch, features: int, batched: int, answered: int
) -> None:
    model, optimiser = grown_model(dict(enumerate(SEEDS[:3])), styles=STYLES)
    practise(model, optimiser, batches=10)
    x, y = digits(20)
    whole = measured_on(model, x, y, (0, 1, 2))
    monkeypatch.setattr(configurations, "FEATURES_AT_ONCE", features)
    monkeypatch.setattr(configurations, "BATCHED_VALUES", batched)
    monkeypatch.setattr(configurations, "ANSWERED_AT_ONCE", answered)
    cut = measured_on(model, x, y, (0, 1, 2))
    assert cut.scores.tolist() == whole.scores.tolist()
    assert cut.losses == pytest.approx(whole.losses, rel=1e-6)
    assert cut.error.tolist() == whole.error.tolist()
    assert len(set(whole.losses.tolist())) == 8


def test_measured_scores_of_a_transformer_equal_those_of_separate_forward_passes() -> None:
    host = TransformerHost(vocabulary=16, context=6, width=8, layers=3, heads=2)
    seeds = {0: BlueprintAction.LORA, 1: BlueprintAction.ATTENTION, 2: BlueprintAction.MLP}
    model, _ = grown_model(seeds, host=host, styles=STYLES)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(16, (40, 6), generator=generator) for _ in range(2))
    measured = measured_on(model, x, y, (0, 1, 2), NEXT_TOKEN)
    for on, score, loss in zip(every_choice(3), measured.scores, measured.losses, strict=True):
        plain = plain_output(model, x, {slot for slot in range(3) if not on[slot]})
        assert score == pytest.approx(NEXT_TOKEN.sample_scores(plain, y).mean().item())
        assert loss == pytest.approx(NEXT_TOKEN.loss(plain, y).item(), rel=1e-5)
    assert len(set(measured.losses.tolist())) == 8


def test_contributions_are_stored_in_the_slot_table_only_for_measured_slots() -> None:
    # Mean scores of the configurations: no seed 10, second seed only 20, first seed only 40, both seeds 80.
    scores = np.array([[10.0, 10.0], [10.0, 30.0], [40.0, 40.0], [70.0, 90.0]])
    table = SlotTable.empty(1, 3)
    record_contributions(table, attribute((0, 2), every_choice(2), scores, np.zeros(4), [(0, 1), (1, 0)]))
    assert table.contribution[0, [0, 2]].tolist() == [60.0, 40.0]
    assert table.contribution_error[0, [0, 2]] == pytest.approx([0.0, 10.0])
    assert table.shapley[0, [0, 2]].tolist() == [45.0, 25.0]
    assert table.interaction_sum[0, [0, 2]].tolist() == [30.0, 30.0]
    assert table.strongest_boost[0, [0, 2]].tolist() == [30.0, 30.0]
    assert np.isnan([table.contribution[0, 1], table.shapley[0, 1], table.interaction_sum[0, 1]]).all()
