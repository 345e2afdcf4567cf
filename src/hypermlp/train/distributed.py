"""Several processes as one: which take part, how they sum numbers, how a model is spread over them.

Started by torchrun, the processes meet through gloo (CPU) or NCCL (GPU); started alone, nothing of it is used. All processes
see the same folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hypermlp.models.lm import LanguageModel

Parallel = Literal["ddp", "fsdp"]


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    saving: dist.ProcessGroup | None = None  # for checkpoints, which may be written while training communicates

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Sum over all processes."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def share(self, value: Any) -> Any:
        """The value of the first process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.saving)
        return box[0]


@contextmanager
def join() -> Iterator[World]:
    """Join the processes that torchrun has started, if any."""
    gpu = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield World(device=device)
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device, dist.new_group(backend="gloo"))
    finally:
        dist.destroy_process_group()


def distribute(model: LanguageModel, parallel: Parallel, half: bool, world: World) -> nn.Module:
    """The model on this process's device.

    Args:
        model: moved there, and taken apart by fsdp.
        parallel: of several processes, "ddp": each has the whole, and gradients are averaged; "fsdp": a share of every tensor.
        half: fsdp gathers weights in bfloat16 and computes with them; what is stored and summed stays float32. The others
            compute under autocast.
        world: the processes.
    """
    model.to(world.device)
    if world.size == 1:
        return model
    if parallel == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without what ddp puts around it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def reshard(model: nn.Module) -> None:
    """Reshard what FSDP has gathered: after a forward pass without a backward pass some tensors are still whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Accumulate without averaging gradients yet. FSDP adds up shares after every pass, which takes less memory."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
