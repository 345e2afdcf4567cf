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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from hypermlp.checks import choose_from
from hypermlp.files import Record, read_json, read_json_lines
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

    def __post_init__(self) -> None:
        choose_from("interval", self.interval, get_args(IntervalKind))
        if min(self.points, self.nats, self.wide) <= 0 or self.seeds < 2:
            raise ValueError(f"points, nats and wide must be above 0 and seeds at least 2: {self}")


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
        for study in self.studies.values():
            study.check(self.contestants, self.seeds)
        for item in self.comparisons:
            for name in (item.better, item.worse):
                choose_from(f"mixer of the comparison {item.title!r}", name, self.contestants)
            for measure in item.on:
                choose_from(f"measure of the comparison {item.title!r}", measure, tuple(sorted(measures)))


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


def read_protocol(text: str) -> Protocol:
    """The protocol that a TOML file holds."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the protocol is not TOML: {error}") from None
    studies: dict[str, Study] = {}
    for folder, kind in (("language", LanguageStudy), ("mad", TaskStudy)):  # the shorter first
        if numbers := values.pop(folder, None):
            studies[folder] = new(kind, folder, with_search(numbers, kind.rate_field))
    if not studies:
        raise ValueError("a protocol has a study: [mad], [language] or both")
    terms = new(Terms, "terms", values.pop("terms", {}))
    comparisons = tuple(new(Comparison, "comparisons", item) for item in values.pop("comparisons", []))
    named = {"why": {}, **values, "contestants": tuple(values.get("contestants", ()))}
    return new(Protocol, "protocol", {**named, "studies": studies, "terms": terms, "comparisons": comparisons, "text": text})


def with_search(numbers: dict[str, Any], rate_field: str) -> dict[str, Any]:
    """The numbers of a study, with its search in place of a rate, and with steps in place of epochs."""
    if "steps" in numbers and rate_field == TaskStudy.rate_field:
        numbers = {"epochs": None, **numbers}
    if "search" not in numbers:
        return numbers
    search = Search.from_plan(numbers["search"])
    return {**numbers, "search": search, rate_field: search.rates if rate_field == TaskStudy.rate_field else search.rates[0]}


def new(kind: type[T], name: str, values: Mapping[str, Any]) -> T:
    """An instance from a table of the file; names that it does not have are refused."""
    known = tuple(field.name for field in fields(kind))  # type: ignore[arg-type]
    for key in values:
        choose_from(f"name in {name}", key, known)
    try:
        return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})
    except TypeError as error:
        raise ValueError(f"{name} of the protocol is not complete: {error}") from None


# ---- versions, in the folder of the study ----


@dataclass(frozen=True)
class Version:
    """The protocol as runs were started with it."""

    digest: str
    text: str
    date: str  # when it was first used here
    commit: str | None  # the commit that the file had; None: it was not committed as it was, or there was no history to ask
    committed: str | None  # the date of that commit
    records: int  # that the folder had by then


def enter(folder: Path, path: Path, protocol: Protocol) -> list[Version]:
    """Note the protocol in the folder of its study, if it is another than before; all versions there."""
    versions = read_versions(folder)
    if not versions or versions[-1].digest != protocol.digest:
        records = sum(len(read_lines(lines)[0]) for lines in sorted(folder.glob("*/runs.jsonl")))
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        version = Version(protocol.digest, protocol.text, date, *commit_of(path), records)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / VERSIONS, "a", encoding="utf-8") as file:
            file.write(json.dumps(vars(version), ensure_ascii=False) + "\n")
        versions.append(version)
    return versions


def read_versions(folder: Path) -> list[Version]:
    lines, _ = read_json_lines(folder / VERSIONS, lambda record: isinstance(record.get("digest"), str))
    return [Version(**line) for line in lines]


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


def deviations(versions: Iterable[Version]) -> list[tuple[Version, list[str]]]:
    """Versions that came after the first record, each with what it changed."""
    found, before = [], None
    for version in versions:
        if before is not None and version.records:
            old, new = tomllib.loads(before.text), tomllib.loads(version.text)
            found.append((version, differences(old, new) or ["comments only"]))
        before = version
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
    """Why the runs of a folder do not count as registered beforehand; none if they do.

    Decided by what the folder itself holds, so that it needs no history.
    """
    versions = read_versions(folder)
    if not versions:
        return [f"{folder} has no {VERSIONS}"]
    known = {version.digest for version in versions}
    found = [f"the text of {v.digest} has the digest {digest(v.text)}" for v in versions if digest(v.text) != v.digest]
    first = versions[0]
    if first.records:
        found.append(f"there were {first.records} runs before the first version")
    starts = [start["date"] for path in sorted(folder.glob("*/plan.json")) for start in read_json(path)["starts"]]
    if first.committed is None:
        found.append("the first version was not committed when the runs began")
    elif starts and moment(first.committed) > min(map(moment, starts)):
        found.append(f"the protocol was committed at {first.committed}, after the first start at {min(starts)}")
    records: list[Record] = [r for path in sorted(folder.glob("*/runs.jsonl")) for r in read_lines(path)[0]]
    strangers = sorted({str(record.get(MARK)) for record in records} - known)
    if strangers:
        found.append(f"there are records of other protocols: {', '.join(strangers)}")
    return found


def moment(date: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(date)
