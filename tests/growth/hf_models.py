"""Tiny models of the package ``transformers`` with random weights."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
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
