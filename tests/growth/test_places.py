"""Places of seeds: choice of ``slots="auto"``, axes, order of tokens, padding masks, shared modules."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel, MixtralConfig, MixtralForCausalLM

import esper
from esper.growth import Growth, GrowthWarning
from esper.kasmina.compute import FlopMeter, forward_flops
from esper.kasmina.dry_run import call
from esper.kasmina.probes import Probes
from esper.kasmina.sites import Site, find_sites
from esper.leyline.errors import EsperError
from tests.growth.models import (
    CASES,
    GPT,
    ClassTokenViT,
    PlainCNN,
    ResNet,
    Siamese,
    Stages,
    TextEncoder,
    UNet,
    Volumes,
    WindowNet,
    padded,
)

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


@pytest.fixture(autouse=True)
def _rng_seed() -> None:
    torch.manual_seed(0)


def grow(net: nn.Module, sample: Any, slots: Any = "auto", **known: Any) -> Growth:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return Growth(
        net, optimizer, **({"sample": sample, "slots": slots, "mode": "min", "controller": None} | known)
    )


def site(net: nn.Module, sample: Any, name: str) -> Site:
    return find_sites(net, name, sample)[0]


def train(net: nn.Module, sample: Any, steps: int = 3) -> None:
    """Change the seeds of a network, so that they have an effect on its output."""
    seeds = [p for name, p in net.named_parameters() if "esper_slot" in name] or list(net.parameters())
    optimizer = torch.optim.Adam(seeds, lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        found = call(net, sample)
        (found if isinstance(found, Tensor) else found[0]).square().mean().backward()
        optimizer.step()


# --- choice of places -------------------------------------------------------------------------------------


class Categories(nn.Module):
    """Regression on two categories and three numbers, with an embedding for each category."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(4, 8), nn.Embedding(5, 8)
        self.numbers, self.joint, self.head = nn.Linear(3, 8), nn.Linear(24, 16), nn.Linear(16, 1)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        parts = [self.first(ids[:, 0]), self.second(ids[:, 1]), self.numbers(x)]
        return self.head(F.relu(self.joint(torch.cat(parts, 1)))).squeeze(1)


def categories() -> tuple[Tensor, Tensor]:
    return torch.randint(4, (6, 2)), torch.randn(6, 3)


class Experts(nn.Module):
    """Mixture of four experts, of which a router selects two for each sample."""

    def __init__(self, hard: bool) -> None:
        super().__init__()
        self.hard = hard
        self.router = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))

    def forward(self, h: Tensor) -> Tensor:
        scores = self.router(h)
        if self.hard:
            values, chosen = scores.topk(2, dim=-1)
            weights = torch.zeros_like(scores).scatter(1, chosen, values.softmax(-1))
        else:
            weights = scores.softmax(-1)
        return sum(weights[:, i : i + 1] * expert(h) for i, expert in enumerate(self.experts))


class Mixture(nn.Module):
    """Network with a mixture of experts, a layer whose output is not used, and a layer with weight norm."""

    def __init__(self, hard: bool = False) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(5, 8))
        self.moe, self.unread = Experts(hard), nn.Linear(8, 8)
        self.last, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.moe(torch.relu(self.inner(x)))
        self.unread(h)
        return self.head(torch.relu(self.last(h))).log_softmax(-1)


def test_auto_offers_no_embedding_and_no_final_head() -> None:
    assert grow(Categories(), categories()).slots == ("numbers", "joint")


@pytest.mark.parametrize("hard", [False, True])
def test_auto_offers_no_router_expert_unread_output_parametrization_or_final_head(hard: bool) -> None:
    assert grow(Mixture(hard), torch.randn(6, 5)).slots == ("inner", "moe.router.0", "last")


def test_auto_offers_the_same_places_if_all_parameters_are_frozen() -> None:
    net = Mixture().requires_grad_(False)
    growth = Growth(net, torch.optim.SGD([{"params": []}], lr=0.1), sample=torch.randn(6, 5), mode="min")
    assert growth.slots == ("inner", "moe.router.0", "last")
    assert not any(p.requires_grad for p in net.parameters())


def test_own_loop_default_spends_no_trial_behind_an_embedding() -> None:
    """Silent failure 1 of the trials with new users."""
    net, sample = Categories(), categories()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    growth = Growth(net, optimizer, sample=sample, mode="min", epochs=40)
    planted = []
    for epoch in range(30):
        train_once(net, sample, optimizer)
        events = growth.end_epoch(lambda epoch=epoch: 1.0 - 1e-6 * (epoch % 2))
        planted += [event.slot for event in events if event.kind == "germinated"]
    assert planted
    assert set(planted) <= {"numbers", "joint"}


def train_once(net: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> None:
    call(net.train(), sample).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("slot", "sentence"),
    [
        (
            "inner.parametrizations.weight",
            r"'inner.parametrizations.weight' \(ParametrizationList\) computes a weight",
        ),
        ("unread", r"the output of Mixture does not depend on submodule 'unread' \(Linear\)"),
    ],
)
def test_named_slot_without_effect_is_refused(slot: str, sentence: str) -> None:
    with pytest.raises(EsperError, match=sentence):
        grow(Mixture(), torch.randn(6, 5), slot)


def test_router_and_embedding_can_be_named_as_slots() -> None:
    assert grow(Mixture(), torch.randn(6, 5), "moe.router").slots == ("moe.router",)
    assert grow(Categories(), categories(), "first").slots == ("first",)


def test_output_inside_reentrant_checkpointing_counts_as_read() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.utils.checkpoint.checkpoint(self.inner, self.first(x), use_reentrant=True)
            return self.head(h)

    net, x = Checkpointed(), torch.randn(4, 5)
    assert ("inner", None) not in Probes(net, x)._graph.read
    assert grow(net, x, "inner").slots == ("inner",)


def test_blocks_of_a_mixtral_are_offered_and_its_router_is_not() -> None:
    config = MixtralConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        use_cache=False,
    )
    net, ids = MixtralForCausalLM(config), torch.randint(20, (2, 6))
    assert grow(net, {"input_ids": ids}).slots == ("model.layers.0", "model.layers.1")
    assert not Probes(net, {"input_ids": ids}).is_hidden("model.layers.0.mlp.gate")


# --- axes -------------------------------------------------------------------------------------------------

SIZES: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[str, str], ...], Any, Any]] = {
    "channels last": (
        WindowNet,
        (("blocks.0", "conv_light"), ("blocks.1", "stack")),
        torch.randn(2, 1, 8, 8),
        torch.randn(3, 1, 12, 16),
    ),
    "residual": (ResNet, (("layer1", "conv_light"),), torch.randn(2, 1, 8, 8), torch.randn(3, 1, 12, 16)),
    "segmentation": (
        UNet,
        (("mid", "conv_heavy"), ("dec", "conv_small")),
        torch.randn(2, 1, 8, 8),
        torch.randn(1, 1, 12, 16),
    ),
    "volumes": (
        Volumes,
        (("conv1", "conv_light"), ("conv2", "norm")),
        torch.randn(2, 1, 4, 6, 8),
        torch.randn(1, 1, 6, 4, 4),
    ),
    "class token": (
        ClassTokenViT,
        (("blocks.0", "attention"),),
        torch.randn(2, 1, 8, 8),
        torch.randn(2, 1, 12, 8),
    ),
    "stages": (Stages, (("stages.2", "stack"),), torch.randn(2, 1, 8, 8), torch.randn(2, 1, 5, 7)),
}


@pytest.mark.parametrize("name", SIZES)
def test_finished_network_accepts_images_of_another_size(name: str) -> None:
    """Silent failure 3: before, height was taken for channels, and another size failed after ``finish``."""
    build, seeds, x, other = SIZES[name]
    net = build()
    growth = grow(net, x, [slot for slot, _ in seeds])
    for slot, blueprint in seeds:
        growth.germinate(slot, blueprint)
    train(net, x)
    wanted = net.eval()(other).detach()
    assert torch.equal(growth.finish(merge=False)(other), wanted)


BIRTHS = [name for name, case in CASES.items() if not any(seed == "stack" for _, seed in case.seeds)]


@pytest.mark.parametrize("name", BIRTHS)
def test_planting_changes_no_output_at_birth(name: str) -> None:
    case = CASES[name]
    net, sample = case.build().eval(), case.sample()
    before = case.tensor(call(net, sample)).detach().clone()
    growth = grow(net, sample, [slot for slot, _ in case.seeds])
    for slot, blueprint in case.seeds:
        growth.germinate(slot.partition(":")[0], blueprint)
    # The mask of attention disables torch's fused layers, which have other last digits.
    torch.testing.assert_close(case.tensor(call(net.eval(), sample)).detach(), before, rtol=1e-5, atol=1e-6)


class Transposed(nn.Module):
    """Network whose blocks take and return ``[batch, width, tokens]`` or ``[batch, tokens, width]``."""

    def __init__(self, width_first: bool) -> None:
        super().__init__()
        self.width_first = width_first
        self.mix, self.head = nn.Parameter(torch.randn(8, 3)), nn.Linear(8, 2)
        self.block = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.mix.T
        h = self.block(h.transpose(1, 2) if self.width_first else h)
        return self.head(h.mean(-1 if self.width_first else 1))


@pytest.mark.parametrize("width_first", [True, False])
def test_order_of_tokens_and_width_is_found_with_another_number_of_tokens(width_first: bool) -> None:
    found = site(Transposed(width_first), torch.randn(4, 6, 3), "block")
    assert (found.shape, found.swap) == ((4, 6, 8), (1, 2) if width_first else None)


def test_slot_whose_width_depends_on_the_size_of_the_input_is_refused() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.flat = nn.Linear(3, 1), nn.Flatten(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.flat(self.score(x)).softmax(-1)

    with pytest.raises(
        EsperError, match="no axis of its features keeps its length for inputs of another size"
    ):
        grow(Scores(), torch.randn(4, 6, 3), "flat")


# --- modules that run several times -----------------------------------------------------------------------


def test_seed_in_a_shared_encoder_takes_part_in_both_calls() -> None:
    """Silent failure 12: shared encoders were refused."""
    net, pair = Siamese(), (torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8))
    growth = grow(net, pair, "encoder.1")
    growth.germinate("encoder.1", "conv_light")
    train(net, pair)
    net.eval()
    assert net(pair[0], pair[1]).equal(net(pair[1], pair[0])), "both images get the same encoder"
    seed = next(p for name, p in net.named_parameters() if "esper_slot" in name and p.ndim == 4)
    one, other = (
        torch.autograd.grad(net(*images).square().sum(), seed)[0]
        for images in (pair, (pair[0], pair[1].flip(0)))
    )
    assert not torch.allclose(one, other), "the gradient depends on the second image, too"


def test_flops_of_a_seed_in_a_shared_encoder_count_both_calls() -> None:
    net, pair = Siamese(), (torch.randn(1, 1, 8, 8), torch.randn(1, 1, 8, 8))
    growth = grow(net, pair, "encoder.1")
    before = growth.flops
    growth.germinate("encoder.1", "conv_light")
    assert growth.network.sites[0].times == 2
    assert growth.flops - before == 2 * 2 * 64 * 4 * 4 * 9


class SharedOnce(nn.Module):
    """Network of one input whose layer runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(torch.relu(self.layer(x))))


def test_meter_of_environments_counts_both_calls_of_a_shared_layer() -> None:
    growth = grow(SharedOnce(), torch.randn(2, 5), "layer")
    meter = FlopMeter(growth.network, torch.randn(5))
    before = forward_flops(growth.net, torch.randn(1, 5))
    growth.germinate("layer", "mlp_small")
    meter.germinated(0)
    host, whole = meter.per_sample()
    assert whole - host == forward_flops(growth.net, torch.randn(1, 5)) - before


def test_contribution_of_a_shared_seed_switches_it_off_in_both_calls() -> None:
    net, x = SharedOnce().eval(), torch.randn(6, 5)
    bare = copy.deepcopy(net)
    growth = grow(net, x, "layer")
    growth.germinate("layer", "mlp_small")
    train(net, x)
    net.eval()
    with torch.no_grad():
        found = growth.end_epoch(lambda: float(net(x).square().mean()))
        wanted = float(bare(x).square().mean()) - float(net(x).square().mean())
    assert growth.measured.contribution[0] == pytest.approx(wanted)
    assert any(event.kind == "measured" for event in found)


def test_stack_inserts_a_copy_into_a_shared_encoder() -> None:
    net, pair = Siamese(), (torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8))
    growth = grow(net, pair, "encoder.2")
    growth.germinate("encoder.2", "stack")
    assert len(net.encoder) == 5
    assert type(growth.finish()) is Siamese


# --- stages -----------------------------------------------------------------------------------------------


def test_stack_copies_a_sequential_inside_a_sequential() -> None:
    net, x = Stages().eval(), torch.randn(2, 1, 8, 8)
    growth = grow(net, x)
    assert growth.slots == ("stages.0", "stages.1", "stages.2")
    growth.germinate("stages.1", "stack")
    assert len(net.stages) == 4
    wanted = net.head(net.stages[3](net.stages[1](net.stages[1](net.stages[0](x)))).mean((2, 3)))
    torch.testing.assert_close(net.eval()(x), wanted)
    with pytest.raises(EsperError, match="returns features of another shape than it takes"):
        growth.germinate("stages.0", "stack")


def test_state_dict_with_another_number_of_stages_is_refused() -> None:
    net, x = Stages(), torch.randn(2, 1, 8, 8)
    state = net.state_dict()
    grow(net, x, "stages.1").germinate("stages.1", "stack")
    with pytest.raises(EsperError, match="the state has 3 blocks in 'stages', and this network has 4"):
        net.load_state_dict(state)


def test_stack_copies_a_sequential_attribute_as_a_side_module() -> None:
    class Attributes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(1, 4, 3, padding=1)
            self.stage = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.stage(self.stem(x)).mean((2, 3)))

    net, x = Attributes().eval(), torch.randn(2, 1, 8, 8)
    wanted = net.head(net.stage(net.stage(net.stem(x))).mean((2, 3)))
    growth = grow(net, x, "stage")
    growth.germinate("stage", "stack")
    torch.testing.assert_close(net.eval()(x), wanted)


# --- order of tokens --------------------------------------------------------------------------------------


def test_attention_is_causal_only_in_causal_networks() -> None:
    ids = torch.randint(11, (4, 6))
    assert site(GPT(), ids, "h.0").is_causal
    assert not site(TextEncoder(), padded(), "encoder.layers.1").is_causal
    assert not site(ClassTokenViT(), torch.randn(4, 1, 8, 8), "blocks.0.norm2").is_causal
    assert not site(ClassTokenViT(), torch.randn(4, 1, 8, 8), "blocks.1.linear2").is_causal


class EncoderDecoder(nn.Module):
    """Encoder that sees all of its tokens, and causal decoder of as many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(11, 8), nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        memory = self.encoder(self.source(source))
        return self.head(self.decoder(self.target(target), memory, tgt_mask=mask))


def test_attention_is_causal_in_a_decoder_and_not_in_its_encoder() -> None:
    net, sample = EncoderDecoder(), (torch.randint(11, (4, 6)), torch.randint(11, (4, 6)))
    causal = {
        found.name: found.is_causal
        for found in find_sites(net, ["source", "encoder", "target", "decoder"], sample)
    }
    assert causal == {"source": False, "encoder": False, "target": True, "decoder": True}


def test_class_token_gets_a_gradient_from_patches_through_an_attention_seed() -> None:
    """Silent failure 4: the seed was causal, so the first token saw no patch."""
    net, x = ClassTokenViT(), torch.randn(4, 1, 8, 8)
    growth = grow(net, x, "blocks.0.linear2")
    growth.germinate("blocks.0.linear2", "attention")
    seed = growth.network.slots[0].held.seed
    for parameter in seed.parameters():
        nn.init.normal_(parameter)
    h = torch.randn(1, 5, 8, requires_grad=True)
    seed(h)[:, 0].sum().backward()
    assert h.grad is not None
    assert (h.grad[0, 1:].abs().sum(-1) > 0).all()


def test_attention_seed_in_a_causal_network_does_not_use_later_tokens() -> None:
    net, ids = GPT().eval(), torch.randint(11, (4, 6))
    growth = grow(net, ids, "h.0")
    growth.germinate("h.0", "attention")
    train(net, ids)
    other = torch.cat([ids[:, :-1], (ids[:, -1:] + 1) % 11], 1)
    one, two = net.eval()(ids)[0], net(other)[0]
    torch.testing.assert_close(one[:, :-1], two[:, :-1])


def trained_vit() -> tuple[nn.Module, Growth, Tensor]:
    net, x = ClassTokenViT(), torch.randn(4, 1, 8, 8)
    growth = grow(net, x, "blocks.0")
    growth.germinate("blocks.0", "attention")
    train(net, x)
    return net.eval(), growth, x


def test_saved_network_restores_whether_attention_is_causal(tmp_path: Path) -> None:
    net, growth, x = trained_vit()
    growth.save(tmp_path / "net.pt")
    loaded = esper.load(tmp_path / "net.pt", base=ClassTokenViT())
    torch.testing.assert_close(loaded.eval()(x), net(x))


def test_state_dicts_restore_whether_attention_is_causal() -> None:
    net, growth, x = trained_vit()
    other = ClassTokenViT()
    # A sample of one patch has no later token, so this growth takes its network for causal.
    again = grow(other, torch.randn(4, 1, 4, 4), "blocks.0")
    kept = copy.deepcopy((growth.state_dict(), net.state_dict()))
    object.__setattr__(again.network.sites[0], "is_causal", True)
    again.load_state_dict(kept[0])
    graft = again.network.slots[0].held
    other.load_state_dict(kept[1])
    assert again.network.slots[0].held is graft
    torch.testing.assert_close(other.eval()(x), net(x))


# --- padding masks ----------------------------------------------------------------------------------------


def bert() -> BertModel:
    config = BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    return BertModel(config)


@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize("is_finished", [True, False])
def test_padded_tokens_on_the_left_do_not_influence_others_through_attention(
    has_mask: bool, is_finished: bool
) -> None:
    """Silent failure 4, also if the network was grown with a sample without padding."""
    net, ids = bert().eval(), torch.randint(2, 20, (2, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    growth = grow(net, {"input_ids": ids} | ({"attention_mask": mask} if has_mask else {}), "encoder.layer.0")
    growth.germinate("encoder.layer.0", "attention")
    train(net, {"input_ids": ids})
    if is_finished:
        with pytest.warns(GrowthWarning, match="from_pretrained of BertModel would leave out"):
            growth.finish()
    other = ids.clone()
    other[0, :2] = 19
    one, two = (net.eval()(each, attention_mask=mask)[0] for each in (ids, other))
    assert not torch.equal(one[0, :2], two[0, :2])
    torch.testing.assert_close(one[0, 2:], two[0, 2:])
    torch.testing.assert_close(one[1], two[1])
    unpadded = net(ids[:1, 2:], position_ids=torch.arange(2, 6)[None])[0]
    torch.testing.assert_close(one[0, 2:], unpadded[0])


def test_padded_tokens_of_a_torch_encoder_do_not_influence_others_through_attention() -> None:
    net, (ids, _) = TextEncoder().eval(), padded()
    padding = torch.tensor([[True, True, False, False, False, False]] * 2)
    growth = grow(net, (ids, torch.zeros_like(padding)), "encoder.layers.0")
    growth.germinate("encoder.layers.0", "attention")
    train(net, (ids, padding))
    net.head, net.encoder.layers[1].register_forward_hook(lambda _m, _a, out: kept.append(out.detach()))
    kept: list[Tensor] = []
    for each in (ids, torch.cat([(ids[:, :2] + 1) % 11, ids[:, 2:]], 1)):
        net.eval()(each, padding)
    torch.testing.assert_close(kept[0][:, 2:], kept[1][:, 2:])


class HiddenMask(nn.Module):
    """Classifier of tokens that takes a mask and does not pass it to its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        kept = attention_mask[..., None].float()
        return self.head((torch.relu(self.layer(self.embed(ids))) * kept).sum(1) / kept.sum(1))


def test_attention_is_no_candidate_and_warns_where_the_mask_of_the_network_cannot_be_seen() -> None:
    growth = grow(HiddenMask(), (torch.randint(11, (4, 6)), torch.ones(4, 6)), "layer")
    space = growth.network.action_space
    offered = {space.blueprint_names[index] for index in space.blueprints}
    assert "mlp_small" in offered
    assert not offered & {"attention", "flex_attention"}
    with pytest.warns(GrowthWarning, match="attention in layer cannot see the padding mask of the network"):
        growth.germinate("layer", "attention")


def test_plain_cnn_grows_in_its_convolutions_and_not_in_its_head() -> None:
    assert grow(PlainCNN(), torch.randn(4, 1, 8, 8)).slots == ("conv1", "conv2", "norm", "conv3")


def test_saved_network_with_a_copied_stage_loads(tmp_path: Path) -> None:
    net, x = Stages(), torch.randn(2, 1, 8, 8)
    growth = grow(net, x, ["stages.1", "stages.2"])
    growth.germinate("stages.1", "stack")
    growth.germinate("stages.2", "conv_light")
    train(net, x)
    growth.save(tmp_path / "net.pt")
    loaded = esper.load(tmp_path / "net.pt", base=Stages())
    assert torch.equal(loaded.eval()(x), net.eval()(x))
