"""How tasks are shown: words, a size to be solved by eye, names of tokens, and pictures where rows are no tokens.

A task without an entry, such as a user's own, is shown by its name, its docstring and the numbers of its tokens. Its file can
make one: SHOWN["my-task"] = Shown(title="My task", asks="What comes next?", roles=lambda setting: {"answer": (2, 3)}).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hypermlp.tasks import copying, languages, listops, regbench
from hypermlp.tasks.base import Task
from hypermlp.tasks.copying import OFFSETS
from hypermlp.tasks.forecast import look_up
from hypermlp.tasks.groups import group_table
from hypermlp.tasks.mad_settings import vocabulary
from hypermlp.tasks.pixels import read_pictures, split_pictures, spread

Roles = Mapping[str, Sequence[int]]  # role → its tokens


def all_data(setting: Any) -> Roles:
    return {"data": range(setting.vocab_size)}


def number(setting: Any, token: int) -> str:
    return str(token)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """How one task is shown.

    Args:
        title: its name in tables.
        asks: what is asked, in one line.
        note: what else to know about the examples that are printed.
        published: what others found, an ordering or numbers, and where.
        small: fields of the baseline, changed so that a row can be solved by eye.
        roles: setting → which tokens play which role, such as "key" or "noise"; examples.py has their colours.
        spell: setting and token → the token as a reader wants to see it.
        sketch: task, setting, count and seed → examples as lines of text, for tasks whose rows are no tokens.
    """

    title: str
    asks: str
    note: str = ""
    published: str = ""
    small: Mapping[str, Any] = field(default_factory=dict)
    roles: Callable[[Any], Roles] = all_data
    spell: Callable[[Any, int], str] = number
    sketch: Callable[[Task, Any, int, int], list[str]] | None = None


def how_shown(task: Task) -> Shown:
    """How this task is shown."""
    words = inspect.cleandoc(type(task).__doc__ or "").partition("\n")[0]
    return SHOWN.get(task.name) or Shown(title=task.name, asks=words)


def unit_of(measure: str) -> tuple[float, int, str]:
    """What a score is multiplied by to be shown, its digits, and how it is called."""
    return (100, 1, "accuracy, %") if measure == "accuracy" else (1, 4, measure)


# ---- MAD ----


def mad(title: str, asks: str, note: str = "", **small: Any) -> Shown:
    return Shown(title=title, asks=asks, note=note, small={**small, "num_train": 1}, roles=vocabulary)


EVERY = "Test rows; in training every next token counts."
MAD = {
    "compression": mad(
        "Compression", "Rebuild every token of the row from the state at its last position.", vocab_size=8, seq_len=10
    ),
    "fuzzy-recall": mad(
        "Fuzzy recall",
        "A key of several tokens comes back: which value followed it before?",
        EVERY,
        vocab_size=9,
        seq_len=36,
    ),
    "in-context-recall": mad(
        "In-context recall", "A key comes back: which value followed it before?", EVERY, vocab_size=8, seq_len=24
    ),
    "memorization": mad(
        "Memorisation",
        "Which value belongs to the key before? The map is the same in all rows and never shown.",
        vocab_size=10,
        seq_len=12,
    ),
    "noisy-recall": mad(
        "Noisy recall",
        "A key comes back after pairs of noise: which value followed it before?",
        EVERY,
        vocab_size=12,
        seq_len=24,
        noise_vocab_size=4,
        frac_noise=0.4,
    ),
    "selective-copying": mad(
        "Selective copying",
        "Behind the copy token, write down the data tokens in order, without the blanks.",
        vocab_size=8,
        seq_len=20,
        num_tokens_to_copy=5,
    ),
}


# ---- recall and languages ----


def recall_roles(setting: Any) -> Roles:
    half = setting.vocab_size // 2
    return {"key": range(1, half), "value": range(half, setting.vocab_size), "blank": range(1)}


def recall(title: str, asks: str, published: str, mix: str) -> Shown:
    small = {"vocab_size": 26, "seq_len": 24, "mix": mix, "noise": False}
    return Shown(title=title, asks=asks, published=published, small=small, roles=recall_roles)


MQAR = {
    "mqar": recall(
        "MQAR",
        "Associative recall: pairs of keys and values, then every key is asked for.",
        "softmax ≥ DeltaNet ≈ Gated DeltaNet > Based, GLA, RWKV-7 > Mamba-2 ≈ Mamba > sliding window ≫ Hyena, H3 "
        "at equal state size (zoology's recall–memory plot, Based's mix, vocabulary 8192)",
        "shown",
    ),
    "mqar-forgetting": recall(
        "MQAR with forgetting",
        "Associative recall in which keys get another value: the last one counts.",
        "",
        "shown-forgetting",
    ),
}
REGBENCH = Shown(
    title="RegBench",
    asks="Words of a random automaton, another one in every row: which letters may follow?",
    published="transformers above all recurrent and convolutional models (Akyürek et al. 2024, abstract)",
    small={"seq_len": 30, "nodes": 4, "longest": 6},
    roles=lambda setting: {"data": range(1, regbench.BAR), "bar": (regbench.BAR,), "pad": (regbench.PAD,)},
    spell=lambda setting, token: {regbench.PAD: ".", regbench.BAR: "|"}.get(token) or chr(ord("a") + token - 1),
)


def begin_of(setting: Any) -> int:
    """The token at which a word of a group begins."""
    return len(group_table(setting.group)) + 1


GROUP_WORDS = Shown(
    title="Words of a group",
    asks="The running product of the elements of a group: Z60, A4xZ5, A5, S3, S5.",
    published="one layer of DeltaNet with eigenvalues in [0, 1] never learns S3; S5 in one layer needs products of four "
    "reflections (DeltaProduct's README)",
    small={"length": 6, "tested": 12, "seq_len": 7},
    roles=lambda setting: {"data": range(len(group_table(setting.group))), "begin": (begin_of(setting),)},
    spell=lambda setting, token: "$" if token == begin_of(setting) else str(token),
)


def language(title: str, asks: str, roles: Roles, signs: Sequence[str], published: str) -> Shown:
    return Shown(
        title=title,
        asks=f"{asks} Tested on rows longer than trained.",
        published=published,
        small={"shortest": 5, "longest": 9, "tested": 15, "seq_len": 9},
        roles=lambda setting: {**roles, "blank": (0,)},
        spell=lambda setting, token: ("_", *signs)[token],
    )


HELPS = "negative eigenvalues improve Mamba and DeltaNet (Grazzi et al. 2025, abstract)"
STEPS, NUMBERS = languages.STEPS + 1, languages.ZERO  # the first token behind the steps, and that of the numbers
LANGUAGES = {
    "parity": language(
        "Parity",
        "Is the number of ones odd?",
        {"data": (1, 2)},
        ("0", "1"),
        "models whose state transitions have eigenvalues in [0, 1] cannot do it; with [−1, 1] Mamba and DeltaNet can "
        "(Grazzi et al. 2025, abstract)",
    ),
    "modular-arithmetic": language(
        "Modular arithmetic",
        "Sums, differences and products modulo 5, * first.",
        {"operator": range(languages.PLUS, NUMBERS), "data": range(NUMBERS, NUMBERS + languages.MODULUS)},
        (*"+-*=", *map(str, range(languages.MODULUS))),
        HELPS,
    ),
    "cycle-navigation": language(
        "Cycle navigation",
        "Where on a cycle of five do these steps lead?",
        {"data": range(1, STEPS), "answer": range(STEPS, STEPS + languages.POSITIONS)},
        ("+0", "+1", "-1", *map(str, range(languages.POSITIONS))),
        HELPS,
    ),
}


# ---- copying ----


def copies(name: str, title: str, asks: str, size: int, roles: Roles, signs: Mapping[int, str]) -> dict[str, Shown]:
    """A task of copying and its variant with offsets, which is shown by rows without them."""
    blank = copying.KINDS[name].vocabulary

    def one(ending: str, more: str) -> Shown:
        return Shown(
            title=title + ending,
            asks=asks + more,
            small={"task": name, "largest": size, "reach": 1, "seq_len": 0},
            roles=lambda setting: {**roles, "blank": (blank,)},
            spell=lambda setting, token: "_" if token == blank else signs.get(token, str(token)),
        )

    behind_blanks = one(", offsets", " Trained behind blanks, so that every lag is trained.")
    return {name: one("", ""), name + OFFSETS: behind_blanks}


COPYING = {
    **copies(
        "copy",
        "Copy",
        "A string of letters, to be written down again; a row counts if all of it is right.",
        8,
        {"data": range(copying.LETTERS), "sign": (copying.BOS, copying.BAR, copying.END)},
        {i: sign for i, sign in enumerate((*map(chr, range(ord("a"), ord("a") + copying.LETTERS)), "$", "|", "."))},
    ),
    **copies(
        "phone-book",
        "Phone book",
        "Names of two symbols and numbers of five digits; one name's number is asked for, all of it.",
        3,
        {"key": range(2 * copying.NAMES), "value": range(2 * copying.NAMES, copying.ASK), "sign": (copying.ASK,)},
        {copying.ASK: "?"},
    ),
    **copies(
        "induction",
        "Induction",
        "What followed the special token when it came first? Only the last token is scored.",
        16,
        {"data": range(copying.ALPHABET), "sign": (copying.SPECIAL,)},
        {copying.SPECIAL: "*"},
    ),
    **copies(
        "needle",
        "Needle",
        "One, four or sixteen pairs of a key and a value among noise; then keys are asked for.",
        24,
        {
            "key": range(copying.KEYS),
            "value": copying.KINDS["needle"].answers,
            "noise": range(copying.KEYS + copying.VALUES, copying.QUERY),
            "sign": (copying.QUERY,),
        },
        {copying.QUERY: "?"},
    ),
    **copies(
        "variables",
        "Variables",
        "Chains of assignments among noise: which value does a variable hold, one to four steps away?",
        32,
        {
            "key": range(copying.VARIABLES),
            "value": copying.KINDS["variables"].answers,
            "noise": range(copying.VARIABLES + copying.CONSTANTS, copying.EQUALS),
            "operator": (copying.EQUALS, copying.WHAT),
        },
        {copying.EQUALS: "=", copying.WHAT: "?"},
    ),
}
LISTOPS = Shown(
    title="ListOps",
    asks="The value of nested operations on digits: minimum, maximum, median, sum modulo 10.",
    published="Long Range Arena, lengths to 2000: Transformer 36.4 %, Linear Transformer 16.1 %; the root operator alone has "
    "37 %",
    small={"seq_len": 24, "shortest": 5, "max_depth": 3, "max_args": 4, "num_train": 1},
    roles=lambda setting: {"data": range(10), "operator": range(listops.MIN, listops.ASK), "ask": (listops.ASK,)},
    spell=lambda setting, token: listops.NAMES.get(token, str(token)),
)


# ---- pictures and series ----


def draw_pictures(task: Task, setting: Any, count: int, seed: int) -> list[str]:
    """Pictures side by side, their digits below."""
    pixels, digits = read_pictures(setting, spread(split_pictures(seed)["test"], count))
    drawn = [[" .:-=+*#@"[value // 2] for value in picture] for picture in pixels]
    lines = ["   ".join("".join(2 * c for c in p[8 * r : 8 * r + 8]) for p in drawn) for r in range(8)]
    return [*lines, "   ".join(f"{digit:<16}" for digit in digits)]


BARS = "▁▂▃▄▅▆▇█"


def draw_series(task: Task, setting: Any, count: int, seed: int) -> list[str]:
    """The end of a look-back and what came after it, as bars."""
    places = task.evaluation(setting, seed, "test")["test"][0].inputs
    places = places[np.random.default_rng(seed).permutation(len(places))[:count]]
    size = f"the last 48 values of a look-back of {setting.lookback}, and the {setting.horizon} to forecast"
    lines = [f"{setting.series.name}: {size}"]
    for row, future, (_, window, channel) in zip(*look_up(setting, places), places, strict=True):
        past, low, high = row[-48:], min(row[-48:].min(), future.min()), max(row[-48:].max(), future.max())
        bars = ["".join(BARS[int(7.99 * (v - low) / (high - low or 1))] for v in part) for part in (past, future)]
        lines += ["", f"{setting.series.channels[channel]}, window {window}", f"{bars[0]} | {bars[1]}"]
    return lines


SHOWN: dict[str, Shown] = {
    **MAD,
    **MQAR,
    "regbench": REGBENCH,
    "group-words": GROUP_WORDS,
    **LANGUAGES,
    **COPYING,
    "listops": LISTOPS,
    "pixels": Shown(
        title="Digits",
        asks="A handwritten digit of 8 × 8 pixels, row by row: which one is it?",
        sketch=draw_pictures,
    ),
    "pixels-next": Shown(
        title="Next pixel",
        asks="Every pixel of a handwritten digit from those before it, in bits per pixel.",
        sketch=draw_pictures,
    ),
    "forecast": Shown(
        title="Forecast",
        asks="The next values of a real series, from a long look-back: mean squared error on standardised values.",
        sketch=draw_series,
    ),
}
