"""One call for a token of a whole language model gives what the modules give, whatever a user does to one of them."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers import assert_same, error, perturb
from hypermlp import LanguageModel, ModelConfig, build_mixer, generate, load_model, quantize, save_model
from hypermlp.mixers.int8 import Int8Linear
from hypermlp.models import lm
from hypermlp.models.lm import ModelCache

SMALL = {"vocabulary": 37, "width": 48, "depth": 2, "length": 24}
MODELS = {
    "llama": {},
    "gpt2": {"style": "gpt2", "length": 60},
    "nanogpt": {"style": "nanogpt", "length": 60},
    "hypermlp, untied": {"mixer": "hypermlp", "tied": False},
    "both, odd": {"mixer": ("hyperglu", "hypermlp"), "width": 40, "heads": 1, "inner": 51, "vocabulary": 3},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make(dtype: torch.dtype = torch.float32, *, codes: bool = False, **options: object) -> LanguageModel:
    model = LanguageModel(ModelConfig(**{**SMALL, **options}))
    perturb(model)
    model = model.to(dtype).eval()
    return quantize(model) if codes else model


@contextmanager
def modules_alone() -> Iterator[None]:
    """Every module is called."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr(lm, "step", lambda *given: None)
        yield


def decode(model: LanguageModel, tokens: Tensor, cache: ModelCache) -> Tensor:
    return torch.cat([model(token, cache=cache) for token in tokens.split(1, dim=1)], 1)


def both_ways(model: LanguageModel, tokens: Tensor, cache: ModelCache) -> tuple[Tensor, Tensor]:
    """Logits by the model's own way and by its modules, which leave the same cache."""
    other = cache.clone()
    found = decode(model, tokens, cache)
    with modules_alone():
        expected = decode(model, tokens, other)
    assert cache.lengths.tolist() == other.lengths.tolist()
    limit = 1e-4 if model.norm.weight.dtype is torch.float32 else 0.1
    for name, held in cache.state_dict().items():
        assert_same(held, other.state_dict()[name], limit, name)
    return found, expected


@pytest.mark.parametrize("codes", [False, True], ids=["weights", "codes"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_logits_and_caches_are_those_of_the_modules(options: dict, dtype: torch.dtype, codes: bool) -> None:
    """Rows of different lengths, part of the window and past it."""
    model = make(dtype, codes=codes, **options)
    tokens = torch.randint(model.config.vocabulary, (3, 56), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 11)
    mask[0, :7], mask[1, 2:5] = 0, 0
    cache = model.new_cache(3)
    model(tokens[:, :11], cache=cache, attention_mask=mask)
    assert model.explain(tokens[:, :1], cache).startswith("model")
    found, expected = both_ways(model, tokens[:, 11:], cache)
    assert found.dtype == expected.dtype == dtype
    if dtype is torch.float32:
        assert_same(found, expected, 2e-5)
        return
    exact = copy.deepcopy(model).double()
    for norm in (m for m in exact.modules() if isinstance(m, nn.RMSNorm)):
        norm.eps = torch.finfo(torch.float32).eps
    whole = exact(tokens, attention_mask=torch.cat([mask, torch.ones(3, 45)], 1))[:, 11:]
    assert error(found, whole) <= max(error(expected, whole), 2e-3)  # it rounds less


@pytest.mark.parametrize("codes", [False, True], ids=["weights", "codes"])
@torch.no_grad()
def test_rows_are_selected_stacked_and_cropped_between_tokens(codes: bool) -> None:
    model, tokens = make(codes=codes), torch.randint(37, (4, 60))
    cache = model.new_cache(4)
    expected = model(tokens)
    assert_same(decode(model, tokens[:, :30], cache), expected[:, :30], 1e-4)
    cache.crop(27)
    cache = ModelCache.stack([cache.select([2, 0]), cache.select([3])])
    assert_same(decode(model, tokens[[2, 0, 3], 27:40], cache), expected[[2, 0, 3], 27:40], 1e-4)
    cache.reorder([2, 2])
    assert_same(decode(model, tokens[[3, 3], 40:], cache), expected[[3, 3], 40:], 1e-4)


def hook(parent: nn.Module, name: str, module: nn.Module) -> None:
    module.register_forward_hook(lambda m, i, o: 1.5 * o if isinstance(o, Tensor) else o)


def patch(parent: nn.Module, name: str, module: nn.Module) -> None:
    original = module.forward
    module.forward = lambda *a, **k: 1.5 * original(*a, **k)


def subclass(parent: nn.Module, name: str, module: nn.Module) -> None:
    kind = type(module)

    class Mine(kind):
        def forward(self, *a: object, **k: object) -> Tensor:
            return 1.5 * super().forward(*a, **k)

    module.__class__ = Mine


def replace(parent: nn.Module, name: str, module: nn.Module) -> None:
    new = copy.deepcopy(module)
    with torch.no_grad():
        for p in new.parameters():
            p.mul_(1.5)
    setattr(parent, name, new)


def new_parameter(parent: nn.Module, name: str, module: nn.Module) -> None:
    for key, p in list(module.named_parameters(recurse=False)):
        setattr(module, key, nn.Parameter(1.5 * p.detach()))


def new_data(parent: nn.Module, name: str, module: nn.Module) -> None:
    for p in module.parameters():
        p.data = 1.5 * p.data


def in_place(parent: nn.Module, name: str, module: nn.Module) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1.5)


CHANGES = [hook, patch, subclass, replace, new_parameter, new_data, in_place]
MODULES = [
    "embedding",
    "norm",
    "head",
    "blocks.0",
    "blocks.0.norm_mixer",
    "blocks.1.norm_ffn",
    "blocks.0.mixer",
    "blocks.1.ffn",
]
MODULES += ["blocks.1.ffn.up", "blocks.0.ffn.gate", "blocks.1.ffn.down", "blocks.1.mixer.q", "blocks.0.mixer.o"]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_what_happens_to_a_module_between_two_tokens_is_seen(change: Callable[..., None], name: str) -> None:
    model, tokens = make(tied=False), torch.randint(37, (2, 6))
    cache = model.new_cache(2)
    decode(model, tokens[:, :3], cache)
    untouched = cache.clone()
    parent, _, leaf = name.rpartition(".")
    owner = model.get_submodule(parent)
    change(owner, leaf, getattr(owner, leaf))
    found, expected = both_ways(model, tokens[:, 3:], cache)
    assert_same(found, expected, 1e-4)
    before = decode(make(tied=False), tokens[:, 3:], untouched)
    shared = change is new_parameter and name in ("blocks.0", "blocks.1.ffn", "blocks.0.mixer")  # they have none of their own
    assert shared or error(before, found) > 1e-3


@torch.no_grad()
def test_a_changed_setting_is_seen() -> None:
    model, tokens = make(), torch.randint(37, (1, 9))
    cache = model.new_cache(1)
    decode(model, tokens[:, :3], cache)
    for at, (name, setting, value) in enumerate([("norm", "eps", 3.0), ("blocks.0.mixer.op1", "shortcut", False)]):
        setattr(model.get_submodule(name), setting, value)
        before = cache.clone()
        found, expected = both_ways(model, tokens[:, 3 + 3 * at : 6 + 3 * at], cache)
        assert_same(found, expected, 1e-4)
        assert error(decode(make(), tokens[:, 3 + 3 * at : 6 + 3 * at], before), found) > 1e-3


@pytest.mark.parametrize("kind", [nn.Linear, nn.RMSNorm, lm.SwiGLU])
@torch.no_grad()
def test_a_patched_class_is_seen(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make(), torch.randint(37, (1, 4))
    cache = model.new_cache(1)
    decode(model, tokens[:, :2], cache)
    original = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 1.5 * original(self, x))
    assert model.explain(tokens[:, :1], cache).startswith("blocks")
    found, expected = both_ways(model, tokens[:, 2:], cache)
    assert torch.equal(found, expected)


def test_what_surrounds_a_call_is_seen() -> None:
    model, token = make(), torch.zeros(1, 1, dtype=torch.int64)
    cache = model.new_cache(1)
    assert "gradients" in model.explain(token, cache)
    assert model(token, cache=cache).requires_grad
    with torch.no_grad():
        assert model.explain(token, cache).startswith("model")
        with torch.autocast("cpu", torch.bfloat16):
            assert "autocast" in model.explain(token, cache)
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        assert "hook" in model.explain(token, cache)
        handle.remove()
        assert "one token" in model.explain(torch.zeros(1, 2, dtype=torch.int64), cache)
        assert "float16" in make(torch.float16).explain(token, cache)
        assert "SoftmaxAttention" in make(mixer="softmax").explain(token, cache)
        assert "registers" in make(mixer="hyperglu+registers=2").explain(token, cache)
        with pytest.MonkeyPatch.context() as m:
            m.setenv("HYPERMLP_IMPL", "chunked")
            assert "chunked" in model.explain(token, cache)
        assert model.explain(token, cache).startswith("model")


@torch.no_grad()
def test_bad_arguments_are_refused_as_ever_and_change_nothing() -> None:
    model, token = make(), torch.zeros(2, 1, dtype=torch.int64)
    cache = model.new_cache(2)
    model(token, cache=cache)
    before = cache.state_dict()
    for bad in (token + 37, token - 1, token.float(), torch.zeros(3, 1, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"vocabulary|whole numbers|rows"):
            model(bad, cache=cache)
    with pytest.raises(ValueError, match="new_cache"):
        model(token, cache=make(width=64).new_cache(2))
    assert cache.lengths.tolist() == [1, 1]
    for name, held in cache.state_dict().items():
        assert torch.equal(held, before[name]), name
    short = make(style="gpt2", length=3)
    cache = short.new_cache(1)
    decode(short, token[:1].expand(1, 3), cache)
    with pytest.raises(ValueError, match="learned position"):
        short(token[:1], cache=cache)


@torch.no_grad()
def test_tokens_of_any_type_and_stride() -> None:
    model, tokens = make(), torch.randint(37, (2, 4))
    expected = model(tokens)
    for odd in (tokens.int(), tokens.repeat_interleave(2, dim=1)[:, ::2]):
        assert_same(decode(model, odd, model.new_cache(2)), expected, 1e-4)


@torch.no_grad()
def test_copies_pickles_and_threads_of_a_model_that_has_decoded() -> None:
    model, tokens = make(), torch.randint(37, (1, 5))
    expected = decode(model, tokens, model.new_cache(1))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        perturb(model, seed=3)
        assert torch.equal(decode(other, tokens, other.new_cache(1)), expected)
        perturb(model)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(decode(model, tokens, model.new_cache(1)), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("whole", [True, False], ids=["model", "layer"])
def test_threads_decode_the_same_model_at_once(whole: bool) -> None:
    model, tokens, found = make(length=200), torch.randint(37, (4, 150)), {}
    layer, x = model.blocks[0].mixer, torch.randn(4, 150, 48)

    def work(row: int) -> None:
        with torch.no_grad():
            if whole:
                found[row] = decode(model, tokens[row : row + 1], model.new_cache(1))
            else:
                cache = layer.new_cache(1)
                found[row] = torch.cat([layer(part, cache=cache) for part in x[row : row + 1].split(1, dim=1)], 1)

    started = [threading.Thread(target=work, args=(row,)) for row in range(4)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    with torch.no_grad():
        assert_same(torch.cat([found[row] for row in range(4)]), model(tokens) if whole else layer(x), 1e-4)


@torch.no_grad()
def test_a_cache_made_in_inference_mode_is_used_outside_it() -> None:
    model, tokens = make(), torch.randint(37, (1, 6))
    expected = model(tokens)
    with torch.inference_mode():
        cache = model.new_cache(1)
        first = decode(model, tokens[:, :3], cache).clone()
    assert_same(torch.cat([first, decode(model, tokens[:, 3:], cache)], 1), expected, 1e-4)


@pytest.mark.parametrize("codes", [False, True], ids=["weights", "codes"])
def test_generate_takes_it(codes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, taken, real = make(codes=codes), torch.randint(37, (2, 5)), [], lm.step

    def counted(*given: object) -> Tensor | None:
        logits = real(*given)
        taken.append(logits is not None)
        return logits

    monkeypatch.setattr(lm, "step", counted)
    found = generate(model, prompt, 40)
    assert taken == [False] + [True] * 39  # the prompt has several tokens
    with modules_alone():
        assert torch.equal(found, generate(model, prompt, 40))


@torch.no_grad()
def test_quantised_is_the_dequantised_model() -> None:
    model = make(tied=False)
    quantised = quantize(copy.deepcopy(model))
    dequantised = copy.deepcopy(model)
    for name, module in quantised.named_modules():
        if isinstance(module, Int8Linear):
            plain = dequantised.get_submodule(name)
            assert float((plain.weight - module.weight).abs().max()) <= float(module.scale.max()) / 2 * 1.001
            plain.weight.copy_(module.weight)
    tokens = torch.randint(37, (2, 30))
    assert_same(quantised(tokens), dequantised(tokens), 1e-5)
    assert_same(decode(quantised, tokens, quantised.new_cache(2)), dequantised(tokens), 1e-4)
    assert sum(isinstance(m, nn.Linear) for m in quantised.modules()) == 0


def test_codes_are_saved_and_loaded(tmp_path: Path) -> None:
    model = quantize(make())
    save_model(model, tmp_path)
    loaded = load_model(tmp_path).eval()
    assert loaded.head.codes.dtype == torch.int8
    tokens = torch.randint(37, (1, 9))
    assert torch.equal(loaded(tokens), model(tokens))
    with pytest.raises(ValueError, match="quantize it afterwards"):
        loaded.extended(48)


@pytest.mark.parametrize("name", ["hyperglu", "softmax", "mamba", "gated_deltanet"])
@torch.no_grad()
def test_any_mixer_may_be_quantised(name: str) -> None:
    mixer = build_mixer(name, 32, 16)
    plain = copy.deepcopy(mixer)
    quantize(mixer)
    for part, module in mixer.named_modules():
        if isinstance(module, Int8Linear):
            plain.get_submodule(part).weight.copy_(module.weight)
    x = torch.randn(2, 12, 32)
    assert_same(mixer(x), plain(x), 1e-5)
    cache = mixer.new_cache(2)
    assert_same(torch.cat([mixer(part, cache=cache) for part in x.split(1, dim=1)], 1), plain(x), 1e-4)


def test_a_weight_without_a_code_is_refused_and_what_is_hooked_stays() -> None:
    linear = nn.Linear(3, 2)
    nn.init.constant_(linear.weight, torch.inf)
    with pytest.raises(ValueError, match="not finite"):
        quantize(nn.Sequential(linear))
    hooked = nn.Sequential(nn.Linear(3, 2))
    hooked[0].register_forward_hook(lambda *_: None)
    assert type(quantize(hooked)[0]) is nn.Linear
    zeros = nn.Linear(3, 2, bias=False)
    nn.init.zeros_(zeros.weight)
    assert not quantize(nn.Sequential(zeros))(torch.ones(1, 3)).any()


@pytest.mark.parametrize("codes", [False, True], ids=["weights", "codes"])
@torch.no_grad()
def test_generate_of_transformers_takes_it(codes: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    heads = pytest.importorskip("hypermlp.models.hf.heads")
    model, prompt, taken = heads.HyperForCausalLM.wrap(make(tied=False)), torch.randint(1, 37, (2, 5)), []
    model = quantize(model.eval()) if codes else model.eval()
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    with monkeypatch.context() as m:
        m.setattr(heads, "step", lambda *given: None)
        expected = model.generate(prompt, **options)
    real = heads.step
    monkeypatch.setattr(heads, "step", lambda *given: (taken.append(1), real(*given))[1])
    mask = torch.ones_like(prompt)
    assert torch.equal(model.generate(prompt, attention_mask=mask, **options), expected)
    assert len(taken) == 29
    found = model.generate(prompt, output_hidden_states=True, return_dict_in_generate=True, **options)
    assert torch.equal(found.sequences, expected)
    assert len(found.hidden_states) == 30
    if codes:
        with pytest.raises(ValueError, match="before it is quantised"):
            model.save_pretrained(tmp_path)
