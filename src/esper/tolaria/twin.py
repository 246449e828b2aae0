"""The do-nothing twin of an episode: the same host, data and random streams, trained without seeds.

The validation scores of a twin are cached on disk; the cache key is a digest of everything that determines
the scores. If the cached scores cannot be read, the twin is trained again.
"""

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from esper.files.atomic_write import SaveError, write_durably
from esper.leyline import CANONICAL_ACTION
from esper.leyline.errors import DivergedError
from esper.tolaria.devices import DEFAULT_COMPUTE, Compute
from esper.tolaria.env import EpisodeReport, MorphEnv, step_together
from esper.tolaria.tasks.spec import TaskSpec


def cache_folder(name: str) -> Path:
    """Return the path of the cache folder ``name``, which may not exist yet.

    The parent folder is the value of the environment variable ``ESPER_CACHE``, by default ``~/.cache/esper``.
    """
    base = os.environ.get("ESPER_CACHE")
    try:
        return Path(base or Path.home() / ".cache" / "esper") / name
    except RuntimeError:  # Path.home() fails for a user without a home directory.
        return Path(tempfile.gettempdir()) / "esper" / name


class TwinOf(NamedTuple):
    """Attempt at an episode that has a do-nothing twin, and the device and precision of the twin."""

    env: int = 0
    episode: int = 0
    attempt: int = 0
    compute: Compute = DEFAULT_COMPUTE


def run_without_growth(task: TaskSpec, *, rng_seed: int, **episode: Any) -> EpisodeReport:
    """Run an episode with WAIT at every step and return its report; ``episode`` has fields of ``TwinOf``."""
    [report] = run_all_without_growth(task, [TwinOf(**episode)], rng_seed=rng_seed)
    return report


def run_all_without_growth(
    task: TaskSpec, episodes: Sequence[TwinOf], *, rng_seed: int
) -> list[EpisodeReport]:
    """Run several episodes together with WAIT at every step and return their reports."""
    twins = [MorphEnv(task, rng_seed=rng_seed, env=of.env, compute=of.compute) for of in episodes]
    for twin, of in zip(twins, episodes, strict=True):
        twin.reset(of.episode, attempt=of.attempt)
    while going := [twin for twin in twins if not twin.ended]:
        step_together([(twin, CANONICAL_ACTION) for twin in going])
    return [twin.finish() for twin in twins]


def twin_scores(task: TaskSpec, episodes: Sequence[TwinOf], *, rng_seed: int) -> list[list[float]]:
    """Return the validation scores by epoch of do-nothing twins, cached on disk; the first is untrained.

    Twins without cached scores are trained together.

    Raises:
        DivergedError: A host diverges even without seeds.
    """
    # Twins of user tasks are not cached, because the code of a user's module is not part of the cache key.
    paths = {of: _path(task, rng_seed, of) for of in episodes} if task.build is None else {}
    cached = {of: _read(path, task.horizon + 1) for of, path in paths.items()}
    scores = {of: kept for of, kept in cached.items() if kept is not None}
    missing = [of for of in episodes if of not in scores]
    try:
        reports = run_all_without_growth(task, missing, rng_seed=rng_seed)
        for of, report in zip(missing, reports, strict=True):
            if report.cut_short:
                cause = f"the host of environment {of.env} broke down {report.rollbacks} times"
                raise DivergedError(f"{cause}; lower the learning rate")
    except DivergedError as error:
        raise DivergedError(
            f"the do-nothing twins of episode {missing[0].episode} could not be made: {error}"
        ) from error
    for of, report in zip(missing, reports, strict=True):
        scores[of] = list(report.val_scores)
        if of in paths:
            kept = {"scores": scores[of], "sha256": _digest(scores[of])}
            with contextlib.suppress(SaveError):
                write_durably(paths[of], json.dumps(kept).encode())
    return [scores[of] for of in episodes]


def _read(path: Path, count: int) -> list[float] | None:
    """Return the scores in a cache file; None if the file is damaged or does not contain ``count`` scores."""
    try:
        kept = json.loads(path.read_bytes())
        scores: list[float] = kept["scores"]
        sound = len(scores) == count and all(map(math.isfinite, scores)) and kept["sha256"] == _digest(scores)
    except (OSError, LookupError, RecursionError, TypeError, ValueError):
        return None
    return scores if sound else None


def _digest(scores: list[float]) -> str:
    return hashlib.sha256(json.dumps(scores).encode()).hexdigest()


def _path(task: TaskSpec, rng_seed: int, of: TwinOf) -> Path:
    device = of.compute.device
    # The cache key has the kind of the device and not its number, on which the scores hardly depend.
    kind = torch.cuda.get_device_name(device.torch) if device.is_cuda else "cpu"
    parts = (_task_key(task), kind, of.compute.amp, *map(str, (rng_seed, of.env, of.episode, of.attempt)))
    return cache_folder("twins") / f"{hashlib.sha256('/'.join(parts).encode()).hexdigest()}.json"


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
    """Return a digest of all source code on which the scores of an episode without seeds depend."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for folder in ("kasmina", "leyline", "tolaria"):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
