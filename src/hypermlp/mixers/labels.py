"""The labels of Table 1: Base-Feat-Rank-TmixLayout, from a text to a mixer and back.

    base     S softmax attention, R ReLU ∘ L2 norm, G GLU: HyperGLU's and HyperMLP's layer with the options below
    feat     p rotary embedding, c convolutions in front of k and v, g gates m1 and m2; any of them, in this order
    rank     q compresses QK, v compresses VO, to a quarter of the width; never both
    tmix     1, 2 or 12: mixing along the sequence by R1, R2 or both, of rank 16 (R and G only)
    layout   o lays the mixing out by lag; without it a slot meets the parameters of its place in the input
    !        full ranks: gates or mixing, and no compression to pay for them; present exactly in that case
    @8       another allocation of the ranks: mixing of rank 8, and q and k wider in proportion; behind a label or a name it has

Parts are separated by "-" and left out where empty; "!" follows the last. Two labels have names: R-cg-q-12o is HyperMLP and
G-cg-q-12o is HyperGLU. The grammar is finite, so errors are explained from the list of all labels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import nn

from hypermlp.checks import choose_from
from hypermlp.config import HyperGLUConfig, Init
from hypermlp.mixers.base import Mixer
from hypermlp.mixers.hyper import HyperGLU
from hypermlp.mixers.softmax import SoftmaxAttention

# In the paper's order.
TABLE1 = (
    *("S", "S-p", "S-c", "S-pc", "R", "R-p", "R-c", "R-pc"),
    *("S-g-q", "R-cg-q", "R-c-12o!", "R-cg-q-12o", "R-pcg-q-12o"),
    *("S-c-q", "S-c-v", "R-c-q", "R-c-v", "G-cg-q", "G-c-12o!", "G-cg-q-12o", "G-pcg-q-12o"),
    *("G-cg-q-1o", "R-cg-q-1o", "G-g-q-12o", "R-g-q-12o"),
    *("G-12o!", "G-1o!", "G-2o!", "R-12o!", "R-1o!", "R-2!", "G-12!", "R-12!"),
)
SAME = {"hyperglu": "G-cg-q-12o", "hypermlp": "R-cg-q-12o", "softmax": "S-p"}  # registered name → the label it is
ALIASES = {"R": "ReLU attention", "S": "softmax attention", "R-cg-q-12o": "HyperMLP", "G-cg-q-12o": "HyperGLU"}
# Letter → its name and, behind the colon, what it does.
MEANING = {
    "S": "softmax attention: the weights of a row are positive and sum to one",
    "R": "ReLU attention: scores divided by their L2 norm, then a ReLU",
    "G": "GLU attention: the ReLU of one set of normalised scores selects slots, the softplus of another sets their strength",
    "p": "rotary embedding: of q and k",
    "c": "convolutions: depthwise and causal, four taps, one in front of k and one in front of v",
    "g": "gates: sigmoids of the input, m1 on q and m2 on the readout",
    "q": "QK compressed: to a quarter of the width, which pays for what is added",
    "v": "VO compressed: to a quarter of the width, which pays for what is added",
    "1": "mixing R1: along the sequence, before the activation, of rank 16",
    "2": "mixing R2: along the sequence, after the activation, of rank 16",
    "o": "lag layout: a parameter of R1 and R2 belongs to a distance from the newest token",
    "!": "full ranks: nothing is compressed to pay for gates or mixing, so the layer is outside the common budget",
    "-": "the next part",
    "": "the end",
}
RANK = HyperGLUConfig.op1_rank  # of mixing, as published
WHOSE_RANKS = "NAME@RANK is for labels with q and temporal mixing and for HyperGLU, such as G-cg-q-12o@8"
NO_LAG = "place layout: a parameter of R1 and R2 belongs to a place in the input, so there is no cache and no longer input"
# Any of the right letters in any order, to say what is wrong with them.
LETTERS = re.compile(r"[SRG](-[pcg]+)?(-[qv]+)?(-[12]*o*)?!?", re.IGNORECASE)
# Letter → the field of Label that it stands for.
FIELDS = {
    **{"p": "rope", "c": "conv", "g": "gate", "q": "compress_qk", "v": "compress_vo"},
    **{"1": "mix1", "2": "mix2", "o": "lag", "!": "over"},
}


@dataclass(frozen=True, kw_only=True)
class Label:
    """One variant of Table 1's grammar, legal by construction.

    >>> str(Label(base="G", conv=True, gate=True, compress_qk=True, mix1=True, mix2=True, lag=True))
    'G-cg-q-12o'
    """

    base: str
    rope: bool = False
    conv: bool = False
    gate: bool = False
    compress_qk: bool = False
    compress_vo: bool = False
    mix1: bool = False
    mix2: bool = False
    lag: bool = False
    over: bool = False
    rank: int | None = None  # of mixing, where it is not the published one

    def __post_init__(self) -> None:
        choose_from("base", self.base, ("S", "R", "G"))
        mixing, compressed = self.mix1 or self.mix2, self.compress_qk or self.compress_vo
        if mixing and self.base == "S":
            raise ValueError(
                "softmax attention has no temporal mixing here: its rows live on the probability simplex, which a linear map "
                "along the sequence leaves, and the paper studies mixing with R and G only"
            )
        if self.lag and not mixing:
            raise ValueError("o lays out temporal mixing, so it needs 1, 2 or 12 before it")
        if self.compress_qk and self.compress_vo:
            raise ValueError("the rank part is q or v, not both: one side is compressed to pay for what is added")
        if self.over and compressed:
            raise ValueError("! means that nothing is compressed, so it excludes q and v")
        if self.over and not (self.gate or mixing):
            raise ValueError("! marks a layer above the budget; without gates (g) or mixing (1, 2) this one is within it")
        if (self.gate or mixing) and not (compressed or self.over):
            raise ValueError("gates and mixing at full ranks exceed the budget: compress with q or v, or mark it with !")
        if self.rank is not None and (self.rank < 1 or not self.shares_ranks):
            raise ValueError(WHOSE_RANKS)

    def __str__(self) -> str:
        feat, rank, mixing, over = ("".join(x for x in part if getattr(self, FIELDS[x])) for part in ("pcg", "qv", "12o", "!"))
        name = "-".join(part for part in (self.base, feat, rank, mixing) if part) + over
        return name if self.rank is None else f"{name}@{self.rank}"

    @property
    def shares_ranks(self) -> bool:
        """Whether temporal mixing and the width of q and k share a budget."""
        return self.compress_qk and (self.mix1 or self.mix2)

    def rank_step(self, n_head: int = 2) -> int:
        """What qk_rank must be a multiple of."""
        return n_head * (2 if self.base == "G" else 1) * (2 if self.rope else 1)

    @classmethod
    def parse(cls, text: str) -> Label:
        """The label that `text` spells; a ValueError shows where it goes wrong."""
        name, at, rank = text.partition("@")
        if at:
            name = SAME.get(name, name)
            if not is_meant(name) or not rank.isdigit():
                raise ValueError(f"{text!r}: {WHOSE_RANKS}")
            return replace(cls.parse(name), rank=int(rank))
        reason, meant = "", {alias.lower(): name for name, alias in ALIASES.items()}.get(text.lower())
        if LETTERS.fullmatch(text):
            letters: dict[str, Any] = {field: letter in text[1:].lower() for letter, field in FIELDS.items()}
            try:
                label = cls(base=text[0].upper(), **letters)
            except ValueError as error:
                reason = str(error)
            else:
                if str(label) == text:
                    return label
                meant = str(label)
        raise ValueError(complaint(text, reason, meant))


def is_meant(text: str) -> bool:
    """Whether a text is to be read as a label, right or wrong: a base alone, or followed by another part; or NAME@RANK."""
    return not set(":+*") & set(text) and ("@" in text or (text[:1] in ("S", "R", "G") and text[1:2] in ("", "-", "!")))


def shares_ranks(name: str) -> bool:
    """Whether NAME@RANK is a mixer too."""
    name = SAME.get(name, name)
    return is_meant(name) and "@" not in name and Label.parse(name).shares_ranks


@cache
def every_label() -> tuple[Label, ...]:
    """All legal labels, the plain ones first."""
    found = []
    for base in "SRG":
        for values in product((False, True), repeat=len(FIELDS)):
            try:
                found.append(Label(base=base, **dict(zip(reversed(FIELDS.values()), values, strict=True))))
            except ValueError:
                continue
    return tuple(found)


def complaint(text: str, reason: str, meant: str | None) -> str:
    """What is wrong with a label: the first character that fits no legal label, what fits there, and the nearest label."""
    legal = [str(label) for label in every_label()]
    at = max(n for n in range(len(text) + 1) if any(label.startswith(text[:n]) for label in legal))
    fitting = {label[at : at + 1] for label in legal if label.startswith(text[:at])}
    expected = ", ".join(f"{letter} {words.split(':')[0]}".strip() for letter, words in MEANING.items() if letter in fitting)
    nearest = meant or min(legal, key=lambda label: (edits(text, label), len(label)))
    lines = [f"{text!r} is no label of Table 1's grammar, Base-Feat-Rank-TmixLayout:", f"    {text}", "    " + " " * at + "^"]
    if reason:
        lines.append(reason)
    lines += [f"expected here: {expected}", f"the nearest label is {nearest}; hypermlp mixers lists mixers by name"]
    return "\n".join(lines)


def edits(a: str, b: str) -> int:
    """The least number of characters to insert or delete that turns a into b."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last if x == y else i + j)
    return row[-1]


def build(
    label: Label | str,
    width: int,
    length: int,
    qk_rank: int | None = None,
    n_head: int = 2,
    *,
    init: Init = "paper",
    **changes: Any,
) -> Mixer:
    """The mixer of a label.

    Args:
        label: a Label, or its text.
        width: of its inputs and outputs.
        length: the longest context, in tokens.
        qk_rank: the width of q and k over all heads, for labels with q; None: width / 4, rounded up to what heads can
            share, or what mixing of another rank leaves to them, at most the full width.
        n_head: heads; the paper's labels have two.
        init: how convolutions and lag factors begin (docs/layer.md).
        changes: fields of HyperGLUConfig that are to have other values than the label gives them (mixers/options.py).
    """
    label = Label.parse(label) if isinstance(label, str) else label
    if qk_rank is None:
        step = label.rank_step(n_head)
        qk_rank = -(-width // 4 // step) * step if label.compress_qk else width
        if label.rank is not None:
            qk_rank = min(width, -(-qk_rank * RANK // (label.rank * step)) * step)
    elif not label.compress_qk:
        raise ValueError(f"qk_rank ({qk_rank}) is for labels with q; {label} has q and k of the full width")
    common: dict[str, Any] = {
        "n_head": n_head,
        "qk_rank": qk_rank,
        "vo_rank": width // 4 if label.compress_vo else width,
        "use_rope": label.rope,
        "use_kv_conv": label.conv,
        "use_qk_gate": label.gate,
        "use_vo_gate": label.gate,
        "init": init,
    }
    if label.base == "S":
        return SoftmaxAttention(width, **common)
    config = HyperGLUConfig(
        n_embd=width,
        block_size=length,
        attn_kind="glu" if label.base == "G" else "relu",
        use_op1=label.mix1,
        use_op2=label.mix2,
        op1_rank=label.rank or RANK,
        op2_rank=label.rank or RANK,
        aligner_kind="offset" if label.lag or not (label.mix1 or label.mix2) else "identity",
        **common,
    )
    return HyperGLU(config.replace(**changes))


OF_MIXING = {"A": "factors", "B": "factors", "diag": "diagonal", "control": "controls"}
COMPONENTS = (
    {name: name for name in (*"qkvo", "registers")}
    | {"conv_k": "convolutions", "conv_v": "convolutions", "gate_qk": "gates", "gate_vo": "gates"}
    | {f"op{n}.{part}": f"R{n} {what}" for n in (1, 2) for part, what in OF_MIXING.items()}
)


def count_by_component(mixer: nn.Module) -> dict[str, int]:
    """Parameters of each component; what a mixer has beside these is "other"."""
    found: dict[str, int] = {}
    for name, parameter in mixer.named_parameters():
        parts = name.split(".")
        component = COMPONENTS.get(".".join(parts[:2])) or COMPONENTS.get(parts[0], "other")
        found[component] = found.get(component, 0) + parameter.numel()
    return found


@dataclass(frozen=True)
class Explanation:
    """A label in words and numbers."""

    label: Label
    alias: str | None  # its name in the paper, if it has one
    words: dict[str, str]  # letter → what it means
    parameters: dict[str, int]  # component → count


def explain(label: Label | str, width: int, length: int) -> Explanation:
    """Every letter in words, and where the parameters are at this width and context."""
    label = Label.parse(label) if isinstance(label, str) else label
    with torch.device("meta"):
        mixer = build(label, width, length)
    words = {letter: MEANING[letter] for letter in str(replace(label, rank=None)) if letter != "-"}
    if label.rank is not None:
        words[f"@{label.rank}"] = f"mixing of rank {label.rank}: and q and k wider in proportion"
    if (label.mix1 or label.mix2) and not label.lag:
        words["no o"] = NO_LAG
    return Explanation(label, ALIASES.get(str(label)), words, count_by_component(mixer))
