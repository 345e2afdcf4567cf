"""The operator as fused Triton kernels for NVIDIA's GPUs. Nothing here imports triton until a call needs it.

device: what kernels run on, and where they start. skew: time order to lag order inside a kernel. forward, backward, products,
decode, pointwise: kernels. tiles: tile sizes; fallback: smaller ones where they do not fit. blocks: who works on what;
work: how much at once. launch, gradients, stepping: from tensors to launches. specialise: a launch as Triton compiles it.
operator: the registered operator.
"""

from __future__ import annotations

from torch import Tensor

from hypermlp.ops.triton.device import obstacle, reason
from hypermlp.ops.types import MixCall

__all__ = ["mix", "obstacle", "reason"]


def mix(call: MixCall) -> Tensor:
    """reference.mix by the kernels; import triton at the first call."""
    from hypermlp.ops.triton.operator import mix as registered_mix

    return registered_mix(call)
