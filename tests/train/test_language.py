"""One update: the mean over the whole batch however it is divided, the schedule, where decay falls."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from small import MODEL, TRAIN, config, described, model, rows, share
from torch import Tensor, nn

from hypermlp.batch import Batch
from hypermlp.mixers import DISTINCT
from hypermlp.models.lm import LanguageModel
from hypermlp.models.saved import load_model, save_model, weights
from hypermlp.train.checkpoint import Checkpoints
from hypermlp.train.distributed import World
from hypermlp.train.fit import Fit
from hypermlp.train.language import new_training, train
from hypermlp.train.metrics import Metrics, check_loggers, open_loggers, read_metrics
from hypermlp.train.optimisation import Recipe, parameter_groups
from hypermlp.train.run_folder import RunFolder


def trained(steps: int = 3, **changes: object) -> tuple[list[float], dict[str, Tensor]]:
    how = config(**changes)
    training = new_training(model(), how)
    losses = [training.update(share(step, how, World())).loss for step in range(steps)]
    return losses, weights(training.model)


@pytest.mark.parametrize("changes", [{"micro": 1}, {"micro": 4}, {"checkpointing": True}], ids=str)
def test_accumulation_and_checkpointing_change_nothing(changes: dict[str, object]) -> None:
    (expected, one), (losses, other) = trained(micro=8), trained(**{"micro": 8, **changes})
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-5)


def test_the_loss_is_the_mean_over_counted_targets() -> None:
    inputs, targets = rows(0)
    expected = F.cross_entropy(model()(inputs).detach().flatten(0, 1), targets.flatten())  # without the targets −100
    assert trained(1, micro=2)[0] == pytest.approx([float(expected)], rel=1e-6)


@pytest.mark.parametrize("clip", [0.05, 1e3], ids=["clipped", "not clipped"])
def test_an_update_is_that_of_the_plain_optimiser(clip: float) -> None:
    """The update in one call, and the clipping that is left out where it changes nothing, are those of torch step by step."""
    how = config(micro=8, clip=clip)
    training, plain = new_training(model(), how), model()
    groups = parameter_groups(plain, how.weight_decay)
    optimiser = torch.optim.AdamW(groups, lr=how.lr, betas=how.betas, foreach=False, fused=False)
    for step in range(3):
        ((inputs, targets, _),) = share(step, how, World())
        F.cross_entropy(plain(inputs).flatten(0, 1), targets.flatten()).backward()
        norm = float(nn.utils.clip_grad_norm_(plain.parameters(), clip))
        for group in optimiser.param_groups:
            group["lr"] = how.rate(step)
        optimiser.step()
        optimiser.zero_grad()
        assert training.update([Batch(inputs, targets)]).grad_norm == pytest.approx(norm, rel=1e-5)
    assert training.optimiser.defaults["fused"]
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(training.model)[name], tensor, rtol=1e-3, atol=2e-6)


def test_packed_documents_are_kept_apart() -> None:
    inputs, targets = (part[:2] for part in rows(0))
    training = new_training(model(), TRAIN)
    expected = training.evaluate([Batch(inputs, targets)])
    packed = Batch(inputs.reshape(1, -1), targets.reshape(1, -1), torch.tensor([0, 12, 24], dtype=torch.int32))
    assert training.evaluate([packed]) == pytest.approx(expected, rel=1e-6)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32() -> None:
    (expected, _), (losses, kept) = trained(), trained(precision="bfloat16")
    assert losses != expected
    assert losses == pytest.approx(expected, rel=2e-2)
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}


def test_the_rate_warms_up_falls_as_a_cosine_and_stays_at_its_end() -> None:
    how = config(steps=100, warmup=10, decay=60, lr=1.0)
    assert [how.rate(step) for step in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert how.rate(35) == pytest.approx(0.55)
    assert [how.rate(step) for step in (60, 99)] == pytest.approx([0.1, 0.1])
    assert config(steps=60, warmup=10, lr=1.0).rate(35) == how.rate(35)


@pytest.mark.parametrize("name", sorted(DISTINCT))
def test_decay_falls_on_matrices_of_linear_maps_alone(name: str) -> None:
    net = LanguageModel(MODEL.replace(mixer=name, style="gpt2"))
    decayed, rest = (group["params"] for group in parameter_groups(net, 0.1))
    assert len(decayed) + len(rest) == len(list(net.parameters()))
    of_linear = {id(m.weight) for m in net.modules() if isinstance(m, nn.Linear) and m is not net.head}
    assert {id(p) for p in decayed} == of_linear
    assert id(net.embedding.weight) in {id(p) for p in rest}
    every, none = (group["params"] for group in parameter_groups(net, 0.1, decayed="all"))
    assert [id(p) for p in every] == [id(p) for p in net.parameters()]
    assert none == []


def test_decay_pulls_towards_zero() -> None:
    (_, free), (_, pulled) = trained(8, weight_decay=0.0), trained(8, weight_decay=20.0)
    assert pulled["blocks.0.ffn.up.weight"].norm() < 0.9 * free["blocks.0.ffn.up.weight"].norm()
    assert pulled["norm.weight"].norm() > 0.99 * free["norm.weight"].norm()


def test_a_loss_that_is_not_finite_stops_before_it_spoils_the_model_or_the_next_update() -> None:
    training = new_training(model(), TRAIN)
    with torch.no_grad():
        training.model.norm.weight.fill_(math.inf)
    before = {name: tensor.clone() for name, tensor in weights(training.model).items()}
    with pytest.raises(RuntimeError, match="step 1 is not finite; start again"):
        training.update(share(0, TRAIN, World()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(training.model).items())
    with torch.no_grad():  # its cause gone, the failed update leaves nothing to the next one
        training.model.norm.weight.fill_(1)
    assert math.isfinite(training.update(share(0, TRAIN, World())).loss)


def test_random_numbers_are_a_function_of_the_step() -> None:
    class Noisy(LanguageModel):
        def forward(self, tokens: Tensor, **options: object) -> Tensor:
            return F.dropout(super().forward(tokens, **options), 0.5)

    def two(disturb: bool) -> float:
        torch.manual_seed(0)
        training = new_training(Noisy(MODEL), TRAIN)
        training.update(share(0, TRAIN, World()))
        if disturb:
            torch.rand(100)
        return training.update(share(1, TRAIN, World())).loss

    assert two(False) == two(True)


@pytest.mark.parametrize(
    "changes, rule",
    [
        ({"steps": 0}, "train.steps"),
        ({"lr": 0.0}, "train.lr"),
        ({"lr": math.nan}, "train.lr"),
        ({"betas": (0.9, 1.0)}, "train.betas"),
        ({"micro": 3}, "train.batch .* divisible by train.micro"),
        ({"precision": "float16"}, "train.precision"),
        ({"decay": 1}, r"train.decay \(1\) must be greater than train.warmup \(2\)"),
        ({"decayed": "some"}, "train.decayed"),
        ({"clip": 0.0}, "train.clip"),
        ({"weight_decay": math.nan}, "train.weight_decay"),
        ({"sample": -1}, "train.sample"),
        ({"parallel": "tp"}, "train.parallel"),
    ],
)
def test_bad_values_are_refused(changes: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        config(**changes)
    with pytest.raises(ValueError, match="processes"):
        config().share(3)


def test_a_recipe_alone_refuses_bad_values_under_its_own_names() -> None:
    assert Recipe(steps=1, lr=1e-3, clip=None, betas=[0.9, 0.99]).betas == (0.9, 0.99)
    for changes, rule in [
        ({"lr": 0.0}, r"^lr \(0.0\) must be positive"),
        ({"steps": 0}, r"^steps \(0\)"),
        ({"final": -1}, "^final"),
    ]:
        with pytest.raises(ValueError, match=rule):
            Recipe(**{"steps": 1, "lr": 1e-3, **changes})


def test_metrics_go_on_after_a_step_without_gap_or_repetition(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)) + '{"step": 4, "lo')
    metrics = Metrics(tmp_path / "metrics.jsonl", 2)
    metrics.append({"step": 3, "loss": 1.5})
    metrics.close()
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3, "loss": 1.5}]


def test_metrics_go_to_tensorboard_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            told.append((Path(folder).name, purge_step))

        def add_scalar(self, *given: object) -> None:
            told.append(given)

        add_text = add_scalar

        def close(self) -> None:
            told.append("closed")

    fake = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    metrics = RunFolder(tmp_path).open_metrics(4, ["tensorboard"], {})
    metrics.append({"step": 5, "loss": 1.5, "sample": "once"})
    metrics.close()
    assert told == [("tensorboard", 5), ("loss", 1.5, 5), ("sample", "once", 5), "closed"]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # not installed
    assert open_loggers(["tensorboard"], tmp_path, 4, {}) == []


def test_metrics_go_to_weights_and_biases_and_a_resumed_run_continues_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="must be one of 'tensorboard', 'wandb'"):
        check_loggers(["tensorbord"])
    if importlib.util.find_spec("wandb") is None:
        with pytest.raises(ImportError, match="pip install wandb"):
            check_loggers(["wandb"])
    begun: list[dict[str, object]] = []
    told: list[object] = []

    class Run:
        def log(self, values: dict[str, object], step: int) -> None:
            told.append((values, step))

        def finish(self) -> None:
            told.append("finished")

    fake = ModuleType("wandb")
    fake.util = SimpleNamespace(generate_id=lambda: f"id-{len(begun)}")
    fake.init = lambda **options: begun.append(options) or Run()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for step in (1, 2):
        metrics = RunFolder(tmp_path).open_metrics(step - 1, ["wandb"], {"train": {"steps": 2}})
        metrics.append({"step": step, "loss": 1.5})
        metrics.close()
    assert told == [({"loss": 1.5}, 1), "finished", ({"loss": 1.5}, 2), "finished"]
    assert [options["id"] for options in begun] == ["id-0", "id-0"]
    assert begun[1]["resume"] == "allow"
    assert begun[0]["config"] == {"train": {"steps": 2}}


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_is_the_same_model(tmp_path: Path, tied: bool) -> None:
    net = LanguageModel(MODEL.replace(tied=tied))
    save_model(net, tmp_path, {"kind": "bytes"})
    again = load_model(tmp_path)
    assert again.config == net.config
    assert ("head.weight" in weights(net)) is not tied
    assert again.head.weight is again.embedding.weight or not tied
    inputs, _ = rows(0)
    assert torch.equal(again(inputs), net(inputs))
    assert json.loads((tmp_path / "tokenizer.json").read_text()) == {"kind": "bytes"}


def test_a_saved_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no saved model: it has no config\.json"):
        load_model(tmp_path)
    save_model(model(), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "depth": 1}))
    with pytest.raises(ValueError, match=r"does not fit its config\.json: blocks\.1"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**values, "model_type": "gpt2"}))
    with pytest.raises(ValueError, match="'gpt2'; it must be 'hypermlp'"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot be read"):
        load_model(tmp_path)


def test_an_update_that_fails_leaves_no_gradients_to_the_next_one() -> None:
    training, untouched = (new_training(model(), TRAIN) for _ in range(2))
    kept = training.model.norm.weight.detach().clone()
    with torch.no_grad():
        training.model.norm.weight.fill_(math.inf)
    with pytest.raises(RuntimeError, match="not finite"):
        training.update(share(0, TRAIN, World()))
    with torch.no_grad():
        training.model.norm.weight.copy_(kept)
    assert training.update(share(0, TRAIN, World())).loss == untouched.update(share(0, TRAIN, World())).loss


def test_evaluation_and_sampling_are_in_eval_mode_and_restore_the_mode_of_every_module(tmp_path: Path) -> None:
    net = model()
    net.blocks[0].ffn = nn.Sequential(net.blocks[0].ffn, nn.Dropout(0.5))
    net.blocks[1].eval()  # frozen by its user
    modes = [module.training for module in net.modules()]
    training = new_training(net, TRAIN)
    validation = share(10**6, TRAIN, World())
    assert training.evaluate(validation) == training.evaluate(validation)
    assert [module.training for module in net.modules()] == modes
    sampled = []

    def sample(one: LanguageModel) -> str:
        sampled.append(one.training or any(module.training for module in one.modules()))
        return ""

    steps = train(
        training,
        config(steps=1),
        lambda step: share(step, TRAIN, World()),
        Checkpoints(tmp_path, World(), files={"config.json": described()}),
        None,
        validation=validation,
        sample=sample,
    )
    assert len(list(steps)) == 1
    assert sampled == [False]
    assert [module.training for module in net.modules()] == modes


def test_studies_evaluate_in_eval_mode_and_restore_the_mode_of_every_module() -> None:
    net = model()
    net.blocks[1].eval()  # frozen by its user
    modes = [module.training for module in net.modules()]
    seen = []

    def evaluate(one: nn.Module) -> dict[str, float]:
        seen.append(any(module.training for module in one.modules()))
        return {"loss": 1.0}

    run = Fit(net, TRAIN, lambda step: share(step, TRAIN, World()), evaluate, evaluate_every=1)
    run.advance()
    assert seen == [False]
    assert [module.training for module in net.modules()] == modes
