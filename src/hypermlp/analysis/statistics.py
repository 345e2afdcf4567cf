"""What the heads of a model do on average over a text: which slots are active, what is read, what mixing changes.

    by lag       share of slots that are active, mean |w|, slots that mixing switched on and off against R = I
    operators    strength and effective rank of A Diag(s) Bᵀ beside D, and how much the controls s move from token to token
    noise        Proposition I.3: how many of the slots of random tokens are active, with mixing and without

Softmax attention has every slot active and no operators; its weights are read in the same way.

Letters: T tokens of a window, M rows, N columns of the hidden layer, R mixing rank, P lags that are met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hypermlp.analysis.capture import capture, exact_copy
from hypermlp.analysis.memory import HyperTrace
from hypermlp.analysis.trace import HiddenRows, Trace
from hypermlp.ops import Mixing

COUNTS = ("slots", "active", "active_plain", "on", "off", "weight", "signed")  # by lag
NOISE_SHARE = 0.5  # of the tokens that are replaced by random ones


@dataclass
class HeadStatistics:
    """One head over all rows of a text; sums by lag (P), lag 0 first."""

    layer: int
    head: int
    mixer: str
    rows: int = 0
    by_lag: dict[str, Tensor] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)  # sums over rows that read noise; see add_noise

    def share(self, name: str) -> Tensor:
        """A count by lag, per slot that exists."""
        return self.by_lag[name] / self.by_lag["slots"].clamp(min=1)

    def overall(self, name: str) -> float:
        """A count over all lags, per slot that exists."""
        return float(self.by_lag[name].sum() / self.by_lag["slots"].sum().clamp(min=1))

    @property
    def reach(self) -> float:
        """The mean lag that is read, by |w|."""
        weight = self.by_lag["weight"]
        lags = torch.arange(len(weight), dtype=weight.dtype)
        return float((weight * lags).sum() / weight.sum().clamp(min=1e-30))

    def spurious(self, name: str) -> float:
        """A share of the noise's slots (or, for "weight", of |w|) over all rows; NaN where there was no noise."""
        whole = self.noise.get("all_weight" if name == "weight" else f"{name.split('_')[0]}_slots", 0.0)
        return self.noise[name] / whole if whole else float("nan")


@dataclass
class OperatorStatistics:
    """R = D + A Diag(s) Bᵀ of one head, means over the tokens of a text."""

    layer: int
    head: int
    name: str  # "R1", "R1 scale", "R2"
    strength: float  # ‖A Diag(s) Bᵀ‖ / ‖D‖, Frobenius, over the lags that the text meets
    rank: float  # effective: e to the entropy of the squared singular values' shares
    full_rank: int  # R
    departure: float  # ‖D − 1‖ / ‖1‖: how far the diagonal has come from its start
    control: float  # mean s
    moves: float  # standard deviation of s over tokens, mean over ranks


@dataclass
class Statistics:
    windows: int
    tokens: int
    heads: list[HeadStatistics]
    operators: list[OperatorStatistics]
    noise_share: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        heads = [
            {
                "layer": h.layer,
                "head": h.head,
                "mixer": h.mixer,
                "rows": h.rows,
                "by_lag": {name: values.tolist() for name, values in h.by_lag.items()},
                "noise": h.noise,
            }
            for h in self.heads
        ]
        operators = [vars(op) for op in self.operators]
        told = {"windows": self.windows, "tokens": self.tokens, "noise_share": self.noise_share}
        return {**told, "heads": heads, "operators": operators}


@torch.no_grad()
def analyse(
    model: nn.Module,
    windows: Sequence[Tensor],
    noise: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    tell: Callable[[int], None] = lambda done: None,
) -> Statistics:
    """Statistics of every head over windows of tokens (each T).

    noise makes of a window the same with noise in it, and says which tokens are noise (both T); see random_noise. tell gets
    the number of windows done.
    """
    if not windows:
        raise ValueError("there is no text: give at least one window of tokens")
    heads: dict[tuple[int, int], HeadStatistics] = {}
    operators: list[list[OperatorStatistics]] = []
    model = exact_copy(model)
    for done, window in enumerate(windows, 1):
        found = capture(model, window[None])
        for layer, (mixer, opened) in enumerate(zip(found.mixers, found.traces(), strict=True)):
            for head in range(0 if opened is None else opened.n_head):
                assert opened is not None
                own = heads.setdefault((layer, head), HeadStatistics(layer, head, type(mixer).__name__))
                add_rows(own, opened, head)
            if isinstance(opened, HyperTrace):
                operators.append(list(operator_statistics(opened, layer)))
        if noise is not None:
            noisy, is_noise = noise(window)
            for layer, opened in enumerate(capture(model, noisy[None]).traces()):
                for head in range(0 if opened is None else opened.n_head):
                    assert opened is not None
                    add_noise(heads[layer, head], opened, head, is_noise)
        tell(done)
    if not heads:
        raise ValueError("this model has no attention: its layers condense the past into states, and have no slots to count")
    tokens, share = sum(map(len, windows)), NOISE_SHARE if noise is not None else 0.0
    return Statistics(len(windows), tokens, list(heads.values()), list(means(operators)), share)


def add_rows(own: HeadStatistics, opened: Trace, head: int) -> None:
    """Count all rows of one sequence into a head's sums."""
    T = opened.q.shape[1]
    mixed, plain = opened.rows(range(T), head), opened.rows(range(T), head, mixing=False)
    lag = lags(mixed, opened)
    longest = max(int(lag[mixed.exists].max()) + 1, len(own.by_lag.get("slots", ())))
    counted = {
        "slots": mixed.exists,
        "active": mixed.active,
        "active_plain": plain.active,
        "on": mixed.active & ~plain.active,
        "off": plain.active & ~mixed.active,
        "weight": mixed.w.abs(),
        "signed": mixed.w,
    }
    for name, values in counted.items():
        sums = torch.zeros(longest, dtype=torch.float64)
        before = own.by_lag.get(name, sums[:0])
        sums[: len(before)] = before
        sums.scatter_add_(0, lag[mixed.exists], values[mixed.exists].double())
        own.by_lag[name] = sums
    own.rows += T


def lags(rows: HiddenRows, opened: Trace) -> Tensor:
    """Lag of every column (M N), for all rows of one sequence; the future of a bidirectional row counts as its distance."""
    return (opened.position[0][:, None] - rows.slot).abs()


def add_noise(own: HeadStatistics, opened: Trace, head: int, is_noise: Tensor) -> None:
    """How the slots of noise tokens fare in the rows of real tokens, with mixing and without (Proposition I.3)."""
    rows = (~is_noise).nonzero().flatten()
    mixed, plain = opened.rows(rows, head), opened.rows(rows, head, mixing=False)
    noise = mixed.exists & is_noise[mixed.slot.clamp(min=0)]
    real = mixed.exists & ~noise
    found = {
        "noise_slots": noise,
        "real_slots": real,
        "noise_active": mixed.active & noise,
        "noise_plain": plain.active & noise,
        "real_active": mixed.active & real,
        "real_plain": plain.active & real,
        "weight": mixed.w.abs() * noise,
        "all_weight": mixed.w.abs(),
    }
    for name, values in found.items():
        own.noise[name] = own.noise.get(name, 0.0) + float(values.double().sum())


def random_noise(
    vocabulary: int, generator: torch.Generator, share: float = NOISE_SHARE
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Replaces a share of a window's tokens by tokens drawn from the whole vocabulary."""

    def make(window: Tensor) -> tuple[Tensor, Tensor]:
        is_noise = torch.rand(window.shape, generator=generator) < share
        drawn = torch.randint(vocabulary, window.shape, generator=generator)
        return torch.where(is_noise, drawn, window), is_noise

    return make


# ---- operators ----


def operator_statistics(opened: HyperTrace, layer: int) -> Iterable[OperatorStatistics]:
    """One entry per head and operator of one window."""
    H, lags = opened.n_head, min(opened.q.shape[1], opened.spec.block_size)
    for name, mixing, shift in (("R1", opened.routing, 0), ("R1 scale", opened.routing, H), ("R2", opened.reading, 0)):
        if mixing is None or shift >= mixing.A.shape[0]:
            continue
        for head in range(H):
            yield OperatorStatistics(layer, head, name, **measure(mixing, head + shift, lags))


def measure(mixing: Mixing, head: int, lags: int) -> dict[str, Any]:
    A, B, s = mixing.A[head, -lags:], mixing.B[head, -lags:], mixing.control[0, :, head]  # P R, P R, T R
    values = singular_values(A, B, s)  # T R
    D = mixing.baseline()
    own = A.new_zeros(lags) if D is None else D[head, -lags:]
    energy = values.square()
    shares = energy / energy.sum(-1, keepdim=True).clamp(min=1e-300)
    entropy = -(shares * shares.clamp(min=1e-300).log()).sum(-1)
    size = own.norm()
    return {
        "strength": float(energy.sum(-1).sqrt().mean() / size) if size > 0 else float("inf"),
        "rank": float(entropy.exp().mean()),
        "full_rank": A.shape[1],
        "departure": float((own - 1).norm() / lags**0.5),
        "control": float(s.mean()),
        "moves": float(s.std(0, correction=0).mean()),
    }


def singular_values(A: Tensor, B: Tensor, s: Tensor) -> Tensor:
    """Of A Diag(s_t) Bᵀ for every token (T R), from the triangular factors of A and B alone."""
    upper_A, upper_B = torch.linalg.qr(A, mode="r").R, torch.linalg.qr(B, mode="r").R
    return torch.linalg.svdvals((upper_A * s[:, None]) @ upper_B.mT)


def means(windows: Sequence[Sequence[OperatorStatistics]]) -> Iterable[OperatorStatistics]:
    """Entries of the same layer, head and operator as one, in the order in which they first come."""
    groups: dict[tuple[int, str, int], list[OperatorStatistics]] = {}
    for entry in (entry for window in windows for entry in window):
        groups.setdefault((entry.layer, entry.name, entry.head), []).append(entry)
    averaged = ("strength", "rank", "departure", "control", "moves")
    for entries in groups.values():
        first = entries[0]
        found = {name: sum(getattr(e, name) for e in entries) / len(entries) for name in averaged}
        yield OperatorStatistics(first.layer, first.head, first.name, full_rank=first.full_rank, **found)
