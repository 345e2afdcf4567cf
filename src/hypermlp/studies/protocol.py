"""A study registered before it runs: a TOML file says who takes part, how all train, what is compared and by which rule.

    title, why             what it is about, and reasons for what is not obvious
    mixers                 names and labels
    seeds                  of the runs that count; a search has its own
    fair                   true: every mixer has the same number of runs of the search, or the file is refused
    [mad], [language]      the numbers of its studies (TaskStudy, LanguageStudy), each with its search, or with `given`: the
                           learning rate of every mixer, which another study has found
    [scaling]              those of a study of language models of several sizes (ScalingStudy)
    [terms]                the smallest effects of interest, and how intervals are made (verdicts/claims.py judges by them)
    [[comparisons]]        what is expected of which pair, on which measures

Every record of the study has the file's digest. Which version was registered, and what was changed later, is told by
verdicts/registration.py.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hypermlp.checks import choose_from, naming
from hypermlp.studies.language import LanguageStudy
from hypermlp.studies.mad import TaskStudy
from hypermlp.studies.scaling import ScalingStudy
from hypermlp.studies.search import Search
from hypermlp.studies.study import Study, each_once

PACKAGED = Path(__file__).parent / "protocols"

T = TypeVar("T")
# "as published": more where the paper gains more than what matters, else not behind. "shown": printed, and not judged.
Expectation = Literal["more", "far more", "level", "not behind", "as published", "shown"]
EACH_TASK = "each task"  # a measure of the paper's claims: every task of a study with several
SOFTMAX, BEST = "softmax attention", "the best other label"  # mixers of the paper's claims: what was run decides which
# holm: Student's t, corrected for the number of measures of a claim. The other two judge each measure alone, as earlier
# protocols were registered: they support a claim of several measures by chance more often than one time in twenty.
IntervalKind = Literal["holm", "student", "bootstrap"]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms on which verdicts are given."""

    points: float = 2.0  # the smallest difference of accuracy that matters, in percentage points
    nats: float = 0.02  # and of the loss
    wide: float = 5.0  # times that: what a collapse ("far more") must exceed, and how far noise may reach
    interval: IntervalKind = "holm"  # of the mean gain, and by which rule it is judged
    paired: bool = True  # gains are taken seed by seed, with the same data on both sides; False: mean against mean (Welch)
    seeds: int = 2  # that a verdict needs at least
    ceiling: float = 98.0  # accuracy in percent: where both sides of a comparison reach it, there is nothing to see

    def __post_init__(self) -> None:
        choose_from("interval", self.interval, get_args(IntervalKind))
        if min(self.points, self.nats, self.wide) <= 0 or self.seeds < 2 or not 0 < self.ceiling <= 100:
            raise ValueError(
                f"points, nats and wide must be above 0, seeds at least 2, ceiling above 0 and at most 100: {self}"
            )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is expected of one mixer against another; several with the same title are one claim."""

    title: str
    better: str
    worse: str
    expect: Expectation
    on: tuple[str, ...]  # measures: tasks, "average", "validation loss", "loss" (of training text); each is judged
    text: str = ""

    def __post_init__(self) -> None:
        choose_from("expect", self.expect, get_args(Expectation))
        each_once(f"measures of {self.title!r}", self.on)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A registered study."""

    title: str
    why: dict[str, str]
    mixers: tuple[str, ...]
    seeds: int
    studies: dict[str, Study]  # folder → study
    terms: Terms
    comparisons: tuple[Comparison, ...]
    text: str  # the file
    fair: bool = False

    @property
    def digest(self) -> str:
        return digest(self.text)

    def check(self) -> None:
        """Names that do not exist fail before anything starts."""
        tasks = {task for study in self.studies.values() for task in getattr(study, "tasks", ())}
        measures = {"average", "loss", "validation loss"} | tasks
        for folder, study in self.studies.items():
            with naming(f"[{folder}]"):
                study.check(self.mixers, self.seeds)
                if self.fair:
                    check_fair(study.search)
        for number, item in enumerate(self.comparisons, 1):
            with naming(f"[[comparisons]] {number} ({item.title!r})"):
                for name in (item.better, item.worse):
                    choose_from("mixer", name, self.mixers)
                for measure in item.on:
                    choose_from("measure", measure, tuple(sorted(measures)))


def check_fair(search: Search | None) -> None:
    """Refuse a search that some mixers would get more out of than others."""
    if search is None:
        raise ValueError("fair = true needs a search: it is unknown how many runs found learning rates that are given")
    if search.unequal:
        cures = {
            "ranks": "ranks = [] (only some mixers have ranks to choose; name them as rows of their own, such as hyperglu@8)",
            "widen": "widen = 0 (a grid that is widened for some gives them more runs; make it wide enough for all)",
            "level": "level = 0 (ties continue, so that some mixers have more runs)",
        }
        raise ValueError(f"fair = true needs {'; '.join(cures[name] for name in search.unequal)}")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- reading the file ----


def find_protocol(name: str) -> Path:
    """A file, or one of those that come with the package by its name."""
    if (path := Path(name)).is_file():
        return path
    packaged = {path.stem: path for path in sorted(PACKAGED.glob("*.toml"))}
    choose_from("protocol (a file, or a name)", name, tuple(packaged))
    return packaged[name]


def load_protocol(path: Path) -> Protocol:
    """The protocol of a file, checked: every mistake in it names the file and the section."""
    with naming(path.name):
        protocol = read_protocol(path.read_text(encoding="utf-8"))
        protocol.check()
    return protocol


def read_protocol(text: str) -> Protocol:
    """The protocol that a TOML file holds."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"it is not TOML: {error}") from None
    studies: dict[str, Study] = {}
    kinds: dict[str, type[Study]] = {"language": LanguageStudy, "mad": TaskStudy, "scaling": ScalingStudy}  # the shorter first
    for folder, kind in kinds.items():
        if numbers := values.pop(folder, None):
            with naming(f"[{folder}]"):
                studies[folder] = new(kind, with_search(numbers, kind.rate_field))
    if not studies:
        raise ValueError("a protocol has a study: [mad], [language] or both, or [scaling]")
    with naming("[terms]"):
        terms = new(Terms, values.pop("terms", {}))
    if "contestants" in values:  # as protocols that were registered before call them
        values["mixers"] = values.pop("contestants")
    found = {"studies": studies, "terms": terms, "comparisons": new_comparisons(values), "text": text}
    return new(Protocol, {"why": {}, **values, **found})


def read_claims(text: str) -> tuple[Comparison, ...]:
    """The comparisons of a file that has nothing else."""
    return new_comparisons(tomllib.loads(text))


def new_comparisons(values: dict[str, Any]) -> tuple[Comparison, ...]:
    found = []
    for number, item in enumerate(values.pop("comparisons", []), 1):
        with naming(f"[[comparisons]] {number}"):
            found.append(new(Comparison, item))
    return tuple(found)


def with_search(numbers: dict[str, Any], rate_field: str) -> dict[str, Any]:
    """The numbers of a study, with its search or given rates in place of a rate, and with steps in place of epochs."""
    if "steps" in numbers and rate_field == TaskStudy.rate_field:
        numbers = {"epochs": None, **numbers}
    if "given" in numbers and rate_field not in numbers:
        numbers = {**numbers, rate_field: (1e-3,) if rate_field == TaskStudy.rate_field else 1e-3}  # no run takes it
    if "search" not in numbers:
        return numbers
    with naming("search"):
        search = new(Search, numbers["search"])
    return {**numbers, "search": search, rate_field: search.rates if rate_field == TaskStudy.rate_field else search.rates[0]}


def new(kind: type[T], values: Mapping[str, Any]) -> T:
    """An instance from a table of the file; a name that it does not have, or a value of another type, is refused."""
    if not isinstance(values, Mapping):
        raise ValueError(f"it ({values!r}) must be a table")
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key in values:
        choose_from("name", key, tuple(known))
    needed = [name for name, field in known.items() if field.default is field.default_factory is MISSING]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"{', '.join(missing)} must be given")
    types = get_type_hints(kind)
    return kind(**{key: convert(key, value, types[key]) for key, value in values.items()})


def convert(name: str, value: Any, wanted: Any) -> Any:
    """A value of the file as its field has it: lists become tuples, whole numbers numbers; anything else is refused."""
    value = tuple(value) if isinstance(value, list) else value
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin is tuple and isinstance(value, tuple):
        types = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(types) == len(value):
            return tuple(convert(name, item, one) for item, one in zip(value, types, strict=True))
    elif origin is dict and isinstance(value, dict):
        return {key: convert(f"{name}.{key}", item, inner[1]) for key, item in value.items()}
    elif origin is Literal:
        choose_from(name, value, inner)
        return value
    elif origin in (Union, UnionType):  # X | None, of which a file can only say X
        return value if value is None else convert(name, value, inner[0])
    elif wanted is Any or (wanted is float and type(value) is int) or type(value) is wanted:
        return value
    elif isinstance(wanted, type) and wanted not in WORDS and isinstance(value, wanted):
        return value  # a part that is read already
    raise ValueError(f"{name} ({value!r}) must be {spelled(wanted)}")


WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def spelled(wanted: Any) -> str:
    """A type in words."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin is tuple:
        return f"a list, each entry {spelled(inner[0])}"
    if origin is dict:
        return "a table"
    return WORDS.get(wanted, str(wanted))
