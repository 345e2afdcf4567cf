"""hypermlp::triton and its backward, and the function of a MixCall that calls them."""

from __future__ import annotations

import torch
from torch import Tensor

from hypermlp.ops.registered import Inputs, register
from hypermlp.ops.triton.gradients import backward
from hypermlp.ops.triton.launch import forward
from hypermlp.ops.triton.stepping import decode, is_step
from hypermlp.ops.types import Spec


def empty_u(i: Inputs) -> Tensor:
    shape = (0,) if i.left1 is None else (*i.q.shape[:3], i.left1.shape[2])
    return i.q.new_empty(shape, dtype=torch.float32)


def empty_y2(i: Inputs) -> Tensor:
    shape = (0,) if i.left2 is None else (*i.q.shape[:2], i.v.shape[2], i.left2.shape[2])
    return i.q.new_empty(shape, dtype=torch.float32)


def infer(inputs: Inputs, spec: Spec, chunk: int | None) -> Tensor:
    """o; by the decode kernels where every sequence has one new row."""
    return decode(inputs, spec) if is_step(inputs) else forward(inputs, spec, chunk)[0]


mix = register("triton", forward, backward, also_saved=(empty_u, empty_y2), infer=infer)
