"""Masks of the eight heads, derived from the legal (op, slot) pairs and ``HEADS_OF_OP``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

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
    """Legal actions of every environment, from which the mask of each head follows."""

    slot_by_op: Tensor
    """Legal pairs ``[env, op, slot]``, see ``legal_slots_by_op``."""
    blueprint: Tensor
    """Selectable blueprints of the host, ``[env, blueprint]``."""
    alpha_is_zero: Tensor
    """Slots ``[env, slot]`` with alpha 0, whose removal needs no ramp."""
    stages: Tensor
    """Stages ``[env, slot]`` for error messages."""
    held: frozenset[int] = frozenset()
    """Heads fixed at their canonical value even where the op reads them."""

    @property
    def op(self) -> Tensor:
        """Mask of the op head, ``[env, op]``."""
        return self.slot_by_op.any(dim=-1)

    def of_head(self, head: int, chosen: Tensor) -> Tensor:
        """Return the mask ``[env, values]`` of one head, given the earlier heads in ``chosen [env, 8]``.

        The only legal value of a head that the op does not read is its canonical value.
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
        """Return masks that fix ``heads`` at their canonical value, blueprint at the first selectable one."""
        legal, blueprint = self.slot_by_op.clone(), self.blueprint.clone()
        if Head.OP in heads:
            legal[:, CANONICAL_ACTION[Head.OP] + 1 :] = False
        if Head.SLOT in heads:
            legal[..., CANONICAL_ACTION[Head.SLOT] + 1 :] = False
        if Head.BLUEPRINT in heads:
            blueprint &= blueprint.cumsum(dim=-1) == 1
        held = self.held | (heads - {Head.OP, Head.SLOT, Head.BLUEPRINT})
        return replace(self, slot_by_op=legal, blueprint=blueprint, held=held)

    def to(self, device: torch.device) -> ActionMasks:
        """Return the masks on ``device``."""
        names = ("slot_by_op", "blueprint", "alpha_is_zero", "stages")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def check(self, head: int, mask: Tensor) -> None:
        """Raise ``EmptyMaskError`` if a row of ``mask [env, values]`` has no legal value."""
        legal = mask.any(dim=-1)
        if not legal.all():
            env = int((~legal).nonzero()[0, 0])
            stages = ", ".join(STAGE_NAMES[stage] for stage in self.stages[env].tolist())
            raise EmptyMaskError(
                f"head {HEAD_NAMES[head]} of environment {env} has no legal value; its slots are {stages}"
            )


@cache
def _tables(num_slots: int, device: torch.device) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return ``HEADS_OF_OP`` as a tensor, and the mask of the canonical value of each head."""
    read = torch.from_numpy(HEADS_OF_OP.copy()).to(device)
    canonical = tuple(
        torch.arange(size, device=device) == int(value)
        for size, value in zip(head_sizes(num_slots), CANONICAL_ACTION, strict=True)
    )
    return read, canonical


def compute_batch_masks(table: SlotTable, space: ActionSpace) -> ActionMasks:
    """Return the masks of all environments of ``table``."""
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
    """Return the masks of one environment, as a batch of one."""
    return compute_batch_masks(table.row(env), space)
