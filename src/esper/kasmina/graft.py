"""Grafts: seeds in the forward pass of a network, beside its layers or as blocks of its containers.

Every blend operator has the form ``h + alpha * change(h)``. For a delta d the change is d (ADD), h·tanh(d)
(MULTIPLY) or g(h)·d (GATE), so it is exactly zero if d is zero. Because of the term h, the gradient into the
host upstream of a slot is non-zero at every alpha.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.kasmina.blueprints import BlueprintSpec, Topology
from esper.kasmina.blueprints.tokens import Heads, showing
from esper.kasmina.edits import BlockContainer
from esper.kasmina.padding_mask import PaddingMask
from esper.kasmina.random_streams import TorchStream
from esper.kasmina.seed_description import description_of
from esper.leyline.errors import IncompatibleSeedError
from esper.leyline.factored_actions import BLEND_IDS, STYLE_OPERATORS, BlendOperator

if TYPE_CHECKING:
    from esper.kasmina.sites import Site
    from esper.kasmina.widening import PairLayers

SHADOW_MIN_SAMPLES: Final = 32
SHADOW_MIN_SHARE: Final = 0.25


def shadow_size(batch: int) -> int:
    """Return the number of samples on which an incubating seed trains, if the training batch has ``batch``
    samples."""
    return min(batch, max(SHADOW_MIN_SAMPLES, math.ceil(SHADOW_MIN_SHARE * batch)))


INITIAL_OPENING: Final = 1.0
"""Initial input of the sigmoid of a gate; the gate starts at sigmoid(1), about 0.73."""


class Participation(NamedTuple):
    """Settings of a seed for a forward pass, such as whether it is blended in and at which alpha."""

    active: bool = True
    """Whether the seed is blended into the features of the host."""
    alpha: Tensor | None = None
    """Alpha of the seed in the forward pass; None for the alpha that the graft stores."""
    taps: bool = False
    """Whether the slot stores features of some samples of a training batch, for the shadow branch."""
    ambient: bool = False
    """Whether the seed draws from the random stream that is active during the forward pass, not from its
    slot's stream."""


POINTWISE: Final[dict[Topology, type[nn.Conv2d | nn.Conv3d]]] = {
    "feature_map": nn.Conv2d,
    "volume": nn.Conv3d,
}
"""Convolutions by topology, for features whose second axis is the width."""


class Gate(nn.Module):
    """Gate: a learned factor between 0 and 1 for every position of the features.

    A gate starts constant, because random initial weights would take long to change: the gradient of a gate
    is proportional to the delta, which is zero at birth.
    """

    def __init__(self, width: int, topology: Topology) -> None:
        super().__init__()
        self.score = (
            POINTWISE[topology](width, 1, kernel_size=1, bias=False)
            if topology in POINTWISE
            else nn.Linear(width, 1, bias=False)
        )
        nn.init.zeros_(self.score.weight)

    def forward(self, h: Tensor) -> Tensor:
        return torch.sigmoid(INITIAL_OPENING + self.score(h))


def change(operator: BlendOperator, h: Tensor, seed: nn.Module, gate: nn.Module | None) -> Tensor:
    """Return the change of the features ``h`` by a seed at alpha 1, in the shape of ``h``."""
    if torch.is_grad_enabled() and not h.requires_grad:
        # In torch 2.13 the backward pass of a channels_last GroupNorm crashes on the CPU if its parameters
        # require a gradient and its input does not, so the input gets a gradient too.
        h = h.detach().requires_grad_()
    return pure_change(operator, h, seed, gate)


def pure_change(operator: BlendOperator, h: Tensor, seed: nn.Module, gate: nn.Module | None) -> Tensor:
    """Return the change of the features ``h`` by a seed, in operations that ``torch.fx`` can trace."""
    delta: Tensor = seed(h)
    if operator is BlendOperator.ADD:
        return delta
    if operator is BlendOperator.MULTIPLY:
        return h * torch.tanh(delta)
    if gate is None:
        raise RuntimeError("the GATE operator needs a gate module")
    opening: Tensor = gate(h)
    return opening * delta


class Handles(NamedTuple):
    """Handles of several hooks that are removed together."""

    hooks: tuple[RemovableHandle, ...]

    def remove(self) -> None:
        """Remove all hooks."""
        for hook in self.hooks:
            hook.remove()


class Graft(nn.Module):
    """Seed with its alpha in the forward pass of a network; subclasses define how the seed is attached.

    Args:
        site: Position of the slot in the network.
        name: Name of the seed's blueprint.
        style: Index of the blend style.
    """

    alpha: Tensor
    description: Tensor
    participation: Participation
    features: Tensor | None
    seed: nn.Module

    def __init__(self, site: Site, name: str, style: int, *, is_stored: bool) -> None:
        super().__init__()
        self.site = site
        self.operator = STYLE_OPERATORS[style]
        self.gate: nn.Module | None = None
        self.stream: TorchStream | None = None
        """Random stream for dropout in the seed; None for torch's global generator."""
        self.stochastic = False
        """Whether the seed draws random numbers in training mode."""
        # Alpha is a 0-d buffer and not a float, because torch.compile would recompile for every new float.
        self.register_buffer("alpha", torch.ones(()), persistent=is_stored)
        # Blueprint and style are a buffer, so that they are part of every state dict.
        self.register_buffer("description", description_of(name, style), persistent=is_stored)
        self.features = None
        vars(self)["participation"] = Participation()

    def attach(
        self, module: nn.Module, container: BlockContainer | None, layers: PairLayers | None
    ) -> RemovableHandle | Handles | None:
        """Add the seed to the forward pass of the network, behind ``module`` or in ``layers``; return a
        handle of its hooks, if there are any in modules outside the seed."""
        raise NotImplementedError

    def detach(self, container: BlockContainer | None) -> None:
        """Remove the seed from the container that it was inserted into, if it was."""

    def check_adds(self, what: str, style: int) -> None:
        """Raise IncompatibleSeedError unless the style blends by addition, the only way to blend ``what``."""
        if self.operator is not BlendOperator.ADD:
            raise IncompatibleSeedError(f"style {BLEND_IDS[style]} cannot blend {what}; choose linear_add")

    @property
    def copied_block(self) -> nn.Module:
        """Copy of a block that the seed has or is."""
        raise NotImplementedError

    def take_part(self, participation: Participation) -> None:
        """Set how the seed takes part in later forward passes, for example at which alpha."""
        # Assigning through vars avoids nn.Module.__setattr__, which would search parameters and submodules at
        # every minibatch.
        vars(self)["participation"] = participation

    def set_alpha(self, alpha: float) -> None:
        """Set the alpha that the graft stores."""
        self.alpha.fill_(alpha)

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Switch the seed off inside the context."""
        before = self.participation
        try:
            self.take_part(Participation(active=False))
            yield
        finally:
            self.take_part(before)

    def tensors(self) -> list[Tensor]:
        """Return every parameter and buffer of seed and gate."""
        return [*self.parameters(), *self.buffers()]

    def floats(self) -> list[Tensor]:
        """Return every floating-point parameter and buffer of seed and gate."""
        return [tensor.detach() for tensor in self.tensors() if tensor.is_floating_point()]


class SideGraft(Graft):
    """Seed with its gate and alpha; runs as a forward hook that returns ``h + alpha * change(h)`` for
    features ``h``.

    Args:
        site: Position of the slot in the network.
        spec: Blueprint of the seed.
        style: Index of the blend style.
        block: Module without slots that a copying blueprint copies; other blueprints ignore it.
        is_causal: Whether attention is causal; as the site states unless given.
    """

    def __init__(
        self,
        site: Site,
        spec: BlueprintSpec,
        style: int,
        block: nn.Module | None,
        is_causal: bool | None = None,
    ) -> None:
        super().__init__(site, spec.name, style, is_stored=True)
        self.seed = spec.build(block if spec.copies and block is not None else site.width)
        self.gate = Gate(site.width, site.topology) if self.operator is BlendOperator.GATE else None
        self.swap = None if spec.copies else site.swap
        """Axes to transpose before the seed receives the features; None for a copied block."""
        is_causal = site.is_causal if is_causal is None else is_causal
        heads = [] if spec.copies else [m for m in self.seed.modules() if isinstance(m, Heads)]
        for each in heads:
            each.is_causal = is_causal
        if heads and not is_causal:
            self.description = description_of(spec.name, style, is_causal=False)
        self.mask = PaddingMask(*site.mask) if heads and site.mask else None
        """Padding mask that the heads of the seed respect."""
        # The gradient of the seed's input is computed only for seeds with an affine GroupNorm, which need it
        # (ADR 0006); on a frozen network it costs time.
        norms = any(isinstance(m, nn.GroupNorm) and m.affine for m in self.seed.modules())
        self.change = change if norms else pure_change

    def attach(
        self, module: nn.Module, container: BlockContainer | None, layers: PairLayers | None
    ) -> RemovableHandle:
        self.train(module.training)
        if self.mask is None:
            return module.register_forward_hook(self.on_forward)
        return module.register_forward_hook(self.on_masked_forward, with_kwargs=True)

    @property
    def copied_block(self) -> nn.Module:
        block = self.seed.block
        assert isinstance(block, nn.Module)
        return block

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Set alpha to 0 inside the context, so that torch.compile does not recompile."""
        before = self.alpha.clone()
        try:
            self.alpha.zero_()
            yield
        finally:
            self.alpha.copy_(before)

    def on_masked_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Blend the seed, which does not attend to padding, into the output of the slot's submodule; this
        method is the forward hook if the slot sees a mask."""
        with self.showing(args, kwargs, self.site.output.features(output)):
            return self.on_forward(module, args, output)

    def showing(self, args: Any, kwargs: Any, h: Tensor) -> AbstractContextManager[None]:
        """Return a context in which the seed does not attend to the padding that arguments of the slot's
        submodule state; ``h`` are the features of the slot."""
        assert self.mask is not None
        seen = h.transpose(*self.swap) if self.swap else h
        return showing(self.seed, self.mask.visible(args, kwargs, seen))

    def on_forward(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Blend the seed into the output of the slot's submodule; this method is the forward hook."""
        part, where = self.participation, self.site.output
        h = output if where.holder == "tensor" else where.features(output)
        if part.taps and self.training:
            # The features at the slot are cloned, because an in-place activation downstream may overwrite
            # them.
            vars(self)["features"] = h.detach()[: shadow_size(len(h))].clone()
        if not part.active:
            return None
        grown = self.blended(h)
        return grown if where.holder == "tensor" else where.replaced(output, grown)

    def blended(self, h: Tensor) -> Tensor:
        """Return the features with the seed blended in, with the settings that ``take_part`` has stored."""
        part = self.participation
        if self.stochastic and self.training and self.stream is not None and not part.ambient:
            with self.stream:
                return self.forward(h, part.alpha)
        return self.forward(h, part.alpha)

    def forward(self, h: Tensor, alpha: Tensor | None = None) -> Tensor:
        """Return the features with the seed blended in, at the alpha that the graft stores unless one is
        given."""
        seen = h.transpose(*self.swap) if self.swap else h
        delta = self.change(self.operator, seen, self.seed, self.gate)
        weight = self.alpha if alpha is None else alpha
        # Under autocast a seed may return another dtype than the host's features.
        grown = torch.addcmul(seen, weight.to(seen.dtype), delta.to(seen.dtype))
        return grown.transpose(*self.swap) if self.swap else grown


class BlockGraft(Graft):
    """Copy of a block, which the network runs as a member of the container that it is inserted into.

    At alpha 1 the block runs as any other block. Otherwise a forward hook of the block returns ``h + alpha *
    (block(h) - h)`` for features ``h``.

    Args:
        site: Position of the slot in the network.
        spec: Blueprint of the seed.
        style: Index of the blend style.
        block: Copied block.

    Raises:
        IncompatibleSeedError: The style does not blend by addition.
    """

    def __init__(self, site: Site, spec: BlueprintSpec, style: int, block: nn.Module) -> None:
        super().__init__(site, spec.name, style, is_stored=False)
        self.check_adds("a block of the network", style)
        assert site.insertion is not None
        self.argument = site.insertion.features
        self._block = (block,)  # A tuple, because the block is registered in its container.
        self._is_full = True
        """Whether alpha is 1."""
        self._hook: RemovableHandle | None = None

    @property
    def seed(self) -> nn.Module:  # type: ignore[override]  # an attribute of other grafts
        return self._block[0]

    copied_block = seed

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters of the block, of which none is a direct parameter of the graft."""
        return self.seed.parameters() if recurse else iter(())

    def attach(self, module: nn.Module, container: BlockContainer | None, layers: PairLayers | None) -> None:
        assert container is not None
        container.insert(module, self.seed.train(module.training))
        self.take_part(self.participation)

    def detach(self, container: BlockContainer | None) -> None:
        assert container is not None
        container.remove(self.seed)
        self.set_hook(False)

    def take_part(self, participation: Participation) -> None:
        super().take_part(participation)
        self.set_hook(not (participation.active and participation.alpha is None and self._is_full))

    def set_alpha(self, alpha: float) -> None:
        super().set_alpha(alpha)
        vars(self)["_is_full"] = alpha == 1.0
        self.take_part(self.participation)

    @property
    def has_hook(self) -> bool:
        """Whether the block has a forward hook, because it is not at alpha 1 or is switched off."""
        return self._hook is not None

    def set_hook(self, needed: bool) -> None:
        """Register or remove the forward hook of the block."""
        if needed and self._hook is None:
            # Hooks of others, such as those that record hidden states, get the blended output.
            self._hook = self.seed.register_forward_hook(self.on_forward, prepend=True, with_kwargs=True)
        elif not needed and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def on_forward(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Blend the block's output with its input; this method is the forward hook of the block."""
        part, where = self.participation, self.site.output
        h = self.argument.value(args, kwargs)
        if not part.active:
            return where.replaced(output, h)
        weight = (self.alpha if part.alpha is None else part.alpha).to(h)
        return where.replaced(output, h + weight * (where.features(output) - h))

    def tensors(self) -> list[Tensor]:
        return [*self.seed.parameters(), *self.seed.buffers()]
