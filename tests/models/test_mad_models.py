"""The backbones of the MAD benchmark: published sizes and initialisation, and who may see what."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hypermlp.mixers import DISTINCT, build_mixer
from hypermlp.mixers.softmax import SoftmaxAttention
from hypermlp.models.lm import LanguageModel, ModelConfig, count_parameters, published_inner
from hypermlp.models.mad import MadAutoEncoder, MadLanguageModel, build_model, positions
from hypermlp.tasks import TASKS
from hypermlp.tasks.mad_settings import MADSetting
from hypermlp.tasks.scores import evaluate
from hypermlp.train.optimisation import Recipe
from hypermlp.train.training import Training

LANGUAGE = MADSetting(task="in-context-recall", vocab_size=11, seq_len=12)
COMPRESSION = MADSetting(task="compression", vocab_size=11, seq_len=12)


def small(setting: MADSetting, name: str = "softmax", inner: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    return build_model(setting, lambda: build_mixer(name, 16, 12), width=16, inner=inner)


def language() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(vocabulary=11, width=16, depth=1, length=12, mixer="softmax"))


def baseline(task: str) -> nn.Module:
    return build_model(TASKS[task].settings("baseline")[0], lambda: SoftmaxAttention(128, 16))


@pytest.mark.parametrize("task, published", [("in-context-recall", 407_184), ("compression", 440_464)])
def test_published_parameter_counts(task: str, published: int) -> None:
    model = baseline(task)
    around = count_parameters(model) - sum(count_parameters(block.mixer) for block in model.blocks)
    assert around == published - 2 * (4 * 128**2 + 4 * 128)  # the published mixer has biases


def test_only_compression_takes_the_auto_encoder() -> None:
    kinds = {name: type(build_model(task.baseline, lambda: SoftmaxAttention(128, 16))) for name, task in TASKS.items()}
    assert {name for name, kind in kinds.items() if kind is MadAutoEncoder} == {"compression"}
    assert {name for name, kind in kinds.items() if kind is MadLanguageModel} == set(TASKS) - {"compression", "forecast"}


@pytest.mark.parametrize("setting", [LANGUAGE, COMPRESSION], ids=lambda s: s.task)
@pytest.mark.parametrize("name", sorted(DISTINCT))
def test_logits_for_every_position(name: str, setting: MADSetting) -> None:
    assert small(setting, name)(torch.randint(11, (3, 12))).shape == (3, 12, 11)


def embedding_gradient(model: nn.Module, position: int) -> Tensor:
    """Which input positions (12) the logits at `position` depend on."""
    seen = []
    hook = model.embedding.register_forward_hook(lambda module, args, out: seen.append(out.requires_grad_()) or out)
    logits = model(torch.arange(12)[None] % 11)
    hook.remove()
    (gradient,) = torch.autograd.grad(logits[0, position].square().sum(), seen[0])
    return gradient[0].abs().sum(-1) > 0


@pytest.mark.parametrize("name", sorted(DISTINCT))
def test_the_language_model_sees_the_past_alone(name: str) -> None:
    assert embedding_gradient(small(LANGUAGE, name), 7).tolist() == [True] * 8 + [False] * 4


@pytest.mark.parametrize("name", sorted(DISTINCT))
def test_the_auto_encoder_sees_the_whole_input(name: str) -> None:
    assert embedding_gradient(small(COMPRESSION, name), 3).all()


def test_the_auto_encoder_decodes_the_last_state_alone() -> None:
    """The same state at the last position gives the same logits, whatever stands before it."""
    model = small(COMPRESSION)
    states = torch.randn(2, 12, 16)
    states[1, -1] = states[0, -1]
    model.encode = lambda tokens: states
    logits = model(torch.zeros(2, 12, dtype=torch.long))
    torch.testing.assert_close(logits[0], logits[1])
    assert not torch.allclose(logits[0, 0], logits[0, 1])


def test_positions_are_sines_then_cosines() -> None:
    place = positions(6, 128)
    i = torch.arange(64)
    angle = 5 * 10000.0 ** (-i / 63)
    torch.testing.assert_close(place[5], torch.cat([angle.sin(), angle.cos()]))


def test_initialisation_of_the_language_model() -> None:
    torch.manual_seed(0)
    model = baseline("in-context-recall")
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.1)
    for linear in (model.head, model.blocks[0].ffn.gate, model.blocks[1].ffn.up):  # uniform up to 1/sqrt(128)
        assert linear.weight.abs().max().item() == pytest.approx(128**-0.5, rel=0.02)
    assert not model.head.bias.any()


def test_initialisation_of_the_auto_encoder() -> None:
    torch.manual_seed(0)
    model = baseline("compression")
    around = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and "mixer" not in name]
    assert len(around) == 2 * 3 + 2 + 1
    for linear in around:
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert linear.bias is None or not linear.bias.any()


def test_mixers_keep_their_own_initialisation() -> None:
    def make() -> SoftmaxAttention:
        mixer = SoftmaxAttention(16, 2)
        nn.init.constant_(mixer.o.weight, 7.0)
        return mixer

    for setting in (LANGUAGE, COMPRESSION):
        model = build_model(setting, make, width=16)
        assert all((block.mixer.o.weight == 7).all() for block in model.blocks)


def test_norms_have_the_published_epsilon() -> None:
    for setting, count in ((LANGUAGE, 5), (COMPRESSION, 7)):
        assert [m.eps for m in small(setting).modules() if isinstance(m, nn.RMSNorm)] == [1e-5] * count


def test_the_inner_width_is_published_or_free() -> None:
    assert published_inner(128) == 352
    published, wider = (count_parameters(small(LANGUAGE, inner=inner)) for inner in (None, 50))
    assert wider - published == 2 * 3 * 16 * (50 - published_inner(16))


def test_widths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="a mixer of width 16; the model's width is 32"):
        build_model(LANGUAGE, lambda: SoftmaxAttention(16, 2), width=32)
    with pytest.raises(ValueError, match=r"width \(2\) must be even and at least 4"):
        build_model(COMPRESSION, lambda: SoftmaxAttention(2, 1), width=2)


@pytest.mark.parametrize("make", [lambda: small(LANGUAGE), lambda: small(COMPRESSION), language], ids=["mad", "decoder", "lm"])
def test_logits_are_computed_where_targets_count_and_losses_are_the_same(make: Callable[[], nn.Module]) -> None:
    model, tokens = make().double(), torch.randint(11, (3, 12), generator=torch.Generator().manual_seed(1))
    counted = torch.rand(3, 12, generator=torch.Generator().manual_seed(2)) < 0.2
    torch.testing.assert_close(model(tokens, at=counted), model(tokens)[counted])
    targets = torch.where(counted, tokens, -100)
    seen: list[int] = []
    model.head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[:-1].numel()))
    found = []
    for model.gathers in (True, False):
        training = Training(model, Recipe(steps=1, lr=1e-3))
        model.zero_grad()
        loss = training.total_loss((tokens, targets, None))
        loss.backward()
        found.append({"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}})
        found[-1] |= {name: torch.tensor(value) for name, value in evaluate(model, tokens, targets, 2)._asdict().items()}
    torch.testing.assert_close(found[0], found[1])
    assert sum(seen[:3]) == 2 * int(counted.sum())
    assert sum(seen[3:]) == 2 * counted.numel()
