"""The do-nothing twin: an episode with the same host, data and random streams, and no seeds.

The twin's scores are cached on disk; the cache key is a digest of everything that determines the scores. If
the cache cannot be read or written, the twin is run again.
"""

import contextlib
import hashlib
import json
import math
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from esper.files.atomic_write import SaveError, write_durably
from esper.files.cache_folder import cache_folder
from esper.leyline.errors import DivergedError
from esper.tolaria.devices import DEFAULT_COMPUTE, Compute
from esper.tolaria.env import MorphEnv
from esper.tolaria.episode_report import EpisodeReport
from esper.tolaria.tasks.spec import TaskSpec


def run_without_growth(
    task: TaskSpec,
    *,
    rng_seed: int,
    env: int = 0,
    episode: int = 0,
    attempt: int = 0,
    compute: Compute = DEFAULT_COMPUTE,
) -> EpisodeReport:
    """Run an episode without actions and return its report."""
    twin = MorphEnv(task, rng_seed=rng_seed, env=env, compute=compute)
    twin.reset(episode, attempt=attempt)
    return twin.run_out()


def twin_scores(
    task: TaskSpec,
    *,
    rng_seed: int,
    env: int = 0,
    episode: int = 0,
    attempt: int = 0,
    compute: Compute = DEFAULT_COMPUTE,
) -> list[float]:
    """Return the twin's validation scores of the untrained host and after every epoch; cached on disk.

    Raises:
        DivergedError: The host alone diverges.
    """
    path = cache_folder("twins") / f"{_key(task, compute, rng_seed, env, episode, attempt)}.json"
    kept = _read(path, task.horizon + 1) if task.build is None else None
    if kept is not None:
        return kept
    try:
        report = run_without_growth(
            task, rng_seed=rng_seed, env=env, episode=episode, attempt=attempt, compute=compute
        )
        if report.cut_short:
            raise DivergedError(f"its host broke down {report.rollbacks} times; lower the learning rate")
    except DivergedError as error:
        raise DivergedError(
            f"the do-nothing twin of environment {env}, episode {episode} could not be made: {error}"
        ) from error
    scores = list(report.val_scores)
    # Twins of user tasks are not cached, because the code of a user's module is not part of the key.
    if task.build is not None:
        return scores
    with contextlib.suppress(SaveError):
        write_durably(path, json.dumps({"scores": scores, "sha256": _digest(scores)}).encode())
    return scores


def _read(path: Path, count: int) -> list[float] | None:
    """Return the scores in a cache file; None if the file is damaged or has not ``count`` finite numbers."""
    try:
        kept = json.loads(path.read_bytes())
        scores: list[float] = kept["scores"]
        sound = len(scores) == count and all(map(math.isfinite, scores)) and kept["sha256"] == _digest(scores)
    except (OSError, LookupError, RecursionError, TypeError, ValueError):
        return None
    return scores if sound else None


def _digest(scores: list[float]) -> str:
    return hashlib.sha256(json.dumps(scores).encode()).hexdigest()


def _key(task: TaskSpec, compute: Compute, *place: int) -> str:
    device = compute.device
    # Devices of one kind compute the same results.
    kind = torch.cuda.get_device_name(device.torch) if device.is_cuda else "cpu"
    parts = (_task_key(task), kind, compute.amp, *map(str, place))
    return hashlib.sha256("/".join(parts).encode()).hexdigest()


@cache
def _task_key(task: TaskSpec) -> str:
    """Return a digest of everything in task, code and machine that can change a twin's scores."""
    settings = {
        name: str(value)
        for name, value in asdict(task).items()
        if name not in ("load", "digest", "objective", "rules")
    }
    parts = (
        json.dumps(settings, sort_keys=True),
        f"{task.load.__module__}.{task.load.__qualname__}",
        task.digest(),
        _code_digest(),
        version("esper"),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        str(torch.get_num_threads()),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def _code_digest() -> str:
    """Return a digest of the source code that an episode without seeds runs."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for folder in ("kasmina", "leyline", "tolaria"):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
