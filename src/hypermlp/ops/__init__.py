"""The operator as pure functions with one signature, and the choice between its implementations."""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch
from torch import Tensor

from hypermlp.config import Impl, choose_from
from hypermlp.ops import reference, strips
from hypermlp.ops.types import Mixing, Spec, dense_spans

__all__ = ["Choice", "Mixing", "Spec", "choose", "dense_spans", "mix"]


class Choice(NamedTuple):
    """Which implementation computes a call, and why."""

    impl: str
    reason: str


def choose(impl: str) -> Choice:
    """Resolve "auto"; every other name is taken at its word."""
    choose_from("impl", impl, get_args(Impl))
    if impl == "auto":
        return Choice("chunked", "linear memory on every device")
    return Choice(impl, "asked for")


def mix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    routing: Mixing | None,
    reading: Mixing | None,
    spec: Spec,
    spans: Tensor | None = None,
    *,
    impl: str = "auto",
    chunk: int | None = None,
) -> Tensor:
    """Readout o (B T H V) of queries q (B T G K) over keys k (B S G K) and values v (B S H V); see reference.mix."""
    if spec.aligner == "identity":
        check_fits(k.shape[1], spec.block_size, spans)
    if choose(impl).impl == "dense":
        return reference.mix(q, k, v, routing, reading, spec, spans)
    return strips.mix(q, k, v, routing, reading, spec, spans, chunk)


def check_fits(slots: int, block_size: int, spans: Tensor | None) -> None:
    """The identity layout has one parameter a slot and no consistent extension, hence no sliding window."""
    if slots > block_size and spans is not None and not torch.compiler.is_compiling():
        slots = int((spans[:, 4] - spans[:, 3]).max()) if len(spans) else 0
    if slots > block_size:
        raise ValueError(
            f"the identity layout has parameters for block_size ({block_size}) slots and no sliding window: a sequence of "
            f'{slots} tokens needs a larger block_size, or aligner_kind="offset"'
        )
