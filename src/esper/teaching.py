"""Runs a training: from a configuration to a directory with telemetry, checkpoints and the best policy.

``DIR/checkpoints/round-N`` are whole states and ``DIR/checkpoints/latest`` names the one that counts;
it is replaced after a state is complete on disk, so a process killed at any moment leaves a state to
resume from. A state is sealed with digests of its files, and one that differs is refused.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from esper.build import describe_run, one_thread
from esper.config import TrainingConfig, checked, read_settings
from esper.karn.query import read_rows
from esper.leyline.errors import EsperError, RunDirectoryError
from esper.leyline.events import DetailRow, RunRow, UpdateRow
from esper.nissa.part import PART_NAME
from esper.nissa.writer import RunWriter
from esper.simic.agent.ppo import PPOSettings
from esper.simic.rewards.families import FAMILIES
from esper.simic.training import exchange
from esper.simic.training.vectorized import (
    OPTIMISER_FILE,
    PROGRESS_FILE,
    RoundSummary,
    Trainer,
    TrainingSettings,
    train,
)
from esper.tamiyo.policy.checkpoint import (
    POLICY_FILE,
    SEAL_FILE,
    SHAPE_FILE,
    CheckpointError,
    SaveError,
    check_seal,
    read_bytes,
    save_policy,
    seal,
    write_durably,
)
from esper.tamiyo.policy.observer import check_capacity
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks import TaskSpec, task_named

CONFIG_FILE = "config.json"
POINTER = "latest"
STATE_NAME: Final = re.compile(r"round-[0-9]{5,}(-again)?")
STATE_FILES: Final = (POLICY_FILE, SHAPE_FILE, OPTIMISER_FILE, PROGRESS_FILE)


class FinishedRunError(EsperError):
    """A run that has no round left."""


def task_of(config: TrainingConfig) -> TaskSpec:
    """The preset with the training's own horizon and slots."""
    task = task_named(config.task)
    task = replace(task, horizon=config.steps or task.horizon)
    if config.slots is not None:
        task = task.with_slots(config.slots)
    check_capacity(task.num_slots, config.capacity or task.num_slots)
    return replace(task, instances=replace(task.instances, vary_slots=config.vary_slots))


def settings_of(config: TrainingConfig) -> TrainingSettings:
    """The part of the configuration that the trainer takes."""
    given = config.model_dump()
    if config.gamma is None:
        given["gamma"] = FAMILIES[config.reward_family].gamma
    ppo = PPOSettings(**{f.name: given[f.name] for f in fields(PPOSettings) if f.name in given})
    own = {f.name: given[f.name] for f in fields(TrainingSettings) if f.name in given}
    return TrainingSettings(**own, ppo=ppo)


def teach(
    config: TrainingConfig,
    directory: Path,
    *,
    resume: bool = False,
    on_round: Callable[[RoundSummary], None] = lambda summary: None,
) -> None:
    """Train to the last round; every process of the run calls this, the first one writes."""
    with one_thread():
        trainer = Trainer(task_of(config), settings_of(config))
        sizes = _load_latest(trainer, config, directory) if resume else None
        if exchange.rank() != 0:
            train(trainer)
            return
        problems: list[str] = []
        with RunWriter(directory, problems.append, resume_from=sizes) as writer:
            if not sizes:
                _begin(config, directory, writer, trainer)

            def record(summary: RoundSummary) -> None:
                writer.emit(row_of(summary))
                for detail in detail_rows(summary):
                    writer.emit(detail)
                writer.flush()
                if problems:  # a checkpoint without its rows would lose them; one before it does not
                    raise SaveError(problems[0].partition(";")[0])
                on_round(summary)

            try:
                train(
                    trainer,
                    record,
                    on_best=lambda: save_policy(trainer.policy, directory / "best"),
                    on_checkpoint=lambda: _save_state(trainer, directory, writer.sizes()),
                )
            except SaveError as error:
                raise SaveError(
                    f"{error}; what was saved before is intact: make room, then go on with"
                    f" esper train --resume {directory}"
                ) from None


def _begin(config: TrainingConfig, directory: Path, writer: RunWriter, trainer: Trainer) -> None:
    write_durably(directory / CONFIG_FILE, (config.model_dump_json(indent=1) + "\n").encode())
    env = MorphEnv(trainer.task, rng_seed=config.rng_seed)
    env.reset(0)
    writer.emit(describe_run(config, "ppo", directory.name, env))
    writer.flush()


# --- the state of a run ---------------------------------------------------------------------------


class Progress(msgspec.Struct):
    """What is asked of a state's progress file."""

    round: Annotated[int, msgspec.Meta(ge=1)]
    best_return: float | None
    skipped_in_a_row: Annotated[int, msgspec.Meta(ge=0)]
    detail_rounds: Annotated[int, msgspec.Meta(ge=0)]
    task: str
    horizon: int
    settings: dict[str, object]
    telemetry: dict[str, Annotated[int, msgspec.Meta(ge=0)]]
    """Bytes by table."""


def _save_state(trainer: Trainer, directory: Path, sizes: dict[str, int]) -> None:
    """A whole new state beside the old one, then the pointer, then the old one goes."""
    folder = directory / "checkpoints"
    name = f"round-{trainer.round:05d}"
    if (folder / POINTER).exists() and (folder / POINTER).read_text() == name:
        name += "-again"  # of a run that ends within the round after a checkpoint
    _flush_to_disk(directory / "telemetry")
    trainer.save(folder / name, {"telemetry": sizes})
    seal(folder / name, STATE_FILES)
    write_durably(folder / POINTER, name.encode())
    for old in folder.glob("round-*"):
        if old.name != name:
            shutil.rmtree(old, ignore_errors=True)


def _flush_to_disk(telemetry: Path) -> None:
    """Rows that a state counts on must outlast a power cut as the state does."""
    try:
        for part in telemetry.glob(f"*/{PART_NAME}"):
            with part.open("rb") as file:
                os.fsync(file.fileno())
    except OSError as error:
        raise SaveError(f"'{telemetry}' cannot be written: {error.strerror}") from None


def _load_latest(trainer: Trainer, config: TrainingConfig, directory: Path) -> dict[str, int]:
    """Load the state that counts and return its sizes of telemetry.

    A run killed before its first state starts again from its own row, or from nothing.
    """
    _check_config(config, directory)
    state = _latest_state(directory / "checkpoints")
    if state is None:
        part = directory / "telemetry" / "run" / PART_NAME
        written = read_bytes(part) if part.exists() else b""
        return {"run": len(written)} if written.endswith(b"\n") else {}
    check_seal(state, STATE_FILES)
    progress = _progress_of(state)
    try:
        trainer.load(state)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"the checkpoint in '{state}' does not fit its run: {reason}") from None
    if trainer.round >= trainer.settings.rounds:
        raise FinishedRunError(
            f"the run in '{directory}' has finished its {trainer.settings.rounds} rounds;"
            " there is nothing to resume"
        )
    _check_telemetry(progress.telemetry, directory)
    return progress.telemetry


def _check_config(config: TrainingConfig, directory: Path) -> None:
    """Refuse a run whose configuration is not the one it began with."""
    for row in read_rows(directory, RunRow)[:1]:
        began = checked(TrainingConfig, row.config).model_dump()
        now = config.model_dump()
        different = [f"{name} was {began[name]}, is {now[name]}" for name in now if began[name] != now[name]]
        if different:
            raise CheckpointError(
                f"'{directory / CONFIG_FILE}' was changed since the run began: {'; '.join(different)}"
            )


def _latest_state(folder: Path) -> Path | None:
    """The state that counts; if the pointer was never written, the newest that is complete."""
    pointer = folder / POINTER
    if not pointer.exists():
        complete = [seal.parent for seal in folder.glob(f"round-*/{SEAL_FILE}")]
        return max(complete, key=lambda state: state.name, default=None)
    name = read_bytes(pointer).decode(errors="replace").strip()
    if not STATE_NAME.fullmatch(name):
        raise CheckpointError(f"'{pointer}' must name a state such as round-00005; found {name[:80]!r}")
    return folder / name


def _progress_of(state: Path) -> Progress:
    try:
        progress = msgspec.json.decode(read_bytes(state / PROGRESS_FILE), type=Progress)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"'{state / PROGRESS_FILE}' is damaged or no checkpoint: {error}") from None
    if state.name.removesuffix("-again") != f"round-{progress.round:05d}":
        raise CheckpointError(f"'{state}' holds the state of round {progress.round}, not of its own")
    return progress


def _check_telemetry(sizes: dict[str, int], directory: Path) -> None:
    """Refuse to continue rows of which some are gone."""
    for table, size in sizes.items():
        part = directory / "telemetry" / table / PART_NAME
        found = part.stat().st_size if part.exists() else 0
        if found < size:
            raise CheckpointError(
                f"'{part}' lost rows since the checkpoint: {found} of {size} bytes are left"
            )


def config_of_run(directory: Path) -> TrainingConfig:
    """The configuration of a training run, as it was written at its start."""
    if not (directory / CONFIG_FILE).exists():
        raise RunDirectoryError(f"'{directory}' is no training run: it has no {CONFIG_FILE}")
    return checked(TrainingConfig, read_settings(directory / CONFIG_FILE))


def row_of(summary: RoundSummary) -> UpdateRow:
    """A round as its row of telemetry."""
    metrics = summary.metrics
    shared = {name: getattr(metrics, name) for name in UpdateRow.__struct_fields__ if hasattr(metrics, name)}
    own = {name: getattr(summary, name) for name in UpdateRow.__struct_fields__ if hasattr(summary, name)}
    explosion = None if metrics.explosion is None else asdict(metrics.explosion)
    columns = {**shared, **own, "op_shares": list(summary.op_shares), "explosion": explosion}
    return UpdateRow(**_known(columns))


def _known(value: Any) -> Any:
    """The same with ``None`` in the place of every number that is not finite, however deep."""
    if isinstance(value, dict):
        return {name: _known(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_known(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def detail_rows(summary: RoundSummary) -> Iterator[DetailRow]:
    """The round decision by decision, where an anomaly asked for it."""
    if summary.detail is None:
        return
    rollout = summary.detail
    for env, step in product(*map(range, rollout.rewards.shape)):
        yield DetailRow(
            round=summary.round,
            env=env,
            step=step,
            action=rollout.actions[env, step].tolist(),
            log_probs=_known(rollout.log_probs[env, step].tolist()),
            value=_known(rollout.values[env, step].item()),
            reward=_known(rollout.rewards[env, step].item()),
            ended=bool(rollout.ended[env, step]),
        )
