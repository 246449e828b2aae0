"""Digests of weights after three epochs of growth, for every built-in host and several training settings.

Run ``python -m tests.golden.growth_digests`` to print the digests of the present code as JSON.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from esper.leyline import LifecycleRules
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks import task_named
from esper.tolaria.tasks.spec import InstanceDistribution, TaskSpec

EPOCHS = 3
AT_ONCE = LifecycleRules(min_training_epochs=0, enters_at_once=True, min_prune_age=3, embargo_epochs=2)
INCUBATING = LifecycleRules(min_training_epochs=2, min_prune_age=3, embargo_epochs=2)


def task_of(host: str, way: str) -> TaskSpec:
    """Return a short task on digits or source code, for a host of kind cnn, residual or gpt."""
    base = replace(task_named("pycode" if host == "gpt" else "digits"), horizon=5, batches_per_epoch=8)
    if host == "residual":
        instances = InstanceDistribution(widths=((8, 8, 8),), learning_rates=(0.02,), trunks=(1,))
        base = replace(base, host="residual", instances=instances)
    if way == "stack" and host == "gpt":
        base = base.with_trunk(1)
    task = replace(base, rules=INCUBATING if way == "incubating" else AT_ONCE)
    if way == "wsd":
        return replace(task, schedule="wsd", warmup=4, optimiser="adamw", clip=1.0)
    return replace(task, budget=10**10 if host == "gpt" else 10**8) if way == "budget" else task


def actions_of(env: MorphEnv, host: str, way: str) -> list[np.ndarray]:
    """Return the actions of the first three steps: two germinations, then WAIT."""
    light = "mlp_small" if host == "gpt" else "conv_light"
    blueprint = "stack" if way == "stack" else light
    style = "gated_gate" if way == "gated" else "linear_add"
    first, second = (
        env.action_space.action(
            "germinate", slot=slot, blueprint=blueprint, style=style, tempo="fast", alpha_target="full"
        )[0]
        for slot in ("r0c0", "r0c2")
    )
    return [first, second, env.action_space.action("wait")[0]]


def tensors_of(env: MorphEnv) -> Iterator[Tensor]:
    """Yield every weight tensor of the host and of its seeds."""
    yield from env.model.host_parameters()
    for slot in range(env.table.num_slots):
        yield from env.model.seed_parameters(slot)


def grown(host: str, way: str) -> MorphEnv:
    """Return an environment whose network was trained and grown for three epochs."""
    env = MorphEnv(task_of(host, way), rng_seed=7)
    env.reset()
    for action in actions_of(env, host, way):
        env.step(action)
    return env


def digest(env: MorphEnv) -> dict[str, object]:
    """Return digest, number of tensors and sum of squares of the weights, FLOPs, and validation loss."""
    weights = [tensor.detach().contiguous() for tensor in tensors_of(env)]
    parts = sorted(hashlib.sha256(w.numpy().tobytes()).hexdigest() for w in weights)
    return {
        "sha256": hashlib.sha256("".join(parts).encode()).hexdigest(),
        "tensors": len(weights),
        "squares": sum(float(w.double().square().sum()) for w in weights),
        "flops": env.host.meter.ledger.total,
        "val_loss": env._val_loss,
    }


def cases() -> list[tuple[str, str]]:
    """Return all pairs (host, way to grow) except (cnn, stack), because a CNN host has no block to copy."""
    ways = ("conv_light", "gated", "stack", "incubating", "wsd", "budget")
    return [(h, w) for h in ("cnn", "residual", "gpt") for w in ways if (h, w) != ("cnn", "stack")]


def machine() -> str:
    """Return torch version, processor model and vector instructions, which can change the last bit of a
    weight.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().split("\n\n")[0].splitlines() if cpuinfo.exists() else []
    known = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    model = "/".join(known.get(key, "?") for key in ("vendor_id", "cpu family", "model"))
    vectors = sorted(f for f in known.get("flags", "").split() if f.startswith(("avx", "amx", "fma")))
    return f"torch {torch.__version__}, {model}, {' '.join(vectors)}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {f"{host}/{way}": digest(grown(host, way)) for host, way in cases()}
    print(json.dumps({"machine": machine(), "digests": found}, indent=1))  # noqa: T201
