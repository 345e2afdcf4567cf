"""Training runs by name: the folder, signals, plan, text."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from helpers import OWN_MIXER
from hypermlp import notice
from hypermlp.cli import app
from hypermlp.cli.train import run_training, show_plan, write
from hypermlp.data.shards import prepare
from hypermlp.data.text import find_source
from hypermlp.data.tokenizers import ByteTokenizer, find_tokenizer
from hypermlp.files import read_json
from hypermlp.mixers import MIXERS
from hypermlp.models.lm import LanguageModel
from hypermlp.models.saved import save_model
from hypermlp.report.page import write_report
from hypermlp.report.terminal import new_console
from hypermlp.runs.configs import CONFIGS, configure, count
from hypermlp.runs.cost import estimate_cost
from hypermlp.runs.generate import corpus_for, decode, find_saved, open_model, write_text
from hypermlp.runs.train import start
from hypermlp.train.checkpoint import complete, newest, step_of
from hypermlp.train.config import RunConfig
from hypermlp.train.metrics import read_metrics
from hypermlp.train.training import count as count_targets

SMALL = (
    *(
        "model.width=16",
        "model.depth=1",
        "data.context=16",
        "train.steps=6",
        "train.batch=4",
        "train.micro=2",
        "train.warmup=2",
    ),
    *("train.evaluate_every=3", "train.evaluate_batches=2", "train.save_every=2", "train.sample=8"),
)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"{n} squared is {n * n}, déjà vu.\n" for n in range(300)), encoding="utf-8")
    return f"data.corpus={path}"


def run(out: Path, *overrides: str, resume: bool = False) -> bool:
    return run_training(new_console(quiet=True), "tiny", [*SMALL, *overrides], out=out, resume=resume)


def tensors(out: Path) -> dict[str, bytes]:
    """Every bit of the last checkpoint."""
    (shard,) = newest(out / "checkpoints").glob("*.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(shard).items()}


# Runs


def test_a_run_learns_and_leaves_everything(tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    console = new_console(width=200)
    assert run_training(console, "tiny", [*SMALL, corpus, "train.steps=30", "train.lr=1e-2", "train.warmup=3"], out=out)
    shown = capsys.readouterr().out
    assert "step     30   loss" in shown
    assert "Validation loss" in shown
    there = len(corpus_for(corpus.removeprefix("data.corpus="), ByteTokenizer()).split("validation"))
    assert f"on 128 of {there:,} held-out tokens" in shown, "2 batches of 4 × 16 tokens"
    assert f"hypermlp eval --model {out}" in shown
    records = read_metrics(out / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 31))
    assert {"step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second"} <= records[0].keys()
    assert records[-1]["tokens"] == 30 * 4 * 16
    validation = [record["validation"] for record in records if "validation" in record]
    assert len(validation) == 10
    assert validation[-1] < 0.8 * validation[0]
    assert (out / "loss.png").stat().st_size > 5_000
    saved = json.loads((out / "run.json").read_text())
    assert saved["config"]["train"]["steps"] == 30
    assert saved["starts"][0]["torch"]
    write(console, out / "model", "12 sq", 20, seed=1)
    assert "12 sq" in capsys.readouterr().out


def test_a_used_folder_is_refused_and_a_run_resumed_exactly(tmp_path: Path, corpus: str) -> None:
    decay = "train.decay=9"
    run(tmp_path / "whole", corpus, decay, "train.steps=9")
    run(tmp_path / "run", corpus, decay)
    with pytest.raises(ValueError, match="--resume"):
        run(tmp_path / "run", corpus, decay)
    with pytest.raises(ValueError, match=r"model.depth was 1, not 2; train.lr was 0.016, not 0.1"):
        run(tmp_path / "run", corpus, decay, "model.depth=2", "train.lr=0.1", resume=True)
    with pytest.raises(ValueError, match="nothing holds no training run to resume"):
        run(tmp_path / "nothing", corpus, resume=True)
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(ValueError, match=r"train.steps was 6, not 5"):
        run(tmp_path / "run", corpus, decay, "train.steps=5", resume=True)
    assert run(tmp_path / "run", corpus, decay, "train.steps=9", "train.keep=3", resume=True)
    assert tensors(tmp_path / "run") == tensors(tmp_path / "whole")
    assert len(json.loads((tmp_path / "run" / "run.json").read_text())["starts"]) == 2
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match="holds other files"):
        run(tmp_path / "other", corpus)


def test_the_validation_set_depends_on_the_batch_and_not_on_how_it_is_divided(tmp_path: Path, corpus: str) -> None:
    def opened(name: str, micro: int, *overrides: str, resume: bool = False) -> tuple[int, float]:
        config = configure("tiny", [*SMALL, corpus, "train.batch=8", f"train.micro={micro}", *overrides])
        run = start(config, tmp_path / name, resume=resume, loggers=())
        assert run.lock is not None
        run.lock.close()
        return count_targets(run.validation)[0], run.training.evaluate(run.validation)

    for overrides in ((), ("data.documents=true",), ("train.evaluate_batches=10000",)):
        targets, loss = opened(f"8 {overrides}", 8, *overrides)
        for micro in (1, 2):
            assert opened(f"{micro} {overrides}", micro, *overrides) == (targets, pytest.approx(loss, rel=1e-6))
    assert run(tmp_path / "run", corpus, "train.batch=8", "train.micro=8")
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["validation"]
    assert opened("run", 2, resume=True)[1] == pytest.approx(last, rel=1e-6)


def test_a_model_without_a_cache_is_trained_and_writes_text(
    tmp_path: Path, corpus: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", notice.logger.name):
        assert run(tmp_path / "run", corpus, "model.mixer=G-12!", "train.sample=50")  # more than the context holds
    assert "no cache" in caplog.text
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["sample"]


def test_a_trained_model_is_continued_in_a_longer_context(tmp_path: Path, corpus: str) -> None:
    short = configure("tiny", [*SMALL, corpus])
    net = LanguageModel(short.model.replace(length=16))
    save_model(net, tmp_path / "short", ByteTokenizer().to_dict())
    longer = configure("tiny", [*SMALL, corpus, "data.context=40", "model.length=40"])
    run = start(longer, tmp_path / "long", begin=tmp_path / "short", lag_extension="zero")
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(run.training.model(tokens), net(tokens))
    assert [step.step for step in run.steps()] == list(range(1, 7))
    assert read_json(tmp_path / "long" / "run.json")["begin"]["lag_extension"] == "zero"
    assert open_model(tmp_path / "long")[0].config == net.config.replace(length=40)
    with pytest.raises(ValueError, match="lag_extension"):
        start(longer, tmp_path / "other", begin=tmp_path / "short")
    with pytest.raises(ValueError, match=r"did you mean|must be one of 'hold', 'decay', 'zero', 'fresh'"):
        start(longer, tmp_path / "other", begin=tmp_path / "short", lag_extension="forever")
    with pytest.raises(ValueError, match="--from"):
        start(longer, tmp_path / "other", lag_extension="hold")
    with pytest.raises(ValueError, match="no new lags"):
        start(short, tmp_path / "other", begin=tmp_path / "short", lag_extension="hold")
    with pytest.raises(ValueError, match=r"model\.width is 16 there, not 32"):
        start(configure("tiny", [*SMALL, corpus, "model.width=32"]), tmp_path / "other", begin=tmp_path / "short")


def test_more_steps_with_the_cosine_as_it_was(tmp_path: Path, corpus: str, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path / "run", corpus)
    with pytest.raises(ValueError, match=r"train.decay was None, not 7"):
        run(tmp_path / "run", corpus, "train.steps=8", "train.decay=7", resume=True)
    with caplog.at_level("INFO", notice.logger.name):
        start(configure("tiny", [*SMALL, corpus, "train.steps=8"]), tmp_path / "run", resume=True).lock.close()
    (advice,) = re.findall(r"train\.decay=\d+", caplog.text)
    shutil.rmtree(tmp_path / "run")
    run(tmp_path / "run", corpus)
    assert run(tmp_path / "run", corpus, "train.steps=8", advice, resume=True)
    rates = [record["lr"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert rates[6] == rates[7] == pytest.approx(0.1 * CONFIGS["tiny"].train.lr)


def test_the_vocabulary_follows_the_corpus_unless_given(tmp_path: Path, corpus: str) -> None:
    source = find_source(corpus.removeprefix("data.corpus="))
    prepared = prepare(source, tmp_path / "prepared", find_tokenizer("bpe:300", source))
    change = f"data.corpus={tmp_path / 'prepared'}"
    assert configure("tiny", [change]).model.vocabulary == prepared.tokenizer.vocabulary == 300
    assert configure("tiny", [change, "model.vocabulary=512"]).model.vocabulary == 512
    assert configure("tiny", [corpus]).model.vocabulary == 257
    assert configure("tiny", [corpus, "data.tokenizer=bpe:280"]).model.vocabulary == 280
    assert configure("nanogpt-owt2", [change]).model.vocabulary == 300
    softmax = configure("tiny", [change, "model.mixer=softmax"]).model
    assert count(softmax) == pytest.approx(count(configure("tiny", [change]).model), rel=0.005)
    assert run(tmp_path / "run", change)


def test_a_rounded_up_vocabulary_stays(tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = RunConfig.from_dict(
        {**CONFIGS["tiny"].to_dict(), "model": CONFIGS["tiny"].model.replace(vocabulary=320).to_dict()}
    )
    monkeypatch.setitem(CONFIGS, "rounded", rounded)
    assert configure("rounded", [corpus]).model.vocabulary == 320
    assert configure("rounded", [corpus, "data.tokenizer=bpe:330"]).model.vocabulary == 330


def test_a_mixer_of_ones_own_is_trained_resumed_and_used(tmp_path: Path, corpus: str) -> None:
    (tmp_path / "mine.py").write_text(OWN_MIXER)
    name = f"{tmp_path / 'mine.py'}:Mine"
    try:
        run(tmp_path / "run", corpus, f"model.mixer={name}", "train.decay=9")
        assert run(tmp_path / "run", corpus, f"model.mixer={name}", "train.decay=9", "train.steps=7", resume=True)
        assert open_model(tmp_path / "run")[0].config.mixer == name
        saved = json.loads((tmp_path / "run" / "run.json").read_text())
        assert list(saved["own"]) == [name]
        (tmp_path / "run" / "run.json").write_text(json.dumps({**saved, "own": {name: "other code"}}))
        with pytest.raises(ValueError, match=r"own.* was 'other code'"):
            run(tmp_path / "run", corpus, f"model.mixer={name}", "train.decay=9", "train.steps=8", resume=True)
    finally:
        del MIXERS[name]
    with pytest.raises(ValueError, match=r"code of its own.* add --own "):
        open_model(tmp_path / "run" / "model")
    for what in (["squared"], ["--over", corpus.removeprefix("data.corpus=")]):
        words = ["explore", *what, "--model", str(tmp_path / "run"), "--out", str(tmp_path / "seen")]
        assert f"add --own {name}" in str(CliRunner().invoke(app, words).exception)
        assert "code of its own" not in str(CliRunner().invoke(app, [*words, "--own", name]).exception)
        del MIXERS[name]
    assert name in write_report(tmp_path / "run").read_text()


def test_two_processes_do_not_share_a_folder(tmp_path: Path, corpus: str) -> None:
    first = start(configure("tiny", [*SMALL, corpus]), tmp_path / "run")
    with pytest.raises(RuntimeError, match="in use"):
        start(configure("tiny", [*SMALL, corpus]), tmp_path / "run", resume=True)
    list(first.steps())


def test_a_corpus_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path, corpus: str) -> None:
    for override, rule in [
        ("model.vocabulary=100", "give model.vocabulary=257"),
        ("data.context=9000", "too few for a context"),
        ("data.corpus=nowhere", "no corpus at nowhere"),
        ("data.tokenizer=nothing", "tokenizer"),
    ]:
        with pytest.raises(ValueError, match=rule):
            run(tmp_path / "run", corpus, override)
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


@pytest.mark.parametrize("documents", ["true", "false"])
def test_documents_can_be_kept_apart(tmp_path: Path, corpus: str, documents: str) -> None:
    run(tmp_path / "run", corpus, f"data.documents={documents}", "train.steps=2")
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2


def test_sigterm_saves_and_ends_and_the_run_goes_on_exactly(tmp_path: Path, corpus: str) -> None:
    changes = [corpus, "train.steps=40", "train.save_every=1000", "train.evaluate_every=1000"]
    run(tmp_path / "whole", *changes)
    code = """
import sys, time
from pathlib import Path
from hypermlp.report.terminal import new_console
from hypermlp.mixers import MIXERS
from hypermlp.report.page import write_report
from hypermlp.cli.train import run_training
from hypermlp.train.training import Training
update = Training.update
Training.update = lambda *given: (time.sleep(0.05), update(*given))[1]
run_training(new_console(), "tiny", sys.argv[2:], out=Path(sys.argv[1]))
"""
    out = tmp_path / "run"
    arguments = [sys.executable, "-c", code, str(out), *SMALL, *changes]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    while len(read_metrics(out / "metrics.jsonl")) < 3:
        assert child.poll() is None
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    shown, errors = child.communicate()
    assert child.returncode == 0
    (saved,) = complete(out / "checkpoints")
    assert 3 <= step_of(saved) < 40
    assert f"Stopped after step {step_of(saved)}" in shown
    assert "--resume" in shown
    assert "hypermlp: stopping, saving a checkpoint" in errors
    assert run(out, *changes, resume=True)
    assert tensors(out) == tensors(tmp_path / "whole")


def test_torchrun_trains_as_one_process_does(tmp_path: Path, corpus: str) -> None:
    run(tmp_path / "one", corpus)
    code = """
import sys
from pathlib import Path
from hypermlp.report.terminal import new_console
from hypermlp.mixers import MIXERS
from hypermlp.report.page import write_report
from hypermlp.cli.train import run_training
run_training(new_console(), "tiny", sys.argv[2:], out=Path(sys.argv[1]))
"""
    (tmp_path / "script.py").write_text(code)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [*torchrun, str(tmp_path / "script.py"), str(tmp_path / "two"), *SMALL, corpus]
    done = subprocess.run(arguments, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Validation loss") == 1
    assert "2 processes (fsdp, cpu)" in done.stdout
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for name in ("step", "tokens", "loss", "grad_norm"):
        assert [record[name] for record in two] == pytest.approx([record[name] for record in one], rel=2e-5)
    assert [r["validation"] for r in two if "validation" in r][-1] > 0


# Plan and text


def test_the_plan_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = show_plan(new_console(width=200), "tiny", SMALL)
    shown = capsys.readouterr().out
    config = configure("tiny", SMALL)
    parameters = count(config.model)
    assert sum(found.parameters.values()) == parameters
    assert found.tokens == 6 * 4 * 16
    assert found.flops["weights, 6·N"] == 6 * parameters * found.tokens  # the tied embedding is the head's matrix
    assert found.flops["mixing"] > 0
    assert found.memory["optimiser"] == 8 * parameters
    assert found.memory["activations"] > 2 * 16 * 4 * (257 + 16)
    assert found.seconds > 0
    assert "the whole model, 2 × 16 tokens" in shown
    assert "train.betas=0.9,0.95" in shown


def test_the_plan_of_a_large_model_measures_a_part_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypermlp.runs.cost.LARGEST_TRIAL", {"cpu": 1e7})
    changes = ["model.depth=6", "data.context=64", "model.width=32", "train.micro=8"]
    config = configure("tiny", changes)
    whole, shared = estimate_cost(config), estimate_cost(config, processes=2)
    assert whole.measured.startswith("1 of 6 layers")
    assert "scaled up by operations" in whole.measured
    assert shared.memory["optimiser"] == whole.memory["optimiser"] / 2
    checkpointed = estimate_cost(configure("tiny", [*changes, "train.checkpointing=true"]))
    assert checkpointed.memory["activations"] < whole.memory["activations"]


def test_text_comes_in_whole_characters() -> None:
    tokenizer = ByteTokenizer()
    text = "naïve € 𝄞!"
    pieces = list(decode(tokenizer, text.encode()))
    assert "".join(pieces) == text
    assert all(piece in text for piece in pieces)
    broken = b"a\x80\x80\xe2\x82"
    assert "".join(decode(tokenizer, broken)) == tokenizer.decode(list(broken))


def test_text_from_a_run_or_a_model_and_from_nothing(tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "run", corpus)
    texts = []
    for folder in (tmp_path / "run", tmp_path / "run" / "model"):
        model, tokenizer = open_model(folder)
        texts.append("".join(write_text(model, tokenizer, "7 sq", 12, seed=3)))
    assert texts[0] == texts[1]
    assert texts[0]
    with monkeypatch.context() as patch:  # a finished run is read from model/, without hashing its checkpoints
        patch.setattr("hypermlp.train.checkpoint.describe", lambda path: pytest.fail("hashed"))
        open_model(tmp_path / "run")
    run_json = tmp_path / "run" / "run.json"
    run_json.write_text(run_json.read_text().replace('"steps": 6', '"steps": 9'))  # resumed with more steps, and not finished
    assert find_saved(tmp_path / "run") is None
    open_model(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for name in ("bytes", "bpe:300"):  # a folder may have the name of a tokenizer
        shutil.copytree(tmp_path / "run" / "model", name)
        source = find_source(corpus.removeprefix("data.corpus="))
        find_tokenizer("bpe:300", source).save(Path(name) / "tokenizer.json")
        assert open_model(Path(name))[1].vocabulary == 300
    with pytest.raises(ValueError, match="neither a saved model"):
        open_model(tmp_path)
