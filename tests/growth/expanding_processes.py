"""Two processes train expanded networks under DistributedDataParallel or fully_shard, by gloo on the CPU.

Each process checks what it sees, and writes a digest of all weights to a file; a test compares the files.
"""

import hashlib
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import esper
from esper.leyline.errors import EsperError
from tests.growth.test_expand import SAMPLE, X, Y, net, output


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def digest(model: nn.Module) -> str:
    joined = b"".join(whole(p).detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(joined).hexdigest()


def train(model: nn.Module, wrapper: nn.Module, parameters: list[nn.Parameter], rank: int) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    model.eval()  # Without batch statistics, which differ between the halves of a batch.
    for _ in range(4):
        half = slice(32 * rank, 32 * rank + 32)
        F.cross_entropy(wrapper(X[half]), Y[half]).backward()
        optimizer.step()
        optimizer.zero_grad()


def alone(settings: dict[str, Any]) -> nn.Module:
    """Return the model that one process trains on whole batches."""
    model = net()
    torch.manual_seed(5)
    expanded = esper.expand(model, sample=SAMPLE, **settings)
    optimizer = torch.optim.AdamW(expanded.parameters(), lr=1e-2)
    for _ in range(4):
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def work(rank: int, folder: str, how: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    found = "done"
    for settings in ({"blocks": 2}, {"widen": 4}, {"rank": 4}):
        model = net()
        before = output(model, SAMPLE)
        torch.manual_seed(5)
        expanded = esper.expand(model, sample=SAMPLE, **settings)
        if how == "ddp":
            wrapper: nn.Module = DistributedDataParallel(model)
            with pytest.raises(EsperError, match="pass the Net in it"):
                esper.expand(DistributedDataParallel(net()), sample=SAMPLE, blocks=1)
        else:
            mesh = init_device_mesh("cpu", (2,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            wrapper = fully_shard(model, mesh=mesh)
            with pytest.raises(EsperError, match="expand it before fully_shard"):
                esper.expand(model, sample=SAMPLE, blocks=1)
            with expanded.original():  # Before the first forward pass of the sharded model.
                assert torch.equal(output(model, SAMPLE), before), settings
        old = {n: whole(p).detach().clone() for n, p in model.named_parameters()}
        train(model, wrapper, expanded.parameters(), rank)
        moved = {n for n, p in model.named_parameters() if not torch.equal(whole(p), old[n])}
        assert moved == set(expanded.trainable), (settings, moved)
        reference = alone(settings)
        for (name, p), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(p), other, rtol=1e-3, atol=1e-4, msg=name)
        trained = output(wrapper, SAMPLE)
        with expanded.original():
            assert torch.equal(output(wrapper, SAMPLE), before), settings
        assert torch.equal(output(wrapper, SAMPLE), trained)
        if how == "fsdp" and "blocks" not in settings:
            with pytest.raises(EsperError, match="cannot join the layers of a sharded model"):
                expanded.finish()
        else:
            expanded.finish()
        found += f" {digest(model)}"
    with open(f"{folder}/{rank}", "w") as file:
        file.write(found)
    # Neither process may close its connections while the other one still uses them.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # Forked processes have torch imported already.
    mp.start_processes(work, args=tuple(sys.argv[1:]), nprocs=2, start_method="fork")
