"""Policies in files: weights as safetensors, with a description of the policy in the header of the file.

Loading a policy runs no code from its file. The header has a SHA-256 digest of description and weights, since
safetensors detects no flipped bit.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from esper.files.atomic_write import write_durably
from esper.leyline.errors import EsperError
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic, PolicyShape
from esper.tamiyo.policy.features import feature_names

POLICY_FILE = "policy.safetensors"

T = TypeVar("T")


class CheckpointError(EsperError):
    """Error: a checkpoint is missing, damaged, or does not fit the present run or version."""


# --- policies -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainedOn:
    """Settings of a policy's training episodes; an evaluation with other settings reports the difference."""

    task: str
    slots: int
    steps: int
    rent: float
    auto_forward: bool
    budget: int | None = None

    def differences(self, **settings: object) -> str:
        """Describe the ``settings`` that differ from those of the training; empty if none differs."""
        trained = asdict(self)
        names = [name for name, value in settings.items() if value != trained[name]]
        return ", ".join(f"{name} {settings[name]} (trained on {trained[name]})" for name in names)


def save_policy(
    policy: FactoredRecurrentActorCritic, directory: Path, trained_on: TrainedOn | None = None
) -> None:
    """Write a policy: its weights, its shape, the names of its features, and its training settings. An
    existing policy is replaced atomically.
    """
    description = {
        "shape": asdict(policy.shape),
        "features": feature_names(policy.num_slots, policy.shape.context),
        "trained_on": None if trained_on is None else asdict(trained_on),
    }
    write_durably(directory / POLICY_FILE, _encoded(json.dumps(description), policy.state_dict()))


def _encoded(description: str, weights: Mapping[str, Tensor]) -> bytes:
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    # One entry: safetensors writes several entries in random order, and equal policies must be equal files.
    return save(weights, {"policy": f"{_digest(description, weights)} {description}"})


def _digest(description: str, weights: dict[str, Tensor]) -> str:
    return hashlib.sha256(description.encode() + save(weights)).hexdigest()


def load_policy(directory: Path | str) -> FactoredRecurrentActorCritic:
    """Read a policy from its folder.

    Raises:
        CheckpointError: The policy is missing or damaged, or was trained on other features than this version
            computes.
    """
    directory = Path(directory)
    bound, tensors = _read_policy(directory)
    shape = _described(bound.get("shape"), PolicyShape, directory)
    _check_features(_described(bound.get("features"), tuple[str, ...], directory), shape, directory)
    policy = _build(shape, tensors, directory)
    policy.load_state_dict(tensors)
    return policy


def read_training(directory: Path | str) -> TrainedOn | None:
    """Return the training settings of the policy in ``directory``; ``None`` if they were not stored."""
    directory = Path(directory)
    bound, _ = _read_policy(directory)
    if bound.get("trained_on") is None:
        return None
    return _described(bound["trained_on"], TrainedOn, directory)


def _described(value: object, kind: type[T], directory: Path) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"'{directory / POLICY_FILE}' does not describe a policy: {error}") from None


def _read_policy(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read description and weights of a policy, and check their digest."""
    path = directory / POLICY_FILE
    content = read_bytes(path)
    try:
        weights = load(content)
        # The file begins with the size of its header, which safetensors does not return.
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        digest, _, description = header.get("__metadata__", {}).get("policy", "").partition(" ")
        if not description:
            raise ValueError("its header has no description")
        if _digest(description, weights) != digest:
            raise ValueError("it is not as it was written, since the digest differs")
        return dict(json.loads(description)), weights
    except (SafetensorError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"'{path}' is damaged or no policy of this version: {error}") from None


def _build(
    shape: PolicyShape, tensors: Mapping[str, Tensor], directory: Path
) -> FactoredRecurrentActorCritic:
    """Build the policy network of ``shape``; raises ``CheckpointError`` if ``tensors`` do not fit it."""
    sizes = asdict(shape)
    largest = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    for name, size in sizes.items():
        if isinstance(size, int) and size > largest:  # Refuse a wrong size before memory is allocated.
            raise _misfit(directory, f"{name} is {size}")
    try:
        with torch.random.fork_rng(devices=[]):  # Initial weights must not change the global random state.
            policy = FactoredRecurrentActorCritic(**sizes)
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"'{directory / POLICY_FILE}' does not describe a policy: {reason}") from None
    expected = policy.state_dict()
    for name in sorted(expected.keys() | tensors.keys()):
        ours, theirs = _in_words(expected.get(name)), _in_words(tensors.get(name))
        if ours != theirs:
            raise _misfit(directory, f"{name} is {theirs}, expected {ours}")
    return policy


def _misfit(directory: Path, found: str) -> CheckpointError:
    return CheckpointError(f"the weights in '{directory}' do not fit its own description: {found}")


def _in_words(tensor: Tensor | None) -> str:
    if tensor is None:
        return "nothing"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _check_features(names: tuple[str, ...], shape: PolicyShape, directory: Path) -> None:
    ours = feature_names(shape.num_slots, shape.context)
    if names != ours:
        missing = [name for name in names if name not in ours]
        new = [name for name in ours if name not in names]
        raise CheckpointError(
            f"the policy in '{directory}' was trained on other features, or on these in another order;"
            f" only in the policy: {', '.join(missing[:5]) or 'none'};"
            f" only in this version: {', '.join(new[:5]) or 'none'}; train it again"
        )


# --- files --------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raises ``CheckpointError`` if the file is missing or damaged."""
    try:
        content = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"'{path}' is damaged or no checkpoint: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"'{path}' holds {type(content).__name__} where an object is expected")
    return content


def read_bytes(path: Path) -> bytes:
    """Return the content of a file; raises ``CheckpointError`` if the file is missing or unreadable."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"'{path.parent}' holds no checkpoint: {path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read: {error.strerror}") from None
