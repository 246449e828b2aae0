import math
from typing import Any

import pytest
import torch
from torch import Tensor

from esper.simic.advantages import gae
from esper.simic.losses import policy_loss, value_loss
from esper.tamiyo.policy.distributions import MaskedCategorical
from tools.make_goldens import LIBRARIES, TOLERANCE, find_differences, generate, load

Case = dict[str, Any]


def cases(kind: str, *libraries: str) -> list[Any]:
    """Return recorded cases of one kind as pytest parameters; each id begins with the reference library."""
    found = [(f"{name}-{i}", case) for name in libraries for i, case in enumerate(load(name)[kind])]
    return [pytest.param(case, id=name) for name, case in found]


def close(found: Tensor, wanted: list[Any]) -> None:
    torch.testing.assert_close(found, torch.tensor(wanted), atol=TOLERANCE, rtol=0.0)


@pytest.mark.parametrize("case", cases("gae", "stable_baselines3", "torchrl"))
def test_gae_equals_the_advantages_of_the_reference_library(case: Case) -> None:
    names = ("rewards", "values", "next_values", "terminated", "ended")
    rows = [torch.tensor(case[name]) for name in names]
    close(gae(*rows, gamma=case["gamma"], lam=case["lam"]), case["advantages"])


def test_recorded_episodes_for_gae_contain_terminations_and_truncations() -> None:
    kinds = {
        (
            library,
            any(
                t != e
                for rows in zip(case["terminated"], case["ended"], strict=True)
                for t, e in zip(*rows, strict=True)
            ),
        )
        for library in ("stable_baselines3", "torchrl")
        for case in load(library)["gae"]
    }
    assert kinds == {("stable_baselines3", False), ("stable_baselines3", True), ("torchrl", True)}


@pytest.mark.parametrize("case", cases("masked", "sb3_contrib"))
def test_masked_probabilities_and_entropies_equal_those_of_the_reference_library(case: Case) -> None:
    mask = torch.tensor(case["mask"])
    ours = MaskedCategorical(torch.tensor(case["logits"]), mask)
    close(ours.probs, case["probs"])
    close(ours.log_prob(torch.tensor(case["actions"])), case["log_probs"])
    legal = mask.sum(dim=-1)
    assert {1, len(case["mask"][0])} < set(legal.tolist()), "cases with one, some and all choices"
    largest = torch.tensor([math.log(count) for count in legal.tolist()])
    # Esper divides the entropy by ln(number of legal values).
    close(ours.entropy() * largest, case["entropies"])


def log_probs_of(logits: list[Any], actions: list[int], requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    """Return logits, and log-probabilities ``[env, step, head]`` that are 0 in all heads but one."""
    leaf = torch.tensor(logits, requires_grad=requires_grad)
    chosen = MaskedCategorical(leaf, torch.ones(leaf.shape, dtype=torch.bool)).log_prob(torch.tensor(actions))
    return leaf, torch.nn.functional.pad(chosen.unsqueeze(-1), (0, 7)).unsqueeze(0)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("case", cases("clipped", "torchrl"))
def test_clipped_policy_loss_and_gradient_equal_those_of_the_reference_library(
    case: Case, per_head: bool
) -> None:
    logits, new = log_probs_of(case["logits"], case["actions"], requires_grad=True)
    _, old = log_probs_of(case["old_logits"], case["actions"])
    advantages = torch.tensor([case["advantages"]])
    rows = advantages.numel()
    result = policy_loss(new, old, advantages, clip=case["clip"], rows=rows, per_head=per_head)
    assert result.loss.item() == pytest.approx(case["policy_loss"], abs=TOLERANCE)
    (gradient,) = torch.autograd.grad(result.loss, logits)
    close(gradient, case["logits_gradient"])
    ratio = result.log_ratio.exp()
    good, bad = ratio[advantages > 0], ratio[advantages < 0]
    assert (good > 1 + case["clip"]).any(), "some ratios are clipped from above"
    assert (bad < 1 - case["clip"]).any(), "some ratios are clipped from below"


@pytest.mark.parametrize("case", cases("clipped", "torchrl"))
def test_clipped_value_loss_and_gradient_equal_those_of_the_reference_library(case: Case) -> None:
    values = torch.tensor([case["values"]], requires_grad=True)
    old, returns = torch.tensor([case["old_values"]]), torch.tensor([case["returns"]])
    loss = value_loss(values, old, returns, clip=case["value_clip"], rows=values.numel())
    assert loss.item() == pytest.approx(case["value_loss"], abs=TOLERANCE)
    (gradient,) = torch.autograd.grad(loss, values)
    close(gradient[0], case["values_gradient"])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.filterwarnings("default")  # Warnings of the reference library do not fail the test.
def test_recorded_reference_values_equal_those_of_the_installed_reference_library(library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed: see tools/make_goldens.py")
    assert find_differences(generate(library), load(library)) == []
