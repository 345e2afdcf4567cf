"""One token of each row through a HyperGLU layer in one call: whether it may be, asked once until the layer changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hypermlp.cache import Cache, on_host
from hypermlp.fixed_cache import FixedCache
from hypermlp.mixers.int8 import DECODED, weights_of
from hypermlp.mixers.modules import OfThread, Watch, find_hooked
from hypermlp.ops.native.decode import COMPUTED, LayerCall
from hypermlp.ops.observer import ORDINARY
from hypermlp.ops.parameters import LinearWeights

if TYPE_CHECKING:
    from hypermlp.mixers.hyper import HyperGLU

HOOKED = "is hooked, wrapped, replaced, quantised or sharded, or a global hook listens"


def own_option(layer: HyperGLU) -> str | None:
    """An option that only `modules` knows."""
    c = layer.config
    if c.registers or c.use_rope:
        return "registers" if c.registers else "use_rope"
    return None if c.gate_act == "sigmoid" else f"gate_act={c.gate_act!r}"


def lay_out(layer: HyperGLU) -> LayerCall:
    """The call of a layer of unhooked modules or Int8Linear; ValueError where parameters have other shapes than its options."""
    return LayerCall(layer.tensors(), [weights_of(module) for module in layer.linears()], layer.shape())


def unreadable(linears: Iterable[LinearWeights | None], others: Iterable[Tensor | None]) -> str | None:
    """Why compiled code cannot read these parameters where they lie: float32 or bfloat16, linear weights perhaps codes."""
    present, beside = [m for m in linears if m is not None], [t for t in others if t is not None]
    floating = [*beside, *(t for m in present for t in ((m.weight if m.scale is None else m.scale), m.bias) if t is not None)]
    if len({t.dtype for t in floating}) != 1 or floating[0].dtype not in COMPUTED:
        return f"parameters of {', '.join(sorted({str(t.dtype) for t in floating}))}"
    if any(m.scale is not None and m.weight.dtype is not torch.int8 for m in present):
        return "codes of another type than int8"
    everything = [*floating, *(m.weight for m in present)]
    if all(type(t) in ORDINARY and t.is_cpu and t.is_contiguous() and not t.is_neg() for t in everything):
        return None
    return "parameters that are elsewhere, strided, or tensors of a class of their own"


class Prepared:
    """What decoding a layer needs, laid out; or why it cannot be."""

    def __init__(self, layer: HyperGLU) -> None:
        self.why = own_option(layer)
        self.call: LayerCall | None = None
        hooked = None if self.why else find_hooked(layer, DECODED)
        if hooked is not None:
            self.why = f"{hooked} {HOOKED}"
        if self.why is None and any(op is not None and op.A.shape[0] != op.heads for op in (layer.op1, layer.op2)):
            self.why = "all heads share the factors of a mixing"
        if self.why is None:
            self.why = unreadable(map(weights_of, layer.linears()), layer.tensors().others)
        if self.why is None:
            try:
                self.watch, self.call = Watch(layer), lay_out(layer)
            except ValueError as error:
                self.why = f"parameters of other shapes than the layer was made with ({error})"

    def holds(self) -> bool:
        """Whether it still is what would be laid out now."""
        return self.call is not None and self.watch.unchanged()


_prepared: OfThread[Prepared] = OfThread()


def prepared(layer: HyperGLU) -> Prepared:
    """What was laid out for the layer before, if that still holds."""
    return _prepared.get(layer, Prepared)


def takes(cache: Cache) -> bool:
    """Whether compiled code may read and write this cache where it lies."""
    if isinstance(cache, FixedCache):
        return False
    tensors = [cache.inputs, *cache.slots.values()]
    dtype = tensors[0].dtype
    return dtype in COMPUTED and all(
        t.dtype is dtype and t.is_cpu and type(t) in ORDINARY and t.is_contiguous() for t in tensors
    )


def run(layer: HyperGLU, x: Tensor, cache: Cache) -> Tensor:
    """y (B 1 C) of one token for each row, which joins the cache; of a layer whose route was just found to be this one."""
    call = _prepared.found[layer].call
    assert call is not None
    counts = [1] * x.shape[0]
    spans = on_host(cache.reserve(counts))
    call.attach(cache.slots["k"], cache.slots["v"], cache.inputs)
    y = call.run(x, spans, cache.tail)
    cache.commit(None, counts)
    return y
