"""First-order (gradient) scores of the candidates of a race."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.batch_training import Loss, loss_of
from esper.growth.race_runners import Candidate, grafted
from esper.kasmina.widening import WidthGraft


def score(
    host: nn.Module,
    candidates: Sequence[Candidate],
    training: Sequence[Any],
    held_out: Sequence[Any],
    loss: Loss,
) -> None:
    """Score every candidate by the slope of the validation loss along the training gradient of its new seed.

    One forward pass contains many candidate seeds, because the output of a new seed is exactly zero. One
    backward pass gives the training gradients g of these candidate seeds, another the validation gradients v.
    The score of a candidate is <g, v> / |g|, from training gradient g and validation gradient v of its seed.

    Args:
        host: Frozen network in evaluation mode.
        candidates: Candidates; their field ``first_order`` is set.
        training: Training batches.
        held_out: Validation batches.
        loss: Loss function.
    """
    for group in scored_together(candidates):
        with ExitStack() as stack:
            for each in group:
                stack.enter_context(grafted(host, each.site, each.graft))
            train = _gradients(host, group, training, loss)
            validation = _gradients(host, group, held_out, loss)
        for each, g, v in zip(group, train, validation, strict=True):
            each.first_order = float(g @ v / g.norm()) if bool(g.norm() > 0) else 0.0


def scored_together(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Return the candidates in groups that fit into one forward pass.

    A side module must not receive the hidden units that another candidate adds. The hooks of side modules run
    first, if they are registered first, so only side modules between two layers are in conflict.
    """
    wider = [each for each in candidates if isinstance(each.graft, WidthGraft)]
    between = {path for each in wider if each.site.pair for path in each.site.pair.unnormed}
    others = [each for each in candidates if each not in wider]
    inside = [each for each in others if each.site.path in between]
    first = [each for each in others if each not in inside] + wider
    return [group for group in (first, inside) if group]


def _gradients(
    host: nn.Module, group: Sequence[Candidate], batches: Sequence[Any], loss: Loss
) -> list[Tensor]:
    """Return the mean gradient of the seed of every candidate in ``group``, as a flat vector."""
    parameters = [list(each.graft.parameters()) for each in group]
    for each in group:
        each.graft.zero_grad()
    for batch in batches:
        (loss_of(host, batch, loss) / len(batches)).backward()
    return [
        torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in own])
        for own in parameters
    ]
