"""Losses and scores of classification and next-token prediction equal values computed by hand."""

import math

import pytest
import torch

from esper.tolaria.tasks.spec import CLASSIFICATION, NEXT_TOKEN

CERTAIN = math.log(3.0)
"""Logit of a class; with the logits (ln 3, 0) the first of two classes has probability 3/4."""


def test_classification_score_of_a_sample_is_100_for_the_right_class_and_0_for_others() -> None:
    output = torch.tensor([[CERTAIN, 0.0], [CERTAIN, 0.0], [0.0, CERTAIN]])
    target = torch.tensor([0, 1, 1])
    assert CLASSIFICATION.sample_scores(output, target).tolist() == [100.0, 0.0, 100.0]
    losses = [math.log(4 / 3), math.log(4), math.log(4 / 3)]
    assert CLASSIFICATION.sample_losses(output, target).tolist() == pytest.approx(losses)
    assert CLASSIFICATION.loss(output, target).item() == pytest.approx(sum(losses) / 3)


def test_next_token_score_of_a_sequence_is_the_percentage_of_right_tokens() -> None:
    right, wrong = [CERTAIN, 0.0], [0.0, CERTAIN]
    output = torch.tensor([[right, right, wrong, right], [wrong, wrong, wrong, right]])
    target = torch.zeros(2, 4, dtype=torch.long)
    assert NEXT_TOKEN.sample_scores(output, target).tolist() == [75.0, 25.0]
    low, high = math.log(4 / 3), math.log(4)
    losses = [(3 * low + high) / 4, (low + 3 * high) / 4]
    assert NEXT_TOKEN.sample_losses(output, target).tolist() == pytest.approx(losses)
    assert NEXT_TOKEN.loss(output, target).item() == pytest.approx(sum(losses) / 2)
