"""The MAD study: both protocols keep their rules, and records depend on nothing but the job."""

import dataclasses
import io
import json
import math
import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from hypermlp.cli import app
from hypermlp.cli.watch import run_study
from hypermlp.files import read_json
from hypermlp.report.progress import Screen, accuracies
from hypermlp.report.terminal import new_console
from hypermlp.studies import mad
from hypermlp.studies.engine import Progress, Running
from hypermlp.studies.executors import LocalPool
from hypermlp.studies.folder import Folder, read_lines
from hypermlp.studies.mad import TaskJob, TaskStudy, task_study
from hypermlp.studies.scores import setting_score, task_scores
from hypermlp.studies.search import Search
from hypermlp.studies.worker import PROGRESS, RunContext, Stopped
from hypermlp.tasks import base as task_base
from hypermlp.tasks import mad as mad_tasks
from hypermlp.tasks.mad import MAD as TASKS
from hypermlp.tasks.mad import SEED, generate
from hypermlp.train.checkpoint import newest
from hypermlp.train.fit import EpochSampler, Fit
from hypermlp.train.optimisation import Recipe

SMALL: dict[str, Any] = {
    "scale": "baseline",
    "width": 16,
    "depth": 1,
    "batch": 16,
    "examples": 40,
    "tests": 24,
    "rates": (3e-3,),
    "decays": (0.1,),
    "changes": {"memorization": {"vocab_size": 16, "seq_len": 8}, "in-context-recall": {"seq_len": 12}},
}
TIMES = ("seconds", "tokens_per_second", "start")


def small_study(protocol: str, **numbers: Any) -> TaskStudy:
    return TaskStudy(protocol=protocol, **{**SMALL, "epochs": 3, **numbers})


def small_job(protocol: str, task: str = "memorization", mixer: str = "softmax", **numbers: Any) -> TaskJob:
    study = small_study(protocol, **numbers)
    setting = study.settings_of(task)[0]
    return TaskJob(mixer=mixer, setting=setting, seed=0, lr=3e-3, weight_decay=0.1, study=study, inner=16, size=None)


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in TIMES}


def test_the_settings_with_the_shortest_runs_come_first() -> None:
    """So that a study that is stopped has as many whole tasks as it can."""
    study = task_study("clean", "laptop")
    tokens = [study.tokens_of(setting) for setting in study.settings().values()]
    assert tokens == sorted(tokens) != [study.tokens_of(setting) for task in study.tasks for setting in study.settings_of(task)]


# ---- the protocols ----


class Counting(nn.Module):
    """Counts its updates in a weight, whatever it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.rows: list[list[int]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.rows.append(tokens[:, 0].tolist())
        return self.weight.expand(*tokens.shape, 4)


def training(
    evaluate: Callable[[nn.Module], dict[str, float]],
    seed: int = 0,
    solved: float | None = None,
    weight_decay: float = 0.0,
    clip: float | None = None,
    **schedule: Any,
) -> Fit:
    inputs = torch.arange(10)[:, None].expand(10, 2)
    rows = task_base.Examples(inputs, torch.ones(10, 2, dtype=torch.long))
    examples = EpochSampler(lambda epoch: [rows], batch=4, seed=seed)
    recipe = Recipe(
        **{"steps": 30, "lr": 1e-3, "final": 1.0, **schedule},
        weight_decay=weight_decay,
        decayed="all",
        betas=(0.9, 0.999),
        clip=clip,
    )
    return Fit(Counting(), recipe, examples, evaluate, evaluate_every=3, solved=solved)


def finish(training: Fit) -> Fit:
    while not training.finished:
        training.advance()
    return training


def scripted(accuracies: list[float], losses: list[float] | None = None) -> Callable[[nn.Module], dict[str, float]]:
    values = iter(zip(accuracies, losses or [1.0] * len(accuracies), strict=True))

    def evaluate(model: nn.Module) -> dict[str, float]:
        accuracy, loss = next(values)
        return {"accuracy": accuracy, "loss": loss, "perplexity": math.exp(loss)}

    return evaluate


def test_every_epoch_shows_every_example_once_in_an_order_of_its_own_and_keeps_the_last_batch() -> None:
    run = finish(training(scripted([0.0] * 10)))
    rows = run.model.rows
    assert [len(batch) for batch in rows[:3]] == [4, 4, 2]
    epochs = [list(chain(*rows[i : i + 3])) for i in range(0, 30, 3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 10
    assert [point["step"] for point in run.curve] == list(range(3, 31, 3))
    other = finish(training(scripted([0.0] * 10), seed=1))
    assert other.model.rows != rows


def test_a_run_ends_after_the_first_evaluation_above_the_threshold() -> None:
    run = finish(training(scripted([0.5, 0.999, 0.9991]), solved=0.999))
    assert run.step == 9
    assert run.stopped == "solved after step 9"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_run_ends_when_numbers_stop_being_finite(bad: float) -> None:
    run = finish(training(scripted([0.5, 0.6], [1.0, bad])))
    assert run.stopped == "the evaluation after step 6 is not finite"
    assert mad.faithful_metrics(run) == run.curve[0]
    assert mad.clean_metrics(run, lambda model: pytest.fail("the test set was looked at")) is None
    run = training(scripted([0.5, 0.6]))
    for _ in range(4):
        run.advance()
    run.model.weight.data[0] = bad
    before = run.model.weight.clone()
    run = finish(run)
    assert run.stopped == "the loss of step 5 is not finite"
    assert run.model.weight[1:].equal(before[1:])


def test_faithful_takes_the_epoch_of_the_lowest_test_perplexity() -> None:
    run = finish(training(scripted([0.2, 0.6, 0.9], [1.5, 0.7, 0.8]), steps=9))
    metrics = mad.faithful_metrics(run)
    assert metrics is not None
    assert (metrics["accuracy"], metrics["step"]) == (0.6, 6)


def test_faithful_trains_at_a_constant_rate_and_clean_warms_up_and_decays() -> None:
    jobs = [
        small_job(protocol, tasks=("memorization",), epochs=None, steps={"memorization": 100}) for protocol in mad.PROTOCOLS
    ]
    faithful, clean = (job.recipe for job in jobs)
    assert [faithful.rate(n) for n in range(100)] == [3e-3] * 100
    rates = [clean.rate(n) for n in range(100)]
    assert rates[:5] == pytest.approx([3e-3 * n / 5 for n in (1, 2, 3, 4, 5)])
    assert rates[52] == pytest.approx(3e-3 / 2, rel=0.02)
    assert all(later < earlier for earlier, later in pairwise(rates[5:]))
    assert rates[-1] < 2e-6
    assert (faithful.clip, clean.clip) == (None, 1.0)
    assert [job.study.rules.solved for job in jobs] == [0.999, None]
    assert [job.evaluate_every for job in jobs] == [3, 8]  # 40 examples in batches of 16
    assert {(recipe.decayed, recipe.betas) for recipe in (faithful, clean)} == {("all", (0.9, 0.999))}  # as published


def test_rate_decay_and_clipping_reach_the_optimiser() -> None:
    """The updates equal those of a plain loop in torch."""
    for clip, final, warmup in [(None, 1.0, 0), (0.01, 0.0, 3)]:
        run = finish(training(scripted([0.0] * 4), steps=12, lr=0.1, weight_decay=0.5, clip=clip, final=final, warmup=warmup))
        weight = nn.Parameter(torch.zeros(4))
        optimiser = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
        for n in range(12):
            optimiser.param_groups[0]["lr"] = run.training.recipe.rate(n)
            weight.grad = torch.softmax(weight.detach(), 0) - torch.tensor([0.0, 1, 0, 0])
            if clip:
                weight.grad *= min(1.0, clip / float(weight.grad.norm()))
            optimiser.step()
        torch.testing.assert_close(run.model.weight, weight, rtol=1e-4, atol=1e-6)


def test_faithful_data_are_the_published_ones_and_clean_data_leave_out_what_is_trivial() -> None:
    plan = small_study("faithful")
    setting = plan.settings_of("compression")[0]
    published = generate(setting, SEED)
    train, validation, test = TASKS["compression"].load(setting, 0, clean=False)
    assert train.inputs.numpy().tolist() == published.train.inputs.tolist()
    assert test.targets.numpy().tolist() == published.test.targets.tolist()
    assert len(validation.inputs) == 0
    train, validation, test = TASKS["compression"].load(setting, 0, clean=True)
    assert len(validation.inputs) == len(test.inputs) == 24
    assert not torch.equal(validation.inputs, test.inputs)
    for split in (train, validation, test):
        assert torch.all(split.targets[:, -1] == -100)
    assert not torch.equal(TASKS["compression"].load(setting, 1, clean=True)[0].inputs, train.inputs)


def test_clean_looks_at_the_test_set_once_with_the_last_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_job("clean")
    _, validation, test = TASKS[TASK].load(job.setting, 0, clean=True)
    looked: list[str] = []

    def evaluate(model: nn.Module, inputs: Tensor, targets: Tensor, batch: int) -> Any:
        looked.append("test" if torch.equal(inputs, test.inputs) else "validation")
        assert torch.equal(inputs, test.inputs) or torch.equal(inputs, validation.inputs)
        return original(model, inputs, targets, batch)

    original = mad_tasks.evaluate
    monkeypatch.setattr(mad_tasks, "evaluate", evaluate)
    record = mad.train(job)
    assert looked == ["validation"] * 9 + ["test"]  # 9 steps, so an evaluation after each
    assert record["metrics"]["step"] == 9
    assert record["metrics"]["validation_loss"] == record["curve"][-1]["loss"]
    assert "perplexity" not in record["metrics"]


def test_scores_follow_the_protocol() -> None:
    def record(protocol: str, setting: str, seed: int, accuracy: float, loss: float) -> dict[str, Any]:
        metrics = {"accuracy": accuracy, "validation_loss": loss}
        fields = {"mixer": "m", "task": "t", "setting": setting, "seed": seed, "protocol": protocol}
        return {**fields, "metrics": metrics, "error": None}

    for protocol, score in [("faithful", 0.9), ("clean", 0.4)]:
        grid = [record(protocol, "a", 0, accuracy, loss) for accuracy, loss in [(0.4, 0.1), (0.9, 0.2), (0.3, 0.3)]]
        blown, failed = {**grid[0], "metrics": None}, {**grid[0], "error": "gone"}
        assert setting_score([blown, *grid, failed]) == score
        assert setting_score([blown, failed]) is None
        others = [record(protocol, "b", 0, 0.1, 1.0), record(protocol, "a", 1, 0.7, 1.0)]
        # Seed 1 lacks setting b: a mean over a alone would not compare with seed 0's.
        assert task_scores([*grid, *others]) == {("m", "t"): {0: pytest.approx((score + 0.1) / 2)}}
        assert task_scores(grid, {"a": "t"}) == {("m", "t"): {0: score}}
        assert task_scores(grid, {"a": "t", "b": "t", "c": "u"}) == {("m", "t"): {}, ("m", "u"): {}}
    with pytest.raises(ValueError, match="different protocols"):
        task_scores([record("clean", "a", 0, 1, 1), record("faithful", "a", 0, 1, 1)])


# ---- scales ----


def test_full_is_the_published_benchmark() -> None:
    plan = task_study("faithful", "full")
    settings = [setting for task in TASKS for setting in plan.settings_of(task)]
    assert len(settings) * len(plan.rates) * len(plan.decays) == 396
    assert all(setting.num_test == 1280 for setting in settings)
    baselines = [setting for setting in settings if setting.baseline]
    assert [plan.steps_of(setting) for setting in baselines] == [20000, 20000, 20000, 400, 20000, 20000]
    assert (plan.width, plan.depth, plan.batch, plan.rates, plan.decays) == (128, 2, 128, (1e-4, 5e-4, 1e-3), (0.0, 0.1))


@pytest.mark.parametrize("scale", sorted(mad.SCALES))
@pytest.mark.parametrize("protocol", sorted(mad.PROTOCOLS))
def test_every_scale_has_settings_and_a_length_for_every_task(scale: str, protocol: str) -> None:
    plan = task_study(protocol, scale)
    for task in TASKS:
        assert all(plan.steps_of(setting) > 0 for setting in plan.settings_of(task))


def test_a_study_begins_all_its_contestants_alike() -> None:
    """The published scales as the paper does, ours with decays; `init` chooses for all, and old plans mean the paper's."""
    scales = ("full", "baseline", "laptop", "quick")
    assert [task_study("clean", scale).init for scale in scales] == ["paper", "paper", "decays", "decays"]
    plan = task_study("clean", "quick", ["noisy-recall"], init="paper")
    assert "init" not in plan.numbers()
    (setting,) = plan.settings_of("noisy-recall")
    for init, least, most in (("paper", 0.0, 0.15), ("decays", 0.4, 0.5)):
        study = task_study("clean", "quick", ["noisy-recall"], init=init)
        for mixer in ("S-pc", "G-cg-q-12o", "hypermlp"):
            weight = study.build(setting, mixer, None, 32).get_parameter("blocks.0.mixer.conv_k.weight")
            assert least < weight.abs().max() <= most, (mixer, init)


def test_overrides_change_what_they_name_and_nothing_else() -> None:
    plan = task_study("clean", "laptop", steps=7, examples=100, batch=8, width=32, lr=[1e-2, 1e-3])
    assert set(plan.steps.values()) == {7}
    expected = {"examples": 100, "batch": 8, "width": 32, "rates": (1e-2, 1e-3), "steps": plan.steps}
    assert plan == dataclasses.replace(task_study("clean", "laptop"), **expected)
    assert task_study("clean", "laptop", epochs=3).steps is None
    assert (
        task_study("clean", "quick", examples=1000).settings_of("memorization")[0].num_train == 256
    )  # never more than there are


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"protocol": "exact"}, r"protocol \('exact'\) must be one of 'faithful', 'clean'"),
        ({"scale": "huge"}, "'full', 'baseline', 'laptop', 'quick'"),
        ({"tasks": ["recall"]}, "'in-context-recall'"),
        ({"mixers": ["softmax", "nobody"]}, "nobody"),
        ({"mixers": ["softmax", "softmax"]}, "each named once"),
        ({"tasks": []}, "at least one"),
        ({"seeds": 0}, r"seeds \(0\)"),
        ({"epochs": 2, "steps": 3}, "give one of them"),
        ({"lr": [0.0]}, "must be above 0"),
        ({"width": 0}, "must be at least 1"),
        ({"init": "zeros"}, r"init \('zeros'\) must be one of 'paper', 'decays'"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"protocol": "clean", "scale": "quick", "tasks": ["compression"], **arguments}
    mixers, seeds = numbers.pop("mixers", ["softmax"]), numbers.pop("seeds", 1)
    with pytest.raises(ValueError, match=message):
        run_study(new_console(quiet=True), tmp_path / "out", task_study(**numbers), mixers, seeds=seeds)
    assert not (tmp_path / "out").exists()


# ---- resuming ----


@pytest.mark.parametrize("protocol", sorted(mad.PROTOCOLS))
@pytest.mark.parametrize("stop_at", [1, 3, 8])
def test_a_stopped_run_continues_with_the_same_bits(protocol: str, stop_at: int, tmp_path: Path) -> None:
    job = small_job(protocol, "in-context-recall", "hyperglu")
    here, there = multiprocessing.Pipe()
    context = RunContext(there, tmp_path / "checkpoint", every=math.inf)
    tick = context.tick

    def watched(step: int, *rest: Any) -> None:
        if step == stop_at:
            here.send(None)
        tick(step, *rest)

    context.tick = watched  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        mad.train(job, context)
    saved = newest(tmp_path / "checkpoint")
    assert saved is not None
    assert read_json(saved / PROGRESS)["step"] == stop_at
    torch.manual_seed(99)  # the state of the process has no say
    resumed = mad.train(job, RunContext(there, tmp_path / "checkpoint", every=math.inf))
    assert timeless(resumed) == timeless(mad.train(job))
    assert len(resumed["curve"]) == (3 if protocol == "faithful" else 9)


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_mad_study import disturbed
if __name__ == "__main__":
    disturbed(Path(sys.argv[1]), workers=1)
"""
MIXERS, TASK = ["hyperglu", "softmax"], "in-context-recall"
DISTURBED = small_study("clean", tasks=(TASK,), epochs=None, steps=dict.fromkeys(TASKS, 30))


def disturbed(out: Path, workers: int) -> list[dict[str, Any]]:
    return DISTURBED.run(out, MIXERS, seeds=2, executor=LocalPool(workers), checkpoint_seconds=0)


def test_killed_and_stopped_studies_end_with_the_records_of_an_undisturbed_one(tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent)))

    def until(number: signal.Signals, condition: Callable[[], bool]) -> None:
        process = subprocess.Popen([sys.executable, str(script), str(out)], stderr=subprocess.DEVNULL, start_new_session=True)
        while process.poll() is None and not condition():
            time.sleep(0.01)
        process.send_signal(number)
        process.wait(timeout=120)

    until(signal.SIGKILL, lambda: any((out / "checkpoints").glob("*/step-*")))
    until(signal.SIGTERM, lambda: len(read_lines(out / "runs.jsonl")[0]) >= 1)
    wholes, _ = read_lines(out / "runs.jsonl")
    assert len(wholes) >= 1
    ended = disturbed(out, workers=2)
    assert [r["start"] for r in ended if r["key"] in {whole["key"] for whole in wholes}] == [w["start"] for w in wholes]
    with Folder(tmp_path / "quiet") as folder:
        jobs = DISTURBED.plan_jobs(folder, MIXERS, seeds=2)
    for job, record in zip(jobs, ended, strict=True):  # no worker, one or two: all the same
        expected = {"key": job.key, **job.identity, **mad.train(job), "error": None}
        assert timeless(record) == timeless(json.loads(json.dumps(expected)))
    assert len(ended) == 4
    assert list((out / "checkpoints").iterdir()) == []
    counts = [record["parameters"] for record in ended]
    assert max(counts) <= 1.01 * min(counts)
    # Two seeds are two data sets and two models.
    assert ended[0]["curve"] != ended[2]["curve"]
    # The plan says what was run, and by which starts.
    plan = json.loads((out / "plan.json").read_text())
    assert len(plan["starts"]) == 3
    assert {record["start"] for record in ended} <= {0, 1, 2}


def test_a_folder_keeps_to_its_plan_and_its_budget(tmp_path: Path) -> None:
    study = small_study("clean", tasks=("memorization",))

    def begin(folder: Folder, mixers: list[str], **changes: Any) -> list[Any]:
        return dataclasses.replace(study, **changes).plan_jobs(folder, mixers, seeds=1)

    with Folder(tmp_path) as folder:
        jobs = begin(folder, ["softmax"])
        assert [job.inner for job in jobs] == [48]
    with Folder(tmp_path) as folder:
        more = small_study("clean", tasks=("memorization", "compression")).plan_jobs(folder, ["softmax"], seeds=3)
        assert {job.key for job in jobs} < {job.key for job in more}
        with pytest.raises(ValueError, match="protocol was 'clean', not 'faithful'"):
            begin(folder, ["softmax"], protocol="faithful")
        with pytest.raises(ValueError, match="width was 16, not 32"):
            begin(folder, ["softmax"], width=32)
        with pytest.raises(ValueError, match=r"epochs was 3, not 4"):
            begin(folder, ["softmax"], epochs=4)
        # Plans do not say these where they have their defaults.
        for name, value in (("init", "decays"), ("precision", "bfloat16"), ("solved", 0.9), ("init_scale", "torch")):
            with pytest.raises(ValueError, match=f"begun with other settings: {name} was .*, not {value!r}"):
                begin(folder, ["softmax"], **{name: value})
        with pytest.raises(ValueError, match=r"search was None, not .*rates was \[0.003\], not None"):
            begin(folder, ["softmax"], search=Search())
        with pytest.raises(ValueError, match=r"changes.memorization.seq_len was 8, not None"):
            begin(folder, ["softmax"], changes={"memorization": {"vocab_size": 16}})
        # HyperGLU is larger here, so softmax attention would have to grow to match it.
        with pytest.raises(ValueError, match=r"with hyperglu the largest model .* so softmax would have to be trained again"):
            begin(folder, ["hyperglu"])


def test_the_terminal_shows_progress_and_accuracies(tmp_path: Path) -> None:
    study = task_study("faithful", "quick", ["memorization"], epochs=1, examples=32, width=16)
    with Folder(tmp_path) as folder:
        (job,) = study.plan_jobs(folder, ["softmax"], seeds=1)
        record = {"key": job.key, **job.identity, **mad.train(job), "error": None}
        folder.append(record)
    accuracy = record["metrics"]["accuracy"]
    console = new_console(width=150, file=io.StringIO())
    found = run_study(console, tmp_path, study, ["softmax"])
    shown = console.file.getvalue()
    assert [one["key"] for one in found] == [job.key]
    assert "MAD, faithful protocol" in shown
    assert f"{100 * accuracy:.1f}" in shown.split("mixer")[1]
    assert str(tmp_path / "plan.json") in shown.replace("\n", "")

    console = new_console(width=150, file=io.StringIO())
    settings = {job.setting.key: "memorization"}
    screen = Screen(console, lambda records, width: accuracies(records, ["softmax"], settings, "faithful", width))
    running = Running(job, step=5, steps=10, metrics={"train_loss": 1.5})
    console.print(screen.render(Progress(3, (record,), (running,), 7300.0)))
    screen.done(record)
    screen.done({"key": "other", **job.identity, "error": "the worker was ended by SIGKILL"})
    shown = console.file.getvalue()
    assert "softmax (Softmax with RoPE), Memorisation" in shown
    assert "5/10" in shown
    assert "1.500" in shown
    assert job.key not in shown  # words, not keys
    assert "1/3 2 h 02 min left" in shown
    assert f"{100 * accuracy:.1f}" in shown.split("mixer")[1]
    assert f"seed 0: accuracy {accuracy:.1%}" in shown
    assert "seed 0: failed: the worker was ended by SIGKILL" in shown
    assert "stopping" not in shown
    console.print(screen.render(Progress(3, (record,), (running,), None, stopping=True)))
    assert "stopping, saving" in console.file.getvalue()


def test_ctrl_c_ends_with_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command line does it; that the engine raises is in test_engine.py."""

    def stopped(*given: Any, **options: Any) -> None:
        raise KeyboardInterrupt("3 of 4 runs are finished; the same command resumes the others")

    monkeypatch.setattr(TaskStudy, "run", stopped)
    options = ["--mixers", "S", "--tasks", "memorization", "--out", str(tmp_path), "--device", "cpu"]
    done = CliRunner().invoke(app, ["study", "run", "mad", *options])
    assert done.exit_code == 130
    assert "Stopped: 3 of 4 runs are finished; the same command resumes the others" in done.output
