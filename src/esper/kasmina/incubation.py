"""Incubation: training of a seed on a shadow branch, before the seed changes the network's output; and the
statistics of a seed's gradients, which gate G2 reads.

On the shadow branch the incubating seed is blended in at a random alpha, all other parameters are detached
and all buffers are cloned. The incubating seed learns from the loss of the shadow branch, and the network
does not change. Incubation in a slot with a random stream also leaves the global random state unchanged. In a
built-in host the shadow branch starts at the slot, from features that the last training pass stored. In any
other network the shadow branch repeats the whole forward pass on a share of the batch.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.kasmina.graft import Participation, shadow_size
from esper.kasmina.network import MorphogeneticModel
from esper.leyline.slot_table import GradientStatistics
from esper.leyline.thresholds import GRADIENT_EXPLODING, GRADIENT_VANISHING

Loss = Callable[[Tensor, Tensor], Tensor]


def shadow_loss(
    model: MorphogeneticModel, slot: int, x: Tensor, y: Tensor, loss: Loss, *, look: bool = True
) -> Tensor:
    """Return the loss of the last training batch ``x, y`` on the shadow branch, in which the seed at ``slot``
    is blended in.

    Args:
        model: Network in training mode.
        slot: Index of the slot of the incubating seed.
        x: Inputs of the last training batch.
        y: Targets of the last training batch.
        loss: Loss function, called with output and target.
        look: Whether to return NaN if a weight of the seed is not finite; tanh or ReLU could hide such a
            weight in the loss.
    """
    if model.segments is not None:
        features = model.captured(slot)
        return _in_shadow(
            model, slot, features.device, look, lambda m: loss(m(features, slot), y[: len(features)])
        )
    size = shadow_size(len(x))
    return _in_shadow(model, slot, x.device, look, lambda m: loss(m(x[:size]), y[:size]))


def shadow_loss_of(model: MorphogeneticModel, slot: int, batch_loss: Callable[[], Tensor]) -> Tensor:
    """Return the loss that ``batch_loss`` computes on the shadow branch, with the seed at ``slot`` blended
    in."""
    device = next(model.slots[slot].held.parameters()).device
    return _in_shadow(model, slot, device, True, lambda _: batch_loss())


class _Call(nn.Module):
    """Module whose forward calls a given function with the network, as ``functional_call`` requires a
    module."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, run: Callable[[nn.Module], Any]) -> Any:
        return run(self.network)


def _in_shadow(
    model: MorphogeneticModel, slot: int, device: torch.device, look: bool, run: Callable[[nn.Module], Tensor]
) -> Tensor:
    own = model.slots[slot]
    if look and not model.is_finite(slot):
        return torch.full((), math.nan, device=device)
    parts = [Participation(active=i in model.blended, ambient=True) for i in range(len(model.slots))]
    with own.draws():
        # Alpha is drawn from (0, 1], because a seed learns nothing at alpha 0; it is drawn on the CPU, so
        # that it is equal on every device.
        alpha = 1.0 - torch.rand(())
        alpha = alpha.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else alpha
        parts[slot] = Participation(alpha=alpha, ambient=True)
        with model.taking_part(parts):
            return functional_call(_Call(model), _frozen_tensors(model, slot), (run,), tie_weights=False)


def _frozen_tensors(model: MorphogeneticModel, slot: int) -> dict[str, Tensor]:
    """Return the model's tensors by name, without those of the incubating seed: parameters detached, buffers
    cloned.

    A tensor that several modules share has one entry for each of these modules. If a shared tensor had only
    one entry, ``functional_call`` (torch 2.13) would not restore the original tensor, and a tied embedding
    would stop learning.
    """
    own = {id(tensor) for tensor in model.slots[slot].held.tensors()}
    frozen: dict[str, Tensor] = {}
    clones: dict[int, Tensor] = {}
    for prefix, module in model.named_modules(prefix="network"):
        for name, weight in module.named_parameters(prefix, recurse=False):
            if id(weight) not in own:
                frozen[name] = weight.detach()
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if id(buffer) not in own:
                frozen[name] = clones.setdefault(id(buffer), buffer.clone())
    return frozen


# --- gradient statistics ------------------------------------------------------------------------------------


def statistics_from(summary: Sequence[float]) -> GradientStatistics:
    """Return gradient statistics of a seed from its total norm and shares of vanishing and exploding norms.

    health = 1 − 0.5·(share of vanishing gradients) − 0.8·(share of exploding gradients), clamped to [0, 1]; 0
    if the total norm is not finite.
    """
    norm, small, large = summary
    health = 1.0 - 0.5 * small - 0.8 * large if math.isfinite(norm) else 0.0
    return GradientStatistics(norm, min(max(health, 0.0), 1.0), small > 0, large > 0)


def statistics_of(norms: Tensor) -> GradientStatistics:
    """Return statistics of a seed's gradient norms, one per parameter tensor, in one read from the device."""
    return statistics_from(gradient_summary(norms).tolist())


def gradient_summary(norms: Tensor) -> Tensor:
    """Return, on the device of ``norms``, the total norm and the shares of vanishing and exploding norms.

    A norm vanishes below the vanishing bound, and explodes above the exploding bound or if it is not finite.
    """
    finite = norms.isfinite()
    small = finite & (norms < GRADIENT_VANISHING)
    large = ~finite | (norms > GRADIENT_EXPLODING)
    return torch.stack([torch.linalg.vector_norm(norms), small.float().mean(), large.float().mean()])


def tensor_norms(tensors: list[Tensor]) -> Tensor:
    """Return the norm of each gradient, one per parameter tensor."""
    return torch.stack(torch._foreach_norm(tensors))
