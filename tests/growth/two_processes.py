"""Two processes train one network under DistributedDataParallel and plant seeds between minibatches.

Each process writes a digest of all weights and the growth events to a file; a test compares the two files.
"""

import hashlib
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import esper
from tests.growth.models import mlp


def digest(net: nn.Module) -> str:
    joined = b"".join(value.numpy().tobytes() for value in net.state_dict().values())
    return hashlib.sha256(joined).hexdigest()


def work(rank: int, folder: str) -> None:
    warnings.simplefilter("error")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    # Initial weights, data and initial weights of seeds differ between the processes.
    torch.manual_seed(rank)
    net = mlp()
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
    growth = esper.Growth(
        ddp, optimizer, sample=torch.randn(4, 5), slots=["1", "2"], controller="mlp@1:1", mode="max"
    )
    said = []
    for step in range(20):
        loss = ddp(torch.randn(4, 5)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if step == 5:
            # The metric passed to ``end_epoch`` differs between the processes.
            said += growth.end_epoch(lambda: torch.rand(3).tolist())
        if step == 10:
            said.append(growth.germinate("2", "lora", alpha=0.5))
        if step == 12:
            said.append(growth.raise_rank("2", 16))
        if step == 15:
            said += growth.end_epoch(lambda: torch.rand(3).tolist())
    # If the processes did not synchronise their networks, the two digests would differ.
    with open(f"{folder}/{rank}", "w") as file:
        file.write("\n".join([digest(net), *(str(event) for event in said)]))
    # Neither process may close its connections while the other one still uses them.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # Forked processes have torch imported already.
    mp.start_processes(work, args=tuple(sys.argv[1:]), nprocs=2, start_method="fork")
