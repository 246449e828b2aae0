"""A slot in a user's network: one child of the submodule it stands behind, and that submodule's forward hook.

The child makes ``parameters``, ``state_dict``, ``to``, ``train``, deepcopy and pickling see the seed by
themselves. An empty slot has neither tensors nor a hook, so it costs nothing, keeps every key, and leaves
torch's fused paths (which look for hooks) as they are. With a seed the hook is there, and they step aside.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final
from weakref import WeakSet

import torch
import torch.fx
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.growth.sites import Output, Site, call, untouched
from esper.kasmina import birth, blend
from esper.kasmina.blueprints import BlueprintSpec, blueprint_named
from esper.kasmina.layers import Conv2d
from esper.kasmina.streams import TorchStream
from esper.leyline.errors import GrowthWarning, HostError, SlotError
from esper.leyline.factored_actions import BLEND_IDS, STYLE_OPERATORS, BlendOperator, Style

RESERVED: Final = "esper_slot"
"""Name under which a submodule has its slot as a child."""
torch.fx.wrap("replace")


class Graft(nn.Module):
    """A seed in the forward: ``h + alpha · change(h)``. It draws from the ambient random generator."""

    alpha: Tensor
    description: Tensor

    def __init__(
        self,
        seed: nn.Module,
        gate: nn.Module | None,
        operator: BlendOperator,
        swap: tuple[int, int] | None,
        description: Tensor,
    ) -> None:
        """``description`` says what to build; as a buffer it is in every state dict beside the weights."""
        super().__init__()
        self.seed = seed
        self.gate = gate
        self.operator = operator
        self.swap = swap
        # Only such a norm needs the input's gradient (ADR 0006), which costs time on a frozen network.
        norms = any(isinstance(m, nn.GroupNorm) and m.affine for m in seed.modules())
        self.change = blend.change if norms else blend.pure_change
        # A 0-d buffer and not a float: a compiled graph would be rebuilt for every new float.
        self.register_buffer("alpha", torch.ones(()))
        self.register_buffer("description", description)

    def forward(self, h: Tensor) -> Tensor:
        seen = h.transpose(*self.swap) if self.swap else h
        change = self.change(self.operator, seen, self.seed, self.gate)
        # Under autocast a seed may answer in another type than the host's.
        grown = torch.addcmul(seen, self.alpha.to(seen.dtype), change.to(seen.dtype))
        return grown.transpose(*self.swap) if self.swap else grown


class GrowthSlot(nn.Module):
    """The place for one seed behind the submodule that has this as its child."""

    def __init__(self, site: Site, submodule: nn.Module, token: str = "") -> None:
        super().__init__()
        self.site = site
        self.parent = (submodule,)
        """A tuple keeps torch from taking it for a part of the slot."""
        self.token = token
        """The same in all copies of the network: an average that has it follows this growth."""
        self.graft: Graft | None = None
        self.handle: RemovableHandle | None = None
        """Kept: only an unpickled handle reserves its hook's number in a new process."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's has no annotations
        COPIES.add(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Never called by a network that names its children; one that iterates over them is refused."""
        raise HostError(
            f"the submodule at '{self.site.path}' runs all its children in turn, its slot among them; name"
            " the child that comes last as the slot"
        )

    def on_forward(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Forward hook of the submodule: its output with the features grown."""
        assert self.graft is not None
        return replaced(self.site.output, output, self.graft(self.site.output.features(output)))

    def germinate(
        self, submodule: nn.Module, blueprint: str, style: int = Style.LINEAR_ADD, *, like: Tensor
    ) -> Graft:
        """Put a new seed into the forward at full alpha; ``like`` has the device and type of its parameters.

        A blueprint that is refused leaves slot and random state as they were.
        """
        if self.graft is not None:
            raise SlotError(f"slot {self.site.name} holds a seed already; prune it before the next one")
        spec = blueprint_named(blueprint, self.site.topology)
        birth.check_fits(spec, self.site.name, self.site.width, copyable=self.site.copyable)
        position = torch.get_rng_state()
        sample = self.sample_features(like, as_they_are=spec.copies)
        try:
            with birth.refusals(spec, sample):
                graft = build_graft(self.site, spec, style, submodule).to(like)
                birth.check_birth(spec, graft.seed, sample)
        except BaseException:  # Ctrl-C too leaves nothing half done
            torch.set_rng_state(position)
            raise
        self.hold(submodule, graft)
        return graft

    def hold(self, submodule: nn.Module, graft: Graft) -> None:
        """Take ``graft`` into the forward of ``submodule``."""
        self.graft = graft.train(submodule.training)
        self.handle = submodule.register_forward_hook(self.on_forward)
        forget_compiled()

    def remove(self) -> Graft:
        """Empty the slot; returns what was in it."""
        assert self.graft is not None
        assert self.handle is not None
        graft = self.graft
        self.handle.remove()
        self.graft, self.handle = None, None
        forget_compiled()
        return graft

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Hold the seed that the state describes before torch loads its weights, or none."""
        wanted = state_dict.get(f"{prefix}graft.description")
        if self.graft is not None and (wanted is None or not torch.equal(self.graft.description, wanted)):
            if wanted is None:
                sentence = (
                    f"the state that was loaded has no seed in slot {self.site.name}; its own was removed"
                )
                GrowthWarning.issue(sentence)
            self.remove()
        if self.graft is None and wanted is not None:
            self.rebuild(wanted, next(self.parent[0].parameters(), state_dict[f"{prefix}graft.alpha"]))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def rebuild(self, description: Tensor, like: Tensor) -> None:
        """The seed that was described, with any weights; drawing them leaves the random state as it is."""
        blueprint, style = described(description)
        spec = blueprint_named(blueprint, self.site.topology)
        with TorchStream(0):
            graft = build_graft(self.site, spec, style, self.parent[0]).to(like).requires_grad_(True)
        self.hold(self.parent[0], graft)

    def sample_features(self, like: Tensor, *, as_they_are: bool) -> Tensor:
        """Two samples of made-up features; all values differ, as a normalisation makes zero of a constant."""
        shape = (2, *self.site.shape[1:])
        count = int(torch.Size(shape).numel())
        sample = torch.linspace(-1.0, 1.0, count).view(shape).to(like)
        return sample.transpose(*self.site.swap) if self.site.swap and as_they_are else sample

    @contextmanager
    def off(self) -> Iterator[None]:
        """The seed changes nothing inside; by its alpha, so that nothing is compiled anew."""
        assert self.graft is not None
        before = self.graft.alpha.clone()
        self.graft.alpha.zero_()
        try:
            yield
        finally:
            self.graft.alpha.copy_(before)


COPIES: Final[WeakSet[GrowthSlot]] = WeakSet()
"""Slots that came about by deepcopy or from a file."""


def build_graft(site: Site, spec: BlueprintSpec, style: int, submodule: nn.Module) -> Graft:
    """A seed with what it needs to join; a copy repeats ``submodule`` without its slots."""
    operator = STYLE_OPERATORS[style]
    seed = spec.build(without_slots(submodule) if spec.copies else site.width)
    for layer in seed.modules():
        if type(layer) is Conv2d:
            object.__setattr__(layer, "__class__", nn.Conv2d)  # torch's own: compilers and exporters know it
    gate = blend.Gate(site.width, site.topology) if operator is BlendOperator.GATE else None
    swap = None if spec.copies else site.swap  # a copy knows the features as they are
    return Graft(seed, gate, operator, swap, description_of(spec.name, style))


def description_of(blueprint: str, style: int) -> Tensor:
    """What to build, as bytes: formats for weights take tensors only."""
    return torch.tensor(list(json.dumps([blueprint, BLEND_IDS[style]]).encode()), dtype=torch.uint8)


def described(description: Tensor) -> tuple[str, int]:
    """Blueprint and style of a seed."""
    blueprint, style = json.loads(bytes(description.tolist()))
    return blueprint, BLEND_IDS.index(style)


def without_slots(module: nn.Module) -> nn.Module:
    """A copy of ``module`` with no slot in it."""
    twin = copy.deepcopy(module)
    detach(twin)
    return twin


def replaced(where: Output, output: Any, features: Tensor) -> Any:
    """``output`` with its features exchanged, as an object of the same kind; ``torch.fx`` can trace it."""
    holder, key = where
    if holder == "tensor":
        return features
    if holder == "tuple":
        return output[:key] + (features,) + output[key + 1 :]  # noqa: RUF005  a proxy cannot be unpacked
    if holder == "list":
        return output[:key] + [features] + output[key + 1 :]  # noqa: RUF005
    if holder == "namedtuple":
        return output._replace(**{key: features})
    if holder == "dataclass":
        return replace(output, **{key: features})
    return output | {key: features}


def slots_of(net: nn.Module) -> dict[str, GrowthSlot]:
    """The slots in ``net`` by the path of their submodule."""
    found = ((path, module._modules.get(RESERVED)) for path, module in net.named_modules())
    return {path: slot for path, slot in found if isinstance(slot, GrowthSlot)}


def attach(net: nn.Module, sites: Sequence[Site], sample: Any, token: str = "") -> list[GrowthSlot]:
    """Give ``net`` an empty slot at every site; refused, it is left as it was."""
    if slots_of(net):
        raise HostError(
            f"this {type(net).__name__} is growing already; call finish() of its Growth before another"
        )
    slots = [GrowthSlot(site, net.get_submodule(site.path), token) for site in sites]
    for slot in slots:
        slot.parent[0].add_module(RESERVED, slot)
    try:
        for training in (False, True):  # finish compares both: what fails then would fail after all training
            with untouched(net, training=training), torch.no_grad():
                call(net, sample)
    except HostError:
        detach(net)
        raise
    except Exception as error:
        detach(net)
        raise HostError(
            f"{type(net).__name__} fails on the sample in training mode: {error}. Pass a batch as in"
            " training, of two samples or more"
        ) from error
    forget_compiled()
    return slots


def detach(net: nn.Module) -> None:
    """Take all slots out of ``net``, with what they hold."""
    for path, slot in slots_of(net).items():
        if slot.graft is not None:
            slot.remove()
        del net.get_submodule(path)._modules[RESERVED]


def forget_compiled() -> None:
    """Compile anew at the next call: torch.compile does not notice a hook that comes or goes."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
