"""Several processes as one: which take part, how they sum numbers, how a model is spread over them.

Started by torchrun, the processes meet through gloo (CPU) or NCCL (GPU); started alone, nothing of it is used. All processes
see the same folder.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from hypermlp.batch import Batch
from hypermlp.models.lm import LanguageModel
from hypermlp.models.parallel import DIMENSIONS, make_mesh, own_rows, parallelize

Parallel = Literal["ddp", "fsdp"]


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    saving: dist.ProcessGroup | None = None  # for checkpoints, which may be written while training communicates
    mesh: DeviceMesh | None = None  # of several processes: dp × cp × tp, the last running fastest

    @property
    def main(self) -> bool:
        return self.rank == 0

    def arranged(self, mesh: str) -> World:
        """The same processes on a mesh such as "dp=2,tp=2"; what it leaves out of dp is what the others leave."""
        if self.mesh is not None:
            return self
        sizes = mesh_sizes(mesh, self.size)
        return self if self.size == 1 else dataclasses.replace(self, mesh=make_mesh(sizes, self.device.type))

    def along(self, *names: str) -> int:
        """How many processes the mesh has in these dimensions."""
        if self.mesh is None:
            return self.size if "dp" in names else 1
        return math.prod(self.mesh[name].size() for name in names)

    @property
    def batch_rank(self) -> int:
        """Which share of the batch is this process's, of `along("dp")`."""
        return self.rank // self.along("cp", "tp")

    def own(self, passes: Sequence[Batch]) -> list[Batch]:
        """Of its share of the batch, this process's rows of every sequence."""
        if self.mesh is None or self.along("cp") == 1:
            return list(passes)
        if any(one.cu_seqlens is not None for one in passes):
            raise ValueError(
                "documents cannot be kept apart where processes share sequences: make data.documents=false or cp=1"
            )
        inputs, targets = ([own_rows(getattr(one, name), self.mesh) for one in passes] for name in ("inputs", "targets"))
        return [Batch(*pair) for pair in zip(inputs, targets, strict=True)]

    def sum(self, *values: float) -> list[float]:
        """Sum over all processes; those that share heads (tp) have the same values, which count once."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return (total / self.along("tp")).tolist()

    def share(self, value: Any) -> Any:
        """The value of the first process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.saving)
        return box[0]


def mesh_sizes(mesh: str, processes: int) -> dict[str, int]:
    """Processes by dimension, from a text such as "dp=2,tp=2".

    >>> mesh_sizes("tp=2", 8)
    {'dp': 4, 'cp': 1, 'tp': 2}
    """
    found: dict[str, int] = {}
    for part in filter(None, mesh.replace(" ", "").split(",")):
        name, _, size = part.partition("=")
        if name not in DIMENSIONS or name in found or not size.isdigit() or int(size) < 1:
            raise ValueError(f'train.mesh ({mesh!r}) must be sizes of {", ".join(DIMENSIONS)}, such as "dp=2,tp=2"')
        found[name] = int(size)
    given = math.prod(found.values())
    if "dp" not in found and processes % given == 0:
        found["dp"], given = processes // given, processes
    if given != processes:
        raise ValueError(
            f"train.mesh ({mesh!r}) needs {given} processes, and there are {processes}: start it as "
            f"torchrun --nproc-per-node {given} -m hypermlp train …, or give another mesh"
        )
    return {name: found.get(name, 1) for name in DIMENSIONS}


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
        parallel: of several processes, "ddp": each has the whole, and gradients are averaged; "fsdp": a share of every tensor,
            and with cp and tp a share of every sequence and of the heads (models/parallel.py).
        half: fsdp gathers weights in bfloat16 and computes with them; what is stored and summed stays float32. The others
            compute under autocast.
        world: the processes.
    """
    model.to(world.device)
    if world.size == 1:
        return model
    if parallel == "ddp":
        if world.along("cp", "tp") > 1:
            raise ValueError('train.parallel ("ddp") divides only the batch: give train.parallel=fsdp with cp or tp')
        return DistributedDataParallel(model)
    assert world.mesh is not None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else None
    return parallelize(model, world.mesh, mp_policy=policy)


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
