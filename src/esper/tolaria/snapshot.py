"""A whole environment as plain tensors and numbers, to return to bit for bit."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

from esper.leyline.errors import EsperError
from esper.tolaria.env import MorphEnv
from esper.tolaria.flops import FlopLedger

Snapshot = dict[str, Any]


def take(env: MorphEnv) -> Snapshot:
    """Weights, buffers, optimisers, slot table, random streams, data cursor and counters of ``env``."""
    return {
        "origin": _origin(env),
        "episode": (env.episode, env.attempt),
        "epoch": env.epoch,
        "model": env.model.state(),
        "optimiser": copy.deepcopy(env.optimiser.state_dict()),
        "cursor": env.cursor.state(),
        "test": env.splits.test.state(),
        "host_stream": env.host_stream.get_state(),
        "sampling": env.sampling.get_state(),
        "augmenting": env.augmenting.get_state(),
        "recovery": env.recovery.state(),
        "next_seed_id": env.next_seed_id,
        "op_counts": list(env.op_counts),
        "refused": env.refused,
        "val_scores": list(env.val_scores),
        "learning_rate": env.learning_rate,
        "flops": asdict(env.meter.ledger),
        "flops_by_seed": env.meter.spent_by_slot(),
    }


def restore(env: MorphEnv, snapshot: Snapshot) -> None:
    """Put ``env`` back to where ``snapshot`` was taken, whatever it did since."""
    if snapshot["origin"] != _origin(env):
        # Weights would fit, but data and random streams are drawn anew from these names.
        raise EsperError(f"the snapshot is of {snapshot['origin']}; this one is {_origin(env)}")
    if (env.episode, env.attempt) != snapshot["episode"]:
        env.reset(*snapshot["episode"])
    env.model.load_state(snapshot["model"])
    env.optimiser.load_state_dict(copy.deepcopy(snapshot["optimiser"]))
    env.cursor.load_state(snapshot["cursor"])
    env.splits.test.load_state(snapshot["test"])
    env.host_stream.set_state(snapshot["host_stream"])
    env.sampling.set_state(snapshot["sampling"])
    env.augmenting.set_state(snapshot["augmenting"])
    env.recovery.load_state(snapshot["recovery"])
    env.epoch = snapshot["epoch"]
    env.next_seed_id = snapshot["next_seed_id"]
    env.op_counts = list(snapshot["op_counts"])
    env.refused = snapshot["refused"]
    env.val_scores = list(snapshot["val_scores"])
    env.learning_rate = snapshot["learning_rate"]
    env.meter.ledger = FlopLedger(**snapshot["flops"])
    env.meter.restore_spent(snapshot["flops_by_seed"])


def _origin(env: MorphEnv) -> str:
    return f"task {env.task.name}, rng seed {env.rng_seed}, environment {env.env}"
