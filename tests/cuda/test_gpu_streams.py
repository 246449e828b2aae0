"""Training on a GPU synchronises once per epoch; environments on one GPU equal separate runs."""

import numpy as np
import pytest
import torch

from esper.leyline import BlueprintAction
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.devices import Compute, Device
from esper.tolaria.vector import SerialVector
from tests.tolaria.building import WAIT, bits, noisy_task, plant, run, started, tiny_task

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU is needed; there is none")
GPU = "cuda:0"


@pytest.mark.parametrize("amp", ["off", "bfloat16"])
def test_training_of_a_minibatch_does_not_synchronise_with_the_gpu(amp: str) -> None:
    """Check every precision but float16, whose loss scaler reads an overflow flag from the GPU."""
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
    env.compute.device.synchronise()
    assert np.isfinite(env.end_step().train_loss)


def test_environments_on_separate_cuda_streams_equal_separate_runs() -> None:
    def weights(envs: tuple[int, ...]) -> dict[int, object]:
        vector = SerialVector(noisy_task(batches_per_epoch=3), rng_seed=0, env_indices=envs, devices=(GPU,))
        vector.reset()
        for _ in range(3):
            vector.step(np.stack([WAIT] * len(envs)))
        states = [{n: t.cpu() for n, t in env.model.state_dict().items()} for env in vector.envs]
        return dict(zip(envs, map(bits, states), strict=True))

    assert weights((0, 1, 2)) == weights((0,)) | weights((1,)) | weights((2,))


def test_weights_buffers_and_data_of_an_environment_are_on_its_gpu() -> None:
    env, _ = started(tiny_task(), compute=Compute(Device(GPU)))
    run(env, {0: plant(1)}, until=5)
    tensors = [*env.model.parameters(), *env.model.buffers(), env.host.splits.train.inputs]
    assert {tensor.device for tensor in tensors} == {torch.device(GPU)}
