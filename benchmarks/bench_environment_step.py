"""Three measurements of an environment step: its time relative to plain PyTorch, its time per environment
with 4 and with 64 environments, and the memory per environment.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import numpy as np
import pytest
import torch

from benchmarks.reference.environment import Environment, Network, Recipe
from benchmarks.timing import GEMM_FLOPS, cpu_times, figure, gemm, gflops
from esper.kasmina.hosts import Host
from esper.leyline import EpochFacts, LifecycleRules
from esper.leyline.slot_table import IntArray
from esper.tolaria.data import Splits, split_images
from esper.tolaria.seeding import EpisodeStreams
from esper.tolaria.tasks import TaskSpec, task_named
from esper.tolaria.tasks.spec import InstanceDistribution
from esper.tolaria.vector import SerialVector
from tests.tolaria.building import WAIT, plant

WIDTHS, SHAPE, CLASSES = (8, 16, 32), (3, 32, 32), 10
BATCH, MINIBATCHES = 64, 4
ENVS, ITERATIONS, STEPS = 4, 5, 3
"""``STEPS`` consecutive environment steps are timed together, because only one of these steps takes a
snapshot of the network.
"""
FEW, MANY = 4, 64
HORIZON = 400
LIMITS = {0: 1.3, 2: 1.3}
"""Least allowed speed of an environment step of Esper, relative to the plain PyTorch step of
``reference/environment.py``; keys are numbers of blended seeds.

On an AMD EPYC in AVX-512 mode, the step of Esper is 1.40 times as fast as the plain PyTorch step if there are
no seeds, and 1.62 times with two seeds. In AVX2 mode (``ATEN_CPU_CAPABILITY=avx2 DNNL_MAX_CPU_ISA=AVX2``) it
is 1.42 times as fast if there are no seeds, and 1.40 times with two seeds.
"""


@cache
def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random images, each noise plus a weak pattern of its class, and their labels."""
    stream = torch.Generator().manual_seed(0)
    count = 1024 + 2 * BATCH
    labels = torch.randint(CLASSES, (count,), generator=stream)
    marks = torch.randn(CLASSES, *SHAPE, generator=stream)
    return torch.randn(count, *SHAPE, generator=stream) + 0.3 * marks[labels], labels


def load_pictures(generator: torch.Generator) -> Splits:
    """Return data splits with 1,024 training images, and one minibatch each for validation and test."""
    return split_images(*pictures(), validation=BATCH, test=BATCH, generator=generator)


TASK: TaskSpec = replace(
    task_named("digits"),
    name="pictures",
    input_shape=SHAPE,
    classes=CLASSES,
    load=load_pictures,
    instances=InstanceDistribution(widths=(WIDTHS,), kernels=(3,)),
    horizon=HORIZON,
    batch_size=BATCH,
    batches_per_epoch=MINIBATCHES,
    rules=LifecycleRules(min_training_epochs=0, enters_at_once=True),
)


@dataclass
class Recorded:
    """Environments of Esper, and equal environments in plain PyTorch that receive the same actions."""

    vector: SerialVector
    references: list[Environment]
    actions: Mapping[int, IntArray]

    @classmethod
    def begin(
        cls, actions: Mapping[int, IntArray], envs: int = ENVS, *, references: bool = True
    ) -> "Recorded":
        vector = SerialVector(TASK, rng_seed=0, env_indices=range(envs))
        vector.reset()
        others = [reference_of(vector, index) for index in range(envs)] if references else []
        return cls(vector, others, actions)

    def ours(self) -> EpochFacts:
        action = self.actions.get(self.vector.envs[0].epoch, WAIT)
        return self.vector.step(np.stack([action] * len(self.vector.envs)))

    def theirs(self) -> list[tuple[float, float]]:
        """Step all plain PyTorch environments and return the training and validation loss of each."""
        losses = []
        for env in self.references:
            if env.epoch in self.actions:
                env.plant(env.epoch)
            measured = env.step(dict.fromkeys(env.seed_optimisers, 1.0))
            losses.append((measured.train_loss, measured.val_loss))
        return losses


def reference_of(vector: SerialVector, index: int) -> Environment:
    """Return a plain PyTorch environment with the weights, data and minibatch order of environment
    ``index``.
    """
    env = vector.envs[index]
    host, splits = env.model.host, env.host.splits
    assert isinstance(host, Host)
    network = Network(WIDTHS, SHAPE[0], CLASSES)
    with torch.no_grad():
        for own, other in zip(network.parameters(), host.parameters(), strict=True):
            own.copy_(other)
    return Environment(
        network,
        (splits.train.x.contiguous(), splits.train.y),
        (splits.validation.x.contiguous(), splits.validation.y),
        EpisodeStreams(0, index, 0, 0).generator("batches"),
        Recipe(env.host.instance.learning_rate, TASK.clip, HORIZON, BATCH, MINIBATCHES),
    )


def several(step: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(STEPS):
            step()

    return run


@pytest.mark.parametrize("seeds", LIMITS)
def bench_a_step_is_faster_than_the_reference(seeds: int) -> None:
    recorded = Recorded.begin({slot: plant(slot) for slot in range(seeds)})
    for _ in range(max(seeds, 1)):
        facts = recorded.ours()
        losses = np.array(recorded.theirs())
        np.testing.assert_allclose(facts.train_loss, losses[:, 0], rtol=1e-3)
        np.testing.assert_allclose(facts.val_loss, losses[:, 1], rtol=1e-3)
    meters = [env.host.meter for env in recorded.vector.envs]
    before = meters[0].ledger.total
    recorded.ours()
    flops = meters[0].ledger.total - before
    recorded.theirs()

    calls = {"esper": several(recorded.ours), "reference": several(recorded.theirs), "gemm": gemm}
    times = cpu_times(calls, repeats=1, iterations=ITERATIONS)
    assert (recorded.vector.table.in_forward.sum(axis=1) == seeds).all()

    ours, theirs = (times[name] / (STEPS * ENVS) for name in ("esper", "reference"))
    rate, gemm_rate = gflops(flops, ours), gflops(GEMM_FLOPS, times["gemm"])
    title, note = f"environment-step with {seeds} blended seeds", f"{rate:.0f} of {gemm_rate:.0f} GFLOP/s"
    figure(f"{title}: useful arithmetic", 100 * rate / gemm_rate, "% of the GEMM rate", note=note)
    note = f"{ours:.1f} and {theirs:.1f} ms"
    figure(f"{title}: speed", theirs / ours, "× the reference", at_least=LIMITS[seeds], note=note)


def bench_an_environment_costs_the_same_among_64_as_among_4() -> None:
    few, many = (Recorded.begin({}, envs, references=False) for envs in (FEW, MANY))
    times = cpu_times({"few": few.ours, "many": many.ours}, repeats=1, iterations=ITERATIONS)
    costs = times["many"] / MANY, times["few"] / FEW
    note = f"{costs[0]:.1f} and {costs[1]:.1f} ms an environment-step"
    title = f"cost per environment, {MANY} against {FEW}"
    figure(title, costs[0] / costs[1], "×", at_most=1.25, note=note)


def bench_an_environment_holds_little_more_than_its_network() -> None:
    """Measure how many bytes of tensor storage one more environment occupies between steps."""
    plants = {slot: plant(slot) for slot in range(2)}

    def held(envs: int) -> tuple[int, Recorded]:
        recorded = Recorded.begin(plants, envs, references=False)
        for _ in range(STEPS):
            recorded.ours()
        gc.collect()
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in gc.get_objects()
            # type() is used, because isinstance() would trigger warnings of proxy objects.
            if issubclass(type(tensor), torch.Tensor)
        }
        return sum(storages.values()), recorded

    few, kept = held(FEW)
    more, others = held(2 * FEW)
    host = others.vector.envs[0].host
    network = sum(t.nbytes for t in chain(host.model.parameters(), host.model.buffers()))
    moments = sum(t.nbytes for state in host.optimiser.state.values() for t in state.values())
    network_with_snapshot = 2 * (network + moments)
    del kept
    per_env = (more - few) / (2 * FEW)
    note = f"{per_env / 1024:.0f} kB held, {network_with_snapshot / 1024:.0f} kB of network"
    title, unit = "bytes held per environment", "× network, optimisers and their snapshot"
    figure(title, per_env / network_with_snapshot, unit, at_most=3.0, note=note)
