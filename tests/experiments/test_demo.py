"""The demo: what it keeps of a run, what it says of it, and that it can be stopped."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from helpers import perturb
from hypermlp.experiments import demo, mad
from hypermlp.experiments.demo import MIXERS, TASKS, lag_kernels, make_plan
from hypermlp.experiments.mad import match_setting
from hypermlp.mixers.hyper import HyperGLU
from hypermlp.models.budget import TOLERANCE
from hypermlp.report.demo import CLAIMS, judge, kernels, show
from hypermlp.report.findings import CONFIRMED, REFUTED, UNKNOWN
from hypermlp.report.study import Study

TINY = dataclasses.replace(
    make_plan(quick=True),
    width=16,
    batch=8,
    examples=16,
    tests=8,
    steps=dict.fromkeys(TASKS, 2),
    changes={"selective-copying": {"seq_len": 8, "num_tokens_to_copy": 2}, "noisy-recall": {"seq_len": 8}},
)


def test_the_demo_trains_all_shows_a_table_and_leaves_a_page(tmp_path: Path) -> None:
    console = Console(width=150, file=io.StringIO())
    records = show(console, tmp_path, TINY, workers=1)
    assert {(record["mixer"], record["task"]) for record in records} == {(m, t) for m in MIXERS for t in TASKS}
    assert all(record["error"] is None for record in records)
    shown, page = console.file.getvalue(), (tmp_path / "report.html").read_text()
    for finding in page_claims(records):
        assert finding in shown
        assert finding.split(":")[0] in page
    for title in ("Learning curves", "What this run supports", "Learned lag kernels"):
        assert f"{title}</h" in page
    assert page.count("mixing, up to") == 2 * 2 * 2 * len(TASKS)  # layers, operators, caption and label
    assert str(tmp_path / "report.html") in shown
    assert "finished before" not in shown

    # Without its last lines the folder is a demo that was stopped: it goes on there.
    lines = (tmp_path / "runs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "runs.jsonl").write_text("".join(lines[:-2]))
    console = Console(width=150, file=io.StringIO())
    show(console, tmp_path, TINY, workers=1)
    assert [json.loads(line)["start"] for line in (tmp_path / "runs.jsonl").read_text().splitlines()] == [0] * 10 + [1] * 2
    console = Console(width=150, file=io.StringIO())
    again = show(console, tmp_path, TINY, workers=1)
    assert "finished before" in console.file.getvalue()
    times = ("seconds", "tokens_per_second", "start")
    assert [{k: v for k, v in record.items() if k not in times} for record in again] == [
        {k: v for k, v in record.items() if k not in times} for record in records
    ]
    with pytest.raises(ValueError, match=r"choose another folder"):
        show(console, tmp_path, dataclasses.replace(TINY, batch=4), workers=1)


def page_claims(records: list[dict[str, Any]]) -> list[str]:
    return [judge(study_of(records), claim).sentence for claim in CLAIMS]


def study_of(records: list[dict[str, Any]]) -> Study:
    return Study(folders=(".",), plans={}, starts=[], mad=records, language=[])


def made_up(accuracy: dict[str, float], seed: int = 0) -> list[dict[str, Any]]:
    """The same percentage on every task."""
    return [
        {
            "mixer": mixer,
            "task": task,
            "setting": f"{task}/baseline",
            "seed": seed,
            "protocol": "clean",
            "error": None,
            "metrics": {"accuracy": percent / 100, "validation_loss": 1.0},
        }
        for mixer, percent in accuracy.items()
        for task in TASKS
    ]


AS_CLAIMED = {"G-cg-q-12o": 99, "R-cg-q-12o": 98, "S-pc": 90, "R-cg-q": 70, "R-12o!": 97, "R-12!": 40}


@pytest.mark.parametrize(
    "changes, statuses",
    [
        ({}, [CONFIRMED, CONFIRMED, CONFIRMED]),
        ({"R-cg-q": 96.1}, [REFUTED, CONFIRMED, CONFIRMED]),  # a gain below two points
        ({"S-pc": 99.5}, [CONFIRMED, REFUTED, CONFIRMED]),
        ({"R-12!": 88}, [CONFIRMED, CONFIRMED, REFUTED]),  # worse, but no failure
        ({"G-cg-q-12o": 10, "R-cg-q-12o": 10, "R-12o!": 10}, [REFUTED, REFUTED, REFUTED]),
    ],
)
def test_the_verdict_is_the_datas(changes: dict[str, float], statuses: list[str]) -> None:
    study = study_of(made_up(AS_CLAIMED | changes))
    findings = [judge(study, claim) for claim in CLAIMS]
    assert [finding.status for finding in findings] == statuses
    for finding in findings:
        start = "This run supports that" if finding.status == CONFIRMED else "This run does not support that"
        assert finding.sentence.startswith(start)
    gain = (AS_CLAIMED | changes)["R-cg-q-12o"] - (AS_CLAIMED | changes)["R-cg-q"]
    assert f"{gain:+.1f} points on selective copying" in findings[0].sentence


def test_every_claim_is_judged_and_by_the_mean_over_seeds() -> None:
    assert all(claim.tasks() for claim in CLAIMS)
    records = made_up(AS_CLAIMED) + made_up(AS_CLAIMED | {"R-cg-q": 100.0}, seed=1)
    finding = judge(study_of(records), CLAIMS[0])
    assert finding.gains["selective-copying"] == pytest.approx(13.0)


def test_a_run_without_a_score_is_not_taken_for_a_failure() -> None:
    records = made_up(AS_CLAIMED)
    for record in records:
        if record["mixer"] == "R-12!":
            record["error"] = "the worker was ended by SIGKILL"
    finding = judge(study_of(records), CLAIMS[2])
    assert finding.status == UNKNOWN
    assert finding.sentence.startswith("Runs are missing to judge that mixing fails")
    assert "No run" in kernels(records)


def test_lag_kernels_are_the_operators_by_lag() -> None:
    """Against each token's dense R, averaged: R is linear in s."""
    plan = TINY
    setting = plan.settings_of("selective-copying")[0]
    torch.manual_seed(0)
    model = mad.build_for(setting, plan, demo.SHOWN, None, 32).double()
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


def test_a_layer_without_mixing_has_no_kernels() -> None:
    setting = TINY.settings_of("selective-copying")[0]
    tokens = torch.zeros(1, 8, dtype=torch.long)
    assert lag_kernels(mad.build_for(setting, TINY, "R-cg-q", None, 32), tokens) == []
    assert lag_kernels(mad.build_for(setting, TINY, "S-pc", None, 32), tokens) == []


def test_models_within_the_budget_are_equal_in_parameters() -> None:
    plan = make_plan()
    for task in TASKS:
        (setting,) = plan.settings_of(task)
        counts = {name: model.parameters for name, model in match_setting(setting, MIXERS, plan).items()}
        within = [count for name, count in counts.items() if not name.endswith("!")]
        assert max(counts.values()) <= max(within)  # those outside have no advantage
        assert max(within) <= (1 + TOLERANCE) * min(within)
