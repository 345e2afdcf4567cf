"""The command line, as a user meets it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hypermlp.provenance import write_json


def hypermlp(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    code = "from hypermlp.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )


def test_help_names_every_command() -> None:
    shown = hypermlp("--help").stdout
    assert "info" in shown
    assert "demo" in shown


def test_info_says_which_implementation_and_why() -> None:
    done = hypermlp("info")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "implementation" in line]
    assert "(" in line


def test_demo_trains_both_models_and_leaves_picture_and_numbers(tmp_path: Path) -> None:
    done = hypermlp("demo", "--steps", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "HyperGLU" in done.stdout
    record = json.loads((tmp_path / "runs" / "demo" / "demo.json").read_text())
    assert record["evaluations"][-1]["step"] == 5
    ours, theirs = record["parameters"]["hyperglu"], record["parameters"]["softmax"]
    assert abs(ours - theirs) < 0.01 * ours
    assert (tmp_path / "runs" / "demo" / "demo.png").stat().st_size > 10_000


def test_demo_is_reproducible(tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        assert hypermlp("demo", "--steps", "3", "--seed", "7", "--out", str(tmp_path / name)).returncode == 0
        runs.append(json.loads((tmp_path / name / "demo.json").read_text())["evaluations"])
    assert [e["loss"] for e in runs[0]] == [e["loss"] for e in runs[1]]


@pytest.mark.parametrize("arguments", [("demo", "--steps", "0"), ("demo", "--steps", "many"), ("dmeo",)])
def test_a_mistake_is_refused_with_a_message_and_no_traceback(arguments: tuple[str, ...]) -> None:
    done = hypermlp(*arguments)
    assert done.returncode != 0
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_an_output_folder_that_cannot_be_made_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = hypermlp("demo", "--out", str(tmp_path / "file" / "below"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "file" in done.stderr


def test_a_failed_write_leaves_the_old_result(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"good": 1})
    with pytest.raises(TypeError):
        write_json(path, {"bad": object()})
    assert json.loads(path.read_text()) == {"good": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
