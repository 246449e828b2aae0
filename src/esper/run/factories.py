"""Construction of task, environment, controller and run row from a configuration."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from esper.leyline import ActionSpace, Controller, RunRow
from esper.run.provenance import run_row
from esper.run.run_config import RunConfig
from esper.simic.config import TrainingConfig
from esper.tamiyo.controller_registry import ControllerSettings, make_controller
from esper.tolaria.devices import Device, device_of
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks import TaskSpec, task_named
from esper.tolaria.vector import SerialVector


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, which is faster for small networks and fixes the order of floating-point
    sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def build_task(config: RunConfig) -> TaskSpec:
    """Return the task preset with the horizon, slots and lifecycle rules of the run."""
    task = preset_of(config, config.slot_count)
    if config.incubation_epochs is None:
        return task
    return replace(task, rules=replace(task.rules, min_training_epochs=config.incubation_epochs))


def preset_of(config: RunConfig | TrainingConfig, slots: int | None) -> TaskSpec:
    """Return the task that a configuration names, with the settings that ``esper run`` and ``esper train``
    share."""
    task = task_named(config.task, config.data)
    if slots is not None:
        task = task.with_slots(slots)
    rules = replace(task.rules, auto_forward=config.auto_forward)
    horizon, budget = config.steps or task.horizon, config.budget or task.budget
    return replace(task, rules=rules, horizon=horizon, budget=budget)


def build_vector(config: RunConfig) -> SerialVector:
    """Return one environment before its first episode; all slots are enabled unless the configuration lists
    slot ids."""
    task = build_task(config)
    slots = task.slot_config
    named = config.slots if config.slots and config.slot_count is None else slots.slot_ids
    return SerialVector(
        task, rng_seed=config.rng_seed, enabled=slots.select(named), devices=config.devices, amp=config.amp
    )


def build_controller(name: str, config: RunConfig, space: ActionSpace) -> Controller:
    """Return the controller ``name`` with the settings of the run."""
    settings = ControllerSettings(
        rng_seed=config.rng_seed,
        rotation=config.rotation,
        plan=config.plan,
        checkpoint=config.checkpoint,
        device=str(Device(config.policy_device).torch),
    )
    return make_controller(name, space, settings)


def describe_run(config: RunConfig | TrainingConfig, controller: str, name: str, env: MorphEnv) -> RunRow:
    """Return the run row: configuration, provenance, and the names that indices in other tables refer to.

    Args:
        config: Configuration of the run or policy training.
        controller: Name of the controller, for the run row.
        name: Name of the run, for the run row.
        env: Any environment of the run, after its first ``reset``.
    """
    return run_row(
        env.action_space,
        name=name,
        task=config.task,
        controller=controller,
        rng_seed=config.rng_seed,
        config=config.model_dump(mode="json"),
        data_hash=env.task.digest(),
        host_params=env.model.count_parameters()[0],
        horizon=env.task.horizon,
        iterations=config.iterations if isinstance(config, TrainingConfig) else None,
        envs=config.environments,
        devices=[device_of(env, config.devices).name for env in range(config.environments)],
    )
