"""Every way through the layer gives what calling its modules gives, whatever a user does to one of them."""

from __future__ import annotations

import gc
import logging
import re
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from helpers import assert_same, make_layer, randn, run_layer
from hypermlp import Cache, HyperGLU, Mixer, ops
from hypermlp.cache import CacheSpec
from hypermlp.mixers import SoftmaxAttention
from hypermlp.mixers.base import Tokens, gather_tokens
from hypermlp.mixers.hyper import Projected, SequenceMixing
from hypermlp.mixers.parts import CausalConv
from hypermlp.mixers.route import INSIDE
from hypermlp.ops import native

PANELS = {"n_embd": 64, "qk_rank": 64, "vo_rank": 64, "op1_rank": 16, "op2_rank": 32, "block_size": 24}  # as `whole` takes them
MODULES = ["q", "k", "v", "o", "gate_qk", "gate_vo", "conv_k", "conv_v", "op1", "op2", "op1.control", "op2.control"]
SHAPES = {"whole": (2, 30, 64), "fused": (2, 300, 64)}


def usual(**options: object) -> HyperGLU:
    return make_layer(dtype=torch.float32, **{**PANELS, **options})


def scaled(output: Tensor | ops.Mixing) -> Tensor | ops.Mixing:
    return 1.5 * output if isinstance(output, Tensor) else output._replace(A=1.5 * output.A)


def with_hook(parent: nn.Module, name: str, module: nn.Module) -> None:
    module.register_forward_hook(lambda m, i, o: scaled(o))


def with_pre_hook(parent: nn.Module, name: str, module: nn.Module) -> None:
    """The parameters change just before they are read, as offloading brings them."""

    def grow(m: nn.Module, inputs: object) -> None:
        m.seen = getattr(m, "seen", 0) + 1

    module.register_forward_pre_hook(grow)
    with_hook(parent, name, module)


def with_patch(parent: nn.Module, name: str, module: nn.Module) -> None:
    original = module.forward
    module.forward = lambda *a: scaled(original(*a))


def with_subclass(parent: nn.Module, name: str, module: nn.Module) -> None:
    kind = type(module)

    class Mine(kind):
        def forward(self, *a: Tensor) -> Tensor | ops.Mixing:
            return scaled(super().forward(*a))

    module.__class__ = Mine


def with_replacement(parent: nn.Module, name: str, module: nn.Module) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *a: Tensor) -> Tensor | ops.Mixing:
            return scaled(self.inner(*a))

        def __getattr__(self, name: str) -> object:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    setattr(parent, name, Wrapped())


CHANGES = [with_hook, with_pre_hook, with_patch, with_subclass, with_replacement]


class Quantised(nn.Module):
    """A linear layer with whole numbers from -3 to 3 for weights, coarse enough to be seen in what is computed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.scale, self.bias = float(weight.abs().max() / 3), linear.bias
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.float() * self.scale, self.bias)


def with_codes(parent: nn.Module, name: str, module: nn.Module) -> None:
    setattr(parent, name, Quantised(module))


LINEARS = [name for name in MODULES if not name.startswith("conv") and name not in ("op1", "op2")]
ALL_CHANGES = [*((change, name) for change in CHANGES for name in MODULES), *((with_codes, name) for name in LINEARS)]


def changed(change: Callable[[nn.Module, str, nn.Module], None], name: str) -> HyperGLU:
    """A layer that was used on every route, and then changed."""
    layer = usual().eval()
    for shape in SHAPES.values():
        layer(torch.zeros(shape)[:, :26])
    in_steps(layer, torch.zeros(2, 3, 64), 1, 1, 1)
    parent, _, leaf = name.rpartition(".")
    owner = layer.get_submodule(parent)
    change(owner, leaf, getattr(owner, leaf))
    return layer


def in_steps(layer: HyperGLU, x: Tensor, *sizes: int, **options: object) -> Tensor:
    with torch.no_grad():
        cache = layer.new_cache(x.shape[0])
        return torch.cat([layer(part, cache=cache, **options) for part in x[:, : sum(sizes)].split(list(sizes), dim=1)], 1)


def test_the_routes_are_taken() -> None:
    layer = usual().eval()
    for kind, shape in SHAPES.items():
        assert layer.explain(torch.randn(shape)).kind == kind
        with torch.no_grad():
            assert layer.explain(torch.randn(shape)).kind == kind
    assert layer.explain(torch.randn(2, 1, 64), cache=layer.new_cache(2)).kind == "step"
    assert layer.explain(torch.randn(2, 2, 64), cache=layer.new_cache(2)).kind == "fused"
    assert layer.explain(torch.randn(2, 30, 64), attention_mask=torch.ones(2, 30)).kind == "fused"


@pytest.mark.parametrize(
    "options, words",
    [
        ({"use_rope": True}, "use_rope"),
        ({"gate_act": "none"}, "gate_act='none'"),
        ({"use_vo_gate": False}, "lacks"),
        ({"dropout": 0.5}, "dropout"),
    ],
)
def test_the_reason_is_given(options: dict, words: str) -> None:
    route = usual(**options).explain(torch.randn(2, 30, 64))
    assert route.kind == "modules"
    assert words in route.why


def test_a_hook_is_named_and_the_log_tells_the_route(caplog: pytest.LogCaptureFixture) -> None:
    layer = changed(with_hook, "op1.control")
    assert "op1.control is hooked" in layer.explain(torch.randn(2, 30, 64)).why
    with caplog.at_level(logging.DEBUG, "hypermlp.route"):
        layer(torch.randn(2, 30, 64))
    assert "op1.control" in caplog.text


@pytest.mark.parametrize("change, name", ALL_CHANGES, ids=lambda value: getattr(value, "__name__", value))
def test_a_changed_module_changes_every_route_alike(change: Callable[..., None], name: str) -> None:
    layer, unchanged = changed(change, name), usual().eval()
    for shape in SHAPES.values():
        x, d_y = (randn(*shape, seed=n, dtype=torch.float32) for n in range(2))
        expected = run_layer(layer, x, d_y, impl="dense")
        assert_same(run_layer(layer, x, d_y, impl="native"), expected, 1e-4)
        assert (expected["y"] - unchanged(x, impl="dense")).norm() > 1e-3 * expected["y"].norm()
    expected = layer(x[:, :20], impl="dense").detach()
    assert_same(in_steps(layer, x, 5, 1, 1, 6, 1, 1, 1, 1, 1, 1, 1), expected, 1e-5)


@pytest.mark.parametrize("name", ["q", "conv_k", "op2"])
def test_replaced_numbers_are_read(name: str) -> None:
    layer = usual().eval()
    x, d_y = (randn(*SHAPES["whole"], seed=n, dtype=torch.float32) for n in range(2))
    before = layer(x).detach()
    parameter = layer.get_submodule(name).weight if name != "op2" else layer.op2.A
    parameter.data = 2 * parameter.data
    assert_same(run_layer(layer, x, d_y, impl="native"), run_layer(layer, x, d_y, impl="dense"), 1e-4)
    y = layer(x)
    parameter.data = parameter.data / 2  # between forward and backward, which reads the new numbers as every module does
    y.backward(d_y)
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("kind", ["attribute", "buffer"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["q", "o", "conv_k", "op2", "op1.control"])
def test_a_tensor_in_the_place_of_a_parameter_is_read_anew(name: str, shape: tuple[int, int, int], kind: str) -> None:
    """As where another network makes the weights."""
    layer, x = usual().eval(), randn(*shape, dtype=torch.float32)
    layer(x)
    in_steps(layer, x, 1)
    module, what = layer.get_submodule(name), "A" if name == "op2" else "weight"
    made = getattr(module, what).detach()
    delattr(module, what)
    if kind == "buffer":
        module.register_buffer(what, made)
    for factor in (1.0, 3.0, -2.0):
        setattr(module, what, factor * made)
        with torch.no_grad():
            expected = layer(x, impl="dense")
            assert_same(layer(x), expected, 1e-5)
        assert_same(in_steps(layer, x, 1, 1, 2), expected[:, :4], 1e-5)


def test_what_was_found_out_about_a_layer_dies_with_it() -> None:
    layer = usual().eval()
    layer(torch.zeros(SHAPES["whole"]))
    in_steps(layer, torch.zeros(2, 3, 64), 1, 1, 1)
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", ["q", "conv_k", "op2"])
def test_backward_hooks_are_heard(name: str) -> None:
    layer, heard = usual(), []
    layer.get_submodule(name).register_full_backward_pre_hook(lambda *_: heard.append(1))
    assert layer.explain(torch.randn(2, 30, 64)).kind == "modules"
    if name == "q":
        layer(torch.randn(2, 30, 64, requires_grad=True)).sum().backward()
        assert heard


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_global_hooks_hear_every_module(shape: tuple[int, int, int]) -> None:
    layer, heard = usual().eval(), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: heard.append(type(m)))
    try:
        layer(torch.randn(shape))
        everything = sorted(map(str, heard))
        heard.clear()
        in_steps(layer, torch.randn(shape), 1)
    finally:
        handle.remove()
    kinds = [nn.Linear] * 8 + [CausalConv] * 2 + [SequenceMixing] * 2 + [HyperGLU]
    assert everything == sorted(map(str, heard)) == sorted(map(str, kinds))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_mode_that_replaces_functions_is_heard(shape: tuple[int, int, int]) -> None:
    class Louder(TorchFunctionMode):
        def __torch_function__(self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
            made = function(*args, **(kwargs or {}))
            return 1.3 * made if function is nn.functional.linear else made

    layer, x = usual().eval(), randn(*shape, dtype=torch.float32)
    kind = layer.explain(x).kind
    with torch.device("cpu"):  # a mode as well, which replaces nothing
        assert layer.explain(x).kind == kind
    with torch.no_grad(), Louder():
        expected = layer(x, impl="dense")
        assert layer.explain(x).kind == "modules"
        assert_same(layer(x), expected, 1e-5)
        assert_same(in_steps(layer, x, 1, 1, 2), expected[:, :4], 1e-5)
    assert (layer(x) - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_subclass_with_a_flow_of_its_own(shape: tuple[int, int, int]) -> None:
    class Doubled(HyperGLU):
        def project(self, tokens: Tokens, history: Tensor | None, impl: str) -> Projected:
            made = super().project(tokens, history, impl)
            return made._replace(v=2 * made.v)

    layer, x = usual(), randn(*shape, dtype=torch.float32)
    expected = layer(x).detach()
    layer.__class__ = Doubled
    assert_same(layer(x), 2 * expected, 1e-5)
    assert_same(in_steps(layer, x, 3, 1, 1), 2 * expected[:, :5], 1e-5)


@pytest.mark.parametrize("how", ["subclass", "instance", "patch"])
@pytest.mark.parametrize("name", INSIDE)
def test_every_method_of_the_flow_may_be_replaced(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def louder(made: object) -> object:
        if isinstance(made, Tensor):
            return 3 * made
        return made._replace(v=2 * made.v)

    layer, original = usual().eval(), getattr(HyperGLU, name)
    plain = layer(randn(*SHAPES["whole"], dtype=torch.float32))
    if how == "subclass":
        layer.__class__ = type("Mine", (HyperGLU,), {name: lambda self, *a, **k: louder(original(self, *a, **k))})
    elif how == "instance":
        setattr(layer, name, lambda *a, **k: louder(original(layer, *a, **k)))
    else:
        monkeypatch.setattr(HyperGLU, name, lambda self, *a, **k: louder(original(self, *a, **k)))
    for shape in SHAPES.values():
        x = randn(*shape, dtype=torch.float32)
        expected = layer(x, impl="dense")
        assert layer.explain(x).kind == "modules"
        assert name in layer.explain(x).why
        assert_same(layer(x), expected, 1e-5)
        assert_same(in_steps(layer, x, 1, 1, 2), expected[:, :4].detach(), 1e-5)
    assert (layer(randn(*SHAPES["whole"], dtype=torch.float32)) - plain).norm() > 1e-3 * plain.norm()


PATCHED_EARLY = """
import torch
from torch import nn

original = nn.Linear.forward
nn.Linear.forward = lambda self, x: 1.3 * original(self, x)
from hypermlp import HyperGLU
project = HyperGLU.project
HyperGLU.project = lambda self, *a: (made := project(self, *a))._replace(v=2 * made.v)
layer, x = HyperGLU(n_embd=64, n_head=2, block_size=24, qk_rank=64, op1_rank=16, op2_rank=32).eval(), torch.randn(2, 30, 64)
why = layer.explain(x).why
HyperGLU.project = project
print(why, "|", layer.explain(x).why)
"""


def test_what_was_patched_before_the_first_call_is_noticed() -> None:
    said = subprocess.run([sys.executable, "-c", PATCHED_EARLY], capture_output=True, text=True, check=True).stdout
    assert re.match("the layer has a method project of its own \\| q is hooked", said)


@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning", "ignore:.*quantization:DeprecationWarning")
def test_a_quantised_layer_steps_as_it_runs() -> None:
    layer, x = usual().eval(), randn(1, 9, 64, dtype=torch.float32)
    quantised = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear})
    with torch.no_grad():
        full = quantised(x)
    assert_same(in_steps(quantised, x, *[1] * 9), full, 0.1)  # activations are rounded for each call anew
    assert_same(full, layer(x), 0.1)
    rival = SoftmaxAttention(64)  # with no other parameters than those that become codes
    quantised = torch.ao.quantization.quantize_dynamic(rival, {nn.Linear})
    with torch.no_grad():
        assert_same(in_steps(quantised, x, *[1] * 9), rival(x), 0.1)


def test_a_mixer_without_parameters() -> None:
    class Sum(Mixer):
        width = 8

        def cache_spec(self) -> CacheSpec:
            return CacheSpec(states={"sum": (8,)})

        def mix(self, tokens: Tokens, cache: Cache | None) -> Tensor:
            y = tokens.x.cumsum(1) if cache is None else tokens.x.cumsum(1) + cache.states["sum"][:, None]
            if cache is not None:
                cache.advance({"sum": y[:, -1]}, tokens.x, tokens.counts())
            return y

    x = torch.randn(2, 5, 8)
    assert_same(in_steps(Sum(), x, 2, 1, 2), Sum()(x), 1e-6)
    assert Sum()(x.double()).dtype == torch.float64


def test_with_and_without_gradients_the_bits_are_the_same() -> None:
    layer = usual()
    for shape in SHAPES.values():
        x = randn(*shape, dtype=torch.float32)
        with torch.no_grad():
            expected = layer(x)
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_both_kinds_of_checkpoint_give_the_same_bits(shape: tuple[int, int, int]) -> None:
    layer, found = usual(), []
    for reentrant in (None, True, False):
        x = randn(*shape, dtype=torch.float32).requires_grad_()
        y = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
        found.append((y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])) if not reentrant else y)
        if reentrant:
            layer.zero_grad()
            y.square().sum().backward()
            found[-1] = (y.detach(), x.grad, *(p.grad for p in layer.parameters()))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("impl", ["native", "chunked"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("frozen", ["q", "conv", "op", "o", "all but conv_k"])
def test_second_derivatives_with_part_of_the_layer_frozen(impl: str, shape: tuple[int, int, int], frozen: str) -> None:
    found = {}
    for way in (impl, "dense"):
        layer = usual(bias=True)
        for name, p in layer.named_parameters():
            p.requires_grad_(name.startswith("conv_k") if frozen == "all but conv_k" else not name.startswith(frozen))
        x = randn(*(2, 13, 64) if shape[1] == 30 else (2, 260, 64), dtype=torch.float32)
        left = [p for p in layer.parameters() if p.requires_grad]
        grads = torch.autograd.grad(layer(x, impl=way).square().sum(), left, create_graph=True)
        found[way] = dict(enumerate(torch.autograd.grad(sum(g.square().sum() for g in grads), left, allow_unused=True)))
    assert_same(found[impl], found["dense"], 1e-3)


def test_mix_resolves_auto_and_refuses_nonsense() -> None:
    layer, x = usual(), randn(2, 30, 64, dtype=torch.float32)
    assert torch.equal(layer.mix(gather_tokens(x), None), layer(x))
    with pytest.raises(ValueError, match="nonsense"):
        layer.mix(gather_tokens(x), None, "nonsense")


def test_a_cache_made_in_inference_mode_is_used_outside_it() -> None:
    layer, x = usual().eval(), randn(2, 9, 64, dtype=torch.float32)
    with torch.no_grad():
        expected = layer(x)
    with torch.inference_mode():
        cache = layer.new_cache(2)
        parts = [layer(x[:, :3], cache=cache)]
    with torch.no_grad():
        parts += [layer(part, cache=cache) for part in (x[:, 3:4], x[:, 4:6])]
    with torch.inference_mode():
        parts.append(layer(x[:, 6:], cache=cache))
    assert_same(torch.cat([p.clone() for p in parts], 1), expected, 1e-5)


def test_an_unfinished_step_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = usual().eval(), randn(1, 5, 64, dtype=torch.float32)
    cache = layer.new_cache(1)

    def fail(*_: object) -> Tensor:
        raise MemoryError

    with torch.no_grad():
        expected = layer(x)
        layer(x[:, :3], cache=cache)
        with monkeypatch.context() as m:
            m.setattr(native.decode.LayerCall, "run", fail)
            with pytest.raises(MemoryError):
                layer(x[:, 3:4], cache=cache)
        assert cache.lengths.tolist() == [3]
        found = torch.cat([layer(part, cache=cache) for part in x[:, 3:].split(1, dim=1)], 1)
    assert_same(found, expected[:, 3:], 1e-5)


@pytest.mark.parametrize("cache", ["hello", 3, {"k": 1}])
def test_what_is_no_cache_is_refused(cache: object) -> None:
    with pytest.raises(ValueError, match="new_cache"):
        usual()(torch.randn(1, 3, 64), cache=cache)


def test_the_caches_type_is_that_of_numbers_and_not_of_codes() -> None:
    layer, x = usual().eval(), randn(1, 6, 64, dtype=torch.float32)
    layer.q = Quantised(layer.q)
    assert next(layer.parameters()).dtype == torch.int8
    assert layer.new_cache(1).slots["k"].dtype == torch.float32
    assert_same(in_steps(layer, x, 2, 1, 1, 1, 1), layer(x).detach(), 1e-5)
