"""Distributed parameters that join several projections, in checkpoints: there as a model of one process has them.

A process has some rows of every block, and a checkpoint takes one run of rows of a tensor from each process. So these
parameters are gathered one after the other, and each process saves other rows than it has.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hypermlp.mixers.base import Cut
from hypermlp.models.parallel import stacked, unstacked


def without_blocks(p: Tensor, cut: Cut) -> DTensor:
    """p (processes, rows, …) as a model of one process has it, divided along the rows."""
    assert isinstance(p, DTensor)
    with torch.no_grad():
        whole = unstacked(p.full_tensor(), cut)
    return distribute_tensor(whole, p.device_mesh, [Shard(0)] * p.device_mesh.ndim, src_data_rank=None)


@torch.no_grad()
def fill_blocks(p: Tensor, value: Tensor, cut: Cut) -> None:
    """Fill p (processes, rows, …) with what without_blocks gave, or a checkpoint has put in its place."""
    assert isinstance(p, DTensor)
    assert isinstance(value, DTensor)
    whole = stacked(value.full_tensor(), cut, p.shape[0])
    p.to_local().copy_(distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).to_local())
