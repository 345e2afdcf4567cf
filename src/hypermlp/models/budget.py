"""Equal parameters for every mixer (section 2.6, appendix F.2.2): first in the mixer, then in the feed-forward.

The budget is that of plain softmax attention, 4 width². The width of q and k pays for gates and mixing. Where that does not do
(the mixing of a long context can cost more than the budget of a narrow layer) the rivals get wider feed-forwards instead.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import nn

from hypermlp.mixers import MIXERS, build_mixer, hybrid, options
from hypermlp.mixers.labels import Label
from hypermlp.models.lm import count_parameters, match_inner_width

TOLERANCE = 0.01
SMALLEST, LARGEST = 1 / 16, 8  # times the width: where the search for a size begins and ends


@dataclass(frozen=True, kw_only=True)
class Matched:
    """The size at which a mixer comes nearest to a budget; of a hybrid the sizes, each for the budget of its own layer."""

    name: str
    size: hybrid.Size  # what build_mixer takes; None: as published, or as the label says
    parameters: int  # of a hybrid, of all layers of its pattern
    target: int
    note: str  # why it is not what one would expect; else empty

    @property
    def deviation(self) -> float:
        return self.parameters / self.target - 1

    @property
    def layer_size(self) -> int | None:
        """The size of a single layer, which a hybrid is not."""
        if isinstance(self.size, tuple):
            raise ValueError(f"{self.name} is a hybrid, the mixers of several layers; a single layer takes one mixer")
        return self.size

    @property
    def reached(self) -> bool:
        return abs(self.deviation) <= TOLERANCE


@dataclass(frozen=True)
class MatchedModel:
    """A mixer's size and the feed-forward around it."""

    mixer: Matched
    inner: int
    parameters: int  # of the whole model


def match(name: str, width: int, block_size: int, target: int | None = None, *, heads: int | None = None) -> Matched:
    """The size of a mixer, by its registered name or label, with which it has `target` parameters (None: 4 width²).

    A size as published is kept where it will do. A label whose ranks are what it is about is built as it says and counted:
    one with "!", and one that compresses without gates or mixing to pay for.
    """
    target = 4 * width**2 if target is None else target
    if hybrid.is_hybrid(name):
        return match_each(name, width, block_size, target, heads)
    count = partial(count_mixer, name, width, block_size, heads=heads)
    published = Matched(name=name, size=None, parameters=count(None), target=target, note="")
    kind, step, obstacle = size_of(name, heads)
    if published.reached or obstacle:
        return published if published.reached else replace(published, note=obstacle)
    sizes = range(step * math.ceil(SMALLEST * width / step), LARGEST * width, step)
    if (least := count(sizes[0])) > (1 + TOLERANCE) * target:
        return replace(published, note=f"even the smallest {kind} ({sizes[0]}) has {least / target:.2f} times the budget")
    above = bisect_left(sizes, target, key=count)  # count grows with the size
    size = min(sizes[max(0, above - 1) : above + 1], key=lambda size: abs(count(size) - target))
    found = replace(published, size=size, parameters=count(size))
    return found if found.reached else replace(found, note=f"the nearest {kind}, in steps of {step}")


def match_each(name: str, width: int, block_size: int, target: int, heads: int | None) -> Matched:
    """A hybrid, each mixer of which is matched by its own rule."""
    mixers = hybrid.pattern(name)
    found = {mixer: match(mixer, width, block_size, target, heads=heads) for mixer in mixers}
    sizes = tuple(found[mixer].layer_size for mixer in mixers)
    return Matched(
        name=name,
        size=sizes if any(sizes) else None,
        parameters=sum(found[mixer].parameters for mixer in mixers),
        target=target * len(mixers),
        note="; ".join(f"{mixer}: {one.note}" for mixer, one in found.items() if one.note),
    )


def match_qk(name: str, width: int, block_size: int, heads: int | None = None) -> Matched | None:
    """The width of q and k by the paper's rule (section 2.6, appendix L): where the layer comes nearest to 4 width².

    It shrinks from a quarter of the width to an eighth, and no further, so a layer with much to pay for stays above the
    budget. None for a mixer that does not pay with q and k: rivals, and labels without q or with nothing added.
    """
    kind, step, obstacle = size_of(name, heads)
    base = options.split(name)[0]
    if obstacle or kind != "qk_rank" or (base in MIXERS and base not in ("hyperglu", "hypermlp")) or "@" in base:
        return None
    target, count = 4 * width**2, partial(count_mixer, name, width, block_size, heads=heads)
    sizes = range(step * math.ceil(width / 8 / step), width // 4 + 1, step) or range(step, step + 1)
    size = min(sizes, key=lambda size: abs(count(size) - target))
    return Matched(name=name, size=size, parameters=count(size), target=target, note="")


@cache
def count_mixer(name: str, width: int, length: int, size: int | None, heads: int | None = None) -> int:
    """Parameters of a mixer, without memory for them."""
    with torch.device("meta"):
        return count_parameters(build_mixer(name, width, length, size, heads=heads))


def size_of(name: str, heads: int | None = None) -> tuple[str, int, str]:
    """What the size of a mixer is, its step, and why it is not to be changed (empty: it may)."""
    base, changes = options.split(name)
    heads = changes.get("n_head", heads)
    said = "it has the size that its name says" if {"qk_rank", "value_width"} & changes.keys() else ""
    if base in MIXERS:
        entry = MIXERS[base]
        return entry.size, entry.step_of(heads), said if entry.size else "it comes in one size"
    label = Label.parse(base)
    obstacle = said
    if label.over:
        obstacle = "its full ranks stay, as its label says"
    elif not label.compress_qk:
        obstacle = "its q and k have the full width, as its label says"
    elif not (label.gate or label.mix1 or label.mix2):
        obstacle = "compressed, as its label says, and nothing added: a matched rank would be the full one"
    return "qk_rank", label.rank_step(heads or 2), obstacle


def match_models(
    names: Sequence[str],
    width: int,
    length: int,
    build_model: Callable[[str, hybrid.Size, int], nn.Module],
    inner: int,
    heads: int | None = None,
) -> dict[str, MatchedModel]:
    """Sizes and feed-forward widths with which whole models are equal: none is narrower than `inner`, the largest has it.

    build_model takes a mixer's name and size, and the width of the feed-forward; its mixers must have `heads` heads (None: as
    published). Labels with "!" are outside the budget: they stay as they are, and nobody is made to match them.
    """
    mixers = {name: match(name, width, length, heads=heads) for name in names}

    def build(name: str, inner: int) -> nn.Module:
        with torch.device("meta"):
            return build_model(name, mixers[name].size, inner)

    counts = {name: count_parameters(build(name, inner)) for name in names}
    within = [name for name in names if not hybrid.outside_budget(name)]
    target = max((counts[name] for name in within), default=0)
    found = {}
    for name in names:
        own = match_inner_width(target, partial(build, name), inner) if name in within else inner
        found[name] = MatchedModel(mixers[name], own, count_parameters(build(name, own)))
    return found
