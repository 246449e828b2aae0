"""A host and its slots as one module.

The slot table owns stages and alphas. ``sync`` is the only function that copies them to where
torch reads them: the alpha buffers and the lists of slots that take part in a pass.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.kasmina.blueprints import blueprint_at, names_for, specs_for
from esper.kasmina.hosts.base import Host
from esper.kasmina.optim import OptimiserRecipe
from esper.kasmina.slot import SeedSlot
from esper.kasmina.streams import TorchStream
from esper.leyline.errors import HostError
from esper.leyline.lifecycle_rules import ActionSpace, LifecycleRules
from esper.leyline.slot_config import SlotConfig
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import Stage
from esper.leyline.stream_seeds import derive_seed

Alphas = Sequence[Tensor | None]
"""One blend weight per slot; ``None`` lets the features pass."""

SHADOW_MIN_SAMPLES = 32
SHADOW_MIN_SHARE = 0.25


def slot_streams(rng_seed: int) -> Callable[[str], TorchStream]:
    """Random streams of slots, named by slot id."""
    return lambda slot_id: TorchStream(derive_seed(rng_seed, "slot", slot_id))


def shadow_size(batch: int) -> int:
    """Samples of a batch that an incubating seed learns from."""
    return min(batch, max(SHADOW_MIN_SAMPLES, math.ceil(SHADOW_MIN_SHARE * batch)))


class MorphogeneticModel(nn.Module):
    """A network that can grow: the host, one ``SeedSlot`` per place, and a row of the slot table."""

    def __init__(
        self,
        host: Host,
        rules: LifecycleRules | None = None,
        *,
        table: SlotTable | None = None,
        streams: Callable[[str], TorchStream] | None = None,
    ) -> None:
        super().__init__()
        self.host = host
        self.rules = rules or LifecycleRules()
        self.slot_config: SlotConfig = host.slot_config
        self.table = table if table is not None else SlotTable.empty(1, self.slot_config.num_slots)
        make_stream = streams or slot_streams(0)
        self.slots = nn.ModuleList(
            SeedSlot(slot_id, width, host.topology, make_stream(slot_id))
            for slot_id, width in zip(self.slot_config.slot_ids, host.widths, strict=True)
        )
        self._seed_slots: list[SeedSlot] = [s for s in self.slots if isinstance(s, SeedSlot)]
        for index, slot in enumerate(self._seed_slots):
            original = host.original(index)
            slot.original = () if original is None else (original,)
        self._host_parameters = list(host.parameters())
        self._optimiser: Optimizer | None = None
        self._recipe: OptimiserRecipe | None = None
        self.sync()

    # --- passes -------------------------------------------------------------------------------

    def forward(self, x: Tensor, alphas: Alphas | None = None, start: int | None = None) -> Tensor:
        """Output for ``x``, by default with the seeds as the table has them.

        In training mode incubating seeds listen in. With ``start`` the pass begins at that slot:
        ``x`` is what ``captured`` returned for it. With ``alphas`` nobody listens, and seeds draw from
        the random stream that the caller entered.
        """
        if alphas is None:
            self._engage_live(x)
        else:
            for slot, weight in zip(self._seed_slots, alphas, strict=True):
                slot.engage(weight, ambient=True)
        try:
            output: Tensor = self.host(x, self._seed_slots, start)
        finally:
            for slot in self._seed_slots:
                slot.engage(None)
        return output

    def forward_from(self, slot: int, h: Tensor, alphas: Alphas) -> Tensor:
        """Run on from the features at ``slot``."""
        return self(h, alphas, start=slot)

    def _engage_live(self, x: Tensor) -> None:
        shadow = self.training and bool(self.incubating) and self.rules.incubation == "shadow"
        tap = shadow_size(x.shape[0]) if shadow else 0
        ghosts = self.training and self.rules.incubation == "straight_through"
        for index, (slot, weight) in enumerate(zip(self._seed_slots, self.live_alphas, strict=True)):
            incubating = index in self.incubating
            slot.engage(weight, tap=tap if incubating else 0, ghost=ghosts and incubating)

    def captured(self, slot: int) -> Tensor:
        """What the last training pass kept for the incubating seed at ``slot``."""
        kept = self._seed_slots[slot].features
        if kept is None:
            raise RuntimeError(f"no pass has kept features for slot {self.slot_config.slot_ids[slot]}")
        return kept

    # --- the table's mirror -------------------------------------------------------------------

    def sync(self) -> None:
        """Bring alpha buffers and participation in line with the slot table."""
        stage, alpha, taking_part = self.table.stage[0], self.table.alpha[0], self.table.in_forward[0]
        self.incubating = [i for i in range(len(self._seed_slots)) if stage[i] == Stage.TRAINING]
        """Slots whose seed learns behind the host."""
        self.blended = [i for i in range(len(self._seed_slots)) if taking_part[i]]
        """Slots whose seed takes part in the forward pass."""
        for index, slot in enumerate(self._seed_slots):
            slot.alpha.fill_(float(alpha[index]))
            slot.disengage()
        # Listed once: walking the modules at every minibatch would cost as much as a convolution.
        self._seed_parameters = [list(slot.parameters()) for slot in self._seed_slots]

    @property
    def live_alphas(self) -> list[Tensor | None]:
        """The blend weights of the network as it stands."""
        # Looked up each time: moving a module to another device or type replaces its buffers.
        return [slot.alpha if i in self.blended else None for i, slot in enumerate(self._seed_slots)]

    def slot(self, index: int) -> SeedSlot:
        return self._seed_slots[index]

    @property
    def action_space(self) -> ActionSpace:
        """What a controller may do with this model."""
        topology, named = self.host.topology, self.rules.blueprints
        specs = [spec for spec in specs_for(topology) if not named or spec.name in named]
        useful = [s for s in specs if any(slot.takes(s) for slot in self._seed_slots)]
        slots, chosen = list(enumerate(self._seed_slots)), tuple(spec.index for spec in useful)
        unfit = frozenset((i, spec.index) for spec in useful for i, slot in slots if not slot.takes(spec))
        return ActionSpace(self.slot_config, self.rules, chosen, names_for(topology), unfit)

    # --- growth -------------------------------------------------------------------------------

    def bind_optimiser(self, optimiser: Optimizer) -> None:
        """Seeds get optimisers like this one, each an object of its own."""
        self._optimiser, self._recipe = optimiser, OptimiserRecipe.of(optimiser)

    @property
    def recipe(self) -> OptimiserRecipe:
        if self._recipe is None:
            raise RuntimeError("call bind_optimiser(host_optimiser) before the first seed germinates")
        return self._recipe

    def germinate(self, slot: int, blueprint: int, style: int) -> int:
        """Build a seed into ``slot``; returns its parameter count. The table is the lifecycle's to change."""
        shape = (2, *self.host.feature_shapes[slot])
        # All values differ: a normalisation would make zero of a constant.
        sample = torch.linspace(-1.0, 1.0, math.prod(shape)).view(shape).to(self._seed_slots[slot].alpha)
        params = self._seed_slots[slot].germinate(blueprint, style, self.recipe, sample)
        if blueprint_at(blueprint, self.host.topology).copies:
            self._seed_slots[slot].take_over(*self._copied(slot))
        return params

    def _copied(self, slot: int) -> tuple[nn.Module, Optimizer]:
        """What a copy in ``slot`` repeats: the nearest copy upstream, else the trunk's block."""
        new, optimiser = self._seed_slots[slot], self._optimiser
        found = new.original[0]
        for earlier in self._seed_slots[:slot]:
            if earlier.seed is not None and type(earlier.seed) is type(new.seed):
                found, optimiser = earlier.seed, earlier.optimiser
        assert optimiser is not None
        return found, optimiser

    def remove(self, slot: int) -> None:
        """Take the seed out of ``slot``, with its optimiser; the table is the lifecycle's to change."""
        self._seed_slots[slot].remove()

    def is_finite(self, slot: int) -> bool:
        """Whether every weight of the seed in ``slot`` is finite."""
        return self._seed_slots[slot].is_finite

    def host_parameters(self) -> list[nn.Parameter]:
        """The host's own parameters, without any seed's."""
        return self._host_parameters

    def seed_parameters(self, slot: int) -> list[nn.Parameter]:
        """The parameters of the seed and gate in ``slot``."""
        return self._seed_parameters[slot]

    def drop_gradients(self) -> None:
        for parameters in (self._host_parameters, *self._seed_parameters):
            for parameter in parameters:
                parameter.grad = None

    def count_parameters(self) -> tuple[int, int]:
        """Trainable parameters of the host, and of all seeds attached to it."""
        host = sum(p.numel() for p in self.host.parameters() if p.requires_grad)
        grown = sum(p.numel() for p in self.slots.parameters() if p.requires_grad)
        return host, grown

    # --- state --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Weights, buffers, seeds with their optimisers and streams, and the slot table."""
        return {
            "host": {name: value.clone() for name, value in self.host.state_dict().items()},
            "slots": [slot.state() for slot in self._seed_slots],
            "table": {name: torch.from_numpy(a.copy()) for name, a in self.table.arrays().items()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Return to a state taken from a model of the same host, whatever grew since.

        Everything is built and checked beside the model first: a state that cannot be used, or is not
        finite, raises and leaves the model as it was.
        """
        table = SlotTable(**{name: value.numpy() for name, value in state["table"].items()})
        seeds = zip(table.blueprint[0].tolist(), table.style[0].tolist(), strict=True)
        slots = [
            slot.rebuilt(kept, blueprint, style, self._recipe)
            for slot, kept, (blueprint, style) in zip(self._seed_slots, state["slots"], seeds, strict=True)
        ]
        _check_fits(self.host.state_dict(), state["host"])
        if not all(slot.is_finite for slot in slots) or not all(
            t.isfinite().all() for t in state["host"].values()
        ):
            raise HostError("a state with weights that are not finite cannot be returned to")
        self.table.assign(table)
        self.host.load_state_dict(state["host"])
        for slot, rebuilt in zip(self._seed_slots, slots, strict=True):
            slot.become(rebuilt)
        self.sync()


def _check_fits(own: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Raise unless both name the same tensors of the same shapes."""
    names = sorted(own.keys() ^ other.keys())
    names += [name for name in own.keys() & other.keys() if own[name].shape != other[name].shape]
    if names:
        raise HostError(f"the state belongs to another host; different: {', '.join(names[:5])}")
