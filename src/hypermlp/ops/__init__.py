"""The operator as a pure function of one call, and the choice between its implementations."""

from hypermlp.ops import flops
from hypermlp.ops.dispatch import Choice, choose, mix
from hypermlp.ops.types import MixCall, Mixing, Spec, dense_spans

__all__ = ["Choice", "MixCall", "Mixing", "Spec", "choose", "dense_spans", "mix"]

flops.watch()
