"""Tables of mixers: where their parameters are, what a label means, how they meet one budget."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Console

from hypermlp.checks import choose_from
from hypermlp.mixers import MIXERS, HyperGLU, Mixer, build_mixer
from hypermlp.mixers.hybrid import pattern, sizes_of
from hypermlp.mixers.labels import TABLE1, count_by_component, explain
from hypermlp.models.budget import Matched, count_mixer, match, size_of
from hypermlp.models.lm import count_parameters
from hypermlp.paper.published import SIZES, TABLE2_MIXERS
from hypermlp.report.terminal import Column, say, show_table
from hypermlp.runs.configs import configure, count

GROUPS = {
    "q,k": ("q", "k"),
    "v,o": ("v", "o"),
    "gates": ("gates",),
    "conv": ("convolutions",),
    "R1": ("R1 factors", "R1 diagonal", "R1 controls"),
    "R2": ("R2 factors", "R2 diagonal", "R2 controls"),
    "other": ("other",),
}


def show_budget(console: Console, width: int, length: int, names: Sequence[str] | None = None) -> None:
    """Parameters of each mixer as published, and the size that meets the budget; None: all of Table 1 and the registry."""
    names = (*TABLE1, *sorted(MIXERS)) if names is None else names
    found = {name: match(name, width, length) for name in names}
    parts = {name: count_by_component(on_paper(name, width, length)) for name in names}
    groups = {title: g for title, g in GROUPS.items() if any(part in parts[name] for name in names for part in g)}
    target = 4 * width**2
    say(console, f"Width {width}, context {length}; the budget is 4 · {width}² = {target:,} parameters")
    heads = [Column("mixer"), *map(Column, groups), Column("total", starts=True), *map(Column, ("ratio", "size", "inner"))]
    rows = []
    for name, m in found.items():
        units = [sum(parts[name].get(part, 0) for part in group) / width**2 for group in groups.values()]
        total = sum(parts[name].values())
        cells = [f"{n:.2f}" if n else "" for n in units]
        rows.append([name, *cells, f"{total:,}", f"{total / target:.3f}", str(m.size or ""), feed_forward(m, width)])
    show_table(console, "", heads, rows)
    say(console, f"Parts are in units of {width}²; total and its ratio to the budget are those of the published sizes.")
    say(console, "size: what meets the budget within 1 %. inner: the feed-forward's width, where that is changed instead.")
    for note in dict.fromkeys(m.note for m in found.values() if m.note):
        say(console, f"{', '.join(name for name, m in found.items() if m.note == note)}: {note}")


def show_models(console: Console, name: str) -> None:
    """The models of Table 2 in a configuration: what a layer's mixer and the whole model have by each budget."""
    choose_from("config", name, tuple(SIZES))
    heads = [*map(Column, ("model", "mixer", "layers", "heads", "q and k", "inner", "of a mixer", "of 4 width²", "model's"))]
    rows = []
    for title, mixer in TABLE2_MIXERS[SIZES[name]].items():
        model = configure(name, [f"model.mixer={mixer}"]).model
        with torch.device("meta"):
            layer = model.build_mixer(0)
        own, size = count_parameters(layer), f"{layer.q.out_features}" if isinstance(layer, HyperGLU) else ""
        many = layer.config.n_head if isinstance(layer, HyperGLU) else getattr(layer, "n_head", "")
        sizes = [str(model.depth), str(many), size, str(model.inner)]
        rows.append([title, mixer, *sizes, f"{own:,}", f"{own / (4 * model.width**2):.3f}", f"{count(model):,}"])
    show_table(console, f"{name}, width {model.width}, budget=paper", heads, rows)
    say(console, "Rivals are as published; HyperMLP and HyperGLU have narrower q and k to meet the budget (section 2.6).")


def feed_forward(found: Matched, width: int) -> str:
    """How much wider a feed-forward makes up for what the mixer lacks, or the rivals' for what it has too much."""
    if found.reached or found.name.endswith("!"):
        return ""
    units = round(abs(found.parameters - found.target) / (3 * width))  # a unit of SwiGLU has three weights a channel
    return f"{'rivals' if found.parameters > found.target else 'its'} +{units}"


def show_explanation(console: Console, label: str, width: int, length: int) -> None:
    """A label in words, letter by letter, and where its parameters are."""
    found = explain(label, width, length)
    alias = f", {found.alias}" if found.alias else ""
    letters = [Column("letter"), Column("meaning", left=True, wraps=True)]
    show_table(console, f"{found.label}{alias}", letters, list(found.words.items()))
    total = sum(found.parameters.values())
    heads = [Column("component"), Column("parameters"), Column("share"), Column(f"of {width}²")]
    counts = (*found.parameters.items(), ("all", total))
    rows = [[component, f"{n:,}", f"{n / total:.1%}", f"{n / width**2:.3f}"] for component, n in counts]
    show_table(console, f"parameters, width {width}, context {length}", heads, rows)
    matched = match(str(found.label), width, length)
    size = "built so" if matched.size is None else f"qk_rank {matched.size}"
    note = f"; {matched.note}" if matched.note else ""
    say(console, f"Budget {matched.target:,}: {size}, {matched.parameters:,} parameters ({matched.deviation:+.1%}){note}")


def show_hybrid(console: Console, name: str, width: int, length: int) -> None:
    """The layers of a pattern, each with the size that its own budget gives it."""
    matched = match(name, width, length)
    rows = []
    mixers = pattern(name)
    for layer, (mixer, size) in enumerate(zip(mixers, sizes_of(mixers, matched.size), strict=True), 1):
        published, count = (count_mixer(mixer, width, length, one) for one in (None, size))
        shown = size_text(mixer, size)
        rows.append([str(layer), mixer, f"{published:,}", shown, f"{count:,}", f"{count / (4 * width**2):.3f}"])
    heads = [Column("layer"), Column("mixer", left=True), Column("published"), Column("size in a study", left=True)]
    show_table(console, f"{name}, width {width}, context {length}", [*heads, Column("parameters"), Column("of 4 width²")], rows)
    say(console, f"All layers: {matched.parameters:,} parameters, {matched.deviation:+.1%} of their budget {matched.target:,}.")
    say(console, f"The pattern repeats through a model, so its depth is a multiple of {len(mixers)}.")
    if matched.note:
        say(console, matched.note)


def sizes_text(matched: Matched) -> str:
    """The sizes of a hybrid's layers, from the input on."""
    mixers = pattern(matched.name)
    own = zip(mixers, sizes_of(mixers, matched.size), strict=True)
    return ", ".join(f"{mixer} ({size_text(mixer, size)})" for mixer, size in own)


def size_text(mixer: str, size: int | None) -> str:
    return "as published" if size is None else f"{size_of(mixer)[0]} {size}"


def show_mixers(console: Console, width: int, length: int) -> None:
    """The registry."""
    heads = [
        Column("name"),
        Column("mixer", left=True, wraps=True),
        Column("paper", left=True, wraps=True),
        *map(Column, ("parameters", f"of {width}²", "state bytes")),
    ]
    rows = []
    for name, entry in MIXERS.items():
        mixer = on_paper(name, width, length)
        n = count_parameters(mixer)
        paper = f"{entry.paper}, {entry.year}"
        rows.append([name, entry.title, paper, f"{n:,}", f"{n / width**2:.2f}", state(mixer, length)])
    show_table(console, f"width {width}, context {length}", heads, rows)


def state(mixer: Mixer, length: int) -> str:
    try:
        return f"{mixer.state_size(1, length):,}"
    except ValueError:
        return "no cache"


def on_paper(name: str, width: int, length: int) -> Mixer:
    """The mixer as published, without memory for its parameters."""
    with torch.device("meta"):
        return build_mixer(name, width, length)
