"""How a seed learns before it touches the host: on a shadow branch.

The features at the slot are blended with the seed at a sampled alpha and pushed through the rest of
the host with detached parameters and cloned buffers, inside the slot's own random stream. The seed
learns on the loss that it *would* cause; nothing of the host changes, not even its random state.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call

from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.transfer import send

Loss = Callable[[Tensor, Tensor], Tensor]


def shadow_loss(
    model: MorphogeneticModel, slot: int, targets: Tensor, loss: Loss, *, look: bool = True
) -> Tensor:
    """The loss of the batch just seen, had the seed at ``slot`` been blended in; call ``backward`` on it.

    With a ``look`` at its weights, NaN for a seed that is not finite, even where tanh or ReLU would hide it.
    """
    seed_slot = model.slot(slot)
    features = model.captured(slot)
    if look and not seed_slot.is_finite:
        return torch.full((), math.nan, device=features.device)  # features may be whole numbers: tokens
    with seed_slot.stream:
        alphas = model.live_alphas
        # Drawn on the processor, whatever the device; in (0, 1]: at 0 nothing is learned.
        alphas[slot] = send(1.0 - torch.rand(()), features.device)
        frozen = _frozen_tensors(model, slot)
        output = functional_call(model, frozen, (features, alphas), {"start": slot}, tie_weights=False)
        return loss(output, targets[: features.shape[0]])


def _frozen_tensors(model: MorphogeneticModel, slot: int) -> dict[str, Tensor]:
    """Stand-ins for every tensor of the model but the incubating seed's own.

    One for each place that a module keeps a tensor in, whatever is shared. Left to itself,
    ``functional_call`` swaps a shared module's tensor once per name of the module, and hands the stand-in
    back as the original (torch 2.13): a tied embedding would learn no more.
    """
    own = f"slots.{slot}."
    frozen: dict[str, Tensor] = {}
    clones: dict[int, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, weight in module.named_parameters(prefix, recurse=False):
            frozen[name] = weight.detach()
        for name, buffer in module.named_buffers(prefix, recurse=False):
            frozen[name] = clones.setdefault(id(buffer), buffer.clone())
    return {name: tensor for name, tensor in frozen.items() if not name.startswith(own)}
