"""Which version of a protocol a study is registered by, and what was changed after it.

The folder of a study keeps each version that runs were started with in protocols.jsonl, with the commit of its file and the
digest of the code that judges; every record has the digest of its version. Verdicts are given by the latest version that was
committed before the first record. All later ones are deviations: they are shown, and judge nothing.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypermlp.files import Record, append_json_line, end_last_line, read_json, read_json_lines
from hypermlp.studies.folder import read_lines
from hypermlp.studies.protocol import Protocol, digest

VERSIONS = "protocols.jsonl"
MARK = "registered"  # what a record calls the digest of its protocol
# What gives verdicts once the runs are there, with the numbers that it takes from elsewhere: of guessing, and the paper's.
JUDGING = (
    *("studies/protocol.py", "studies/scores.py", "studies/search.py", "verdicts/*.py", "verdicts/*.toml"),
    *("tasks/mad_settings.py", "paper/tables.py"),
)


def judging_code() -> str:
    """The digest of the code that judges."""
    package = Path(__file__).parents[1]
    return digest("".join(path.read_text(encoding="utf-8") for name in JUDGING for path in sorted(package.glob(name))))


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
    version = Version(protocol.digest, protocol.text, date, *commit_of(path, protocol.text), records, judging_code())
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


def commit_of(path: Path, text: str) -> tuple[str | None, str | None]:
    """The commit in which the file has this text, if that is its latest, and its date.

    The text itself is compared: git can be told not to look at a file, and a file can change while a program runs.
    """

    path = path.resolve()

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=path.parent, capture_output=True, check=True).stdout.decode()

    try:
        commit, _, date = git("log", "-1", "--format=%H %cI", "--", path.name).strip().partition(" ")
        committed = git("show", f"{commit}:./{path.name}") if commit else None
    except (OSError, subprocess.CalledProcessError, UnicodeDecodeError):
        return None, None
    return (commit, date) if committed is not None and committed.replace("\r\n", "\n") == text else (None, None)


def registered_version(versions: Sequence[Version]) -> Version | None:
    """The latest that was committed, and noted, before the first record; None if there is none. Verdicts are given by it."""
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
    """Why the runs of a folder do not count as registered beforehand; none if they do.

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
    return found + [f"{count} runs {why}" for why, count in reasons.items()]


def other_judge(folder: Path) -> str | None:
    """Which code the verdicts were registered with, where it is not this one; None where it is."""
    versions = read_versions(folder)
    version = registered_version(versions) or next(iter(versions), None)
    if version is None or version.judging in (None, judging_code()):
        return None
    starts = [start for path in folder.glob("*/plan.json") for start in read_json(path)["starts"]]
    starts.sort(key=lambda start: moment(start["date"]))
    commits = [start["commit"] for start in starts if moment(start["date"]) >= moment(version.date) and start.get("commit")]
    return f"{version.judging}{f', which commit {commits[0]} has' if commits else ''}"


def objections(folder: Path, marks: Iterable[str | None]) -> tuple[str, ...]:
    """What a reader must know before the verdicts of a study, in sentences; marks: what its records say of a protocol."""
    if not (folder / VERSIONS).exists():
        lost = ", ".join(sorted({str(mark) for mark in marks if mark is not None}))
        return (f"Its runs say that they are registered ({lost}), and {VERSIONS} is gone: see its history.",) if lost else ()
    found = [f"Not registered beforehand: {problem}." for problem in registration_problems(folder)]
    if (registered := other_judge(folder)) is not None:
        found.append(f"Judged by other code ({judging_code()}) than was registered ({registered}).")
    return tuple(found)


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
