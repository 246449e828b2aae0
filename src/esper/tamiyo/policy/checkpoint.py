"""A trained policy on disk: weights as safetensors, the rest as JSON. Loading runs no code from the file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from esper.leyline.errors import EsperError
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic, PolicyShape
from esper.tamiyo.policy.features import feature_names

POLICY_FILE = "policy.safetensors"
SHAPE_FILE = "policy.json"


class CheckpointError(EsperError):
    """A checkpoint that is missing, damaged, or of another kind than what is asked of it."""


def write_durably(path: Path, content: bytes) -> None:
    """Write, flush to the disk, then rename: a reader sees the old file or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def save_policy(policy: FactoredRecurrentActorCritic, directory: Path) -> None:
    """Write the policy with what it is bound to: its shape and the names of its features."""
    directory.mkdir(parents=True, exist_ok=True)
    shape = asdict(policy.shape)
    bound = {"shape": shape, "features": list(feature_names(policy.num_slots))}
    write_durably(directory / POLICY_FILE, save_tensors(policy.state_dict()))
    write_durably(directory / SHAPE_FILE, (json.dumps(bound, indent=1) + "\n").encode())


def load_policy(directory: Path | str) -> FactoredRecurrentActorCritic:
    """Read a policy back; one whose features are not this version's is refused by name."""
    directory = Path(directory)
    bound = read_json(directory / SHAPE_FILE)
    known = {field.name for field in fields(PolicyShape)}
    try:
        shape = PolicyShape(**{name: value for name, value in bound["shape"].items() if name in known})
        names = tuple(bound["features"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"'{directory / SHAPE_FILE}' does not describe a policy: {error}") from None
    _check_features(names, shape.num_slots, directory)
    settings = asdict(shape)
    policy = FactoredRecurrentActorCritic(settings.pop("state_dim"), settings.pop("num_slots"), **settings)
    weights = load_tensors(directory / POLICY_FILE)
    try:
        policy.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights in '{directory}' do not fit its own description: {error}"
        ) from None
    return policy


def _check_features(names: tuple[str, ...], num_slots: int, directory: Path) -> None:
    ours = feature_names(num_slots)
    if names != ours:
        missing = [name for name in names if name not in ours]
        new = [name for name in ours if name not in names]
        raise CheckpointError(
            f"the policy in '{directory}' was trained on other features: it knows"
            f" {', '.join(missing[:5]) or 'none'} that are not there, and not"
            f" {', '.join(new[:5]) or 'none'} that are; train it again"
        )


def save_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as safetensors."""
    return save({name: tensor.contiguous() for name, tensor in tensors.items()})


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file; a damaged one gets a sentence."""
    try:
        return load(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"'{path.parent}' holds no checkpoint: {path.name} is missing") from None
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(f"'{path}' is damaged or no checkpoint: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; a damaged one gets a sentence."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"'{path.parent}' holds no checkpoint: {path.name} is missing") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"'{path}' is damaged or no checkpoint: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"'{path}' holds {type(content).__name__} where an object is expected")
    return content
