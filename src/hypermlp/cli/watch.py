"""Run a study and watch it: the live display, what it leaves, and the verdicts on its claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from hypermlp.files import Record
from hypermlp.models.budget import TOLERANCE
from hypermlp.ops import dispatch
from hypermlp.report.page import write_report
from hypermlp.report.progress import Scores, Screen, accuracies, describe, losses
from hypermlp.report.repeat import show_repeated
from hypermlp.report.scaling import losses_so_far, show_scaling, write_scaling
from hypermlp.report.tasks import task_table
from hypermlp.report.terminal import say
from hypermlp.report.words import power_words, sentence
from hypermlp.studies.catalogue import StudyPlan
from hypermlp.studies.executors import Executor
from hypermlp.studies.folder import read_lines
from hypermlp.studies.mad import TaskStudy
from hypermlp.studies.repeat import CHANGED, FAILED, choose_runs, conditions, read_runs, repeat
from hypermlp.studies.scaling import ScalingStudy
from hypermlp.studies.search import PHASE
from hypermlp.studies.study import Study
from hypermlp.studies.tasks import ScaledStudy
from hypermlp.verdicts.judged import Judged, judge_folder
from hypermlp.verdicts.registration import MARK, deviations, enter, registered_version
from hypermlp.verdicts.results import QUICK
from hypermlp.verdicts.scaling import Unfinished, find_scaling, read_scaling


def run_study(
    console: Console,
    out: Path,
    study: Study,
    mixers: Sequence[str],
    *,
    seeds: int = 1,
    executor: Executor | None = None,
    retry_failed: bool = False,
    marks: Mapping[str, Any] = MappingProxyType({}),
) -> list[Record]:
    """Run a study in `out`, or what is missing of it; marks: what every record says besides."""
    run = partial(study.run, out, mixers, seeds=seeds, executor=executor, retry_failed=retry_failed, marks=marks)
    return watch(console, out, run, partial(scores_so_far, study, mixers))


def scores_so_far(study: Study, mixers: Sequence[str], records: Sequence[Record], width: int) -> Group:
    records = [record for record in records if record.get("phase") != PHASE]
    if isinstance(study, ScalingStudy):
        return losses_so_far(records, mixers, study, width)
    if not isinstance(study, TaskStudy):
        return losses(records, mixers, width)
    settings = {key: setting.task for key, setting in study.settings().items()}
    if isinstance(study, ScaledStudy):
        return task_table(records, mixers, settings, width)
    return accuracies(records, mixers, settings, f"MAD, {study.protocol} protocol: accuracy, %", width)


def run_plan(
    console: Console, plan: StudyPlan, out: Path | None = None, *, executor: Executor | None = None, retry_failed: bool = False
) -> list[Record]:
    """Run all studies of a plan, or what is missing of them; then say what they show, and leave report.html."""
    for study in plan.studies.values():
        study.check(plan.mixers, plan.seeds)  # before anything is written or shown
    folder = out or plan.folder
    marks = enter_protocol(console, plan, folder) | ({QUICK: True} if plan.quick else {})
    begin_quick(console, plan)
    before = finished(folder)
    records: list[Record] = []
    for part, study in plan.studies.items():
        if part:
            say(console, f"{part}{f', {plan.scale} scale' if plan.scale else ''}:")
        records += run_study(
            console,
            folder / part,
            study,
            plan.mixers,
            seeds=plan.seeds,
            executor=executor,
            retry_failed=retry_failed,
            marks=marks,
        )
    if finished(folder) == before:
        say(console, f"All runs were finished before and are in {folder}; another --out trains them again.")
    if any(isinstance(study, ScalingStudy) for study in plan.studies.values()):
        leave_scaling(console, folder)  # its models are equal, whatever the mixers take of them
        end_quick(console, plan)
        return records
    show_budgets(console, records)
    if plan.quick:
        say(console, f"Report: {write_report(folder)}")
        end_quick(console, plan)
    else:
        leave_page(console, folder)
        if plan.seeds == 1:
            say(console, "One seed cannot tell an effect from chance; the same command with --seeds 4 runs the other seeds.")
    return records


def finished(folder: Path) -> set[str]:
    return {record["key"] for path in folder.rglob("runs.jsonl") for record in read_lines(path)[0]}


def enter_protocol(console: Console, plan: StudyPlan, folder: Path) -> dict[str, Any]:
    """Note a registered study's protocol in its folder, and say where it deviates; what its records are to say besides."""
    if plan.protocol is None or plan.file is None:
        return {}
    versions = enter(folder, plan.file, plan.protocol)
    if registered_version(versions) is None:
        say(console, f"{plan.file.name} is not committed as it is, so these runs will not count as registered.", "red")
    for changed, lines in deviations(versions):
        say(console, f"Changed on {changed.date}, after {changed.records} runs: {'; '.join(lines)}", "red")
    return {MARK: plan.protocol.digest}


def begin_quick(console: Console, plan: StudyPlan) -> None:
    if plan.quick:
        say(console, "The quick scale shows that everything works. It is too short to rank mixers.")


def end_quick(console: Console, plan: StudyPlan) -> None:
    """A quick run is too short to rank mixers: it says what is not."""
    if not plan.quick:
        return
    instead = "hypermlp demo" if plan.name == "demo" else f"hypermlp study run {plan.name} --scale laptop"
    say(console, f"These scores do not rank the mixers: they were trained for too few steps. To rank them: {instead} --seeds 4")


def show_budgets(console: Console, records: Sequence[Record]) -> None:
    """Name the mixers that miss their budget of parameters, and say whether whole models have equal sizes all the same."""
    notes: dict[str, dict[str, None]] = {}
    for record in records:
        if note := record.get("budget"):
            notes.setdefault(note, {})[record["mixer"]] = None
    for note, mixers in notes.items():
        say(console, f"Not at the mixer's budget of parameters: {', '.join(mixers)}: {note}.", "yellow")
    if notes:
        smaller = [f"{mixer} {share:.2f}" for mixer, share in model_shares(records).items() if share < 1 - TOLERANCE]
        equal = "Whole models have equal sizes all the same: wider feed-forward layers make up for it."
        differ = f"So whole models differ in size, as parts of the largest: {', '.join(smaller)}; the others are equal."
        say(console, differ if smaller else equal, "yellow")


def model_shares(records: Sequence[Record]) -> dict[str, float]:
    """Parameters of each mixer's models beside the largest model of the same setting: the smallest share."""
    sizes: dict[Any, dict[str, int]] = {}
    for record in records:
        if record.get("parameters") is not None:
            sizes.setdefault(record.get("setting"), {})[record["mixer"]] = record["parameters"]
    shares: dict[str, float] = {}
    for own in sizes.values():
        for mixer, size in own.items():
            shares[mixer] = min(shares.get(mixer, 1.0), size / max(own.values()))
    return shares


def show_verdicts(console: Console, studies: Sequence[Judged]) -> None:
    """The claims that these studies can judge, as their page has them."""
    for study in studies:
        for found in study.claims:
            if found.judged:
                say(console, f"{sentence(found)}\n")
        if power := power_words(study.claims):
            say(console, f"{power}\n")


def leave_scaling(console: Console, folder: Path, out: Path | None = None, *, force: bool = False) -> bool:
    """Tables and page of each scaling study in a folder, of several a page each; whether it holds nothing else."""
    found = find_scaling(folder)
    alone = all(path.parent in found for path in folder.rglob("runs.jsonl"))
    for place in found:
        only = alone and len(found) == 1
        try:
            show_scaling(console, read_scaling(place))
        except Unfinished as reason:
            if only:
                raise
            say(console, f"Left out: {reason}", "yellow")  # the others are there
        else:
            say(console, f"Report: {write_scaling(place, out or folder / 'report.html' if only else None, force=force)}")
    return bool(found) and alone


def leave_page(console: Console, folder: Path) -> None:
    """Read what a folder holds and judge it, once: say the verdicts, write the page."""
    studies = judge_folder(folder)
    show_verdicts(console, studies)
    say(console, f"Report: {write_report(folder, studies=studies)}")


def leave(records: Sequence[Record]) -> None:
    """End the program with an error if a run failed, after all that could be done was done."""
    if any(record["error"] is not None for record in records):
        raise SystemExit(1)


def repeat_runs(console: Console, folder: Path, count: int, executor: Executor) -> None:
    """Make some of a folder's runs again, and show what became of their numbers."""
    runs = choose_runs(list(read_runs(folder)), count)
    if not runs:
        raise ValueError(f"{folder} and the folders below have no finished runs that can be made again")
    minutes = sum(one.record["seconds"] for one in runs) / 60
    say(console, f"{len(runs)} runs of {folder}, which took {minutes:.1f} minutes of one core.")
    dispatch.announce(dispatch.choose())
    screen = Screen(console, lambda records, width: Group())
    try:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            found = repeat(
                runs, executor=executor, tell=lambda progress: live.update(screen.render(progress)), done=screen.done
            )
    except KeyboardInterrupt:
        say(console, "Stopped: nothing was compared, and the folder is as it was.")
        raise SystemExit(130) from None
    show_repeated(console, found, conditions())
    if any(one.outcome in (CHANGED, FAILED) for one in found):
        raise SystemExit(1)


def watch(console: Console, out: Path, study: Callable[..., list[Record]], scores: Scores) -> list[Record]:
    """Show a study while it runs, and its outcome."""
    dispatch.announce(dispatch.choose())  # compiles, where that is still to be done, before the workers all want it
    screen = Screen(console, scores)
    try:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            records = study(tell=lambda progress: live.update(screen.render(progress)), done=screen.done)
    except KeyboardInterrupt as stop:  # here, since typer ends the program at one without a word
        say(console, f"Stopped: {stop}")
        raise SystemExit(130) from None
    console.print(scores(records, console.width))
    failed = [record for record in records if record["error"] is not None]
    for record in failed:
        say(console, f"failed: {describe(record)}, seed {record['seed']}: {record['error']}", "red")
    if failed:
        say(console, f"{len(failed)} of {len(records)} runs failed; --retry-failed runs them again")
    say(console, f"Runs: {out / 'runs.jsonl'}   Plan: {out / 'plan.json'}")
    return records
