"""How a head divides a plane of inputs by the slots it activates: exact boundaries, and a picture of them.

    >>> field = lambda places: torch.stack([places[:, 0], 1 - places.square().sum(1)], dim=1)
    >>> found = partition(field)  # a half-plane and a disc
    >>> found.regions, round(found.bend, 2)
    (4, 1.0)

A field gives the scores h of all slots at points of the plane. A slot's boundary is the set where its score is zero; it is
found on the edges of a grid, each crossing to machine precision, and joined cell by cell. The partition is the signs' pattern.

Letters: n points, t slots, d width of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from markupsafe import Markup
from torch import Tensor

from hypermlp import ops
from hypermlp.mixers import registers
from hypermlp.mixers.base import gather_tokens
from hypermlp.mixers.hyper import HyperGLU

Field = Callable[[Tensor], Tensor]  # n 2 → n t

STEPS = 48  # cells along a side of the grid
FINE = 3  # times as many along a side of the shading


@dataclass(frozen=True)
class Plane:
    """A square in input space: origin + a·first + b·second, |a|, |b| ≤ radius."""

    origin: Tensor  # d
    axes: Tensor  # 2 d, orthonormal
    radius: float = 2.0

    def points(self, places: Tensor) -> Tensor:
        return self.origin + places @ self.axes


def random_plane(d: int, generator: torch.Generator, radius: float = 2.0) -> Plane:
    """A plane through a random point near zero, in random directions."""
    axes = torch.linalg.qr(torch.randn(d, 2, generator=generator, dtype=torch.float64)).Q.T
    return Plane(0.3 * torch.randn(d, generator=generator, dtype=torch.float64), axes, radius)


def layer_field(layer: HyperGLU, context: Tensor, plane: Plane, head: int = 0) -> Field:
    """Scores h of a head (HyperGLU: of its gate) for a newest token on a plane, behind a context (t d, in time order).

    The token is the query and a slot of its own; slots are in lag order, so the first one is the token itself.
    """
    registers.refuse(layer.config)
    spec = replace(layer.spec, kind="relu", norm="none")

    def field(places: Tensor) -> Tensor:
        x = plane.points(places).to(context.dtype)
        rows = torch.cat([context.expand(len(x), -1, -1), x[:, None]], dim=1)
        made = layer.project(gather_tokens(rows, None, None), None, "dense")
        mixing = made.routing
        routing = None
        if mixing is not None:
            own = slice(head, head + 1)
            diag = None if mixing.diag is None else mixing.diag[own]
            routing = ops.Mixing(mixing.A[own], mixing.B[own], mixing.control[:, -1:, own], diag, mixing.shortcut)
        q, k = made.q[:, -1:, head : head + 1], made.k[:, :, head : head + 1]
        unit = torch.eye(k.shape[1], dtype=k.dtype)[None, :, None].expand(len(x), -1, -1, -1)
        # Values that are unit vectors read out relu(h), and relu(h) − relu(−h) = h.
        up, down = (ops.mix(ops.MixCall(sign * q, k, unit, routing, None, spec), impl="chunked") for sign in (1, -1))
        return (up - down)[:, 0, 0].flip(-1)

    return torch.no_grad()(field)


def find_roots(field: Field, begin: Tensor, end: Tensor, slot: Tensor) -> Tensor:
    """On each segment begin → end (n 2), whose ends have scores of opposite sign, the place where score `slot` (n) is zero.

    False position and bisection in turns: the root stays enclosed, and smooth scores need few steps.
    """
    if not len(begin):
        return begin.clone()

    def score(at: Tensor) -> Tensor:
        return field(begin + at[:, None] * (end - begin)).gather(1, slot[:, None])[:, 0]

    low, high = begin.new_zeros(len(begin)), begin.new_ones(len(begin))
    f_low, f_high = score(low), score(high)
    best = torch.where(f_low.abs() < f_high.abs(), low, high)
    f_best = torch.minimum(f_low.abs(), f_high.abs())
    for step in range(120):
        middle = (low + high) / 2
        secant = low - f_low * (high - low) / (f_high - f_low)
        at = torch.where(secant.isfinite() & (secant > low) & (secant < high), secant, middle) if step % 2 == 0 else middle
        found = score(at)
        best, f_best = torch.where(found.abs() < f_best, at, best), torch.minimum(found.abs(), f_best)
        left = (found > 0) == (f_low > 0)  # the root lies to the right of `at`
        low, f_low = torch.where(left, at, low), torch.where(left, found, f_low)
        high, f_high = torch.where(left, high, at), torch.where(left, f_high, found)
        if bool(((high - low < 2e-16) | (f_best == 0) | (f_best < 1e-16)).all()):
            break
    return begin + best[:, None] * (end - begin)


@dataclass(frozen=True)
class Partition:
    """The activated sets over a square of a plane, and the boundaries between them."""

    title: str
    radius: float
    pattern: Tensor  # steps+1 steps+1 t, bool: which slots are active at a point of the grid
    shade: Tensor  # FINE·steps FINE·steps: how many slots are active in the middle of a small cell
    segments: tuple[Tensor, ...]  # per slot: n 2 2, ends of the pieces of its boundary
    slots: tuple[str, ...]
    marks: tuple[tuple[float, float, str], ...] = ()  # places of the plane to point at, with their names

    @property
    def regions(self) -> int:
        """How many different activated sets the grid meets."""
        return len(torch.unique(self.pattern.flatten(0, 1), dim=0))

    def boundary(self, slot: int) -> Tensor:
        """The points found on a slot's boundary (n 2)."""
        return self.segments[slot].flatten(0, 1)

    @property
    def bend(self) -> float:
        """How far the boundaries are from straight lines: the largest distance of a point from its slot's best line."""
        return max((straightness(self.boundary(i)) for i in range(len(self.segments))), default=0.0)

    def svg(self, size: int = 320) -> str:
        """A picture whose colours follow the page's: darker where more slots are active, a line per slot."""
        return draw(self, size)


def straightness(points: Tensor) -> float:
    """Largest distance of points (n 2) from the line that fits them best; 0 for fewer than three."""
    if len(points) < 3:
        return 0.0
    centred = points - points.mean(0)
    normal = torch.linalg.svd(centred, full_matrices=False).Vh[-1]
    return float((centred @ normal).abs().max())


def grid(radius: float, steps: int) -> Tensor:
    """Points of a square grid (steps+1 steps+1 2), first coordinate along columns."""
    line = torch.linspace(-radius, radius, steps + 1, dtype=torch.float64)
    rows, columns = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([columns, rows], dim=-1)


def partition(
    field: Field,
    *,
    radius: float = 2.0,
    steps: int = STEPS,
    title: str = "",
    slots: Sequence[str] = (),
    marks: Sequence[tuple[float, float, str]] = (),
) -> Partition:
    """Signs on a grid, and for every slot its boundary, exact where it crosses the grid."""
    if steps < 2:
        raise ValueError(f"steps ({steps}) must be at least 2")
    places = grid(radius, steps)
    pattern = field(places.flatten(0, 1)).unflatten(0, (steps + 1, steps + 1)) > 0
    across = crossings(field, places[:, :-1], places[:, 1:], pattern[:, :-1], pattern[:, 1:])  # steps+1 steps t 2
    down = crossings(field, places[:-1], places[1:], pattern[:-1], pattern[1:])  # steps steps+1 t 2
    t = pattern.shape[-1]
    segments = tuple(join(across[:, :, i], down[:, :, i]) for i in range(t))
    names = tuple(slots) or tuple(f"slot {i + 1}" for i in range(t))
    small = FINE * steps
    middles = grid(radius * (1 - 1 / small), small - 1)
    shade = (field(middles.flatten(0, 1)) > 0).sum(1).unflatten(0, (small, small))
    return Partition(title, radius, pattern, shade, segments, names, tuple(marks))


def crossings(field: Field, begin: Tensor, end: Tensor, sign: Tensor, other: Tensor) -> Tensor:
    """Where each score crosses zero on each edge (… t 2); NaN where its sign is the same at both ends."""
    edge = (sign != other).nonzero()  # k 3: row, column, slot
    found = begin.new_full((*sign.shape, 2), float("nan"))
    row, column, slot = edge.unbind(1)
    found[row, column, slot] = find_roots(field, begin[row, column], end[row, column], slot)
    return found


def join(across: Tensor, down: Tensor) -> Tensor:
    """The pieces of one slot's boundary (n 2 2): in each cell of the grid, its crossings two by two."""
    sides = torch.stack([across[:-1], down[:, 1:], across[1:], down[:, :-1]], dim=2)  # cells 4 2, around the cell
    crossed = ~sides[..., 0].isnan()
    return sides[crossed].unflatten(0, (-1, 2))  # signs around a cell change an even number of times


def draw(shown: Partition, size: int) -> Markup:
    """An SVG; Markup.format escapes what is text."""
    head = Markup('<svg class="partition" viewBox="0 0 {0} {0}" role="img" aria-label="{1}">').format(size, describe(shown))
    ground = Markup('<rect class="ground" width="{0}" height="{0}"/>').format(size)
    parts = [head, ground, *shades(shown, size)]
    scale = size / (2 * shown.radius)
    for slot, pieces in enumerate(shown.segments):
        across, up = ((pieces[..., 0] + shown.radius) * scale).tolist(), ((shown.radius - pieces[..., 1]) * scale).tolist()
        moves = "".join(f"M{a:.1f} {b:.1f}L{c:.1f} {d:.1f}" for (a, c), (b, d) in zip(across, up, strict=True))
        if moves:
            path = Markup('<path class="s{}" d="{}"><title>{}</title></path>')
            parts.append(path.format(slot % 8, moves, shown.slots[slot]))
    for a, b, name in shown.marks:
        mark = Markup('<circle class="mark" cx="{:.1f}" cy="{:.1f}" r="4"><title>{}</title></circle>')
        parts.append(mark.format((a + shown.radius) * scale, (shown.radius - b) * scale, name))
    return Markup("").join([*parts, Markup("</svg>")])


def shades(shown: Partition, size: int) -> Iterator[Markup]:
    """The small cells, row by row, neighbours with equally many active slots in one rectangle."""
    cell, most = size / len(shown.shade), max(1, shown.pattern.shape[-1])
    for row, line in enumerate(shown.shade.tolist()):
        begin = 0
        for count, run in groupby(line):
            end = begin + len(list(run))
            if count:
                rectangle = Markup('<rect class="on" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" opacity="{:.2f}"/>')
                at, extent = (begin * cell, size - (row + 1) * cell), ((end - begin) * cell, cell)
                yield rectangle.format(*at, *extent, 0.42 * count / most)
            begin = end


def describe(shown: Partition) -> str:
    lines = sum(len(pieces) > 0 for pieces in shown.segments)
    return (
        f"{shown.title}: {shown.regions} activated sets, {lines} boundaries, "
        f"the most bent {shown.bend:.2g} away from a straight line"
    )
