"""Runs a training: from a configuration to a directory with telemetry, checkpoints and the best policy."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from esper.build import describe_run, one_thread
from esper.config import TrainingConfig
from esper.karn.query import read_rows
from esper.leyline.events import RunRow, UpdateRow
from esper.leyline.protocols import EventSink
from esper.nissa.journal import IterationJournal
from esper.nissa.writer import RunWriter
from esper.run_state import CONFIG_FILE, load_latest, save_state
from esper.simic.agent.ppo import PPOSettings
from esper.simic.rewards.families import FAMILIES
from esper.simic.training import exchange
from esper.simic.training.vectorized import IterationSummary, Trainer, TrainingSettings, train
from esper.tamiyo.policy.checkpoint import SaveError, TrainedOn, save_policy, write_durably
from esper.tamiyo.policy.observer import check_capacity
from esper.telemetry import Telemetry
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks import TaskSpec, task_named


def task_of(config: TrainingConfig) -> TaskSpec:
    """The preset with the training's own horizon, slots and lifecycle rules."""
    task = task_named(config.task)
    rules = replace(task.rules, auto_forward=config.auto_forward)
    task = replace(task, rules=rules, horizon=config.steps or task.horizon)
    if config.slots is not None:
        task = task.with_slots(config.slots)
    check_capacity(task.num_slots, config.capacity or task.num_slots)
    varied = config.vary_slots or task.instances.vary_slots
    return replace(task, instances=replace(task.instances, vary_slots=varied))


def trained_on(config: TrainingConfig) -> TrainedOn:
    """What a policy says of its training."""
    task = task_of(config)
    return TrainedOn(config.task, task.num_slots, task.horizon, config.rent, config.auto_forward)


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
    views: Sequence[EventSink] = (),
    on_iteration: Callable[[IterationSummary], None] = lambda summary: None,
) -> None:
    """Train to the last iteration; every process of the run calls this, the first one writes and shows."""
    with one_thread():
        trainer = Trainer(task_of(config), settings_of(config))
        sizes = load_latest(trainer, config, directory) if resume else None
        if exchange.rank() != 0:
            _keep_journal(trainer, config, directory, began=0.0)
            train(trainer)
            return
        with RunWriter(directory, resumable=True, resume_from=sizes, detail=config.detail) as writer:
            _keep_journal(trainer, config, directory, began=writer.began)
            run = read_rows(directory, RunRow)[0] if sizes else _begin(config, directory, trainer)
            telemetry = Telemetry(run, writer, views)
            if sizes:
                telemetry.replay(directory)
            else:
                telemetry.emit(run)
                writer.flush()

            def record(summary: IterationSummary) -> None:
                with writer.adding_iteration(summary.iteration):
                    telemetry.emit_iteration(summary.rows, row_of(summary))
                on_iteration(summary)

            def save_best() -> None:
                save_policy(trainer.policy, directory / "best", trained_on(config))

            def save() -> None:
                with writer.checkpoint() as sizes:
                    save_state(trainer, directory, sizes)

            train(
                trainer,
                record,
                on_best=lambda: _attempt(save_best, trainer, directory),
                on_checkpoint=lambda: _attempt(save, trainer, directory),
            )


def _keep_journal(trainer: Trainer, config: TrainingConfig, directory: Path, began: float) -> None:
    """Let this process keep what it episodes; ``began`` is asked of the first one, whose writer is ready."""
    trainer.on_rows = IterationJournal(directory, config.detail, exchange.from_first(began)).take


def _attempt(save: Callable[[], None], trainer: Trainer, directory: Path) -> bool:
    """Save if that is possible; a full disk ends no training but one of which nothing else is left to do."""
    try:
        save()
    except SaveError as error:
        intact = f"{error}; what was saved before is intact"
        if trainer.is_over:
            resume = f"esper train --resume {directory}"
            raise SaveError(f"{intact}: make room, then go on with {resume}") from None
        sys.stderr.write(f"esper: {intact}, and the training goes on\n")
        return False
    return True


def _begin(config: TrainingConfig, directory: Path, trainer: Trainer) -> RunRow:
    write_durably(directory / CONFIG_FILE, (config.model_dump_json(indent=1) + "\n").encode())
    env = MorphEnv(trainer.task, rng_seed=config.rng_seed)
    env.reset(0)
    return describe_run(config, "ppo", directory.name, env)


def row_of(summary: IterationSummary) -> UpdateRow:
    """An iteration as its row of telemetry."""
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
