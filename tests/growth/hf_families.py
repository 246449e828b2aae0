"""Tiny models of many families of the package ``transformers``, with random weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

VOCABULARY, WIDTH, TOKENS = 48, 16, 7


class Family(NamedTuple):
    """Model of three or four blocks."""

    model: str
    """Name of the model's class in ``transformers``."""
    settings: dict[str, Any]
    """Arguments of the configuration."""
    blocks: str
    """Path of the container with the blocks."""
    is_residual: bool = True
    """Whether a block returns its input if its output projections are zero."""
    count: str = "num_hidden_layers"
    """Attribute of the configuration that counts the blocks."""
    inputs: Callable[[], dict[str, Tensor]] | None = None
    """Function that returns inputs with labels; token numbers unless given."""

    def build(self) -> transformers.PreTrainedModel:
        """Return a new model in evaluation mode; no parameter has its initial value of 0 or 1."""
        kind = getattr(transformers, self.model)
        torch.manual_seed(0)
        net = kind(kind.config_class(**self.settings))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return net.eval()

    def sample(self) -> dict[str, Tensor]:
        """Return a batch of two inputs with labels."""
        torch.manual_seed(1)
        return tokens() if self.inputs is None else self.inputs()


def tokens() -> dict[str, Tensor]:
    numbers = torch.randint(3, VOCABULARY, (2, TOKENS))
    return {"input_ids": numbers, "attention_mask": torch.ones_like(numbers), "labels": numbers}


def classified_tokens() -> dict[str, Tensor]:
    return tokens() | {"labels": torch.tensor([0, 1])}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}


LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"head_dim": 8}
FOUR = {"num_hidden_layers": 4}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
GPT = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": WIDTH, "n_layer": 3, "n_head": 2} | ENDS
BERT = {"vocab_size": VOCABULARY, "num_labels": 2} | {
    name: LLAMA[name]
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_heads": 2} | {
    "num_layers": 4,
    "num_decoder_layers": 3,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
LAYERS = "model.layers"

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", LLAMA, LAYERS),
    "mistral": Family("MistralForCausalLM", LLAMA | {"sliding_window": 4}, LAYERS),
    "qwen2": Family("Qwen2ForCausalLM", LLAMA | {"use_sliding_window": True, "max_window_layers": 2}, LAYERS),
    "qwen3": Family("Qwen3ForCausalLM", LLAMA | HEADS, LAYERS),
    "gemma": Family("GemmaForCausalLM", LLAMA | HEADS, LAYERS),
    "gemma2": Family("Gemma2ForCausalLM", LLAMA | HEADS | FOUR | {"sliding_window": 4}, LAYERS),
    "gemma3": Family(
        "Gemma3ForCausalLM", LLAMA | HEADS | FOUR | {"sliding_window": 4, "sliding_window_pattern": 2}, LAYERS
    ),
    "phi": Family("PhiForCausalLM", LLAMA, LAYERS),
    "phi3": Family("Phi3ForCausalLM", LLAMA, LAYERS),
    "olmo": Family("OlmoForCausalLM", LLAMA, LAYERS),
    "olmo2": Family("Olmo2ForCausalLM", LLAMA, LAYERS),
    "smollm3": Family("SmolLM3ForCausalLM", LLAMA | FOUR | {"no_rope_layer_interval": 2}, LAYERS),
    "granite": Family("GraniteForCausalLM", LLAMA, LAYERS),
    "cohere": Family("CohereForCausalLM", LLAMA, LAYERS),
    "glm4": Family("Glm4ForCausalLM", LLAMA | HEADS, LAYERS),
    "mixtral": Family("MixtralForCausalLM", LLAMA | EXPERTS, LAYERS),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", LLAMA | HEADS | EXPERTS, LAYERS),
    "gpt2": Family("GPT2LMHeadModel", GPT, "transformer.h"),
    "gptj": Family("GPTJForCausalLM", GPT | {"rotary_dim": 4}, "transformer.h"),
    "gpt_neox": Family("GPTNeoXForCausalLM", LLAMA, "gpt_neox.layers"),
    "opt": Family(
        "OPTForCausalLM", LLAMA | {"ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH}, "model.decoder.layers"
    ),
    "bloom": Family("BloomForCausalLM", GPT | {"hidden_size": WIDTH}, "transformer.h"),
    "falcon": Family("FalconForCausalLM", LLAMA, "transformer.h"),
    "bert": Family(
        "BertForSequenceClassification",
        BERT,
        "bert.encoder.layer",
        is_residual=False,
        inputs=classified_tokens,
    ),
    "deberta_v2": Family(
        "DebertaV2ForSequenceClassification",
        BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        "deberta.encoder.layer",
        is_residual=False,
        inputs=classified_tokens,
    ),
    "vit": Family(
        "ViTForImageClassification", BERT | {"image_size": 8, "patch_size": 4}, "vit.layers", inputs=images
    ),
    "t5_encoder": Family("T5ForConditionalGeneration", T5, "encoder.block"),
    # A cache of transformers 5.23 has one layer per block of the encoder, so the decoder may not be deeper.
    "t5_decoder": Family("T5ForConditionalGeneration", T5, "decoder.block", count="num_decoder_layers"),
}
