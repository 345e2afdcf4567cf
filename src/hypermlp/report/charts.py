"""Line charts as inline SVG: their colours are classes of page.css, so that a page's dark mode is theirs too."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from hypermlp.mixers.hybrid import is_hybrid
from hypermlp.verdicts.estimates import Estimate, seeds_text

LEFT, RIGHT, TOP, BOTTOM = 38, 114, 8, 34  # margins; the right one holds the names of the lines
COLOURS = 8  # of page.css
LETTERS = 15  # of a name that fit beside the plot; a hybrid's has a line for each mixer where it is longer
GAP = 10.5  # between names
FEW = 8  # places on the x axis that are marked one by one


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, Estimate]]
    colour: int | None  # None: grey, in the background
    fitted: bool = False  # a curve that was fitted, not measured
    named: bool = True  # at its right end


@dataclass(frozen=True)
class Axis:
    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """0 at its beginning, 1 at its end."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low or 1)


def numeric_axis(label: str, low: float, high: float) -> Axis:
    return Axis(label, low, high, [(tick, number(tick)) for tick in nice_ticks(low, high)])


def log_axis(label: str, low: float, high: float, show: Callable[[float], str]) -> Axis:
    """With a tick at 1, 2 and 5 times each power of ten, or at the powers alone where these are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if math.log10(high / low) < 2 else (1,)
    ticks = [k * 10.0**power for power in powers for k in steps]
    return Axis(label, low, high, [(tick, show(tick)) for tick in ticks if low <= tick <= high], logarithmic=True)


def category_axis(label: str, values: Sequence[float]) -> Axis:
    """Values at equal distances, in their order; points are numbered from 0."""
    return Axis(label, -0.3, len(values) - 0.7, [(i, number(value)) for i, value in enumerate(values)])


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within the range."""
    span = high - low or 1
    power = 10 ** math.floor(math.log10(span / most))
    step = next(power * k for k in (1, 2, 5, 10) if span / (power * k) <= most + 1e-9)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 1000 and value % 100 == 0 else f"{value:.5g}"


@dataclass(frozen=True)
class Chart:
    """A figure: grey lines first, the coloured ones above them, and the name of every line at the right.

    A coloured line is a mean over seeds: with two or three of them their values are points, from four on the confidence
    interval is a band.
    """

    title: str
    lines: Sequence[Line]
    x: Axis
    y: Axis
    width: int = 400
    least_height: int = 230

    @property
    def height(self) -> int:
        """Enough for all names."""
        rows = sum(len(rows_of(line.name)) for line in self.lines if line.named)
        return max(self.least_height, math.ceil(GAP * rows) + TOP + BOTTOM)

    @property
    def plot_width(self) -> int:
        return self.width - LEFT - RIGHT

    @property
    def plot_height(self) -> int:
        return self.height - TOP - BOTTOM

    def html(self) -> Markup:
        ordered = sorted(self.lines, key=lambda line: line.colour is not None)
        plot = f'<svg x="{LEFT}" y="{TOP}" width="{self.plot_width}" height="{self.plot_height}">'  # cuts off what is outside
        return Markup(  # all text in it is escaped here
            f"<figure><figcaption>{escape(self.title)}</figcaption>"
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self.title)}">{self.frame()}'
            f"{plot}{''.join(map(self.draw, ordered))}</svg>{self.names()}</svg></figure>"
        )

    def frame(self) -> str:
        right, bottom = LEFT + self.plot_width, TOP + self.plot_height
        middle_x, middle_y = LEFT + self.plot_width / 2, TOP + self.plot_height / 2
        parts = []
        for value, text in self.y.ticks:
            at = TOP + self.down(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(f'<text x="{LEFT - 5}" y="{at + 3.5:.1f}" text-anchor="end">{escape(text)}</text>')
        for value, text in self.x.ticks:
            at = LEFT + self.plot_width * self.x.place(value)
            parts.append(f'<text x="{at:.1f}" y="{bottom + 13}" text-anchor="middle">{escape(text)}</text>')
        parts.append(f'<text x="{middle_x:.0f}" y="{self.height - 6}" text-anchor="middle">{escape(self.x.label)}</text>')
        turned = f'transform="rotate(-90 9 {middle_y:.0f})" text-anchor="middle"'
        parts.append(f'<text x="9" y="{middle_y:.0f}" {turned}>{escape(self.y.label)}</text>')
        return "".join(parts)

    def down(self, value: float) -> float:
        """How far a value is below the top of the plot; far outside of it, far enough."""
        return self.plot_height * (1 - min(max(self.y.place(value), -9.0), 10.0))

    def draw(self, line: Line) -> str:
        """The mean, and for a coloured line what its seeds say."""

        def at(x: float, value: float) -> str:
            return f"{self.plot_width * self.x.place(x):.1f},{self.down(value):.1f}"

        def dot(x: float, value: float, radius: float) -> str:
            left = self.plot_width * self.x.place(x)
            return f'<circle cx="{left:.1f}" cy="{self.down(value):.1f}" r="{radius}"/>'

        parts = [f'<g class="{style_of(line)}"><title>{escape(describe(line))}</title>']
        if line.colour is not None and all(mean.has_interval for _, mean in line.points):
            edge = [at(x, mean.high) for x, mean in line.points] + [at(x, mean.low) for x, mean in line.points[::-1]]
            parts.append(f'<polygon class="band" points="{" ".join(edge)}"/>')
        parts.append(f'<polyline points="{" ".join(at(x, mean.mean) for x, mean in line.points)}"/>')
        if line.colour is not None and not line.fitted and len(line.points) <= FEW:
            parts += [dot(x, mean.mean, 2.2) for x, mean in line.points]
        if line.colour is not None:
            some = evenly(line.points, FEW)
            values = [(x, value) for x, mean in some if mean.seeds > 1 and not mean.has_interval for value in mean.values]
            parts.append(f'<g class="seeds">{"".join(dot(x, value, 1.3) for x, value in values)}</g>' if values else "")
        return "".join([*parts, "</g>"])

    def names(self) -> str:
        """Names at the right end of their lines, moved apart where they would meet."""
        bottom, right = float(TOP + self.plot_height), LEFT + self.plot_width + 8
        ends = []
        for line in (line for line in self.lines if line.named):
            ends.append((TOP + min(max(self.down(line.points[-1][1].mean), 0), self.plot_height), line))
        ends.sort(key=lambda pair: pair[0])
        rows = [rows_of(line.name) for _, line in ends]
        places: list[float] = []  # of the middles
        for (wanted, _), own in zip(ends, rows, strict=True):
            before = places[-1] + GAP * (len(rows[len(places) - 1]) + len(own)) / 2 if places else wanted
            places.append(max(wanted, before))
        for i in range(len(places) - 1, -1, -1):
            places[i] = min(places[i], bottom - GAP * (len(rows[i]) - 1) / 2)
            bottom = places[i] - GAP * (len(rows[i]) + 1) / 2
        parts = []
        for (wanted, line), place, own in zip(ends, places, rows, strict=True):
            begin = LEFT + self.plot_width * self.x.place(line.points[-1][0])
            first = place + 3.5 - GAP * (len(own) - 1) / 2
            texts = [f'<text x="{right + 2}" y="{first + GAP * i:.1f}">{escape(text)}</text>' for i, text in enumerate(own)]
            far = " far" if right - begin > self.plot_width / 4 else ""  # no part of the line
            lead = f'<path class="lead{far}" d="M{begin:.1f} {wanted:.1f}L{right} {place:.1f}"/>'
            parts.append(f'<g class="{style_of(line)}">{lead}{"".join(texts)}</g>')
        return "".join(parts)


def rows_of(name: str) -> list[str]:
    """A name as it stands beside its line: in one row, or that of a hybrid in one for each mixer."""
    parts = [name] if len(name) <= LETTERS or not is_hybrid(name) else re.split(r"(?=\+)", name)
    return [part if len(part) <= LETTERS else f"{part[: LETTERS - 1]}…" for part in parts]


def style_of(line: Line) -> str:
    """Its classes in page.css."""
    colour = "other" if line.colour is None else f"s{line.colour}"
    return f"{colour} fit" if line.fitted else colour


def evenly(points: Sequence[tuple[float, Estimate]], count: int) -> list[tuple[float, Estimate]]:
    """At most `count` of them, the last one included."""
    every = math.ceil(len(points) / count)
    return list(points[::-1][::every][::-1])


def describe(line: Line) -> str:
    last = line.points[-1][1]
    values = f", {', '.join(f'{value:.4g}' for value in last.values)}" if last.seeds > 1 and not last.has_interval else ""
    spread = f" ± {last.half:.4g}" if last.has_interval else ""
    return f"{line.name}: {last.mean:.4g}{spread} at the end, {seeds_text([last])}{values}"
