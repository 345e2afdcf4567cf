"""The models that come with the package: their folders, what they score, and every command that answers with them."""

from __future__ import annotations

import json
import math
import platform
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hypermlp import load_model
from hypermlp.cli import app
from hypermlp.data.corpus import TokenStream
from hypermlp.data.tokenizers import read_tokenizer
from hypermlp.evals.perplexity import measure
from hypermlp.files import file_sha256
from hypermlp.models.bundled import BUNDLED, COPYING, LANGUAGE, bundled_models, find_model
from hypermlp.models.lm import count_parameters
from hypermlp.models.saved import WEIGHTS, read_weights
from hypermlp.runs.generate import corpus_for
from hypermlp.studies.task_models import open_task_model, task_accuracy

ABOUT = bundled_models()


def run(*words: str | Path) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    return done.stdout


def refusal(*words: str | Path) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code, done.output
    return str(done.exception) if isinstance(done.exception, ValueError) else " ".join(re.sub("[│]", " ", done.output).split())


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_folders_are_small_and_complete() -> None:
    assert {LANGUAGE, COPYING} == set(ABOUT)
    files = [path for path in BUNDLED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 4e6
    assert not [path for path in files if path.suffix not in (".json", ".md", ".safetensors")], "all is data, none is code"
    for name, about in ABOUT.items():
        folder = find_model(name)
        assert file_sha256(folder / WEIGHTS) == about["sha256"], f"{name} is not what docs/make_models.py wrote"
        assert (folder / WEIGHTS).stat().st_size == about["bytes"]
        assert {tensor.dtype for tensor in read_weights(folder).values()} == {torch.bfloat16}
        assert about["provenance"]["commit"]
        assert about["text_licence"]


def test_the_cards_say_what_was_measured() -> None:
    language, copying = ((find_model(name) / "README.md").read_text() for name in (LANGUAGE, COPYING))
    assert f"loss is {ABOUT[LANGUAGE]['loss']:.4f} nats per byte" in language
    assert f"| parameters | {ABOUT[LANGUAGE]['parameters']:,} |" in language
    assert "PSF License 2.0" in language
    assert ABOUT[LANGUAGE]["text"] in language
    assert f"{ABOUT[COPYING]['accuracy']:.1%} of the" in " ".join(copying.split())
    assert f"{ABOUT[COPYING]['parameters']:,} parameters" in copying


def test_the_language_model_predicts_as_its_card_says() -> None:
    about, model = ABOUT[LANGUAGE], load_model(LANGUAGE).eval()
    assert count_parameters(model) == about["parameters"]
    tokenizer = read_tokenizer(find_model(LANGUAGE))
    held_out = corpus_for("stdlib", tokenizer).split("validation")
    found = measure(model, TokenStream([held_out.read(0, about["piece"])], []), tokenizer).loss
    same = about["text"] == f"Python {platform.python_version()} standard library"
    # Another Python has another library, of which other files are held out.
    assert math.isclose(found, about["loss_of_piece"], abs_tol=2e-4 if same else 0.25), about["text"]
    assert about["loss"] < 1.5


def test_the_copying_model_copies() -> None:
    saved = open_task_model(COPYING)
    assert saved.setting.task == "selective-copying"
    assert task_accuracy(saved) == pytest.approx(ABOUT[COPYING]["accuracy"], abs=0.002)
    assert ABOUT[COPYING]["accuracy"] > 0.98


def test_generate_answers_without_any_training() -> None:
    first = run("generate", "def main(", "--model", LANGUAGE, "--count", "40", "--temperature", "0")
    assert first.startswith("def main(")
    assert len(first) > 30
    assert run("generate", "def main(", "--count", "40", "--temperature", "0") == first, "it is the default"
    Path("runs/tiny").mkdir(parents=True)
    assert str(Path("runs/tiny")) in refusal("generate", "def main("), "one's own run comes first"


def test_eval_scores_both() -> None:
    Path("text.txt").write_text("def add(a, b):\n    return a + b\n" * 100)
    (table,) = json.loads(run("eval", "--model", LANGUAGE, "--corpus", "text.txt", "--json"))
    assert 0 < table["rows"][0]["loss"] < 5
    (table,) = json.loads(run("eval", "--model", COPYING, "--json"))
    assert table["rows"][0]["right, %"] == pytest.approx(100 * ABOUT[COPYING]["accuracy"], abs=0.2)
    assert {path.name for path in Path("runs/eval").iterdir()} == {"language-perplexity.json", "copying-task.json"}


def test_explore_shows_both() -> None:
    run("explore", "return self", "--model", LANGUAGE, "--out", "text.html")
    assert "hypermlp:language (702,240 parameters) reads 12 tokens" in Path("text.html").read_text()
    run("explore", "--out", "copying.html")
    assert "copy" in Path("copying.html").read_text(), "with nothing else, the copying model and an example"
    Path("text.txt").write_text("def add(a, b):\n    return a + b\n" * 200)
    assert "Heads over" in run("explore", "--model", LANGUAGE, "--over", "text.txt", "--out", "over")
    page = Path("over/analysis.html").read_text()
    assert re.search(
        r"Over [\d,]+ tokens of text.txt, \d+% to \d+% of the slots of a head of hypermlp:language are active", page
    )


def test_export_and_the_auto_classes() -> None:
    transformers = pytest.importorskip("transformers")
    import hypermlp.models.hf  # noqa: F401  (registers the classes)

    run("export", LANGUAGE, "exported")
    assert (Path("exported") / "README.md").read_text() == (find_model(LANGUAGE) / "README.md").read_text()
    tokens = torch.tensor([[256, *b"def main("]])
    expected = load_model(LANGUAGE).eval()(tokens)
    for folder in (Path("exported"), find_model(LANGUAGE)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
        assert transformers.AutoTokenizer.from_pretrained(folder)("def")["input_ids"] == list(b"def")


def test_a_run_begins_with_its_weights() -> None:
    small = ("train.steps=1", "train.warmup=1", "train.batch=2", "train.micro=2", "train.evaluate_batches=1", "train.sample=0")
    Path("text.txt").write_text("def add(a, b):\n    return a + b\n" * 400)
    shown = run("train", "tiny", "data.corpus=text.txt", *small, "--from", LANGUAGE, "--out", "mine")
    assert "Beginning with the weights of" in shown


@pytest.mark.parametrize(
    "words, message",
    [
        (("generate", "a", "--model", COPYING), "is a model of a task and reads no text; hypermlp explore"),
        (("explore", "a text", "--model", COPYING), "leave out the text"),
        (("explore", "runs/nowhere"), "holds no runs of a demo"),
        (("generate", "a", "--model", "hypermlp:langauge"), "did you mean 'hypermlp:language'"),
    ],
)
def test_what_cannot_be_done_is_refused(words: Any, message: str) -> None:
    assert message in refusal(*words)


def test_help_and_info_name_them() -> None:
    for command in ("generate", "eval", "explore", "export"):
        assert LANGUAGE in CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    rows = json.loads(run("info", "--json"))[0]["rows"]
    assert {LANGUAGE, COPYING} <= {row["what"] for row in rows}
