"""The examples run as they are, at a small size; the notebooks are their scripts, and run too."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {
    "own_gpt": ["--steps", "2"],
    "train_save_generate": ["--steps", "2", "--mixer", "hyperglu,softmax", "--out", "model"],
    "hugging_face_lora": ["--steps", "2"],
    "own_mixer": ["--steps", "2"],
    "streaming": [],
    "first_steps": [],
    "real_time": [],
    "served_stream": ["--tokens", "30", "--answers", "1", "--out", "served.json"],
}


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *SMALL[name]])
    with torch.enable_grad():  # which an example may switch off
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capfd.readouterr().out


def test_every_example_is_run_and_described() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SMALL, "make_notebook"}
    for name in SMALL:
        assert f"`{name}.py`" in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("name", ["own_gpt", "train_save_generate", "own_mixer", "hugging_face_lora"])
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    shown = run(name, tmp_path, monkeypatch, capfd)
    assert {"own_gpt": "step    2", "own_mixer": "S-pc", "train_save_generate": "def parse_"}.get(name, "it writes") in shown


def test_real_time_answers_what_it_can_and_drops_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    try:
        shown = run("real_time", tmp_path, monkeypatch, capfd)
    finally:
        torch.set_num_threads(threads)
    assert shown.startswith("model (native)")
    assert "a burst of 2000: answered 4, dropped 1996" in shown
    answered, dropped = (int(re.search(rf"{word} (\d+)", shown)[1]) for word in ("answered", "dropped"))
    assert answered + dropped == 256


def test_a_served_stream_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    shown = run("served_stream", tmp_path, monkeypatch, capfd)
    found = json.loads((tmp_path / "served.json").read_text())
    (row,) = found["rows"]
    assert found["sessions"][0]["command"].startswith("python served_stream.py --tokens 30")
    assert 0 < row["pieces"] + row["dropped"] < 30
    assert 0 < row["p50"] <= row["p99"] <= row["p99.9"] <= row["worst"]
    assert f"p50  {row['p50']:,.2f} ms" in shown


def check_differences(text: str) -> None:
    found = [float(number) for number in re.findall(r"\d\.\de[-+]\d+", text)]
    assert len(found) == 5
    assert all(number < 1e-12 for number in found)


def test_streaming_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    check_differences(run("streaming", tmp_path, monkeypatch, capfd))


def check_first_steps(text: str) -> None:
    """What the cells claim beside what they print."""
    assert "the future changes nothing: True" in text
    assert "the same after loading: True" in text
    answers = re.findall(r"^answer +(\S+) \(right: +(\S+)\) reads most at token +(\d+), behind: (.*)$", text, re.M)
    assert len(answers) == 8
    assert sum(given == right for given, right, _, _ in answers) >= 7
    assert sum(right in around.split() for _, right, _, around in answers) >= 5, "the place where the token stood"
    assert int(re.search(r"HyperGLU copies (\d+)%", text)[1]) > 90


def test_the_first_steps_end_with_a_model_that_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    check_first_steps(run("first_steps", tmp_path, monkeypatch, capfd))


def printed(notebook: nbformat.NotebookNode) -> str:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output["text"] for output in outputs)


def test_the_notebooks_are_their_scripts_and_run(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, EXAMPLES / "make_notebook.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    checks = {"first_steps": check_first_steps, "streaming": check_differences}
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(checks)
    for name, check in checks.items():
        kept, new = (nbformat.read(folder / f"{name}.ipynb", as_version=4) for folder in (EXAMPLES, tmp_path))
        sources = [[(cell.cell_type, cell.source) for cell in notebook.cells] for notebook in (kept, new)]
        assert sources[0] == sources[1], "run examples/make_notebook.py"
        check(printed(kept))
        check(printed(new))
