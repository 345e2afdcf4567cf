"""What other software does to a layer: every mixer gives what it gives by itself, or a ValueError that names the cure.

Never anything else: no other number, no error of another kind.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
import socket
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from helpers import assert_same, perturb, randn
from hypermlp import HyperGLU
from hypermlp.mixers import MIXERS, Mixer, build_mixer

WIDTH, LENGTH, T = 64, 12, 5  # a width at which HyperGLU is one call of compiled code
CURE = "make |cast |leave |give |use |call |move |load |run |split "
each_mixer = pytest.mark.parametrize("name", sorted(MIXERS))


def made(name: str) -> Mixer:
    return perturb(build_mixer(name, WIDTH, LENGTH)).eval()


def given(seed: int = 0) -> Tensor:
    return randn(2, T, WIDTH, seed=seed, dtype=torch.float32)


def equals_or_refuses(client: Callable[[], Tensor], expected: Tensor, tolerance: float = 1e-5) -> bool:
    """Whether it was computed, and then rightly; otherwise it was refused with a cure."""
    said = ""
    try:
        found = client()
    except ValueError as error:
        said = str(error)
    if said:
        assert re.search(CURE, said), f"names no cure: {said}"
        return False
    assert_same(found.detach(), expected.detach(), tolerance)
    return True


# Clients that every mixer must serve


def hooked(mixer: Mixer, x: Tensor) -> Tensor:
    """A hook on the last projection, which halves what another one before it has doubled."""
    mixer.get_submodule("o").register_forward_hook(lambda m, i, y: 2 * y)
    return mixer(x) / 2


def hooked_globally(mixer: Mixer, x: Tensor) -> Tensor:
    heard: set[nn.Module] = set()
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, y: heard.add(m))
    try:
        y = mixer(x)
    finally:
        handle.remove()
    assert heard >= {module for module in mixer.modules() if isinstance(module, nn.Linear)}
    return y


def subclass_of_tensor(mixer: Mixer, x: Tensor) -> Tensor:
    return mixer(x.as_subclass(type("Mine", (Tensor,), {}))).as_subclass(Tensor)


def subclass_of_mixer(mixer: Mixer, x: Tensor) -> Tensor:
    kind = type(mixer)

    def mix(self: Mixer, *arguments: object, **options: object) -> Tensor:
        return 2 * kind.mix(self, *arguments, **options)

    mixer.__class__ = type("Mine", (kind,), {"mix": mix})
    return mixer(x) / 2


def float64(mixer: Mixer, x: Tensor) -> Tensor:
    return mixer.double()(x.double()).float()


def traced(mixer: Mixer, x: Tensor) -> Tensor:
    return torch.jit.trace(mixer, (given(1)[:1, :3],), check_trace=False)(x)


def traced_without_gradients(mixer: Mixer, x: Tensor) -> Tensor:
    with torch.no_grad():
        return traced(mixer, x)


def vectorised(mixer: Mixer, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: mixer(row[None])[0])(x)


def called_functionally(mixer: Mixer, x: Tensor) -> Tensor:
    parameters = {name: p.detach().clone() for name, p in mixer.named_parameters()}
    for p in mixer.parameters():
        nn.init.zeros_(p)
    return torch.func.functional_call(mixer, parameters, (x,))


def copied(mixer: Mixer, x: Tensor) -> Tensor:
    twin = copy.deepcopy(mixer)
    for p in mixer.parameters():
        nn.init.zeros_(p)
    return twin(x)


def pickled(mixer: Mixer, x: Tensor) -> Tensor:
    return pickle.loads(pickle.dumps(mixer))(x)


def from_meta(mixer: Mixer, x: Tensor) -> Tensor:
    twin = copy.deepcopy(mixer).to("meta")
    assert twin(x.to("meta")).shape == x.shape
    twin.to_empty(device="cpu").load_state_dict(mixer.state_dict())
    return twin(x)


SERVED = [
    hooked,
    hooked_globally,
    subclass_of_tensor,
    subclass_of_mixer,
    float64,
    traced,
    traced_without_gradients,
    vectorised,
    called_functionally,
    copied,
    pickled,
    from_meta,
]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.*is deprecated")
@pytest.mark.parametrize("client", SERVED, ids=lambda client: client.__name__)
@each_mixer
def test_served(name: str, client: Callable[[Mixer, Tensor], Tensor]) -> None:
    mixer, x = made(name), given()
    expected = mixer(x).detach()
    assert expected.norm() > 0.1
    assert_same(client(mixer, x).detach(), expected, 1e-5)


# Clients that a mixer serves or refuses


def narrowed(linear: nn.Linear) -> nn.Linear:
    """The first half of its outputs, as pruning leaves them."""
    rows = linear.out_features // 2
    half = nn.Linear(linear.in_features, rows, bias=linear.bias is not None)
    half.weight = nn.Parameter(linear.weight[:rows].detach())
    if linear.bias is not None:
        half.bias = nn.Parameter(linear.bias[:rows].detach())
    return half


@pytest.mark.parametrize("length, cached", [(T, False), (300, False), (1, True), (T, True)])
@each_mixer
def test_a_projection_of_another_width(name: str, length: int, cached: bool) -> None:
    """What is narrower within the layer is refused; what leaves it narrower is the first half of the output."""
    x = randn(2, length, WIDTH, dtype=torch.float32)
    names = [n for n, m in made(name).named_modules() if isinstance(m, nn.Linear) and m.out_features > 1]
    for place in names:
        mixer = made(name)
        expected = mixer(x)[..., : WIDTH // 2]
        parent, _, leaf = place.rpartition(".")
        mixer.get_submodule(parent)._modules[leaf] = narrowed(mixer.get_submodule(place))

        def client(mixer: Mixer = mixer) -> Tensor:
            with torch.no_grad():
                return mixer(x, cache=mixer.new_cache(2) if cached else None)

        assert not equals_or_refuses(client, expected) or place == "o"


@each_mixer
def test_an_input_of_another_type(name: str) -> None:
    mixer, x = made(name), given()
    expected = mixer(x)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert not equals_or_refuses(lambda dtype=dtype: mixer(x.to(dtype)), expected)
    half = mixer.to(torch.bfloat16)(x.to(torch.bfloat16))
    assert_same(half.float(), expected, 0.1)


@each_mixer
def test_symbolic_tracing(name: str) -> None:
    """torch.fx runs Python without numbers; make_fx runs it on tensors."""
    mixer, x = made(name), given()
    expected = mixer(x)
    with pytest.raises(ValueError, match=r"use torch\.export"):
        torch.fx.symbolic_trace(mixer)
    assert_same(torch.fx.experimental.proxy_tensor.make_fx(mixer)(given(1))(x), expected, 1e-5)


@each_mixer
def test_every_parameter_can_begin_again(name: str) -> None:
    """Layers that are made without memory get their first values from reset_parameters, as a new one gets them."""
    new = build_mixer(name, WIDTH, LENGTH)
    with torch.device("meta"):
        mixer = build_mixer(name, WIDTH, LENGTH)
    poison(mixer.to_empty(device="cpu"))
    for layer in (new, mixer):
        torch.manual_seed(0)
        layer.reset_parameters()
    assert_same(dict(mixer.named_parameters()), dict(new.named_parameters()), 0)
    if not isinstance(mixer, HyperGLU):  # whose tests compare it with the paper
        torch.manual_seed(0)
        assert_same(dict(mixer.named_parameters()), dict(build_mixer(name, WIDTH, LENGTH).named_parameters()), 0)


# What is no weight of a linear layer, and where it begins.
BEGINNINGS: dict[str, Callable[[Tensor], Tensor]] = {
    r"norm(\.weight)?|.*\.D|D|write_scale": lambda p: p == 1,
    "A_log": lambda p: p.exp().log2() <= 4.01,
    "dt_bias|delta_bias|delta.bias": lambda p: (F.softplus(p) > 0.9e-3) & (F.softplus(p) < 0.11),
    r"w\.2\.bias": lambda p: (p >= -6.51) & (p <= -1.49),
    r"conv.*\.weight": lambda p: p.abs() <= 3**-0.5,
    "remove_scale": lambda p: (p - 0.85).abs() < 1e-6,
    r"op[12]\.[AB]": lambda p: p.abs() < 0.2,
}


@each_mixer
def test_every_module_can_begin_again(name: str) -> None:
    """As hosts do it, module by module; linear layers then begin as torch's, but for biases with a meaning."""
    mixer = build_mixer(name, WIDTH, LENGTH)
    poison(mixer)
    for module in mixer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for key, p in mixer.named_parameters():
        assert p.isfinite().all(), key
        for pattern, holds in BEGINNINGS.items():
            assert not re.fullmatch(pattern, key) or holds(p).all(), key


def poison(module: nn.Module) -> None:
    for p in module.parameters():
        nn.init.constant_(p, float("nan"))


@pytest.mark.parametrize("name", ["mamba", "rwkv7"])
def test_a_host_that_makes_biases_zero_sees_which_to_leave(name: str) -> None:
    """As the hosts of Mamba do."""
    mixer = build_mixer(name, WIDTH, LENGTH)
    kept = [
        m.bias.detach().clone() for m in mixer.modules() if isinstance(m, nn.Linear) and m.bias is not None and m.bias.any()
    ]
    assert kept
    for module in mixer.modules():
        if isinstance(module, nn.Linear) and module.bias is not None and not getattr(module.bias, "_no_reinit", False):
            nn.init.zeros_(module.bias)
    found = [m.bias for m in mixer.modules() if isinstance(m, nn.Linear) and m.bias is not None and m.bias.any()]
    assert len(kept) == len(found)
    assert all(torch.equal(*pair) for pair in zip(kept, found, strict=True))


@pytest.fixture(scope="module")
def mesh() -> Iterator[torch.distributed.DeviceMesh]:
    """Of this process alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    added = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    before = {key: os.environ.get(key) for key in added}
    os.environ.update(added)
    init_process_group("gloo")
    yield init_device_mesh("cpu", (1,))
    destroy_process_group()
    for key, value in before.items():
        os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=["whole", "divided"])
@each_mixer
def test_distributed_tensors(name: str, placement: object, mesh: torch.distributed.DeviceMesh) -> None:
    mixer, x = made(name), given()
    expected = mixer(x)

    def divide(_: str, module: nn.Module, mesh: torch.distributed.DeviceMesh) -> None:
        for key, p in list(module._parameters.items()):
            if p is not None:
                module._parameters[key] = nn.Parameter(distribute_tensor(p.detach(), mesh, [placement]))

    distributed = distribute_module(mixer, mesh, divide)

    def client() -> Tensor:
        with implicit_replication():
            return distributed(DTensor.from_local(x, mesh, [Replicate()])).full_tensor()

    equals_or_refuses(client, expected)
