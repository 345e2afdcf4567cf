"""The command line, as a user meets it."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers import OWN_MIXER
from hypermlp import __version__, cli
from hypermlp.cli import app, watch
from hypermlp.cli.app import DEBUG
from hypermlp.errors import RunError
from hypermlp.files import write_json
from hypermlp.studies.catalogue import StudyPlan
from hypermlp.studies.demo import demo_study
from hypermlp.studies.study import Study


def hypermlp(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    code = "from hypermlp.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )


def fail(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that must fail prints, run in this process: each of its own would import torch first."""
    monkeypatch.setattr(sys, "argv", ["hypermlp", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code not in (0, None)
    return capsys.readouterr().err


def test_help_names_every_command() -> None:
    shown = hypermlp("--help").stdout
    assert "info" in shown
    assert "demo" in shown


def test_the_module_is_the_command_and_knows_its_version() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-m", "hypermlp", "--version"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"hypermlp {__version__}\n"


def test_shells_complete_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_HYPERMLP_COMPLETE": "complete_bash", "COMP_WORDS": "hypermlp mi", "COMP_CWORD": "1"}.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, prog_name="hypermlp")
    assert done.output.split() == ["mixers"], done.output


def fail_with(error: Exception, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    def show_mixers(*_: object) -> None:
        raise error

    monkeypatch.setattr("hypermlp.report.budget.show_mixers", show_mixers)
    monkeypatch.setattr(sys, "argv", ["hypermlp", *options, "mixers"])
    cli.main()


@pytest.mark.parametrize("kind", [ValueError, OSError, ImportError, RunError])
def test_a_users_mistake_is_one_line_unless_asked_for_more(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(DEBUG, "")
    with pytest.raises(SystemExit) as ended:
        fail_with(kind("no such label; try S-p"), monkeypatch)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "hypermlp: no such label; try S-p\n"
    with pytest.raises(kind, match="no such label"):
        fail_with(kind("no such label; try S-p"), monkeypatch, "--debug")


def test_the_environment_asks_for_tracebacks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG, "1")
    with pytest.raises(ValueError, match="no such label"):
        fail_with(ValueError("no such label"), monkeypatch)


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as defect:
        fail_with(RuntimeError("shapes cannot be multiplied"), monkeypatch)
    assert "please report" in defect.value.__notes__[0]
    with pytest.raises(RuntimeError) as full:
        fail_with(RuntimeError("DefaultCPUAllocator: can't allocate memory"), monkeypatch)
    assert "too little free memory" in full.value.__notes__[0]


def test_info_says_which_implementation_and_why() -> None:
    done = hypermlp("info")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "implementation" in line]
    assert "native (CPU, float32" in lines[0]
    assert "native (CPU, bfloat16" in lines[1]
    assert "chunked (for float64" in lines[2]


def test_bench_layer_measures_checks_and_records(tmp_path: Path) -> None:
    names = ["hyperglu native", "hyperglu chunked", "softmax sdpa 2 heads", "softmax sdpa 12 heads"]
    only = f"only={','.join(names)}"
    done = hypermlp("bench", "layer", "shape=1x32x32", "rounds=2", "match=true", only, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "12 heads do not divide width 32" in done.stdout
    rows = json.loads((tmp_path / "layer.json").read_text())["rows"]
    assert [row["contestant"] for row in rows] == names[:3]
    for row in rows:
        assert row["training_1t"]["seconds"] > 0
        assert row["training_extra_bytes"] >= 0
    assert rows[2]["training_2t"]["ratio"]["median"] == 1
    assert (tmp_path / "layer.png").stat().st_size > 10_000


def test_bench_layer_in_bfloat16(tmp_path: Path) -> None:
    only = ("only=hyperglu native,softmax sdpa 2 heads", "memory=false")
    done = hypermlp("bench", "layer", "shape=1x32x32", "rounds=1", "dtype=bfloat16", *only, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {row["dtype"] for row in json.loads((tmp_path / "layer.json").read_text())["rows"]} == {"bfloat16"}


def test_bench_profile_adds_up(tmp_path: Path) -> None:
    done = hypermlp("bench", "profile", "shape=2x64x32", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "profile.json").read_text())["rows"]
    assert [row["contestant"] for row in rows] == ["hyperglu native", "softmax sdpa 2 heads"]
    for row in rows:
        assert row["milliseconds"]["mixing"] > 0
        assert row["milliseconds"]["projections"] > 0
    assert rows[0]["milliseconds"]["convolutions and gates"] > 0
    assert rows[1]["milliseconds"]["convolutions and gates"] == 0


def test_bench_decode_measures_checks_and_records(tmp_path: Path) -> None:
    done = hypermlp("bench", "decode", "context=20,40", "batch=1,2", "width=48", "rounds=2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "decode.json").read_text())
    assert len(record["rows"]) == 4 * 4
    assert record["sessions"][0]["command"].startswith("hypermlp bench decode")
    assert str(tmp_path) not in json.dumps(record)
    assert all(row["cache_bytes"] > 0 and row["ms_per_token"] > 0 for row in record["rows"])
    assert (tmp_path / "decode.png").stat().st_size > 10_000


def test_bench_latency_times_every_token_and_resumes(tmp_path: Path) -> None:
    command = ["bench", "latency", "context=16,24", "width=48", "steps=40", "--out", str(tmp_path)]
    done = hypermlp(*command, "batch=1", "weights=float32")
    assert done.returncode == 0, done.stderr
    first = json.loads((tmp_path / "latency.json").read_text())["rows"]
    assert {row["contestant"] for row in first} == {"hyperglu", "softmax 12 heads", "mamba", "gated_deltanet"}
    done = hypermlp(*command, "batch=1", "weights=float32,int8")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "latency.json").read_text())["rows"]
    assert rows[: len(first)] == first
    assert len(rows) == 2 * len(first)
    for row in rows:
        assert 0 < row["p50"] <= row["p99"] <= row["p99.9"] <= row["worst"]
        assert sum(number for _, number in row["distribution"]) == 40
        assert row["first_ms"] > 0
    assert (tmp_path / "latency.png").stat().st_size > 10_000
    assert hypermlp(*command, "batch=1", "threads=1").returncode != 0  # other settings


@pytest.mark.parametrize("arguments, folder", [((), "runs/demo"), (("--quick",), "runs/demo-quick"), (("--out", "x"), "x")])
def test_demo_runs_its_plan_in_a_folder_of_its_own(
    arguments: tuple[str, ...], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[Path, Study]] = []

    def run(console: Any, plan: StudyPlan, out: Path | None, **options: Any) -> list[Any]:
        shown.append((out or plan.folder, plan.studies[""]))
        return []

    monkeypatch.setattr(watch, "run_plan", run)
    for command in (["demo"], ["study", "run", "demo"]):
        scale = ["--scale", "quick"] if "--quick" in arguments and len(command) > 1 else []
        given = [word for word in arguments if not scale or word != "--quick"]
        done = CliRunner().invoke(app, [*command, *given, *scale])
        assert done.exit_code == 0, done.output
    assert shown == [(Path(folder), demo_study(quick="--quick" in arguments))] * 2
    assert demo_study() != demo_study(quick=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "--seeds", "0"),
        ("study", "run", "demo", "--workers", "many"),
        ("dmeo",),
        ("bench", "layer", "shape=8x1024"),
        ("bench", "layer", "only=nobody"),
        ("bench", "layer", "against=nowhere.py"),
        ("bench", "layer", "threads=two"),
        ("bench", "decode", "context=4"),
        ("bench", "latency", "weights=int4"),
        ("bench", "latency", "only=nobody"),
        ("bench", "latency", "width=100"),
    ],
)
def test_a_mistake_is_refused_with_a_message_and_no_traceback(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = fail(arguments, monkeypatch, capsys)
    assert shown
    assert "Traceback" not in shown


def test_an_output_folder_that_cannot_be_made_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    shown = fail(["demo", "--out", str(tmp_path / "file" / "below")], monkeypatch, capsys)
    assert "Traceback" not in shown
    assert "file" in shown


def test_a_failed_write_leaves_the_old_result(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"good": 1})
    with pytest.raises(TypeError):
        write_json(path, {"bad": object()})
    assert json.loads(path.read_text()) == {"good": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_table1_runs_a_half_and_leaves_the_page(tmp_path: Path) -> None:
    """`hypermlp study run table1` by its short name."""
    options = ("--tasks", "language", "--scale", "quick", "--mixers", "S,R-cg-q-12o", "--seeds", "1", "--workers", "1")
    done = CliRunner().invoke(app, ["table1", *options, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert len((tmp_path / "out" / "language" / "runs.jsonl").read_text().splitlines()) == 2
    assert "R-cg-q-12o" in (tmp_path / "out" / "report.html").read_text()


def test_a_study_with_a_failed_run_goes_on_and_ends_with_an_error(tmp_path: Path) -> None:
    mixer = tmp_path / "mine.py"
    mixer.write_text(OWN_MIXER.replace("return self.proj(tokens.x)", "raise ArithmeticError('gone')"))
    options = ("steps=1", "examples=16", "width=16", "--tasks", "memorization", "--workers", "1", "--scale", "quick")
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["study", "run", "mad", *options, "--mixers", f"{mixer}:Mine,S", "--out", str(out)])
    assert done.exit_code == 1, done.output
    assert "1 of 2 runs failed" in done.output
    assert "gone" in done.output
    assert [json.loads(line)["error"] is None for line in (out / "runs.jsonl").read_text().splitlines()] == [False, True]


def test_table1_at_the_papers_scale_is_the_papers_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "needs corpus=FOLDER" in fail(["table1", "--scale", "paper", "--out", str(tmp_path / "out")], monkeypatch, capsys)
    assert not (tmp_path / "out").exists()

    asked: list[Any] = []
    monkeypatch.setattr(watch, "run_study", lambda console, out, study, mixers, **options: asked.append(study) or [])
    monkeypatch.setattr(watch, "leave_page", lambda console, folder: None)
    options = ["--scale", "paper", "--tasks", "mad", "--device", "cpu", "--out", str(tmp_path)]
    done_here = CliRunner().invoke(app, ["table1", *options])
    assert done_here.exit_code == 0, done_here.output
    assert (asked[0].protocol, asked[0].scale) == ("faithful", "full")
