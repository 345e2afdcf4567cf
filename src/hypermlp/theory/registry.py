"""Statements of the paper as entries that can be run: a check on random instances, and a control on which it must fail.

A check is a function of an Instance. It draws one random instance in float64 and returns its error: the distance between what
the statement says and what the instance shows, 0 where the two agree. An instance that is `broken` is drawn outside the
statement's assumptions, and the same check must then find an error above the tolerance; otherwise it tests nothing.
Where the printed statement is false or imprecise, a counterexample returns the error of the statement as printed. A check of an
inequality notes how much room it left (`Instance.bound`): the bound over the largest value that was found.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from hypermlp.config import HyperGLUConfig
from hypermlp.mixers.hyper import HyperGLU

Check = Callable[["Instance"], float]

HOLDS, FAILS, TOOTHLESS, NOT_RUN = "holds", "fails", "control passes", "not run"
# What is listed and not checked.
PROOF_ONLY, DEFINITION, ASSUMPTION, RESTATED = "proof only", "definition", "assumption", "restated"
LISTED = (PROOF_ONLY, DEFINITION, ASSUMPTION, RESTATED)


@dataclass
class Instance:
    """One instance: a source of random numbers, and whether it must break the statement's assumption."""

    seed: int
    broken: bool = False
    generator: torch.Generator = field(init=False)
    slack: float = field(init=False, default=math.inf)  # the smallest bound ÷ value so far

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def integer(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def bound(self, found: float | Tensor, bound: float | Tensor) -> float:
        """By how much of the bound a quantity exceeds it, up to rounding; notes how close it came."""
        value, most = (float(torch.as_tensor(x, dtype=torch.float64).detach()) for x in (found, bound))
        self.slack = min(self.slack, most / value if value else math.inf)
        return excess(value, most)

    def layer(self, **changes: object) -> HyperGLU:
        """A small layer without convolutions, as in equations (7) to (10), all parameters from N(0, 0.4²)."""
        small = {"n_embd": 6, "n_head": 2, "block_size": 12, "qk_rank": 8, "vo_rank": 6, "op1_rank": 2, "op2_rank": 2}
        chosen = {"attn_kind": "relu", "use_kv_conv": False, **small, **changes}
        return self.randomise(HyperGLU(HyperGLUConfig.from_dict(chosen)).double())

    def randomise(self, layer: HyperGLU, scale: float = 0.4) -> HyperGLU:
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(self.normal(*p.shape, scale=scale))
        return layer.requires_grad_(False)


@dataclass(frozen=True, kw_only=True)
class Counterexample:
    """Why the printed statement does not hold as it stands, and an instance that shows it."""

    says: str
    check: Check


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A numbered statement. `says` is the exact sentence that is checked; `printed`, if any, tells how the paper's differs."""

    number: str
    kind: str
    title: str
    says: str
    assumes: str = "nothing further"
    control: str = ""
    check: Check | None = None
    unchecked: str = ""  # one of LISTED, where there is no check
    trivial: str = ""  # what of the statement holds by definition, where that is most of it
    blind: str = ""  # why the check notices no fault of the operator (faults.py) but junk, if not even that
    tolerance: float = 1e-9
    instances: int = 10
    needs: str = ""  # the optional package that the check imports
    printed: tuple[Counterexample, ...] = ()

    @property
    def name(self) -> str:
        return self.number.capitalize() if self.number.startswith(self.kind.lower()) else f"{self.kind} {self.number}"


@dataclass(frozen=True, kw_only=True)
class Result:
    statement: Statement
    verdict: str
    reason: str = ""
    instances: int = 0
    error: float = 0.0  # the largest over all instances
    control: float = 0.0  # the smallest over all broken instances
    slack: float = math.inf  # the smallest bound ÷ value over all instances; infinite where nothing is bounded
    printed: tuple[float, ...] = ()  # the smallest error of each counterexample
    seconds: float = 0.0


STATEMENTS: dict[str, Statement] = {}


def statement(
    number: str,
    kind: str,
    title: str,
    *,
    says: str,
    assumes: str = "nothing further",
    control: str,
    tolerance: float = 1e-9,
    instances: int = 10,
    needs: str = "",
    trivial: str = "",
    blind: str = "",
) -> Callable[[Check], Check]:
    """Enter a check under its number."""

    def enter(check: Check) -> Check:
        add(
            Statement(
                number=number,
                kind=kind,
                title=title,
                says=says,
                assumes=assumes,
                control=control,
                check=check,
                tolerance=tolerance,
                instances=instances,
                needs=needs,
                trivial=trivial,
                blind=blind,
            )
        )
        return check

    return enter


def printed(number: str, says: str) -> Callable[[Check], Check]:
    """Attach a counterexample to the printed form of a statement that is already entered."""

    def attach(check: Check) -> Check:
        old = STATEMENTS[number]
        more = (*old.printed, Counterexample(says=says, check=check))
        STATEMENTS[number] = Statement(**{**old.__dict__, "printed": more})
        return check

    return attach


def listed(number: str, kind: str, title: str, *, says: str, unchecked: str = PROOF_ONLY) -> None:
    """Enter what is no check: a definition, an assumption, what other checks cover, what no finite computation can test."""
    if unchecked not in LISTED:
        raise ValueError(f"unchecked must be one of {', '.join(LISTED)}, not {unchecked!r}")
    add(Statement(number=number, kind=kind, title=title, says=says, unchecked=unchecked))


def add(entry: Statement) -> None:
    if entry.number in STATEMENTS:
        raise ValueError(f"statement {entry.number} is entered twice")
    STATEMENTS[entry.number] = entry


def select(wanted: Iterable[str]) -> list[Statement]:
    """Statements by number, or by the beginning of it ("C" is the whole appendix), in the paper's order."""
    chosen = [text.strip() for text in wanted if text.strip()]
    for text in chosen:
        if not any(matches(number, text) for number in STATEMENTS):
            raise ValueError(f"no statement {text!r}; known are {', '.join(entry.number for entry in select([]))}")
    found = [entry for number, entry in STATEMENTS.items() if not chosen or any(matches(number, text) for text in chosen)]
    return sorted(found, key=place)


def place(entry: Statement) -> tuple[str, int, str]:
    """The paper's order: main text, appendices B to I, examples."""
    part, _, rest = entry.number.partition(".")
    digits = "".join(c for c in rest.split(" ")[0] if c.isdigit())
    return part, int(digits or 0), entry.number


def matches(number: str, text: str) -> bool:
    number, text = number.lower(), text.lower()
    return number == text or number.startswith((f"{text}.", f"{text} "))


def outcomes(
    entry: Statement, check: Check, instances: int, *, broken: bool = False, salt: int = 0
) -> Iterator[tuple[float, float]]:
    """Error and slack of each instance; seeds depend on the statement alone, so that a run is reproducible."""
    base = zlib.crc32(entry.number.encode()) + 7919 * salt
    for i in range(instances):
        case = Instance(base + 1000003 * i, broken)
        found = check(case)
        yield math.inf if math.isnan(found) else found, case.slack


def errors(entry: Statement, check: Check, instances: int, *, broken: bool = False, salt: int = 0) -> Iterator[float]:
    """The error of each instance."""
    return (error for error, _ in outcomes(entry, check, instances, broken=broken, salt=salt))


def run(entry: Statement, instances: int | None = None) -> Result:
    """Check, control and counterexamples of one statement."""
    if entry.check is None:
        return Result(statement=entry, verdict=entry.unchecked)
    if reason := missing(entry):
        return Result(statement=entry, verdict=NOT_RUN, reason=reason)
    count = min(instances or entry.instances, entry.instances)
    begin = perf_counter()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        found_errors, slacks = zip(*outcomes(entry, entry.check, count), strict=True)
        control = min(errors(entry, entry.check, count, broken=True, salt=1))
        printed_errors = tuple(min(errors(entry, c.check, count, salt=2 + i)) for i, c in enumerate(entry.printed))
    error = max(found_errors)
    verdict = judge(entry, error, control, printed_errors)
    seconds = perf_counter() - begin
    return Result(
        statement=entry,
        verdict=verdict,
        instances=count,
        error=error,
        control=control,
        slack=min(slacks),
        printed=printed_errors,
        seconds=seconds,
    )


def judge(entry: Statement, error: float, control: float, counterexamples: Iterable[float]) -> str:
    if error > entry.tolerance:
        return FAILS
    toothless = control <= entry.tolerance or any(found <= entry.tolerance for found in counterexamples)
    return TOOTHLESS if toothless else HOLDS


def missing(entry: Statement) -> str:
    """What must be installed before the check can run; empty if nothing is missing."""
    if not entry.needs:
        return ""
    from importlib.util import find_spec

    return "" if find_spec(entry.needs) else f"needs {entry.needs}: pip install {entry.needs}"


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest entry; NaN counts as infinite."""
    if found.shape != expected.shape:
        raise ValueError(f"shapes differ: {tuple(found.shape)} and {tuple(expected.shape)}")
    if not found.numel():
        return 0.0
    scale = float(expected.detach().abs().max())
    gap = float((found.detach() - expected.detach()).abs().max())
    return math.inf if math.isnan(gap) else gap / (scale or 1.0)


def excess(found: float | Tensor, bound: float | Tensor) -> float:
    """By how much of the bound a quantity exceeds it; 0 if it does not, up to rounding."""
    gap = torch.as_tensor(found, dtype=torch.float64) / torch.as_tensor(bound, dtype=torch.float64) - 1
    return max(0.0, float(gap.max()))
