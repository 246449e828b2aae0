"""Steps of several environments together: number of reads per device, order in which training is launched,
recorded seconds, and results read as float32."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from esper.leyline import BlueprintAction
from esper.leyline.rows import EpochRow
from esper.tolaria import devices
from esper.tolaria.tasks import TaskSpec
from esper.tolaria.tasks.spec import Objective
from esper.tolaria.twin import TwinOf, run_all_without_growth, run_without_growth
from esper.tolaria.vector import SerialVector
from tests.tolaria.building import WAIT, ListSink, noisy_task, plant, token_task
from tests.tolaria.reads import counted_reads, step_counts
from tests.tolaria.test_unread_epochs import SLOW

TWO = ("cpu:0", "cpu:1")
CNN_KINDS = (BlueprintAction.CONV_LIGHT, BlueprintAction.ATTENTION)
TOKEN_KINDS = (BlueprintAction.MLP, BlueprintAction.LORA)


def started(
    task: TaskSpec, envs: int, kinds: Sequence[BlueprintAction] = (), **settings: Any
) -> SerialVector:
    """Return environments after five steps, with a blended and an incubating seed of the given kinds."""
    vector = SerialVector(task, rng_seed=0, env_indices=range(envs), devices=TWO, **settings)
    vector.reset()
    plan = dict(zip((0, 4), (plant(1 - at, kind) for at, kind in enumerate(kinds)), strict=False))
    for step in range(5 if kinds else 0):
        vector.step(np.stack([plan.get(step, WAIT)] * envs))
    if kinds:
        states = [(env.model.blended, env.model.incubating) for env in vector.envs]
        assert states == [([1], [0])] * envs
    return vector


# --- reads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_task", "kinds"),
    [
        (noisy_task, CNN_KINDS),
        (token_task, TOKEN_KINDS),
        (token_task, TOKEN_KINDS[::-1]),
        (token_task, (BlueprintAction.ATTENTION, BlueprintAction.MLP)),
    ],
    ids=["cnn", "mlp and lora", "lora and mlp", "attention and mlp"],
)
def test_step_of_several_environments_reads_every_device_twice(
    make_task: Callable[..., TaskSpec], kinds: Sequence[BlueprintAction], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count one read for the results of training and one for all scores, for any number of environments."""
    for envs in (2, 5):
        vector = started(make_task(batches_per_epoch=2, rules=SLOW), envs, kinds)
        with counted_reads(monkeypatch, lambda vector=vector: step_counts(*vector.envs)) as reads:
            facts = vector.step(np.stack([WAIT] * envs))
        assert reads.calls == ["cpu"] * 2 * len(TWO)
        assert np.isfinite(facts.train_loss).all()
        assert (vector.table.epochs_since_measured[:, 1] == 0).all(), "the blended seeds were measured"


def test_all_environments_are_started_before_the_first_read_and_devices_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vector, calls = started(noisy_task(batches_per_epoch=1), 4), []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return call(*args, **kwargs)

        return note

    for number, env in enumerate(vector.envs):
        note = noted(f"train {number}", env.host.train_minibatch)
        monkeypatch.setattr(env.host, "train_minibatch", note)
        monkeypatch.setattr(env.host, "_scorer", noted(f"score {number}", env.host._scorer))
    monkeypatch.setattr(Tensor, "cpu", noted("read", Tensor.cpu))
    vector.step(np.stack([WAIT] * 4))

    training = [f"train {number}" for number in range(4)]
    assert calls == [*training, "read", "score 0", "score 2", "read", "score 1", "score 3", "read", "read"]


# --- seconds ----------------------------------------------------------------------------------------


def test_waiting_for_a_device_is_part_of_the_phase_that_waits_and_divided_among_its_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Use a clock that stands still except while a device is read, so that waiting is all that counts."""
    sink, cpu, now = ListSink(), Tensor.cpu, [0.0]
    vector = started(noisy_task(batches_per_epoch=1), 3, sink=sink)

    def slow(tensor: Tensor) -> Tensor:
        now[0] += 0.3
        return cpu(tensor)

    monkeypatch.setattr(Tensor, "cpu", slow)
    monkeypatch.setattr(devices, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    vector.step(np.stack([WAIT] * 3))

    for row in sink.of(EpochRow):
        waited = {0: 150.0, 1: 300.0, 2: 150.0}[row.env]
        assert row.phase_ms == pytest.approx({"act": 0.0, "train": waited, "measure": waited, "rest": 0.0})
        assert row.ms == pytest.approx(2 * waited)


def test_work_queue_of_an_environment_is_kept_from_episode_to_episode() -> None:
    vector = started(noisy_task(), 1)
    [env] = vector.envs
    queue, host = env.queue, env.host
    env.reset(1)
    assert env.host is not host
    assert env.host._queue is env.queue is queue


# --- float32 ------------------------------------------------------------------------------------------


def precisions() -> list[str]:
    backends = torch.backends
    return [part.fp32_precision for part in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)]


def test_networks_are_measured_without_tf32_and_trained_with_the_settings_of_the_program() -> None:
    task, seen = noisy_task(batches_per_epoch=1), {}

    def noting(name: str) -> Callable[[Tensor, Tensor], Tensor]:
        def measure(output: Tensor, target: Tensor) -> Tensor:
            seen[name] = precisions()
            found: Tensor = getattr(task.objective, name)(output, target)
            return found

        return measure

    objective = Objective(*map(noting, ("loss", "sample_losses", "sample_scores")))
    before = precisions()
    vector = started(replace(task, objective=objective), 1)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        own = precisions()
        vector.step(np.stack([WAIT]))
        assert precisions() == own, "restored"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert seen == {"loss": own, "sample_losses": ["ieee"] * 3, "sample_scores": ["ieee"] * 3}
    assert "tf32" in own
    assert precisions()[1:] == before[1:]


# --- twins --------------------------------------------------------------------------------------------


def test_twins_that_train_together_have_the_reports_of_twins_that_train_alone_and_share_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = noisy_task(batches_per_epoch=2, horizon=3)
    places = [TwinOf(env=0, episode=2), TwinOf(env=1, episode=2), TwinOf(env=1, episode=2, attempt=1)]
    with counted_reads(monkeypatch) as reads:
        together = run_all_without_growth(task, places, rng_seed=5)
    assert together == [run_without_growth(task, rng_seed=5, **place._asdict()) for place in places]
    own, shared = len(("untrained host", "test")), len(("training", "scores")) * 3 + len(("commit",))
    assert reads.calls.count("cpu") == own * len(places) + shared
    assert len({report.val_loss for report in together}) == 3
