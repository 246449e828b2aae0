"""Tiny models of the package ``transformers`` with random weights."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ConvNextConfig,
    ConvNextForImageClassification,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from tests.growth.models import Case


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=20,
        n_positions=8,
        n_embd=8,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=1,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def bert() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        num_labels=3,
    )
    return BertForSequenceClassification(config)


def resnet() -> ResNetForImageClassification:
    config = ResNetConfig(
        num_channels=1, embedding_size=4, hidden_sizes=[4, 8], depths=[1, 2], layer_type="basic", num_labels=3
    )
    return ResNetForImageClassification(config)


def swin() -> SwinForImageClassification:
    config = SwinConfig(
        image_size=16,
        patch_size=2,
        num_channels=1,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=2,
        num_labels=3,
        drop_path_rate=0.0,
    )
    return SwinForImageClassification(config)


def convnext() -> ConvNextForImageClassification:
    config = ConvNextConfig(
        num_channels=1, patch_size=2, num_stages=2, hidden_sizes=[4, 8], depths=[1, 2], num_labels=3
    )
    return ConvNextForImageClassification(config)


def vit() -> ViTForImageClassification:
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
    )
    return ViTForImageClassification(config)


def mixtral() -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=16,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


def pictures(size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(4, 1, size, size), "labels": torch.randint(3, (4,))}


def tokens(labels: tuple[int, ...], classes: int) -> dict[str, torch.Tensor]:
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    return {
        "input_ids": torch.randint(2, 20, (2, 6)),
        "attention_mask": mask,
        "labels": torch.randint(classes, labels),
    }


LAYER = "bert.encoder.layer."
HF_CASES: dict[str, Case] = {
    "transformers gpt2": Case(
        gpt2,
        lambda: tokens((2, 6), 20),
        (
            ("transformer.h.0", "mlp"),
            ("transformer.h.1.mlp", "lora"),
            ("transformer.h.1.attn", "attention"),
            ("transformer", "mlp_small"),
        ),
        lambda output: output.loss,
    ),
    "transformers bert": Case(
        bert,
        lambda: tokens((2,), 3),
        (
            (f"{LAYER}0", "mlp"),
            (f"{LAYER}1.attention", "attention"),
            ("bert.encoder", "norm"),
            ("bert.pooler", "mlp"),
        ),
        lambda output: output.loss,
    ),
    "transformers swin": Case(
        swin,
        lambda: pictures(16),
        (("swin.encoder.layers.0.blocks.0", "mlp"), ("swin.encoder.layers.1.blocks.0", "attention")),
        lambda output: output.loss,
    ),
    "transformers convnext": Case(
        convnext,
        lambda: pictures(16),
        (
            ("convnext.encoder.stages.1.layers.0", "conv_light"),
            ("convnext.encoder.stages.0.layers.0.pwconv1", "norm"),
        ),
        lambda output: output.loss,
    ),
    "transformers vit": Case(
        vit,
        lambda: pictures(8),
        (("vit.layers.0", "attention"), ("vit.layers.1", "mlp")),
        lambda output: output.loss,
    ),
    "transformers mixtral": Case(
        mixtral,
        lambda: tokens((2, 6), 20),
        (("model.layers.0", "attention"), ("model.layers.1", "lora")),
        lambda output: output.loss,
    ),
    "transformers resnet": Case(
        resnet,
        lambda: {"pixel_values": torch.randn(4, 1, 16, 16), "labels": torch.randint(3, (4,))},
        (
            ("resnet.embedder", "norm"),
            ("resnet.encoder.stages.0", "bottleneck"),
            ("resnet.encoder.stages.1", "conv_light"),
            ("resnet.encoder", "conv_small"),
        ),
        lambda output: output.loss,
    ),
}
