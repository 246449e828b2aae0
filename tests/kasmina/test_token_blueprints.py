"""Parameter counts and formulas of the blueprints for tokens; other tests of blueprints are in
tests/contracts."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from esper.kasmina.blueprint_check import sees_later_tokens
from esper.kasmina.blueprints import blueprint_named, tokens
from tests.contracts.matrix import restart

WIDTH = 8


def build(name: str, width: int = WIDTH) -> nn.Module:
    restart(0)
    return blueprint_named(name, "tokens").build(width)


def features(width: int = WIDTH) -> Tensor:
    return 2 * torch.randn(4, 6, width, generator=torch.Generator().manual_seed(1))


def one_step(seed: nn.Module, h: Tensor) -> nn.Module:
    """Train the seed for one step, with a loss whose gradient differs at every output value."""
    weighting = torch.randn(h.shape, generator=torch.Generator().manual_seed(9))
    (seed(h) * weighting).mean().backward()
    torch.optim.SGD(seed.parameters(), lr=0.5).step()
    return seed


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("norm", 32),
        ("lora", 512),  # lora has 2 branches of rank 4, each with 4 · (32 + 32) weights.
        ("lora_large", 2048),  # lora_large has 2 branches of rank 16, each with 16 · (32 + 32) weights.
        # attention has 2 branches, each with 32·48 parameters for queries, keys and values, and 16·32 + 32
        # for the output.
        ("attention", 4160),
        ("flex_attention", 4160),
        ("mlp_small", 4224),  # mlp_small has 2 branches of 2 layers of 32·32 + 32 parameters.
        ("mlp", 8384),  # mlp has 2 branches of 2 layers of 32·64 + 64 and 64·32 + 32 parameters.
    ],
)
def test_parameter_counts_of_token_blueprints_at_width_32(name: str, parameters: int) -> None:
    assert sum(p.numel() for p in build(name, 32).parameters()) == parameters


def test_norm_seed_with_positive_scale_moves_features_towards_their_layer_norm() -> None:
    seed = build("norm", 2)
    with torch.no_grad():
        seed.scale.copy_(torch.tensor([0.5, 0.0]))
    # LayerNorm of the features (1, 3) is (−1, 1). The first feature has scale 0.5, so the delta of this
    # feature is tanh(0.5)·(−1 − 1), and tanh(0.5) = 0.4621172.
    delta = seed(torch.tensor([[[1.0, 3.0]]]))
    torch.testing.assert_close(delta, torch.tensor([[[-0.9242343, 0.0]]]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "rank"), [("lora", 8), ("lora_large", 32)])
def test_lora_seed_is_a_linear_map_with_the_rank_of_its_blueprint(name: str, rank: int) -> None:
    h = features(48)
    seed = one_step(build(name, 48), h)
    basis = torch.eye(48).unsqueeze(0)
    matrix = seed(basis)[0].double()
    assert torch.linalg.matrix_rank(matrix, rtol=1e-6) == rank
    torch.testing.assert_close(seed(h), h @ matrix.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "hidden"), [("mlp_small", 16), ("mlp", 32)])
def test_mlp_seed_equals_its_formula_and_has_the_hidden_width_of_its_blueprint(
    name: str, hidden: int
) -> None:
    seed = one_step(build(name), features())
    h = features()
    wanted = torch.zeros_like(h)
    widths = 0
    for branch in (seed.one, seed.other):
        first, _, last = branch
        widths += first.out_features
        wanted = wanted + F.gelu(h @ first.weight.T + first.bias) @ last.weight.T + last.bias
    assert widths == hidden
    torch.testing.assert_close(seed(h), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["attention", "flex_attention"])
def test_attention_seed_for_tokens_equals_causal_softmax_attention_computed_by_hand(name: str) -> None:
    seed, h = one_step(build(name), features()), features()
    size = WIDTH // 4
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    wanted = torch.zeros_like(h)
    for branch in (seed.one, seed.other):
        qkv, heads, out = branch
        assert qkv.bias is None
        assert heads.heads == 2
        query, key, value = (h @ part.T for part in qkv.weight.chunk(3))
        gathered = []
        for head in range(2):
            at = slice(head * size, (head + 1) * size)
            scores = query[..., at] @ key[..., at].transpose(1, 2) / math.sqrt(size)
            gathered.append(scores.masked_fill(later, -math.inf).softmax(-1) @ value[..., at])
        wanted = wanted + torch.cat(gathered, -1) @ out.weight.T + out.bias
    assert wanted.abs().max() > 0.01
    torch.testing.assert_close(seed(h), wanted, rtol=0, atol=1e-6)


def test_queries_keys_and_values_of_an_attention_seed_all_have_gradients() -> None:
    # Queries, keys and values share one weight tensor, so other tests would not notice if only the values had
    # gradients.
    h = features(4)
    seed = one_step(build("attention", 4), h)
    seed.zero_grad()
    one_step(seed, h)
    for branch in (seed.one, seed.other):
        gradients = branch[0].weight.grad.chunk(3)
        for gradient, weight in zip(gradients, branch[0].weight.chunk(3), strict=True):
            assert gradient.norm() >= 1e-6 * weight.norm() + 1e-8


def test_sees_later_tokens_detects_outputs_that_depend_on_later_tokens_with_weight_1e_7() -> None:
    def leaking(x: Tensor) -> Tensor:
        return x + 1e-7 * x.sum(dim=1, keepdim=True)

    x = torch.randn(2, 3, 1, generator=torch.Generator().manual_seed(0))
    assert sees_later_tokens(leaking, x)
    assert not sees_later_tokens(lambda x: x.cumsum(dim=1), x)


# --- flex attention ---------------------------------------------------------------------------


def test_flex_attention_seed_calls_scaled_dot_product_attention_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokens, "_compiled_flex", lambda: pytest.fail("it has no backward pass on the CPU"))
    query, key, value = torch.randn(3, 2, 4, 6, 16, generator=torch.Generator().manual_seed(0)).unbind()
    wanted = tokens.dense_attention(query, key, value)
    assert torch.equal(tokens.flex_causal_attention(query, key, value), wanted)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_with_the_block_mask_equals_causal_attention() -> None:
    query, key, value = torch.randn(3, 2, 2, 130, 16, generator=torch.Generator().manual_seed(0)).unbind()
    blocks = tokens._earlier_blocks(130, query.device)
    with torch.no_grad():
        found = flex.flex_attention(query, key, value, block_mask=blocks)
    wanted = tokens.dense_attention(query, key, value)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex attention trains on CUDA only")
def test_flex_attention_seed_on_cuda_has_the_output_of_an_attention_seed_after_one_training_step() -> None:
    h = features(64).cuda()
    seed, twin = (build(name, 64).cuda() for name in ("flex_attention", "attention"))
    assert torch.equal(seed(h), torch.zeros_like(h))
    torch.testing.assert_close(one_step(seed, h)(h), one_step(twin, h)(h), rtol=1e-3, atol=1e-3)
    assert not sees_later_tokens(seed, h)
