"""Export of low-rank seeds on linear layers as an adapter in the LoRA format of PEFT.

A seed with the linear map M = B·A behind a layer with weight W and bias b turns the output W·x + b of the
layer into (1 + alpha·M)·(W·x + b). PEFT adds lora_B·(lora_A·x) to the output of the layer, so lora_A is A·W,
lora_B is alpha·B, and the bias of lora_B is alpha·M·b.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from esper.files.atomic_write import write_folder_durably
from esper.kasmina.low_rank import branches_of, rank_of
from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.seed_description import described
from esper.kasmina.slot import SeedSlot, slots_of
from esper.leyline import BlendOperator, HostError

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"


def save(network: MorphogeneticModel, folder: Path) -> None:
    """Write the seeds that take part in the forward pass of ``network`` to ``folder`` atomically.

    Raises:
        HostError: No seed takes part, or a seed is not a low-rank seed that is added to a linear layer.
        SaveError: The folder could not be written, or holds other files.
    """
    taking_part = [network.slots[index] for index in network.blended]
    check_exportable(taking_part)
    paths = {slot: path for path, slot in slots_of(network.host).items()}
    parts = {paths[slot]: slot for slot in taking_part}
    config = json.dumps(config_of(network.host, parts), indent=2) + "\n"
    weights = save_tensors(tensors_of(parts), metadata={"format": "pt"})
    write_folder_durably(folder, {CONFIG_FILE: config.encode(), WEIGHTS_FILE: weights})


def check_exportable(slots: list[SeedSlot]) -> None:
    """Raise HostError unless all seeds in ``slots`` can be exported, and there is at least one."""
    if not slots:
        raise HostError("no seed takes part in the forward pass, so there is no adapter to save")
    found = [(slot, obstacle_to(slot)) for slot in slots]
    refused = [
        f"{described(slot.held.description)[0]} in {slot.site.name} {why}" for slot, why in found if why
    ]
    if refused:
        raise HostError(
            f"an adapter holds only low-rank seeds (lora) that are added to a torch.nn.Linear:"
            f" {', '.join(refused)}; prune() these seeds, or store everything with save(path)"
        )


def obstacle_to(slot: SeedSlot) -> str | None:
    """Return why the seed in ``slot`` cannot be exported; None if it can."""
    graft, module = slot.held, slot.place.module
    if not rank_of(graft.seed):
        return "has no rank"
    if type(module) is not nn.Linear:
        return f"is on a {type(module).__name__}"
    if graft.operator is not BlendOperator.ADD:
        return f"is blended by {graft.operator.name.lower()}"
    return None


def config_of(net: nn.Module, parts: dict[str, SeedSlot]) -> dict[str, Any]:
    """Return the content of PEFT's ``adapter_config.json`` for the seeds ``parts``, by path of their layer.

    The alpha of PEFT equals the rank of each layer, so that PEFT scales by 1.
    """
    ranks = {path: rank_of(slot.held.seed) for path, slot in parts.items()}
    [(usual, _)] = Counter(ranks.values()).most_common(1)
    pattern = {f"^{re.escape(path)}": rank for path, rank in ranks.items() if rank != usual}
    name = getattr(getattr(net, "config", None), "_name_or_path", None)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if _is_causal_language_model(net) else None,
        "base_model_name_or_path": name or None,
        "inference_mode": True,
        # PEFT takes the entries of a list as endings of names, which may fit further layers.
        "target_modules": "|".join(map(re.escape, ranks)),
        "r": usual,
        "lora_alpha": usual,
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "lora_bias": _has_bias(parts),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }


def tensors_of(parts: dict[str, SeedSlot]) -> dict[str, Tensor]:
    """Return the weights of PEFT's ``adapter_model.safetensors`` for the seeds ``parts``.

    PEFT trains adapters of models in half precision in float32, so weights are stored at least in float32.
    """
    tensors: dict[str, Tensor] = {}
    with_bias = _has_bias(parts)
    for path, slot in parts.items():
        layer, branches = slot.place.module, branches_of(slot.held.seed)
        assert isinstance(layer, nn.Linear)
        weight = layer.weight.detach().double()
        down = torch.cat([branch.down.weight.detach().double() for branch in branches])
        up = torch.cat([branch.up.weight.detach().double() for branch in branches], dim=1)
        up = slot.held.alpha.double() * up
        found = {"lora_A.weight": down @ weight, "lora_B.weight": up}
        if with_bias:
            found["lora_B.bias"] = up @ (down @ _bias_of(layer))
        dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        for name, value in found.items():
            tensors[f"base_model.model.{path}.{name}"] = value.to("cpu", dtype).contiguous()
    return tensors


def _bias_of(layer: nn.Linear) -> Tensor:
    bias: Tensor | None = layer.bias
    return layer.weight.new_zeros(layer.out_features).double() if bias is None else bias.detach().double()


def _has_bias(parts: dict[str, SeedSlot]) -> bool:
    """Return whether any layer has a bias; PEFT has one setting for all layers."""
    return any(slot.place.module.bias is not None for slot in parts.values())


def _is_causal_language_model(net: nn.Module) -> bool:
    return type(net).__name__.endswith(("ForCausalLM", "LMHeadModel"))
