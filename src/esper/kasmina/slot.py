"""One slot: the seed module, its gate, its optimiser and its random stream.

Stage, ages and alpha belong to the slot table; the slot keeps only what torch needs. The part set
by ``engage`` describes the pass under way and is no state of the slot.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.kasmina import birth, blend
from esper.kasmina.blueprints import BlueprintSpec, Topology, blueprint_at
from esper.kasmina.blueprints.conv import ConvLight
from esper.kasmina.native import takes
from esper.kasmina.optim import OptimiserRecipe, clone_tree, copy_moments
from esper.kasmina.streams import TorchStream
from esper.leyline.errors import BlueprintError, SlotError
from esper.leyline.factored_actions import STYLE_OPERATORS, BlendOperator


class Part(NamedTuple):
    """What a slot does in one pass; a single value, because setting attributes of a module is slow."""

    weight: Tensor | None
    """Blend the seed in at this alpha."""
    tap: int
    """Keep the features of so many samples."""
    ghost: bool
    """Join straight-through: the host's value, the seed's gradient."""
    ambient: bool
    """Draw from the random stream that the caller entered, not from the slot's own."""


class SeedSlot(nn.Module):
    """A place in the host where a seed can live."""

    alpha: Tensor
    part: Part | None

    def __init__(self, slot_id: str, width: int, topology: Topology, stream: TorchStream) -> None:
        super().__init__()
        self.slot_id = slot_id
        self.width = width
        self.topology: Topology = topology
        self.stream = stream
        self.original: tuple[nn.Module, ...] = ()
        """The trunk's last block before this slot, if there is one that could be repeated here. A tuple keeps
        torch from taking it for a part of the slot."""
        self.seed: nn.Module | None = None
        self.gate: nn.Module | None = None
        self.operator = BlendOperator.ADD
        self.optimiser: Optimizer | None = None
        self.stochastic = False
        """The seed draws random numbers when it runs in training mode."""
        # A 0-d buffer and not a float: a compiled graph would be rebuilt for every new float.
        self.register_buffer("alpha", torch.zeros(()))
        self.disengage()

    # --- the pass under way -------------------------------------------------------------------

    def engage(
        self, weight: Tensor | None, *, tap: int = 0, ghost: bool = False, ambient: bool = False
    ) -> None:
        """Take a part in the pass to come, or none; see ``Part``."""
        joins = weight is not None or tap > 0 or ghost
        # Past nn.Module, which would look through parameters and submodules at every pass.
        vars(self)["part"] = Part(weight, tap, ghost, ambient) if joins else None

    @property
    def engaged(self) -> bool:
        return self.part is not None

    def disengage(self) -> None:
        """Let the features pass as they are, and forget what earlier passes left."""
        self.engage(None)
        self.features: Tensor | None = None
        self.poisoned = False

    def forward(self, h: Tensor) -> Tensor:
        """The features that the host continues with."""
        part = self.part
        if part is None:
            return h
        if part.tap:
            # A clone, because an in-place activation downstream may overwrite h.
            self.features = h.detach()[: part.tap].clone()
        if part.weight is not None:
            return self._blended(h, part.weight, part.ambient)
        return self._straight_through(h) if part.ghost else h

    def _blended(self, h: Tensor, alpha: Tensor, ambient: bool) -> Tensor:
        seed, trains_host = self.seed, h.requires_grad or not torch.is_grad_enabled()
        if isinstance(seed, ConvLight) and self.operator is BlendOperator.ADD and takes(h) and trains_host:
            return seed.added(h, alpha)
        return torch.addcmul(h, alpha, self._change(h, ambient))

    def _change(self, h: Tensor, ambient: bool = False) -> Tensor:
        if self.seed is None:
            raise RuntimeError(f"slot {self.slot_id} is engaged but empty")
        if self.stochastic and self.training and not ambient:
            with self.stream:
                return blend.change(self.operator, h, self.seed, self.gate)
        return blend.change(self.operator, h, self.seed, self.gate)

    def _straight_through(self, h: Tensor) -> Tensor:
        """The host's value with the seed's gradient; a non-finite seed is left out of the graph.

        Its weights are looked at too: tanh and ReLU return finite values for infinite ones, and only
        the gradient would show it.
        """
        change = self._change(h.detach().clone()) if self.is_finite else None
        if change is None or not torch.isfinite(change).all():
            self.poisoned = True
            return h
        self.poisoned = False
        return h + (change - change.detach())

    # --- the seed of this slot ----------------------------------------------------------------

    def germinate(self, blueprint: int, style: int, recipe: OptimiserRecipe, sample: Tensor) -> int:
        """Attach a new seed; returns its parameter count. ``sample`` is a batch of features of this slot.

        A blueprint that is refused leaves the slot as it was.
        """
        if self.seed is not None:
            raise SlotError(f"slot {self.slot_id} holds a seed already; prune it before the next one")
        spec = blueprint_at(blueprint, self.topology)
        birth.check_fits(spec, self.slot_id, self.width, copyable=bool(self.original))
        position = self.stream.get_state()
        try:
            with self.stream, birth.refusals(spec, sample):
                seed = self._attach(blueprint, style, recipe)
                self.stochastic = birth.check_birth(spec, seed, sample)
        except BlueprintError:
            self.remove()
            self.stream.set_state(position)
            raise
        return sum(p.numel() for p in self.parameters())

    def takes(self, spec: BlueprintSpec) -> bool:
        """Whether a seed of this blueprint can be built here."""
        return birth.takes(spec, self.width, copyable=bool(self.original))

    def _attach(self, blueprint: int, style: int, recipe: OptimiserRecipe) -> nn.Module:
        spec = blueprint_at(blueprint, self.topology)
        operator = STYLE_OPERATORS[style]
        seed = spec.build(copy.deepcopy(self.original[0]) if spec.copies else self.width)
        gate = blend.Gate(self.width, self.topology) if operator is BlendOperator.GATE else None
        self.seed, self.gate, self.operator = seed, gate, operator
        self.to(self.alpha.device, self.alpha.dtype)
        if self.topology == "feature_map":
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stubs
        self.optimiser = recipe.make(self.parameters())
        self.train(self.training)
        return seed

    def take_over(self, original: nn.Module, optimiser: Optimizer) -> None:
        """Go on from the weights of ``original`` and from what its optimiser has gathered for them."""
        assert self.seed is not None
        assert self.optimiser is not None
        own = self.seed.state_dict()
        self.seed.load_state_dict(dict(zip(own, original.state_dict().values(), strict=True)))
        copy_moments(optimiser, original.parameters(), self.optimiser, self.seed.parameters())

    def remove(self) -> None:
        """Empty the slot: module, gate, optimiser and gradients go, the random stream stays."""
        self.seed, self.gate, self.optimiser = None, None, None
        self.operator, self.stochastic = BlendOperator.ADD, False
        self.alpha.zero_()
        self.disengage()

    def floats(self) -> list[Tensor]:
        """Every weight and statistic of the seed that could be other than finite."""
        return [t.detach() for t in chain(self.parameters(), self.buffers()) if t.is_floating_point()]

    @property
    def is_finite(self) -> bool:
        """Whether every weight and statistic of the seed is finite."""
        return all(bool(torch.isfinite(t).all()) for t in self.floats())

    # --- state --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything torch holds for this slot, apart from what the slot table knows."""
        empty = self.seed is None
        return {
            "weights": None if empty else {k: v.clone() for k, v in self.state_dict().items()},
            "optimiser": None if self.optimiser is None else clone_tree(self.optimiser.state_dict()),
            "stochastic": self.stochastic,
            "stream": self.stream.get_state(),
        }

    def rebuilt(
        self, state: dict[str, Any], blueprint: int, style: int, recipe: OptimiserRecipe | None
    ) -> SeedSlot:
        """A slot in ``state``, beside this one; the slot table's blueprint and style say what to build."""
        twin = SeedSlot(self.slot_id, self.width, self.topology, TorchStream(0))
        twin.stream.set_state(state["stream"])
        twin.original = self.original
        twin.to(self.alpha.device, self.alpha.dtype).train(self.training)
        if state["weights"] is not None:
            if recipe is None:
                raise RuntimeError("a state with seeds needs bind_optimiser(host_optimiser) first")
            with TorchStream(0):  # initial values are overwritten, so they must not cost a draw
                twin._attach(blueprint, style, recipe)
            twin.load_state_dict(state["weights"])
            assert twin.optimiser is not None
            twin.optimiser.load_state_dict(clone_tree(state["optimiser"]))
            twin.stochastic = state["stochastic"]
        return twin

    def become(self, other: SeedSlot) -> None:
        """Take over everything of ``other``; it is left for the collector."""
        self.remove()
        self.seed, self.gate, self.operator = other.seed, other.gate, other.operator
        self.optimiser, self.stochastic = other.optimiser, other.stochastic
        self.alpha.copy_(other.alpha)
        self.stream.set_state(other.stream.get_state())
