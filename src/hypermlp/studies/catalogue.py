"""What can be studied by a name: the demo, the paper's Table 1, scaling curves, tasks and their families, and protocol files.

`plan_study` is the one way from a name and options to studies, for running, costing and checking alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hypermlp.checks import choose_from, did_you_mean
from hypermlp.config import Init
from hypermlp.mixers.groups import choose_mixers
from hypermlp.overrides import read_overrides
from hypermlp.studies.demo import MIXERS, demo_study
from hypermlp.studies.mad import task_study
from hypermlp.studies.protocol import PACKAGED, Protocol, find_protocol, load_protocol
from hypermlp.studies.scaling import ScalingStudy, scaling_study
from hypermlp.studies.search import choose_search
from hypermlp.studies.study import Study
from hypermlp.studies.table1 import PARTS, table1_studies
from hypermlp.studies.table1 import SCALES as TABLE1_SCALES
from hypermlp.studies.tasks import find_tasks, scaled_studies
from hypermlp.tasks import TASKS
from hypermlp.tasks.base import SCALES
from hypermlp.tasks.mad import MAD

QUICK, DEFAULT = "quick", "laptop"
NAMED = ("demo", "table1", "scaling")
TWO = "G-cg-q-12o,S-pc"  # HyperGLU, and softmax attention with rotary embedding and convolutions
SUFFIX = ".toml"  # of a protocol
MAD_SCALES = {"quick": "quick", "laptop": "laptop", "baseline": "baseline", "published": "full"}
NUMBERS: dict[str, Any] = {"steps": int, "batch": int, "width": int, "lr": tuple[float, ...], "init": Init}
MAD_FIELDS: dict[str, Any] = {**NUMBERS, "epochs": int, "examples": int, "protocol": Literal["clean", "faithful"]}
TASK_FIELDS: dict[str, Any] = {**NUMBERS, "depth": int}
SCALING_FIELDS: dict[str, Any] = {
    **{name: int for name in ("depth", "length", "batch", "evaluations", "sample", "largest_seeds")},
    **{"widths": tuple[int, ...], "ratios": tuple[float, ...], "lr": tuple[float, ...], "corpus": str, "init": Init},
}
TABLE1_FIELDS: dict[str, Any] = {"corpus": str, "init": Init}


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What a user may say about a study beside its name; None: as the study has it."""

    scale: str | None = None
    mixers: str | None = None
    tasks: str | None = None
    seeds: int | None = None
    search: bool | None = None
    device: str = "auto"
    changes: Sequence[str] = ()  # FIELD=VALUE

    def refuse(self, name: str, why: str, *options: str) -> None:
        """Options that this study does not take."""
        given = [option for option in options if getattr(self, option)]
        if given:
            spelled = ", ".join("FIELD=VALUE" if option == "changes" else f"--{option}" for option in given)
            raise ValueError(f"{name} takes no {spelled}: {why}")


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """Studies, and who takes part."""

    name: str
    folder: Path  # for the runs, where no other is given
    studies: dict[str, Study]  # folder below → study; "" is the folder itself
    mixers: tuple[str, ...]
    seeds: int = 1
    scale: str | None = None
    protocol: Protocol | None = None
    file: Path | None = None  # of the protocol

    @property
    def quick(self) -> bool:
        """Too short to rank mixers."""
        return self.scale == QUICK


def plan_study(name: str, choice: StudyOptions | None = None) -> StudyPlan:
    """The studies that a name and options stand for.

    Args:
        name: demo, table1, scaling, mad, a task, a family of tasks, several of these comma-separated, all, a task of
            the user's own (FILE.py:CLASS), or a protocol (FILE.toml, or one that comes with the package).
        choice: what is to be different.
    """
    choice = choice or StudyOptions()
    if is_protocol(name):
        return plan_protocol(name, choice)
    if name == "scaling":
        return plan_scaling(choice)
    if name == "demo":
        choice.refuse("demo", "its claims compare its own six models on its own tasks", "mixers", "tasks", "search", "changes")
        scale = choice.scale or DEFAULT
        choose_from("scale", scale, (QUICK, DEFAULT))
        folder = Path("runs/demo-quick" if scale == QUICK else "runs/demo")
        studies: dict[str, Study] = {"": demo_study(quick=scale == QUICK)}
        return StudyPlan(name=name, folder=folder, studies=studies, mixers=MIXERS, seeds=choice.seeds or 1, scale=scale)
    usual = "core" if name == "table1" else TWO
    scale, mixers = choice.scale or DEFAULT, tuple(choose_mixers(usual if choice.mixers is None else choice.mixers))
    folder = Path("runs") / (name if name in ("table1", "mad") else "tasks")
    if name == "table1":
        fields: dict[str, Any] = read_overrides(choice.changes, TABLE1_FIELDS, name)
        parts = choice.tasks.split(",") if choice.tasks else PARTS
        search = choose_search() if choice.search else None
        studies = table1_studies(scale, parts, device=choice.device, search=search, **fields)
    else:
        studies = plan_tasks(name, scale, choice)
    seeds = choice.seeds or (2 if name == "table1" else 1)
    return StudyPlan(name=name, folder=folder, studies=studies, mixers=mixers, seeds=seeds, scale=scale)


def plan_tasks(name: str, scale: str, choice: StudyOptions) -> dict[str, Study]:
    check_names(name)
    places = find_tasks(name.split(","))
    found = list(places)
    if choice.tasks:
        for task in choice.tasks.split(","):
            choose_from(f"task of {name}", task, tuple(found))
        found = choice.tasks.split(",")
    if set(found) <= set(MAD):
        fields = read_overrides(choice.changes, MAD_FIELDS, name)
        choose_from("scale", scale, tuple(MAD_SCALES))
        if choice.search:
            fields["search"] = choose_search(fields.pop("lr", None))
        protocol = fields.pop("protocol", "clean")
        return {"" if name == "mad" else "mad": task_study(protocol, MAD_SCALES[scale], found, **fields)}
    numbers = [text for text in choice.changes if text.removeprefix("--").partition("=")[0] in TASK_FIELDS]
    settings = [text.removeprefix("--") for text in choice.changes if text not in numbers]
    fields = read_overrides(numbers, TASK_FIELDS, name)
    return scaled_studies(
        [next(iter(places[task]), task) for task in found], scale, search=choice.search, changes=settings, **fields
    )


def plan_scaling(choice: StudyOptions) -> StudyPlan:
    """The numbers of scaling.toml, where nothing else is said."""
    choice.refuse("scaling", "it trains language models", "tasks")
    scale, name = choice.scale or DEFAULT, "scaling"
    choose_from("scale", scale, (QUICK, DEFAULT))
    rules, quick = load_protocol(find_protocol(name)), scale == QUICK
    standard = rules.studies[name]
    assert isinstance(standard, ScalingStudy)
    changes = read_overrides(choice.changes, SCALING_FIELDS, name)
    return StudyPlan(
        name=name,
        folder=Path("runs") / (f"{name}-quick" if quick else name),
        studies={"": scaling_study(standard, quick=quick, search=choice.search, **changes)},
        mixers=rules.mixers if choice.mixers is None else tuple(choose_mixers(choice.mixers)),
        seeds=choice.seeds or (2 if quick else rules.seeds),
        scale=scale,
    )


def plan_protocol(name: str, choice: StudyOptions) -> StudyPlan:
    """A registered study, in which nothing is left to options."""
    why = "a registered study is what its file says; change the file, or copy it (hypermlp study new)"
    choice.refuse(name, why, "scale", "mixers", "tasks", "seeds", "search", "changes")
    file = find_protocol_file(name)
    rules = load_protocol(file)
    return StudyPlan(
        name=name,
        folder=Path("runs") / "registered" / file.stem,
        studies=rules.studies,
        mixers=rules.mixers,
        seeds=rules.seeds,
        protocol=rules,
        file=file,
    )


def find_protocol_file(name: str) -> Path:
    """A file, or by its name one that comes with the package."""
    if name.endswith(SUFFIX) and Path(name).is_file():
        return Path(name)
    named = packaged_protocols()
    if (found := named.get(name) or named.get(name.removesuffix(SUFFIX))) is None:
        raise unknown(name)
    return found


def is_protocol(name: str) -> bool:
    return name.endswith(SUFFIX) or name in packaged_protocols()


def packaged_protocols() -> dict[str, Path]:
    """Those that come with the package, by name; with the end of a file where another study has the name."""
    return {path.name if path.stem in built_in() else path.stem: path for path in sorted(PACKAGED.glob(f"*{SUFFIX}"))}


def built_in() -> list[str]:
    return list(dict.fromkeys([*NAMED, *families(), *TASKS, "all"]))


def check_names(name: str) -> None:
    """Refuse a study, or one of several tasks, that there is not."""
    for part in name.split(","):
        if ":" not in part and part not in built_in():
            raise unknown(part)


def unknown(name: str) -> ValueError:
    meant = did_you_mean(name, study_names(), most=3) or ";"
    return ValueError(f"there is no study {name!r}{meant} hypermlp study list shows all")


def families() -> list[str]:
    return list(dict.fromkeys(task.family for task in TASKS.values()))


def study_names() -> list[str]:
    """All names, for lists and for a shell to complete."""
    return [*built_in(), *packaged_protocols()]


def scales_of(name: str) -> tuple[str, ...]:
    """The scales that a study can be run at; none for a protocol."""
    if is_protocol(name):
        return ()
    if name in ("demo", "scaling"):
        return (QUICK, DEFAULT)
    if name == "table1":
        return TABLE1_SCALES
    return tuple(MAD_SCALES) if name == "mad" or name in MAD else SCALES


def new_protocol() -> str:
    """The text of a protocol to begin with."""
    return NEW


NEW = """\
# A study that is registered before it runs. Change what is to be different, check it (hypermlp study check FILE), see what it
# takes (hypermlp study cost FILE), commit it, and only then run it (hypermlp study run FILE): verdicts count as registered if
# the file was committed before the first run.
title = "What is asked, in a few words"
mixers = ["G-cg-q-12o", "G-cg-q", "S-pc"]  # names and labels that hypermlp mixers lists
seeds = 3

[why]
question = "What would be learned, and what was known when this was written?"

[mad]
protocol = "clean"
scale = "baseline"
tasks = ["in-context-recall"]
width = 64
batch = 16
tests = 320
decays = [0.1]
init = "decays"
steps = {in-context-recall = 200}
search = {rates = [1e-3, 3e-3], rungs = [0.5, 1.0]}  # of learning rates; or rates = [3e-3]

[terms]
points = 2.0  # the smallest difference that matters, in percentage points
seeds = 3  # that a verdict needs at least

[[comparisons]]
title = "Mixing along the sequence gains"
better = "G-cg-q-12o"
worse = "G-cg-q"
expect = "more"  # or: far more, level, not behind
on = ["in-context-recall"]
"""
