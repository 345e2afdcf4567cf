"""The settings of the MAD benchmark: six tasks, their baselines, and what the full benchmark varies about each."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from hypermlp.checks import choose_from, divisible

# What each task has beyond vocab_size, seq_len and the numbers of examples.
OPTIONS: dict[str, tuple[str, ...]] = {
    "compression": (),
    "fuzzy-recall": ("k_motif", "v_motif", "multi_query"),
    "in-context-recall": ("multi_query",),
    "memorization": (),
    "noisy-recall": ("noise_vocab_size", "frac_noise", "multi_query"),
    "selective-copying": ("num_tokens_to_copy",),
}
# Tokens with a meaning of their own: the last ones of the vocabulary, in this order.
SPECIAL: dict[str, tuple[str, ...]] = {
    "compression": ("compress",),
    "fuzzy-recall": ("pad",),
    "memorization": ("insert",),
    "selective-copying": ("blank", "copy"),
}


@dataclass(frozen=True, kw_only=True)
class MADSetting:
    """One task at one size, under the benchmark's names."""

    task: str
    vocab_size: int
    seq_len: int
    num_train: int = 12800
    num_test: int = 1280
    noise_vocab_size: int = 0
    frac_noise: float = 0.0  # chance that a slot of two tokens holds noise
    num_tokens_to_copy: int = 0
    k_motif: int = 1  # most tokens in a key
    v_motif: int = 1  # most tokens in a value
    multi_query: bool = True  # False: only the last key is asked for, behind a copy token

    def __post_init__(self) -> None:
        choose_from("task", self.task, tuple(OPTIONS))
        optional = {name for names in OPTIONS.values() for name in names}
        for option in dataclasses.fields(self):
            if option.name in optional - set(OPTIONS[self.task]) and getattr(self, option.name) != option.default:
                raise ValueError(f"{option.name} has no effect on {self.task}; leave it at {option.default}")
        least = {"num_train": 1, "num_test": 1, "k_motif": 1, "v_motif": 1, "noise_vocab_size": 0}
        if self.task == "selective-copying":
            least["num_tokens_to_copy"] = 1
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least {value}")
        if not 0 <= self.frac_noise < 1:
            raise ValueError(f"frac_noise ({self.frac_noise}) must be at least 0 and below 1")
        if self.frac_noise and self.noise_vocab_size < 1:
            raise ValueError(f"frac_noise ({self.frac_noise}) needs noise tokens; set noise_vocab_size to at least 1")
        self._check_sizes()

    def _check_sizes(self) -> None:
        content = 1 if self.task in ("compression", "selective-copying") else max(2 * self.k_motif, 2 * self.v_motif - 1)
        smallest = content + self.noise_vocab_size + len(self.special)
        if self.vocab_size < smallest:
            raise ValueError(f"vocab_size ({self.vocab_size}) is too small for {self.task}; try {smallest} or more")
        shortest = {
            "compression": 2,
            "fuzzy-recall": 2 * (self.k_motif + self.v_motif) + 1,
            "memorization": 2,
            "selective-copying": 2 * self.num_tokens_to_copy + 2,
        }.get(self.task, 4)
        if self.seq_len < shortest:
            raise ValueError(f"seq_len ({self.seq_len}) is too short for this {self.task}; try {shortest} or more")
        if self.task in ("in-context-recall", "noisy-recall", "memorization"):
            divisible("seq_len", self.seq_len, 2, "2: keys and values come in pairs")

    @property
    def special(self) -> tuple[str, ...]:
        return SPECIAL.get(self.task, ()) + (() if self.multi_query else ("copy",))

    @property
    def key(self) -> str:
        """The task and what differs from its baseline, such as "in-context-recall/vocab_size=32"."""
        baseline = dataclasses.asdict(BENCHMARK[self.task].baseline)
        changed = [f"{name}={value}" for name, value in dataclasses.asdict(self).items() if value != baseline[name]]
        return f"{self.task}/{','.join(changed) or 'baseline'}"

    @property
    def baseline(self) -> bool:
        return self == BENCHMARK[self.task].baseline


def vocabulary(setting: MADSetting) -> dict[str, range]:
    """Which tokens play which role: content first, then noise, then the special tokens."""
    rest = setting.vocab_size - len(setting.special)
    content = rest - setting.noise_vocab_size
    roles = {name: range(rest + i, rest + i + 1) for i, name in enumerate(setting.special)}
    if setting.noise_vocab_size:
        roles["noise"] = range(content, rest)
    if setting.task in ("compression", "selective-copying"):
        return {"data": range(content), **roles}
    return {"key": range(content // 2), "value": range(content // 2, content), **roles}


def spell(setting: MADSetting, token: int) -> str:
    """A token as a reader wants to see it: content by its number, the others by their role.

    >>> copying = Setting(task="selective-copying", vocab_size=8, seq_len=20, num_tokens_to_copy=5)
    >>> [spell(copying, token) for token in (0, 5, 6, 7)]
    ['0', '5', '·', 'copy']
    """
    role = next(name for name, tokens in vocabulary(setting).items() if token in tokens)
    return str(token) if role in ("data", "key", "value") else {"blank": "·", "pad": "·"}.get(role, role)


def chance(setting: MADSetting) -> float:
    """The accuracy of guessing among the tokens that can be an answer."""
    roles = vocabulary(setting)
    return 1 / len(roles.get("value") or roles["data"])


class Benchmark(NamedTuple):
    """One task as published."""

    baseline: MADSetting
    axes: dict[str, tuple[Any, ...]]  # the full benchmark varies each one alone


EXAMPLES = (6400, 3200, 1600, 800)
# In the order of the columns of the paper's Table 1.
BENCHMARK: dict[str, Benchmark] = {
    "compression": Benchmark(
        MADSetting(task="compression", vocab_size=16, seq_len=32),
        {"vocab_size": (32, 64, 128), "seq_len": (64, 128, 256), "num_train": EXAMPLES},
    ),
    "fuzzy-recall": Benchmark(
        MADSetting(task="fuzzy-recall", vocab_size=16, seq_len=128, k_motif=3, v_motif=3),
        {"vocab_size": (32, 64, 128), "seq_len": (256, 512, 1024), "num_train": EXAMPLES},
    ),
    "in-context-recall": Benchmark(
        MADSetting(task="in-context-recall", vocab_size=16, seq_len=128),
        {"vocab_size": (32, 64, 128), "seq_len": (256, 512, 1024), "num_train": EXAMPLES},
    ),
    "memorization": Benchmark(
        MADSetting(task="memorization", vocab_size=256, seq_len=32, num_train=256),
        {"vocab_size": (512, 1024, 2048, 4096, 8192)},
    ),
    "noisy-recall": Benchmark(
        MADSetting(task="noisy-recall", vocab_size=32, seq_len=128, noise_vocab_size=16, frac_noise=0.2),
        {
            "vocab_size": (48, 80, 144),
            "seq_len": (256, 512, 1024),
            "num_train": EXAMPLES,
            "frac_noise": (0.4, 0.6, 0.8),
        },
    ),
    "selective-copying": Benchmark(
        MADSetting(task="selective-copying", vocab_size=16, seq_len=256, num_tokens_to_copy=16),
        {
            "vocab_size": (32, 64, 128),
            "seq_len": (512, 1024),
            "num_train": EXAMPLES,
            "num_tokens_to_copy": (32, 64, 96),
        },
    ),
}
