"""Run a study and watch it: the live display, what it leaves, and how to resume it after Ctrl-C."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from hypermlp import ops
from hypermlp.experiments import demo, language, mad
from hypermlp.experiments.mad import Plan
from hypermlp.experiments.runs import Record, read_lines
from hypermlp.report.claims import judge_claims
from hypermlp.report.page import write_report
from hypermlp.report.progress import Scores, Screen, accuracies, describe, losses
from hypermlp.report.study import read_studies
from hypermlp.report.terminal import say


def run_mad(
    console: Console,
    out: Path,
    mixers: Sequence[str],
    tasks: Sequence[str],
    protocol: str,
    scale: str,
    seeds: int,
    workers: int | None,
    *,
    retry_failed: bool = False,
    **overrides: Any,
) -> list[Record]:
    """Run the study in `out`, or what is missing of it. overrides: of the scale's numbers (experiments/mad.py: make_plan)."""
    plan = mad.make_plan(protocol, scale, **overrides)
    mad.check(mixers, tasks, seeds)
    study = partial(mad.study, out, mixers, tasks, plan, seeds=seeds, workers=workers, retry_failed=retry_failed)
    settings = {setting.key: task for task in tasks for setting in plan.settings_of(task)}
    return watch(console, out, study, lambda records, width: accuracies(records, mixers, settings, protocol, width))


def run_language(
    console: Console,
    out: Path,
    mixers: Sequence[str],
    scale: str,
    seeds: int,
    workers: int | None,
    *,
    retry_failed: bool = False,
    **overrides: Any,
) -> list[Record]:
    """The same for the language half of Table 1 (experiments/language.py)."""
    plan = language.make_plan(scale, **overrides)
    language.check(mixers, seeds, plan)
    study = partial(language.study, out, mixers, plan, seeds=seeds, workers=workers, retry_failed=retry_failed)
    return watch(console, out, study, lambda records, width: losses(records, mixers, width))


def run_demo(
    console: Console, out: Path, plan: Plan, *, seeds: int = 1, workers: int | None = None, retry_failed: bool = False
) -> list[Record]:
    """Run the demo in `out`, or what is missing of it; then say which claims it supports, and leave report.html."""
    before = {record["key"] for record in read_lines(out / "runs.jsonl")[0]}
    names, tasks = demo.MIXERS, demo.TASKS
    study = partial(
        mad.study, out, names, tasks, plan, seeds=seeds, work=demo.train, workers=workers, retry_failed=retry_failed
    )
    settings = {setting.key: task for task in tasks for setting in plan.settings_of(task)}
    records = watch(console, out, study, lambda found, width: accuracies(found, names, settings, plan.protocol, width))
    if {record["key"] for record in records} <= before:
        say(console, f"All runs were finished before and are in {out}; with another --out they are trained anew.")
    show_verdicts(console, out)
    say(console, f"Report: {write_report(out)}")
    return records


def show_verdicts(console: Console, folder: Path) -> None:
    """The claims that the runs of a folder can judge, as its page has them."""
    for study in read_studies(folder):
        for found in judge_claims(study):
            if found.judged:
                say(console, f"{found.sentence}\n")


def watch(console: Console, out: Path, study: Callable[..., list[Record]], scores: Scores) -> list[Record]:
    """Show a study while it runs, and its outcome."""
    ops.announce(ops.choose())  # compiles, where that is still to be done, before the workers all want it
    screen = Screen(console, scores)
    try:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            records = study(tell=lambda progress: live.update(screen.render(progress)), done=screen.done)
    except KeyboardInterrupt:
        say(console, f"{screen.farewell} Resume with the same command: {shlex.join(['hypermlp', *sys.argv[1:]])}")
        raise SystemExit(130) from None
    console.print(scores(records, console.width))
    failed = [record for record in records if record["error"] is not None]
    for record in failed:
        say(console, f"failed: {describe(record)}, seed {record['seed']}: {record['error']}", "red")
    if failed:
        say(console, f"{len(failed)} of {len(records)} runs failed; --retry-failed runs them again")
    say(console, f"Runs: {out / 'runs.jsonl'}   Plan: {out / 'plan.json'}")
    return records
