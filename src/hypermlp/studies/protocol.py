"""A study registered before it runs: a TOML file says who takes part, how all train, what is compared and by which rule.

    title, why             what it is about, and reasons for what is not obvious
    contestants            mixers and labels
    seeds                  of the runs that count; a search has its own
    [mad], [language]      the numbers of its studies (TaskStudy, LanguageStudy), each with its search
    [terms]                the smallest effects of interest, and how intervals are made (report/claims.py judges by them)
    [[comparisons]]        what is expected of which pair, on which measures

Every record of the study has the file's digest. Its folder keeps each version that runs were started with, in protocols.jsonl,
so that a change after the first record can be shown as the deviation it is; the page does.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hypermlp.checks import choose_from, naming
from hypermlp.files import Record, append_json_line, end_last_line, read_json, read_json_lines
from hypermlp.studies.folder import read_lines
from hypermlp.studies.language import LanguageStudy
from hypermlp.studies.mad import TaskStudy
from hypermlp.studies.search import Search
from hypermlp.studies.study import Study, each_once

PACKAGED = Path(__file__).parent / "protocols"
VERSIONS = "protocols.jsonl"
MARK = "registered"  # what a record calls the digest of its protocol

T = TypeVar("T")
Expectation = Literal["more", "far more", "level", "not behind"]
IntervalKind = Literal["student", "bootstrap"]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms on which verdicts are given."""

    points: float = 2.0  # the smallest difference of accuracy that matters, in percentage points
    nats: float = 0.02  # and of the loss
    wide: float = 5.0  # times that: what a collapse ("far more") must exceed, and how far noise may reach
    interval: IntervalKind = "student"  # of the mean gain, paired by seed: Student's, or the bootstrap's
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
    on: tuple[str, ...]  # measures: tasks, "average", "loss"; each is judged
    text: str = ""

    def __post_init__(self) -> None:
        choose_from("expect", self.expect, get_args(Expectation))
        each_once(f"measures of {self.title!r}", self.on)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A registered study."""

    title: str
    why: dict[str, str]
    contestants: tuple[str, ...]
    seeds: int
    studies: dict[str, Study]  # folder → study
    terms: Terms
    comparisons: tuple[Comparison, ...]
    text: str  # the file

    @property
    def digest(self) -> str:
        return digest(self.text)

    def check(self) -> None:
        """Names that do not exist fail before anything starts."""
        measures = {"average", "loss"} | {task for study in self.studies.values() for task in getattr(study, "tasks", ())}
        for folder, study in self.studies.items():
            with naming(f"[{folder}]"):
                study.check(self.contestants, self.seeds)
        for number, item in enumerate(self.comparisons, 1):
            with naming(f"[[comparisons]] {number} ({item.title!r})"):
                for name in (item.better, item.worse):
                    choose_from("mixer", name, self.contestants)
                for measure in item.on:
                    choose_from("measure", measure, tuple(sorted(measures)))


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
    for folder, kind in (("language", LanguageStudy), ("mad", TaskStudy)):  # the shorter first
        if numbers := values.pop(folder, None):
            with naming(f"[{folder}]"):
                studies[folder] = new(kind, with_search(numbers, kind.rate_field))
    if not studies:
        raise ValueError("a protocol has a study: [mad], [language] or both")
    with naming("[terms]"):
        terms = new(Terms, values.pop("terms", {}))
    comparisons = []
    for number, item in enumerate(values.pop("comparisons", []), 1):
        with naming(f"[[comparisons]] {number}"):
            comparisons.append(new(Comparison, item))
    found = {"studies": studies, "terms": terms, "comparisons": comparisons, "text": text}
    return new(Protocol, {"why": {}, **values, **found})


def with_search(numbers: dict[str, Any], rate_field: str) -> dict[str, Any]:
    """The numbers of a study, with its search in place of a rate, and with steps in place of epochs."""
    if "steps" in numbers and rate_field == TaskStudy.rate_field:
        numbers = {"epochs": None, **numbers}
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


# ---- versions, in the folder of the study ----

# What decides a verdict once the runs are there. By path: studies know nothing of what judges them.
JUDGING = (
    "studies/scores.py",
    "studies/search.py",
    "report/claims.py",
    "report/estimates.py",
    "report/folders.py",
    "report/study.py",
)


def judging_code() -> str:
    """The digest of the code that judges."""
    package = Path(__file__).parents[1]
    return digest("".join((package / name).read_text(encoding="utf-8") for name in JUDGING))


@dataclass(frozen=True)
class Version:
    """The protocol as runs were started with it."""

    digest: str
    text: str
    date: str  # when it was first used here
    commit: str | None  # the commit that the file had; None: it was not committed as it was, or there was no history to ask
    committed: str | None  # the date of that commit
    records: int  # that the folder had by then
    judging: str | None = None  # digest of the code that judges; None: an older version of this program did not say


def enter(folder: Path, path: Path, protocol: Protocol) -> list[Version]:
    """Note the protocol in the folder of its study, if it or the code that judges is another than before; all versions there.

    One that was noted before it was committed is noted again afterwards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end_last_line(folder / VERSIONS, is_version)  # a kill before its runs began
    versions = read_versions(folder)
    records = sum(len(read_lines(lines)[0]) for lines in sorted(folder.glob("*/runs.jsonl")))
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    version = Version(protocol.digest, protocol.text, date, *commit_of(path), records, judging_code())
    if not versions or not same_version(versions[-1], version):
        append_json_line(folder / VERSIONS, vars(version))
        versions.append(version)
    return versions


def same_version(old: Version, new: Version) -> bool:
    return (old.digest, old.judging) == (new.digest, new.judging) and (old.commit is not None or new.commit is None)


def is_version(record: Record) -> bool:
    needed = {field.name for field in fields(Version)} - {"judging"}
    return needed <= record.keys() and isinstance(record["text"], str) and isinstance(record["records"], int)


def read_versions(folder: Path) -> list[Version]:
    lines, _ = read_json_lines(folder / VERSIONS, is_version)
    known = {field.name for field in fields(Version)}
    return [Version(**{name: value for name, value in line.items() if name in known}) for line in lines]


def commit_of(path: Path) -> tuple[str | None, str | None]:
    """The commit that gave the file its present content, and its date."""

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", *arguments], cwd=path.resolve().parent, capture_output=True, text=True, check=True)
        return run.stdout.strip()

    try:
        if git("status", "--porcelain", "--", path.name):
            return None, None
        commit, _, date = git("log", "-1", "--format=%H %cI", "--", path.name).partition(" ")
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return commit or None, date or None


def registered_version(versions: Sequence[Version]) -> Version | None:
    """The latest that was committed, and noted, before the first record; None if there is none."""
    return next((version for version in reversed(versions) if not version.records and version.commit is not None), None)


def deviations(versions: Sequence[Version]) -> list[tuple[Version, list[str]]]:
    """The versions after the registered one, or after the first if none is registered, each with what it changed."""
    found = []
    base = registered_version(versions)
    later = versions[versions.index(base) :] if base is not None else versions
    for before, version in pairwise(later):
        lines = differences(tomllib.loads(before.text), tomllib.loads(version.text))
        if before.digest != version.digest and not lines:
            lines = ["comments only"]
        if None not in (before.judging, version.judging) and before.judging != version.judging:
            lines.append(f"the code that judges: {before.judging} → {version.judging}")
        if lines:
            found.append((version, [*lines, *([] if version.commit else ["this version was not committed"])]))
    return found


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """What has changed between two files, value by value."""
    if isinstance(old, dict) and isinstance(new, dict):
        parts = [*old, *(key for key in new if key not in old)]
        return [line for key in parts for line in differences(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))]
    if old == new:
        return []
    if isinstance(old, list) and isinstance(new, list):
        if len(old) == len(new) and all(isinstance(item, dict) for item in (*old, *new)):
            pairs = enumerate(zip(old, new, strict=True), 1)
            return [line for i, (a, b) in pairs for line in differences(a, b, f"{name} {i}")]
        removed, added = ([item for item in a if item not in b] for a, b in ((old, new), (new, old)))
        if removed or added:
            return [f"{name}: {what} {shown(item)}" for what, some in (("without", removed), ("with", added)) for item in some]
    return [f"{name}: {shown(old)} → {shown(new)}"]


def shown(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 200 else f"{text[:200]}…"


def registration_problems(folder: Path) -> list[str]:
    """Why the runs and verdicts of a folder do not count as registered beforehand; none if they do.

    Decided by what the folder itself holds, so that it needs no history.
    """
    versions = read_versions(folder)
    if not versions:
        return [f"{folder} has no {VERSIONS}"]
    _, damaged = read_json_lines(folder / VERSIONS, is_version)
    found = [f"{damaged} of the lines in {VERSIONS} are damaged: versions may be missing"] if damaged else []
    found += [f"the text of {v.digest} has the digest {digest(v.text)}" for v in versions if digest(v.text) != v.digest]
    if versions[0].records:
        found.append(f"there were {versions[0].records} runs before the first version")
    for version in versions:
        if version.committed is not None and moment(version.committed) > moment(version.date):
            found.append(f"the protocol was committed at {version.committed}, after the first start at {version.date}")
    reasons = Counter(filter(None, map(partial(unregistered, versions), read_runs(folder))))
    found += [f"{count} runs {why}" for why, count in reasons.items()]
    registered = (registered_version(versions) or versions[0]).judging
    if registered is not None and registered != judging_code():
        found.append(f"verdicts are given by other code than was registered: {judging_code()}, not {registered}")
    return found


def read_runs(folder: Path) -> Iterator[tuple[str | None, str | None]]:
    """Of every record in the folder: the digest of its protocol, and the date of the start that made it."""
    for path in sorted(folder.glob("*/runs.jsonl")):
        plan = path.parent / "plan.json"
        starts = read_json(plan)["starts"] if plan.exists() else []
        for record in read_lines(path)[0]:
            start = starts[number : number + 1] if isinstance(number := record.get("start"), int) and number >= 0 else []
            yield record.get(MARK), start[0]["date"] if start else None


def unregistered(versions: Sequence[Version], run: tuple[str | None, str | None]) -> str | None:
    """Why a run does not count as registered; None if it does."""
    mark, date = run
    own = [version for version in versions if version.digest == mark]
    if not own:
        return f"are of another protocol ({mark})"
    used = [version for version in own if date is None or moment(version.date) <= moment(date)]
    if not any(version.commit for version in used):
        return f"were made with the version of {own[0].date} ({mark}), which was not committed"
    return None


def moment(date: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(date)
