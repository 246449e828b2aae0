"""Helpers of tests and benchmarks: small tasks, grown networks, bit-for-bit comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.kasmina import CNNHost, Host, MorphogeneticModel, lifecycle
from esper.kasmina.contributions import Contributions, measure, score_samples
from esper.kasmina.optimizer_groups import SEED_NAME
from esper.leyline import (
    CANONICAL_ACTION,
    BlueprintAction,
    EnvFacts,
    Head,
    LifecycleOp,
    LifecycleRules,
    Row,
    SlotTable,
    Stage,
    Style,
)
from esper.leyline.slot_table import IntArray
from esper.tolaria.data import GuardedTest, Samples, Splits, split_images
from esper.tolaria.env import MorphEnv
from esper.tolaria.minibatch import Learner
from esper.tolaria.tasks import TaskSpec, task_named
from esper.tolaria.tasks.digits import _load_arrays
from esper.tolaria.tasks.spec import CLASSIFICATION, Instance, InstanceDistribution, Objective

RowType = TypeVar("RowType", bound=Row)

SMALL_RULES = LifecycleRules(min_training_epochs=2, min_prune_age=3, embargo_epochs=2)


class ListSink:
    """Telemetry sink that collects all rows in a list."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def emit(self, row: Row) -> None:
        self.rows.append(row)

    def of(self, kind: type[RowType]) -> list[RowType]:
        """Return the collected rows of exactly the type ``kind``."""
        return [row for row in self.rows if type(row) is kind]


# --- actions ---------------------------------------------------------------------------------------


def action(op: LifecycleOp, slot: int = 0, **heads: int) -> IntArray:
    """Return an action ``[head]``; action heads that are not given have their canonical value."""
    row = CANONICAL_ACTION.copy()
    row[Head.OP], row[Head.SLOT] = op, slot
    for name, value in heads.items():
        row[Head[name.upper()]] = value
    return row


WAIT = action(LifecycleOp.WAIT)


def plant(slot: int, blueprint: BlueprintAction = BlueprintAction.CONV_LIGHT, **heads: int) -> IntArray:
    """Return a GERMINATE action with the shortest tempo and alpha target 1."""
    return action(LifecycleOp.GERMINATE, slot, blueprint=blueprint, **{"tempo": 0, **heads})


PLAN = {
    0: plant(1, BlueprintAction.CONV_HEAVY),
    1: plant(0, BlueprintAction.DEPTHWISE),
    3: plant(2, BlueprintAction.NORM),
    6: action(LifecycleOp.FOSSILIZE, 1),
    8: action(LifecycleOp.PRUNE, 0, alpha_speed=1),
}
"""Actions by epoch: plant three seeds, fossilize that of slot 1 and prune that of slot 0 by a ramp."""


# --- environments ----------------------------------------------------------------------------------


def load_few_digits(generator: torch.Generator) -> Splits:
    """Return splits of 128 training, 48 validation and 48 test images of digits."""
    images, labels = _load_arrays()
    return split_images(images[:224], labels[:224], validation=48, test=48, generator=generator)


def tiny_task(
    widths: Sequence[int] = (2, 4, 4), *, kernel: int = 1, rules: LifecycleRules = SMALL_RULES, **changes: Any
) -> TaskSpec:
    """Return a task on digits with 128 training images, a narrow host and one minibatch of 32 per epoch."""
    few = {"load": load_few_digits, "batches_per_epoch": 1, "batch_size": 32, "horizon": 25}
    return replace(
        task_named("digits_impaired"),
        name="tiny",
        instances=InstanceDistribution(widths=(tuple(widths),), kernels=(kernel,)),
        rules=rules,
        **{**few, **changes},
    )


SYMBOLS, TOKENS = 24, 6


def load_chains(generator: torch.Generator) -> Splits:
    """Return token sequences in which a fixed permutation gives the next token with probability 0.9."""
    follower = torch.randperm(SYMBOLS, generator=torch.Generator().manual_seed(7))

    def draw(count: int) -> Samples:
        chain = [torch.randint(SYMBOLS, (count,), generator=generator)]
        for _ in range(TOKENS):
            stray = torch.randint(SYMBOLS, (count,), generator=generator)
            strays = torch.rand(count, generator=generator) < 0.1
            chain.append(torch.where(strays, stray, follower[chain[-1]]))
        tokens = torch.stack(chain, dim=1)
        return Samples(tokens[:, :-1], tokens[:, 1:])

    return Splits(draw(1024), draw(128), GuardedTest(draw(64)))


def token_task(
    widths: Sequence[int] = (4, 4), *, rules: LifecycleRules = SMALL_RULES, **changes: Any
) -> TaskSpec:
    """Return a task of token sequences for a GPT that is too narrow to learn them without seeds."""
    few = {"load": load_chains, "input_shape": (TOKENS,), "classes": SYMBOLS, "batches_per_epoch": 12}
    return replace(
        task_named("pycode"),
        name="chains",
        instances=InstanceDistribution(widths=(tuple(widths),), learning_rates=(0.03,)),
        rules=rules,
        **{**few, **changes},
    )


class NoisyTask(TaskSpec):
    """Task on digits whose host has a dropout layer."""

    def build_host(self, instance: Instance) -> Host:
        host = super().build_host(instance)
        assert isinstance(host, CNNHost)
        host.segments[0].append(nn.Dropout(0.3))  # type: ignore[operator]  # a Sequential
        return host


def noisy_task(**changes: Any) -> TaskSpec:
    """Return the task "tiny" with dropout in its host."""
    tiny = tiny_task(**changes)
    return NoisyTask(**{field.name: getattr(tiny, field.name) for field in fields(tiny)})


class RecordedEnv(MorphEnv):
    """Environment that emits its decision rows itself; in runs the caller of ``step`` emits these rows."""

    def step(self, action: IntArray) -> EnvFacts:
        facts = super().step(action)
        self.recorder.emit_last_action()
        return facts


def started(task: TaskSpec | None = None, **arguments: Any) -> tuple[MorphEnv, ListSink]:
    """Return an environment at the start of its first episode, and the sink of its telemetry rows."""
    sink = ListSink()
    env = RecordedEnv(task or tiny_task(), **{"rng_seed": 0, "sink": sink, **arguments})
    env.reset()
    return env, sink


def run(env: MorphEnv, actions: Mapping[int, IntArray], until: int | None = None) -> MorphEnv:
    """Step an environment to epoch ``until`` or the horizon, with ``actions`` by epoch and otherwise WAIT."""
    while not env.ended and env.epoch != until:
        env.step(actions.get(env.epoch, WAIT))
    return env


def stages_of(env: MorphEnv) -> list[Stage]:
    return [Stage(int(stage)) for stage in env.table.stage[0]]


# --- models ----------------------------------------------------------------------------------------


def stir(module: nn.Module, rng_seed: int = 0, scale: float = 0.3) -> None:
    """Add noise to every weight, so that seeds change the output."""
    generator = torch.Generator().manual_seed(rng_seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def grown_model(
    seeds: Mapping[int, BlueprintAction],
    *,
    host: Host | None = None,
    styles: Sequence[Style] = (Style.LINEAR_ADD,),
    stage: Stage = Stage.BLENDING,
    rules: LifecycleRules = SMALL_RULES,
    rng_seed: int = 0,
) -> tuple[MorphogeneticModel, torch.optim.Optimizer]:
    """Return a network whose seeds change the output, and the optimiser of its host.

    Args:
        seeds: Blueprint of the seed in each slot.
        host: Host of the network; by default that of the task ``digits_impaired``.
        styles: Blend styles, assigned to the seeds in turn.
        stage: Stage of all seeds; blended seeds have full alpha.
        rules: Lifecycle rules of the network.
        rng_seed: Rng seed of the initial weights.
    """
    torch.manual_seed(rng_seed)
    if host is None:
        host = cnn((2, 4, 8), kernel=1)
    model = MorphogeneticModel(host, rules)
    optimiser = torch.optim.SGD(host.parameters(), lr=0.05, momentum=0.9, foreach=True)
    model.bind_optimiser(optimiser)
    for number, (slot, blueprint) in enumerate(seeds.items()):
        style = styles[number % len(styles)]
        params = model.germinate(slot, blueprint, style)
        seed = lifecycle.Germination(number, blueprint, style, 1.0, 3, params)
        lifecycle.germinate(model.table, 0, slot, seed, rules)
        stir(model.slot(slot), rng_seed + number)
        set_stage(model, slot, stage)
    return model, optimiser


def practise(model: MorphogeneticModel, optimiser: torch.optim.Optimizer, batches: int = 60) -> None:
    """Train the network on digits, so that switching a seed off changes the scores of the network."""
    model.train()
    for number in range(batches):
        x, y = digits(64, start=400 + 64 * (number % 16))
        Learner(model, optimiser, CLASSIFICATION.loss, clip=5.0).run(x, y)


def measured_on(
    model: MorphogeneticModel,
    x: Tensor,
    y: Tensor,
    slots: Sequence[int],
    objective: Objective = CLASSIFICATION,
    calibration: Tensor | None = None,
    **settings: Any,
) -> Contributions:
    """Return the contributions of the seeds in ``slots`` on the samples ``x, y``."""
    scorer = score_samples(model, x, y, objective.sample_scores, objective.sample_losses, calibration)
    return measure(slots, scorer, **settings)


def cnn(widths: Sequence[int], kernel: int = 3) -> CNNHost:
    return CNNHost(widths, kernel=kernel, input_shape=(1, 8, 8), classes=10)


def set_stage(model: MorphogeneticModel, slot: int, stage: Stage, alpha: float = 1.0) -> None:
    """Set stage and alpha of a seed without an episode; alpha is 0 in stages that are not blended."""
    table = model.table
    table.stage[0, slot] = stage
    table.ramp_elapsed[0, slot] = table.ramp_epochs[0, slot]
    table.alpha[0, slot] = alpha if table.in_forward[0, slot] else 0.0
    model.sync()


def digits(count: int, start: int = 0) -> tuple[Tensor, Tensor]:
    """Return ``count`` of the packaged digit images, roughly normalised, and their labels."""
    images, labels = _load_arrays()
    chosen = slice(start, start + count)
    return ((images[chosen] - 5.0) / 6.0).contiguous(memory_format=torch.channels_last), labels[chosen]


# --- bit-for-bit comparison ------------------------------------------------------------------------


def bits(tree: Any) -> Any:
    """Return nested dictionaries and lists with all arrays converted to bytes, so that NaN equals NaN."""
    if isinstance(tree, Tensor):
        return tuple(tree.shape), tree.detach().contiguous().numpy().tobytes()
    if isinstance(tree, np.ndarray):
        return tree.shape, tree.tobytes()
    if isinstance(tree, SlotTable):
        return bits(tree.arrays())
    if isinstance(tree, Mapping):
        return {key: bits(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [bits(value) for value in tree]
    if isinstance(tree, float):
        return np.float64(tree).tobytes()
    return tree


def host_tensors(model: MorphogeneticModel) -> dict[str, Tensor]:
    """Return the host's weights and buffers by name, without those of seeds."""
    tensors = model.host.state_dict().items()
    return {name: tensor for name, tensor in tensors if SEED_NAME not in name.split(".")}


def host_bits(env: MorphEnv) -> Any:
    """Return the host's weights, buffers, optimiser state, random stream and data cursor as bytes."""
    parameters, optimiser = env.model.host_parameters(), env.host.optimiser
    settings = {name: value for name, value in optimiser.param_groups[0].items() if name != "params"}
    return bits(
        {
            "weights": host_tensors(env.model),
            "optimiser": [settings, *(optimiser.state[p] for p in parameters if p in optimiser.state)],
            "stream": env.host._host_stream.get_state(),
            "cursor": (env.host._cursor._order, env.host._cursor._position),
        }
    )


def every_choice(count: int) -> NDArray[np.bool_]:
    """Return all on/off configurations ``[configuration, seed]``, from all seeds off to all seeds on."""
    return np.array(list(product((False, True), repeat=count)))


def boolean_rows(configurations: NDArray[np.bool_]) -> list[tuple[bool, ...]]:
    return [tuple(row) for row in configurations.tolist()]
