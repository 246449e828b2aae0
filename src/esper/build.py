"""From configuration to objects: task, environment, controller, and the row that describes a run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import torch

from esper import provenance
from esper.config import RunConfig
from esper.leyline import (
    HEAD_NAMES,
    OP_NAMES,
    STAGE_NAMES,
    ActionSpace,
    Controller,
    SlotConfig,
    UnknownNameError,
)
from esper.leyline.errors import EsperError
from esper.leyline.rows import SCHEMA_VERSION, RunRow
from esper.simic.training_config import TrainingConfig
from esper.tamiyo import (
    CountingController,
    HeuristicController,
    HeuristicSettings,
    OffController,
    PeriodicController,
    RandomController,
    parse_plan,
)
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic
from esper.tamiyo.policy.checkpoint import load_policy
from esper.tamiyo.policy.controller import PolicyController
from esper.tolaria.devices import Device, device_of
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks import TaskSpec, task_named
from esper.tolaria.vector import SerialVector

ControllerFactory = Callable[[ActionSpace, RunConfig], Controller]

CONTROLLERS: dict[str, ControllerFactory] = {
    "heuristic": lambda space, config: HeuristicController(
        space, num_envs=1, settings=HeuristicSettings(rotation=config.rotation)
    ),
    "counting": lambda space, config: CountingController(space, num_envs=1),
    "random": lambda space, config: RandomController(space, config.rng_seed, env_indices=(0,)),
    "periodic": lambda space, config: PeriodicController(space, parse_plan(config.plan, space)),
    "off": lambda space, config: OffController(space),
    "ppo": lambda space, config: PolicyController(space, 1, _policy_of(config)),
}


def _policy_of(config: RunConfig) -> FactoredRecurrentActorCritic:
    if config.checkpoint is None:
        raise EsperError("the ppo controller needs a trained policy; name its folder with --checkpoint")
    return load_policy(config.checkpoint).to(Device(config.policy_device).torch)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: faster on small networks, and sums of another order change results."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def build_task(config: RunConfig) -> TaskSpec:
    """The preset with the run's own horizon, slots and lifecycle rules."""
    task = preset_of(config, config.slot_count)
    rules = replace(task.rules, incubation=config.incubation)
    if config.incubation_epochs is not None:
        rules = replace(rules, min_training_epochs=config.incubation_epochs)
    return replace(task, rules=rules)


def preset_of(config: RunConfig | TrainingConfig, slots: int | None) -> TaskSpec:
    """A task by name, with what runs and trainings can say of it."""
    task = task_named(config.task)
    if slots is not None:
        task = task.with_slots(slots)
    rules = replace(task.rules, auto_forward=config.auto_forward)
    horizon, budget = config.steps or task.horizon, config.budget or task.budget
    return replace(task, rules=rules, horizon=horizon, budget=budget)


def build_vector(config: RunConfig, task: TaskSpec) -> SerialVector:
    """One environment, ready for its first episode; all its slots may grow, or those named."""
    slots = SlotConfig.of_count(task.num_slots)
    named = config.slots if config.slots and config.slot_count is None else slots.slot_ids
    return SerialVector(
        task, rng_seed=config.rng_seed, enabled=slots.select(named), devices=config.devices, amp=config.amp
    )


def build_controller(name: str, config: RunConfig, space: ActionSpace) -> Controller:
    if name not in CONTROLLERS:
        raise UnknownNameError("controller", name, CONTROLLERS)
    return CONTROLLERS[name](space, config)


def describe_run(config: RunConfig | TrainingConfig, controller: str, name: str, env: MorphEnv) -> RunRow:
    """The run's own row: what, where, and the names behind every index. Needs an environment after reset."""
    space = env.action_space
    host_params, _ = env.model.count_parameters()
    return RunRow(
        schema_version=SCHEMA_VERSION,
        name=name,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        task=config.task,
        controller=controller,
        rng_seed=config.rng_seed,
        config=config.model_dump(mode="json"),
        data_hash=env.task.digest(),
        git_revision=provenance.git_revision(),
        versions=provenance.versions(),
        hardware=provenance.hardware(),
        host_params=host_params,
        slots=list(space.slot_config.slot_ids),
        ops=list(OP_NAMES),
        heads=list(HEAD_NAMES),
        blueprints=list(space.blueprint_names),
        stages=list(STAGE_NAMES),
        head_choices=[list(names) for names in space.choice_names],
        horizon=env.task.horizon,
        iterations=config.iterations if isinstance(config, TrainingConfig) else None,
        envs=config.environments,
        devices=[device_of(env, config.devices).name for env in range(config.environments)],
    )
