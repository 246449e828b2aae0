"""Masks of legal values for the eight heads of an action, derived from the legal pairs (op, slot)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from esper.leyline import (
    CANONICAL_ACTION,
    HEAD_NAMES,
    HEADS_OF_OP,
    NUM_BLUEPRINTS,
    STAGE_NAMES,
    ActionSpace,
    AlphaSpeed,
    Head,
    SlotTable,
    head_sizes,
    legal_slots_by_op,
)
from esper.tamiyo.policy.distributions import EmptyMaskError


@dataclass(frozen=True, slots=True)
class ActionMasks:
    """Legal actions of every environment, from which the mask of legal values of each head is computed."""

    slot_by_op: Tensor
    """Whether each op is legal on each slot, bool ``[env, op, slot]``."""
    blueprint: Tensor
    """Whether each blueprint is selectable for the host, bool ``[env, blueprint]``."""
    alpha_is_zero: Tensor
    """Whether the alpha of each slot is 0, bool ``[env, slot]``; pruning a seed at alpha 0 needs no ramp."""
    stages: Tensor
    """Stage of every slot, ``[env, slot]``, for error messages."""
    held: frozenset[int] = frozenset()
    """Heads that are fixed at their canonical value even if the op reads them."""

    @property
    def op(self) -> Tensor:
        """Mask of the op head, bool ``[env, op]``."""
        return self.slot_by_op.any(dim=-1)

    def of_head(self, head: int, chosen: Tensor) -> Tensor:
        """Return the mask ``[env, value]`` of one head, given the earlier heads in ``chosen [env, head]``.

        If the op does not read a head, the canonical value is the only legal value of that head.
        """
        if head == Head.OP:
            return self.op
        rows = torch.arange(chosen.shape[0], device=chosen.device)
        op, slot = chosen[:, Head.OP], chosen[:, Head.SLOT]
        if head == Head.SLOT:
            return self.slot_by_op[rows, op]
        read, canonical = _tables(self.slot_by_op.shape[-1], chosen.device)
        is_read = read[op, head] if head not in self.held else torch.zeros_like(op, dtype=torch.bool)
        if head in (Head.ALPHA_SPEED, Head.ALPHA_CURVE):
            is_read = is_read & ~self.alpha_is_zero[rows, slot]
        if head == Head.ALPHA_CURVE:
            is_read = is_read & (chosen[:, Head.ALPHA_SPEED] != AlphaSpeed.INSTANT)
        free = self.blueprint if head == Head.BLUEPRINT else torch.ones_like(canonical[head]).unsqueeze(0)
        return torch.where(is_read.unsqueeze(-1), free, canonical[head])

    def holding(self, heads: frozenset[int]) -> ActionMasks:
        """Return masks that fix ``heads`` at canonical values (blueprint: its first selectable value)."""
        legal, blueprint = self.slot_by_op.clone(), self.blueprint.clone()
        if Head.OP in heads:
            legal[:, CANONICAL_ACTION[Head.OP] + 1 :] = False
        if Head.SLOT in heads:
            legal[..., CANONICAL_ACTION[Head.SLOT] + 1 :] = False
        if Head.BLUEPRINT in heads:
            blueprint &= blueprint.cumsum(dim=-1) == 1
        held = self.held | (heads - {Head.OP, Head.SLOT, Head.BLUEPRINT})
        return replace(self, slot_by_op=legal, blueprint=blueprint, held=held)

    def each(self, change: Callable[[Tensor], Tensor]) -> ActionMasks:
        """Return the masks with every tensor ``x`` replaced by ``change(x)``."""
        names = ("slot_by_op", "blueprint", "alpha_is_zero", "stages")
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in names}
        return replace(self, **changed)

    def check(self, head: int, mask: Tensor) -> None:
        """Raise ``EmptyMaskError`` if an environment has no legal value in ``mask [env, value]``, a tensor on
        the CPU like the masks.
        """
        legal = mask.numpy().any(axis=-1)
        if not legal.all():
            env = int(legal.argmin())
            stages = ", ".join(STAGE_NAMES[stage] for stage in self.stages[env].tolist())
            raise EmptyMaskError(
                f"head {HEAD_NAMES[head]} of environment {env} has no legal value; its slots are {stages}"
            )


@cache
def _tables(num_slots: int, device: torch.device) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return which heads each op reads, bool ``[op, head]``, and the mask of each head's canonical value."""
    read = torch.from_numpy(HEADS_OF_OP.copy()).to(device)
    canonical = tuple(
        torch.arange(size, device=device) == int(value)
        for size, value in zip(head_sizes(num_slots), CANONICAL_ACTION, strict=True)
    )
    return read, canonical


def compute_batch_masks(table: SlotTable, space: ActionSpace) -> ActionMasks:
    """Return the legal actions of all environments of the slot table ``table``."""
    blueprint = torch.zeros(NUM_BLUEPRINTS, dtype=torch.bool)
    blueprint[list(space.blueprints)] = True
    masks = ActionMasks(
        slot_by_op=torch.from_numpy(legal_slots_by_op(table, space.rules)),
        blueprint=blueprint.expand(table.num_envs, -1),
        alpha_is_zero=torch.from_numpy(table.alpha == 0.0),
        stages=torch.from_numpy(table.stage.copy()),
        held=frozenset({int(Head.TEMPO)}) if space.rules.enters_at_once else frozenset(),
    )
    masks.check(Head.OP, masks.op)
    return masks


def compute_action_masks(table: SlotTable, env: int, space: ActionSpace) -> ActionMasks:
    """Return the legal actions of environment ``env``, as masks with a first axis of length 1."""
    return compute_batch_masks(table.row(env), space)
