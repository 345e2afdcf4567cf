"""The demo: what it keeps of a run, what it says of it, and that it can be stopped."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch

from helpers import perturb
from hypermlp.analysis.capture import capture
from hypermlp.cli.watch import run_plan
from hypermlp.mixers.hyper import HyperGLU
from hypermlp.models.budget import TOLERANCE
from hypermlp.report.terminal import new_console
from hypermlp.report.words import sentence
from hypermlp.studies import demo
from hypermlp.studies.catalogue import StudyPlan
from hypermlp.studies.demo import MIXERS, TASKS, DemoStudy, demo_study, lag_kernels
from hypermlp.studies.executors import LocalPool
from hypermlp.tasks import TASKS as TASK_REGISTRY
from hypermlp.verdicts.claims import judge_claims
from hypermlp.verdicts.folders import read_studies

TINY = dataclasses.replace(
    demo_study(quick=True),
    width=16,
    batch=8,
    examples=16,
    tests=8,
    steps=dict.fromkeys(TASKS, 2),
    changes={"selective-copying": {"seq_len": 8, "num_tokens_to_copy": 2}, "noisy-recall": {"seq_len": 8}},
)


def plan(study: DemoStudy, folder: Path) -> StudyPlan:
    return StudyPlan(name="demo", folder=folder, studies={"": study}, mixers=MIXERS)


def test_the_demo_trains_all_shows_a_table_and_leaves_a_page(tmp_path: Path) -> None:
    console = new_console(width=150, file=io.StringIO())
    records = run_plan(console, plan(TINY, tmp_path), executor=LocalPool(1))
    assert {(record["mixer"], record["task"]) for record in records} == {(m, t) for m in MIXERS for t in TASKS}
    assert all(record["error"] is None for record in records)
    shown, page = console.file.getvalue(), (tmp_path / "report.html").read_text()
    (study,) = read_studies(tmp_path)
    judged = [claim for claim in judge_claims(study) if claim.judged]
    assert len(judged) == 4
    for claim in judged:
        assert f"{claim.title}: undecided: too few seeds (one seed)" in sentence(claim)
        assert sentence(claim) in shown
        assert claim.title in page
    assert "supports" not in shown + page
    assert "G-cg-q-12o HyperGLU" in shown
    for title in ("Learning curves", "Learned lag kernels", "What an answer reads"):
        assert f"{title}</h" in page
    readers = {(record["mixer"], record["task"]) for record in records if "reading" in record}
    assert readers == {(m, t) for m in demo.READERS for t in TASKS}
    assert page.count("mixing, up to") == 2 * 2 * 2 * len(TASKS)  # layers, operators, caption and label
    assert str(tmp_path / "report.html") in shown
    assert "finished before" not in shown

    # Without its last lines the folder is a demo that was stopped: it goes on there.
    lines = (tmp_path / "runs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "runs.jsonl").write_text("".join(lines[:-2]))
    console = new_console(width=150, file=io.StringIO())
    run_plan(console, plan(TINY, tmp_path), executor=LocalPool(1))
    assert [json.loads(line)["start"] for line in (tmp_path / "runs.jsonl").read_text().splitlines()] == [0] * 10 + [1] * 2
    console = new_console(width=150, file=io.StringIO())
    again = run_plan(console, plan(TINY, tmp_path), executor=LocalPool(1))
    assert "finished before" in console.file.getvalue()
    times = ("seconds", "tokens_per_second", "start")
    assert [{k: v for k, v in record.items() if k not in times} for record in again] == [
        {k: v for k, v in record.items() if k not in times} for record in records
    ]
    with pytest.raises(ValueError, match=r"batch was 8, not 4.* another folder"):
        run_plan(console, plan(dataclasses.replace(TINY, batch=4), tmp_path), executor=LocalPool(1))


def test_lag_kernels_are_the_operators_by_lag() -> None:
    """Against each token's dense R, averaged: R is linear in s."""
    study = TINY
    setting = study.settings_of("selective-copying")[0]
    torch.manual_seed(0)
    model = study.build(setting, demo.SHOWN, None, 32).double()
    perturb(model)
    tokens = torch.randint(setting.vocab_size, (3, 8), generator=torch.Generator().manual_seed(1))
    found = lag_kernels(model, tokens)
    assert [(kernel["layer"], kernel["operator"]) for kernel in found] == [(1, "R1"), (1, "R2"), (2, "R1"), (2, "R2")]
    inputs: list[torch.Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, HyperGLU)]
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))
    model.requires_grad_(False)(tokens)
    for kernel in found:
        layer, x = layers[kernel["layer"] - 1], inputs[kernel["layer"] - 1]
        op = layer.op1 if kernel["operator"] == "R1" else layer.op2
        assert op is not None
        A, B, D = op.A, op.B, 1 + op.diag
        s = torch.sigmoid(x @ op.control.weight.T + op.control.bias).unflatten(-1, (op.heads, -1))  # B T H R
        R = torch.einsum("hir,bthr,hjr->bthij", A, s, B).mean((0, 1))  # H L L
        head = kernel["head"] - 1
        assert R.flatten(1).norm(dim=1).argmax() == head
        for lag in range(8):
            assert [row[lag] for row in kernel["diagonal"]] == pytest.approx(D[:, 7 - lag].tolist(), abs=1e-4)
            for to in range(8):
                entry = R[head, 7 - lag, 7 - to] if kernel["operator"] == "R1" else R[head, 7 - to, 7 - lag]
                assert kernel["mixing"][lag][to] == pytest.approx(float(entry), abs=1e-4)


def test_answers_read_what_the_decomposition_says() -> None:
    """Every row of shares sums to one, and is that of the head which adds most in the last layer."""
    (setting,) = TINY.settings_of("selective-copying")
    torch.manual_seed(0)
    model = TINY.build(setting, demo.SHOWN, None, 32).double()
    perturb(model)
    _, _, test = TASK_REGISTRY["selective-copying"].load(setting, 0, clean=True)
    found = demo.reading(model, setting, test.inputs[0], test.targets[0])
    assert found["tokens"][found["answers"][0] - 1] == "copy"
    assert [str(token) for token in test.targets[0].tolist() if token >= 0] == found["right"]
    opened = capture(model, test.inputs[:1]).traces()[1]
    assert opened is not None
    sizes = [sum(float(opened.memory(t, h).output.norm()) for t in found["answers"]) for h in range(2)]
    assert (found["layer"], found["head"]) == (2, 1 + sizes.index(max(sizes)))
    for row, token in zip(found["shares"], found["answers"], strict=True):
        memory = opened.memory(token, found["head"] - 1)
        assert row[: token + 1] == pytest.approx(memory.token_shares.tolist(), abs=1e-4)
        assert row[token + 1 :] == [0] * (len(row) - token - 1)


def test_a_layer_without_mixing_has_no_kernels() -> None:
    setting = TINY.settings_of("selective-copying")[0]
    tokens = torch.zeros(1, 8, dtype=torch.long)
    assert lag_kernels(TINY.build(setting, "R-cg-q", None, 32), tokens) == []
    assert lag_kernels(TINY.build(setting, "S-pc", None, 32), tokens) == []


def test_models_within_the_budget_are_equal_in_parameters() -> None:
    plan = demo_study()
    for task in TASKS:
        (setting,) = plan.settings_of(task)
        counts = {name: model.parameters for name, model in plan.match(setting, MIXERS).items()}
        within = [count for name, count in counts.items() if not name.endswith("!")]
        assert max(counts.values()) <= max(within)  # those outside have no advantage
        assert max(within) <= (1 + TOLERANCE) * min(within)
