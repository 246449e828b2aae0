"""Check that an epoch waits for its GPU twice, and that environments on one GPU do not interact."""

import numpy as np
import pytest
import torch

from esper.leyline import BlueprintAction
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.devices import Compute, Device, run_together
from esper.tolaria.vector import SerialVector
from tests.tolaria.building import WAIT, noisy_task, plant, run, started, tiny_task
from tests.tolaria.reads import counted_reads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU is needed; there is none")
GPU = "cuda:0"


@pytest.mark.parametrize("amp", ["off", "bfloat16"])
def test_training_of_a_minibatch_does_not_synchronise_with_the_gpu(amp: str) -> None:
    """Test all precisions except float16, whose loss scaler reads an overflow flag from the GPU."""
    task = tiny_task(batches_per_epoch=4)
    env, _ = started(task, compute=Compute(Device(GPU), amp))  # type: ignore[arg-type]
    run(env, {0: plant(1), 3: plant(0, BlueprintAction.ATTENTION)}, until=5)
    env.begin_step(WAIT)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for [(_, inputs, targets)] in SharedBatchIterator([env.host]):
            env.host.train_minibatch(inputs, targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    [facts] = run_together([(env.queue, env.end_step())])
    assert np.isfinite(facts.train_loss)


def test_step_of_several_environments_reads_their_gpu_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = SerialVector(noisy_task(batches_per_epoch=3), rng_seed=0, env_indices=range(3), devices=(GPU,))
    vector.reset()
    with counted_reads(monkeypatch) as reads:
        vector.step(np.stack([WAIT] * 3))
    assert reads.calls == ["cpu"] * 2


def test_environments_on_separate_cuda_streams_give_nearly_the_results_of_separate_runs() -> None:
    """A tolerance is needed, because a GPU adds up the terms of a sum in varying order."""

    def losses(envs: tuple[int, ...]) -> list[list[float]]:
        vector = SerialVector(noisy_task(batches_per_epoch=3), rng_seed=0, env_indices=envs, devices=(GPU,))
        vector.reset()
        return np.array([vector.step(np.stack([WAIT] * len(envs))).val_loss for _ in range(3)]).T.tolist()

    assert losses((0, 1, 2)) == pytest.approx([*losses((0,)), *losses((1,)), *losses((2,))], rel=1e-3)


def test_environment_keeps_its_cuda_stream_from_episode_to_episode() -> None:
    env, _ = started(tiny_task(), compute=Compute(Device(GPU)))
    with env.queue.entered():
        first = torch.cuda.current_stream(GPU)
    env.reset(1)
    with env.queue.entered():
        assert torch.cuda.current_stream(GPU) == first != torch.cuda.default_stream(GPU)


def test_weights_buffers_and_data_of_an_environment_are_on_its_gpu() -> None:
    env, _ = started(tiny_task(), compute=Compute(Device(GPU)))
    run(env, {0: plant(1)}, until=5)
    tensors = [*env.model.parameters(), *env.model.buffers(), env.host.splits.train.inputs]
    assert {tensor.device for tensor in tensors} == {torch.device(GPU)}
