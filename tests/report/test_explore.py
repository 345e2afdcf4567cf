"""The explorer's page, without a browser: what it holds is what the layers compute."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from explored import MIXERS, TEXT, save_small
from rich.console import Console
from typer.testing import CliRunner

from hypermlp.analysis.capture import capture
from hypermlp.cli import app
from hypermlp.models.lm import LanguageModel, ModelConfig
from hypermlp.report.explore import END, Subject, build_page, open_subject, pack, show_explore, unpack
from hypermlp.studies import demo
from hypermlp.studies.executors import LocalPool
from hypermlp.studies.task_models import open_task_model
from hypermlp.tasks.mad_settings import spell

TOKENS = [256, *TEXT.encode()]


def read_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LanguageModel]:
    folder = tmp_path_factory.mktemp("models") / "all-kinds"
    return folder, save_small(folder)


@pytest.fixture(scope="module")
def page(saved: tuple[Path, LanguageModel]) -> str:
    return build_page([open_subject(saved[0], TEXT)])


def test_page_is_complete_in_itself(page: str) -> None:
    assert "default-src 'none'" in page, "the browser refuses anything from a network"
    outside = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert not re.search(r"https?://|src=|@import|url\(", outside)
    assert "$" not in re.findall(r"<title>(.*?)</title>", page)[0]


def test_text_is_shown_as_the_tokenizer_cut_it_and_cannot_break_the_page(page: str) -> None:
    data = read_data(page)
    assert len(data["tokens"]) == len(TOKENS)
    assert data["tokens"][0] == END
    assert "".join(data["tokens"][1:-2]) == TEXT[:-1]
    assert data["tokens"][-2:] == ["\\xc3", "\\xa9"], "half of a character is shown as a byte"
    assert page.count("</script>") == 2


def test_page_holds_what_the_rows_are_computed_from(page: str, saved: tuple[Path, LanguageModel]) -> None:
    """q · k are the scores, and w (v · g) the shares, of every attention at every token."""
    data = read_data(page)
    traces = capture(saved[1], torch.tensor([TOKENS])).traces()
    assert [layer["kind"] for layer in data["models"][0]["layers"]] == [
        *("hyper", "hyper", "hyper", "softmax", "differential", "path", "state", "hyper")
    ]
    for layer, opened in zip(data["models"][0]["layers"], traces, strict=True):
        if opened is None:
            assert not layer["arrays"]
            continue
        arrays = {name: unpack(packed) for name, packed in layer["arrays"].items()}
        for token, head in ((0, 0), (11, 1), (len(TOKENS) - 1, 0)):
            memory = opened.memory(token, head)
            slots = memory.place.numpy()
            if layer["kind"] != "path":
                scores = arrays["k"][slots, head] @ arrays["q"][token, head]
                np.testing.assert_allclose(scores, memory.z, rtol=1e-4, atol=1e-5)
            shares = memory.w.numpy() * (arrays["v"][slots, head] @ arrays["g"][token, head])
            np.testing.assert_allclose(shares, memory.token_shares, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(arrays["size"][token, head], memory.output.norm(), rtol=1e-5, atol=1e-9)


def test_predictions_are_the_models(page: str, saved: tuple[Path, LanguageModel]) -> None:
    model = read_data(page)["models"][0]
    with torch.no_grad():
        probability = saved[1].double()(torch.tensor([TOKENS]))[0].softmax(-1)
    expected = [probability[t, TOKENS[t + 1]].item() for t in range(len(TOKENS) - 1)]
    np.testing.assert_allclose(model["next"][:-1], expected, rtol=1e-4)
    assert model["next"][-1] is None, "nothing comes after the last token"
    assert [round(p, 5) for _, p in model["top"][5]] == [round(p, 5) for p in probability[5].topk(5).values.tolist()]


def test_half_precision_survives_packing() -> None:
    values = torch.tensor([[1.5, -2.25], [6e-8, 1e4]])
    np.testing.assert_allclose(unpack(pack(values, half=True)), values, rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(unpack(pack(values)), values)


def test_size_at_256_tokens_and_four_layers_of_gpt2_width() -> None:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocabulary=257, width=768, depth=4, length=256))
    tokens = [256, *([97, 98, 32] * 85)]
    page = build_page([Subject("wide", model, tokens, [END, *map(chr, tokens[1:])], chr_or_end, [0], [*tokens[1:], None])])
    assert len(page.encode()) < 10_000_000


def chr_or_end(token: int) -> str:
    return END if token == 256 else chr(token)


def test_two_models_on_the_same_text(saved: tuple[Path, LanguageModel], tmp_path: Path) -> None:
    other = tmp_path / "softmax"
    save_small(other, ("softmax",))
    out = show_explore(Console(), TEXT, [saved[0], other], tmp_path / "pages" / "both.html")
    data = read_data(out.read_text())
    assert [model["name"] for model in data["models"]] == ["all-kinds", "softmax"]
    twice = read_data(show_explore(Console(), TEXT, [other, other], tmp_path / "twice.html").read_text())
    assert [model["name"] for model in twice["models"]] == ["softmax (1)", "softmax (2)"]


def test_the_folder_of_a_demo_opens_its_models_on_an_example(tmp_path: Path) -> None:
    """Both models as they were trained there, and an example of the test set with its answers; nothing is trained again."""
    short = dataclasses.replace(demo.demo_study(quick=True), steps=dict.fromkeys(demo.TASKS, 2), examples=64, tests=4)
    records = short.run(tmp_path / "demo", demo.READERS, executor=LocalPool(1))
    out = tmp_path / "explore.html"
    command = ["explore", str(tmp_path / "demo"), "--out", str(out)]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert [model["name"] for model in read_data(out.read_text(encoding="utf-8"))["models"]] == list(demo.READERS)
    one = [*command, "--task", "noisy-recall", "--mixer", "S-pc", "--example", "2"]
    assert CliRunner().invoke(app, one).exit_code == 0
    saved = open_task_model(tmp_path / "demo" / "models" / "noisy-recall-S-pc")
    (record,) = [own for own in records if (own["mixer"], own["task"]) == ("S-pc", "noisy-recall")]
    assert saved.accuracy == record["metrics"]["accuracy"]
    data = read_data(out.read_text(encoding="utf-8"))
    assert data["words"]
    assert data["tokens"] == [spell(saved.setting, token) for token in saved.inputs[2].tolist()]
    assert [t for t in data["targets"] if t is not None] == [str(t) for t in saved.targets[2].tolist() if t >= 0]
    refused = CliRunner().invoke(app, [*command, "--model", "x"])
    assert "neither a text nor --model" in str(refused.exception)
    refused = CliRunner().invoke(app, [*command, "--example", "4"])
    assert "below the 4 test examples" in str(refused.exception)
    refused = CliRunner().invoke(app, ["explore", "long " * 500, "--mixer", "S-pc"])
    assert "neither a text nor --model" in str(refused.exception)
    refused = CliRunner().invoke(app, [*command, "--mixer", "gla"])
    assert "has no model selective-copying-gla; there are" in str(refused.exception)


def test_command_and_its_errors(saved: tuple[Path, LanguageModel], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["explore", TEXT, "--model", str(saved[0]), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert f"{len(TOKENS)} tokens" in done.output
    assert len(read_data(out.read_text())["models"][0]["layers"]) == len(MIXERS)
    with pytest.raises(ValueError, match="3 models were given"):
        show_explore(Console(), TEXT, [saved[0]] * 3, out)
    with pytest.raises(ValueError, match="there is no text"):
        show_explore(Console(), "", [saved[0]], out)
    with pytest.raises(ValueError, match="5001 tokens; the page takes 4096"):
        show_explore(Console(), "x" * 5000, [saved[0]], out)
