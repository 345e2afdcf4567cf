"""What several processes compute together is what one computes, or they refuse it and name the cure: the whole registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers import error, perturb, randn, run_layer
from hypermlp import HyperGLU, LanguageModel, ModelConfig, make_mesh, own_rows, parallelize
from hypermlp.bench.parallel import count as count_bytes
from hypermlp.bench.parallel import take_step
from hypermlp.collectives import RowShare
from hypermlp.mixers import MIXERS, Mixer, build_mixer
from hypermlp.models.generate import generate
from hypermlp.models.lm import token_loss
from hypermlp.models.parallel import in_blocks, unstacked
from processes import run_together

WIDTH, LENGTH, T = 64, 24, 32  # longer than HyperGLU's window
SHAPES = {
    2: [{"tp": 2}, {"cp": 2}],
    4: [{"tp": 4}, {"cp": 4}, {"cp": 2, "tp": 2}, {"dp": 2, "tp": 2}],
    8: [{"dp": 2, "cp": 2, "tp": 2}],
}
OPTIONS = [
    {},
    {"use_rope": True, "attn_kind": "relu"},
    {"use_kv_conv": False, "use_qk_gate": False, "use_vo_gate": False},
    {"op1_per_head": False, "op2_per_head": False, "bias": True},
    {"attn_norm": "l2", "use_op2": False},
    {"impl_default": "chunked"},
    {"n_head": 2},  # not enough heads for four
    {"aligner_kind": "identity", "block_size": T},
    {"dropout": 0.1},
    {"registers": 3},
]
OPTIONS_AT = {2: OPTIONS, 4: [{}, {"n_head": 2}], 8: []}
MIXERS_AT = {2: sorted(MIXERS), 4: ["hyperglu", "softmax", "gated_deltanet", "mamba", "mamba2", "retnet"], 8: []}
NOT_BY_ROWS = {"differential", "forgetting", "path"}
HYBRID = ("hyperglu", "softmax", "gated_deltanet", "mamba2")
CURES = ("make ", "give ", "try ", "use ", "move ", "must be 0", "set cp=1", "set tp=1")
Found = dict[tuple[str, str], dict[str, float] | str]


def name_of(shape: dict[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in shape.items())


def gathered(x: Tensor, mesh: dist.DeviceMesh) -> Tensor:
    """All rows of x (B T …), of which each process has its own."""
    rows = RowShare(mesh["cp"].get_group())
    return x if mesh["cp"].size() == 1 else rows.in_order(rows.stacked(x))


def whole(module: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Distributed tensors as one process has them: parameters of a module, or their gradients."""
    found = {name: t.full_tensor() for name, t in tensors.items()}
    return found | {name: unstacked(found[name], cut) for name, cut in in_blocks(module).items()}


def differences(found: nn.Module, expected: dict[str, Tensor]) -> dict[str, float]:
    """How far all gradients are from the expected, in the order of named_parameters."""
    grads = whole(found, {name: p.grad for name, p in found.named_parameters()})
    assert list(grads) == list(expected)
    return {name: error(grad, expected[name]) for name, grad in grads.items()}


def begins_alike(mixer: Mixer, make: Callable[[], Mixer], dtype: torch.dtype) -> bool:
    """Whether a divided mixer that begins again gets the numbers of a new one."""
    torch.manual_seed(0)
    new = dict(make().to(dtype).named_parameters())
    torch.manual_seed(0)
    mixer.reset_parameters()
    return all(torch.equal(p, new[name]) for name, p in whole(mixer, dict(mixer.named_parameters())).items())


def is_identity(mixer: Mixer) -> bool:
    """Whether it is of the layout that has no cache."""
    return isinstance(mixer, HyperGLU) and mixer.config.aligner_kind == "identity"


def compare(make: Callable[[], Mixer], mesh: dist.DeviceMesh, dtype: torch.dtype) -> dict[str, float] | str:
    """How far one mixer is from itself in one process, or what it said instead."""
    mixer = perturb(make()).to(dtype)
    x, d_y = (randn(2, T, WIDTH, seed=seed, dtype=dtype) for seed in (0, 1))
    try:
        expected = run_layer(mixer, x, d_y)
        grads = {name: p.grad.clone() for name, p in mixer.named_parameters()}
        mixer.zero_grad()
        if dist.get_rank() > 0:  # the weights of the first process are everybody's
            perturb(mixer, seed=dist.get_rank())
        parallelize(mixer, mesh)
        own = own_rows(x.detach(), mesh).clone().requires_grad_()
        y = mixer(own)
        y.backward(own_rows(d_y, mesh) * mesh["cp"].size())  # gradients are averaged
        found = {"y": error(gathered(y.detach(), mesh), expected["y"])}
        found["dx"] = error(gathered(own.grad, mesh) / mesh["cp"].size(), expected["dx"])
        found |= differences(mixer, grads)
        if mesh["cp"].size() == 1 and not is_identity(mixer):
            cache = mixer.new_cache(2)
            with torch.no_grad():
                steps = torch.cat([mixer(part, cache=cache) for part in x.split([T - 4, 1, 2, 1], 1)], 1)
            found["cached"] = error(steps, expected["y"])
        assert begins_alike(mixer, make, dtype)
        return found
    except ValueError as refusal:
        return str(refusal)


def compare_models(style: str, mesh: dist.DeviceMesh) -> dict[str, float] | str:
    torch.manual_seed(0)
    mixers = HYBRID if style == "llama" else HYBRID[:2]
    config = ModelConfig(
        vocabulary=31, width=32, depth=len(mixers), length=LENGTH, mixer=mixers, heads=4, style=style, inner=32
    )
    model = perturb(LanguageModel(config)).double()
    tokens = torch.randint(31, (4, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    token_loss(model(inputs), targets).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    text = generate(model, tokens[:, :3], 6)
    model.zero_grad()
    try:
        parallelize(model, mesh)
    except ValueError as refusal:
        return str(refusal)
    mine, all_dp = mesh["dp"].get_local_rank(), mesh["dp"].size()
    own = [own_rows(part.chunk(all_dp)[mine], mesh) for part in (inputs, targets)]
    token_loss(model(own[0]), own[1]).backward()
    found = differences(model, grads)
    found["norm"] = error(nn.utils.clip_grad_norm_(model.parameters(), 0.01).full_tensor(), norm)
    if mesh["cp"].size() == 1:
        assert torch.equal(generate(model, tokens[:, :3], 6), text)
    return found


def compare_changed(change: str, mesh: dist.DeviceMesh) -> dict[str, float] | str:
    """What a layer says that somebody has changed before or after it was divided."""
    mixer, x = HyperGLU(n_embd=WIDTH, n_head=4, block_size=LENGTH), randn(2, T, WIDTH, dtype=torch.float32)
    try:
        if change == "adapter":
            mixer.v = nn.Sequential(mixer.v, nn.Linear(WIDTH, WIDTH))
        parallelize(mixer, mesh)
        if change == "hook":
            mixer.q.register_forward_hook(lambda module, given, y: 2 * y)
        if change == "weights":
            mixer(x, weights=[])
        return {"y": mixer(x).norm().item()}
    except ValueError as refusal:
        return str(refusal)


def process(count: int) -> Found:
    found: Found = {}
    for shape in SHAPES[count]:
        where, mesh = name_of(shape), make_mesh(shape)
        for name in MIXERS_AT[count]:
            heads = 4 if MIXERS[name].heads else None
            found[name, where] = compare(partial(build_mixer, name, WIDTH, LENGTH, heads=heads), mesh, torch.float32)
        for options in OPTIONS_AT[count] if len(shape) == 1 else ():
            fields = {"n_embd": WIDTH, "n_head": 4, "block_size": LENGTH, **options}
            found[str(options), where] = compare(partial(HyperGLU, **fields), mesh, torch.float64)
        for change in ("adapter", "hook", "weights") if where == "tp=2" else ():
            found[change, where] = compare_changed(change, mesh)
        for style in ("llama", "gpt2") if count == 2 else ("llama",):
            found[style, where] = compare_models(style, mesh)
    if count < 8:
        config = ModelConfig(vocabulary=256, width=64, depth=2, length=256, mixer=("hyperglu", "softmax"))
        found["bytes", ""] = {"sent": take_step(config, 2, 256)["sent"], "counted": count_bytes(config, 2, 256, count)}
    return found


@pytest.fixture(scope="module", params=sorted(SHAPES), ids=lambda count: f"{count} processes")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """Of all processes."""
    return run_together(process, request.param, tmp_path_factory.mktemp("parallel"), request.param)


def cases(results: list[Found], names: Iterable[str]) -> list[tuple[str, str, dict[str, float] | str]]:
    wanted = set(names)
    chosen = [(name, where, found) for result in results for (name, where), found in result.items() if name in wanted]
    count = len(results)
    there = {*MIXERS_AT[count], *map(str, OPTIONS_AT[count]), "llama", *(["gpt2"] if count == 2 else [])}
    assert {name for name, _, _ in chosen} == wanted & there
    return chosen


def assert_equal(found: dict[str, float] | str, *where: str, tolerance: float = 1e-9) -> None:
    assert isinstance(found, dict), (*where, found)
    assert len(found) > 4
    for what, difference in found.items():
        assert difference < tolerance, (*where, what, difference)


def assert_refused(found: dict[str, float] | str, *where: str) -> None:
    assert isinstance(found, str), where
    assert any(cure in found for cure in CURES), (*where, found)


def test_every_mixer_is_equal_or_refuses(results: list[Found]) -> None:
    for name, where, found in cases(results, MIXERS):
        if name not in NOT_BY_ROWS or "cp" not in where:
            assert_equal(found, name, where, tolerance=1e-5)
        else:
            assert_refused(found, name, where)


def test_every_option_of_hyperglu_is_equal_or_refused(results: list[Found]) -> None:
    for name, where, found in cases(results, map(str, OPTIONS)):
        left_out = {"cp": ("dropout", "identity", "registers"), "tp": ("dropout",), "tp=4": ("n_head",)}
        fits = not any(option in name for part, options in left_out.items() if part in where for option in options)
        (assert_equal if fits else assert_refused)(found, name, where)


def test_models_are_equal_or_refused(results: list[Found]) -> None:
    for name, where, found in cases(results, ["llama", "gpt2"]):
        (assert_refused if name == "gpt2" and "cp" in where else assert_equal)(found, name, where)


def test_bytes_are_those_counted(results: list[Found]) -> None:
    for result in results if len(results) < 8 else ():
        said = result["bytes", ""]
        assert 0.99 < said["sent"] / said["counted"] < 1.1, said


def test_changed_layers_are_refused(results: list[Found]) -> None:
    for result in results[:2] if len(results) == 2 else ():
        for change, said in (("adapter", "has been changed"), ("hook", "would hear nothing"), ("weights", "set tp=1")):
            assert said in str(result[change, "tp=2"])


def test_a_mesh_is_checked() -> None:
    with pytest.raises(ValueError, match=r"unknown mesh dimensions \['pp'\]; known are dp, cp, tp"):
        make_mesh({"pp": 2})
