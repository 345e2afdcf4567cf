"""Seeded faults of the operator, and which statements notice them.

A fault takes the place of ops.dispatch.compute, through which every layer and every probe of this package goes, and gives a
wrong readout. A statement notices it if its check, otherwise unchanged, finds an error above its tolerance.

Letters as in ops/types.py: B batch, T rows, S slots, H heads, G routing heads, L block_size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hypermlp import ops
from hypermlp.ops import dispatch, reference
from hypermlp.ops.types import Mixing
from hypermlp.theory.registry import Statement, errors, missing


class Operands(ops.MixCall):
    """A call of the operator, and its result."""

    def mix(self, **changes: Any) -> Tensor:
        """The right operator, on these operands with some of them changed."""
        return reference.mix(*self._replace(**changes)[:7])

    def both(self, change: Callable[[Mixing], Mixing]) -> Tensor:
        """With both mixings changed."""
        found = (None if m is None else change(m) for m in (self.routing, self.reading))
        return self.mix(**dict(zip(("routing", "reading"), found, strict=True)))

    def reversed(self) -> Tensor:
        """With queries of the opposite sign in the gate's heads."""
        H = self.v.shape[2]
        return self.mix(q=torch.cat([-self.q[:, :, :H], self.q[:, :, H:]], 2))

    def scores(self) -> Tensor:
        """The gate's h (B T H S): what a readout of unit vectors gives, without norm and R2."""
        B, S, H = self.v.shape[:3]
        unit = torch.eye(S, dtype=self.v.dtype)[None, :, None].expand(B, S, H, S)
        plain = replace(self.spec, kind="relu", norm="none")
        routing = None if self.routing is None else first_heads(self.routing, H)
        own = self._replace(q=self.q[:, :, :H], k=self.k[:, :, :H], v=unit, routing=routing, reading=None, spec=plain)
        return own.mix() - own.reversed()

    def read(self, weights: Tensor) -> Tensor:
        """The readout of activations (B T H S, not negative): as scores of unit keys, without R1 and norm."""
        B, S, H = self.v.shape[:3]
        unit = torch.eye(S, dtype=self.v.dtype)[None, :, None].expand(B, S, H, S)
        return self.mix(q=weights, k=unit, routing=None, spec=replace(self.spec, kind="relu", norm="none"))

    @property
    def normalised(self) -> bool:
        return self.spec.norm != "none"


Fault = Callable[[Operands], Tensor]
FAULTS: dict[str, Fault] = {}


def fault(name: str) -> Callable[[Fault], Fault]:
    def enter(compute: Fault) -> Fault:
        FAULTS[name] = compute
        return compute

    return enter


def first_heads(m: Mixing, heads: int) -> Mixing:
    diag = None if m.diag is None else m.diag[:heads]
    return m._replace(A=m.A[:heads], B=m.B[:heads], control=m.control[:, :, :heads], diag=diag)


def rearranged(m: Mixing, order: Callable[[Tensor], Tensor]) -> Mixing:
    """Lags in another order."""
    return m._replace(A=order(m.A), B=order(m.B), diag=None if m.diag is None else order(m.diag))


@fault("lags off by one")
def shifted(o: Operands) -> Tensor:
    return o.both(lambda m: rearranged(m, lambda p: p.roll(1, 1)))


@fault("lags in forward order")
def forward_order(o: Operands) -> Tensor:
    S = o.k.shape[1]
    return o.both(lambda m: rearranged(m, lambda p: torch.cat([p[:, :-S], p[:, -S:].flip(1)], 1) if p.shape[1] >= S else p))


@fault("A and B swapped in R1")
def swapped_routing(o: Operands) -> Tensor:
    return o.mix(routing=None if o.routing is None else o.routing._replace(A=o.routing.B, B=o.routing.A))


@fault("R2 not transposed")
def swapped_reading(o: Operands) -> Tensor:
    return o.mix(reading=None if o.reading is None else o.reading._replace(A=o.reading.B, B=o.reading.A))


@fault("R1 left out")
def no_routing(o: Operands) -> Tensor:
    return o.mix(routing=None)


@fault("R2 left out")
def no_reading(o: Operands) -> Tensor:
    return o.mix(reading=None)


@fault("controls ignored")
def no_controls(o: Operands) -> Tensor:
    return o.both(lambda m: m._replace(control=torch.ones_like(m.control)))


@fault("shortcut missing")
def no_shortcut(o: Operands) -> Tensor:
    return o.both(lambda m: m._replace(shortcut=not m.shortcut))


@fault("diagonal missing")
def no_diagonal(o: Operands) -> Tensor:
    return o.both(lambda m: m._replace(diag=None))


@fault("normalisation left out")
def no_norm(o: Operands) -> Tensor:
    return o.mix(spec=replace(o.spec, norm="none"))


@fault("root mean square for the norm")
def mean_square(o: Operands) -> Tensor:
    return o.mix() * (math.sqrt(o.k.shape[1]) if o.normalised else 1.0)


@fault("norm of the active scores alone")
def active_norm(o: Operands) -> Tensor:
    if not o.normalised:
        return o.mix()
    h = o.scores()
    rho, active = ((x.square().sum(-1, keepdim=True) + o.spec.eps).sqrt() for x in (h, h.relu()))
    return o.mix() * rho / active


@fault("mean subtracted before the gate")
def centred(o: Operands) -> Tensor:
    if not o.normalised or o.spec.kind == "glu":
        return o.mix()
    h = o.scores()
    rho = (h.square().sum(-1, keepdim=True) + o.spec.eps).sqrt()
    return o.read((h - h.mean(-1, keepdim=True)).relu() / rho)


@fault("gate of the wrong sign")
def wrong_sign(o: Operands) -> Tensor:
    return o.reversed()


@fault("no gate")
def no_gate(o: Operands) -> Tensor:
    return o.mix() - o.reversed()


@fault("leaky gate")
def leaky_gate(o: Operands) -> Tensor:
    return o.mix() - 0.1 * o.reversed()


@fault("gate and scale exchanged")
def exchanged(o: Operands) -> Tensor:
    """Only a HyperGLU has a scale."""
    if o.spec.kind == "relu":
        return o.mix()
    H = o.v.shape[2]
    swap = torch.arange(2 * H).roll(H)
    m = o.routing
    diag = None if m is None or m.diag is None else m.diag[swap]
    routing = None if m is None else m._replace(A=m.A[swap], B=m.B[swap], control=m.control[:, :, swap], diag=diag)
    return o.mix(q=o.q[:, :, swap], k=o.k[:, :, swap], routing=routing)


@fault("own token not seen")
def own_token_hidden(o: Operands) -> Tensor:
    """As a strictly causal mask does: row t sees slots before t alone."""
    T = o.q.shape[1]
    k, v = (torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1) for x in (o.k, o.v))
    return o.mix(k=k, v=v) if o.k.shape[1] >= T else o.mix()


@fault("next token seen")
def future_leak(o: Operands) -> Tensor:
    """Row t is computed as if it stood at t + 1; the last row, which has no future, rightly."""
    if o.q.shape[1] < 2:
        return o.mix()

    def later(m: Mixing | None) -> Mixing | None:
        return None if m is None else m._replace(control=m.control.roll(1, 1))

    early = o.mix(q=o.q.roll(1, 1), routing=later(o.routing), reading=later(o.reading))
    return torch.cat([early[:, 1:], o.mix()[:, -1:]], 1)


@fault("values of the neighbouring slot")
def wrong_value(o: Operands) -> Tensor:
    return o.mix(v=o.v.roll(1, 1))


@fault("keys of the next head")
def wrong_head(o: Operands) -> Tensor:
    return o.mix(k=o.k.roll(1, 2) if o.k.shape[2] > 1 else o.k.roll(1, 3))


@fault("output off by a thousandth")
def offset(o: Operands) -> Tensor:
    return o.mix() * 1.001


JUNK = "junk for the output"


@fault(JUNK)
def junk(o: Operands) -> Tensor:
    return torch.randn_like(o.mix())  # other numbers in every call


@contextmanager
def seeded(name: str) -> Iterator[None]:
    """The operator with a fault."""
    wrong = FAULTS[name]

    def compute(impl: str, call: ops.MixCall, keep: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return wrong(Operands(*call))

    with patch.object(dispatch, "compute", compute):
        yield


def notices(entry: Statement, name: str) -> bool:
    """Whether a statement fails under a fault; an instance that can no longer be drawn counts as noticed."""
    if entry.check is None or missing(entry):
        return False
    with seeded(name), torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        try:
            return max(errors(entry, entry.check, 1)) > entry.tolerance
        except (AssertionError, RuntimeError, ValueError):
            return True


def noticed(entries: Iterable[Statement]) -> Iterator[tuple[Statement, list[str]]]:
    """Each statement that is checked, with the faults it notices."""
    return ((e, [name for name in FAULTS if notices(e, name)]) for e in entries if e.check is not None)
