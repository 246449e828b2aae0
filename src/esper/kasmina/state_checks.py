"""Comparison of the seeds and blocks in a state dict with those of a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor, nn

from esper.kasmina.optimizer_groups import SEED_NAME
from esper.kasmina.seed_description import described, described_rank
from esper.leyline.errors import HostError
from esper.leyline.factored_actions import BLEND_IDS

NOTE: Final = (
    "grown by esper: read with esper.lightning.load_from_checkpoint(cls, path), or under transformers call"
    " finish and save_pretrained"
)
"""Key of the edits in a state dict that a trainer saves; an error about unknown keys shows it to the user."""


def check_blocks(
    containers: Mapping[str, nn.Module], state_dict: Mapping[str, Any], prefix: str, remedy: str
) -> None:
    """Raise HostError if a state dict has another number of blocks in one of the containers."""
    for container, blocks in containers.items():
        inside = f"{prefix}{container}." if container else prefix
        saved = {name[len(inside) :].partition(".")[0] for name in state_dict if name.startswith(inside)}
        own = {name for name, block in blocks.named_children() if block.state_dict()}
        if saved and saved != own:
            raise HostError(
                f"the state has {len(saved)} blocks in '{inside[:-1] or type(blocks).__name__}', and this"
                f" network has {len(own)}; {remedy}"
            )


def seeds_in(state_dict: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """Return texts about the seeds in the state dict of a growing network, by path of their submodule."""
    end = f".{SEED_NAME}.graft.description"
    return {
        name[len(prefix) : -len(end)]: text_of(value)
        for name, value in state_dict.items()
        if name.startswith(prefix) and name.endswith(end)
    }


def listed(seeds: Mapping[str, str]) -> str:
    """Return the seeds as a text, such as "lora (linear_add) in head"."""
    return ", ".join(f"{text} in {path}" for path, text in sorted(seeds.items())) or "no seed"


def text_of(description: Tensor) -> str:
    """Return a text about a seed, such as "lora (linear_add, rank 10)"."""
    blueprint, style = described(description)
    rank = described_rank(description)
    return f"{blueprint} ({BLEND_IDS[style]}{'' if rank is None else f', rank {rank}'})"
