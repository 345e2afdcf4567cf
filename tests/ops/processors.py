"""The native kernel on other processors and compilers: a table of the largest differences from the float64 reference.

python tests/ops/processors.py [VARIANT …]

Every variant is tests/ops/driver.cpp, compiled for it and run beside this process, under qemu-user where the processor is
another one. Python's own calls of the kernel are sent there, so a variant computes whatever Python can ask for.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import ctypes
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import make_problem, run_problem
from hypermlp import HyperGLU, HyperMLP, LanguageModel, ModelConfig, quantize
from hypermlp.models.lm import Style
from hypermlp.ops import native
from hypermlp.ops.native import bindings, build, project
from hypermlp.ops.scan import selective_scan

DRIVER = Path(__file__).with_name("driver.cpp")
FLAGS = ("-O1", "-std=c++17", "-pthread", "-ffp-contract=fast")


class Variant(NamedTuple):
    compiler: str
    flags: tuple[str, ...]
    features: tuple[str, ...] = ()  # of /proc/cpuinfo, without which this processor cannot run it
    runner: tuple[str, ...] = ()

    def obstacle(self) -> str | None:
        """Why the variant cannot be built or run here; None if it can."""
        missing = [name for name in (self.compiler, *self.runner[:1]) if shutil.which(name) is None]
        if missing:
            return f"{' and '.join(missing)} not installed"
        lacking = [name for name in self.features if name not in build.processor().split()]
        return f"this processor lacks {', '.join(lacking)}" if lacking else None


V4 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma")
VARIANTS = {
    "AVX-512 with BF16": Variant("g++", ("-march=x86-64-v4", "-mavx512bf16"), (*V4, "avx512_bf16")),
    "AVX-512": Variant("g++", ("-march=x86-64-v4",), V4),
    "AVX2, ThreadSanitizer": Variant("g++", ("-march=x86-64-v3", "-fsanitize=thread"), ("avx2", "fma")),  # ends at a race
    "SSE2": Variant("g++", ("-march=x86-64",), ("sse2",)),
    "NEON": Variant("aarch64-linux-gnu-g++", ("-march=armv8-a", "-static"), (), ("qemu-aarch64",)),
    "clang": Variant("clang++", ("-march=x86-64-v3",), ("avx2", "fma")),
    "GOMP": Variant("g++", ("-march=native", "-DHM_GOMP", "-fopenmp")),
}


class Driver:
    """A running variant."""

    def __init__(self, variant: Variant, folder: Path) -> None:
        program = folder / "driver"
        command = [variant.compiler, *FLAGS, *variant.flags, f"-I{build.SOURCES}", str(DRIVER), "-o", str(program)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
        self.process = subprocess.Popen(
            [*variant.runner, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.addresses: dict[int, Any] = {}  # storages whose address Python has asked for; kept, so that none is taken again
        self.starts: list[int] = []  # of them, sorted
        self.failing = -1  # the allocation of the next call that fails
        self.failed_in = 0  # 1: the caller, 2: a worker

    def entry_point(self, name: str) -> Callable[..., int]:
        return lambda reference=None: self.call(name, None if reference is None else reference._obj)

    def call(self, name: str, arguments: ctypes.Structure | None) -> int:
        """Send a structure and all it points to, and put what comes back in their places."""
        places, buffers, links = [0], [b""], []
        storages = {}

        def place(value: int) -> tuple[int, int]:
            start = self.starts[bisect.bisect_right(self.starts, value) - 1] if self.starts else value + 1
            if not start <= value < start + self.addresses[start].nbytes():
                raise AssertionError(f"{name} was given an address that belongs to no tensor")
            if start not in storages:
                storages[start] = len(buffers)
                buffers.append(ctypes.string_at(start, self.addresses[start].nbytes()))
                places.append(start)
            return storages[start], value - start

        def follow(made: Any, buffer: int, offset: int) -> None:
            for field, kind in made._fields_:
                value, at = getattr(made, field), offset + getattr(type(made), field).offset
                if issubclass(kind, ctypes.Structure):
                    follow(value, buffer, at)
                elif field == "blocks" and value:  # of a model: structures too
                    each = (bindings.STRUCTURES["hm_block"] * made.depth).from_address(value)
                    own = len(buffers)
                    links.append((buffer, at, own, 0))
                    buffers.append(bytes(each))
                    places.append(0)
                    for i, one in enumerate(each):
                        follow(one, own, i * ctypes.sizeof(one))
                elif issubclass(kind, ctypes.Array) and issubclass(kind._type_, ctypes.Structure):
                    for i, one in enumerate(value):
                        follow(one, buffer, at + i * ctypes.sizeof(one))
                elif field == "parallel":
                    links.append((buffer, at, -1, 0))
                elif kind is bindings.SEVEN or kind is bindings.POINTER:
                    each = value if kind is bindings.SEVEN else [value]
                    links.extend((buffer, at + 8 * i, *place(one)) for i, one in enumerate(each) if one)

        if arguments is not None:
            buffers[0] = bytes(arguments)
            follow(arguments, 0, 0)
        else:
            places, buffers = [], []
        numbers = struct.Struct("<q").pack
        message = [numbers(len(name)), name.encode(), numbers(self.failing), numbers(len(buffers))]
        for data in buffers:
            message += [numbers(len(data)), data]
        message += [numbers(len(links)), *(numbers(n) for link in links for n in link)]
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join(message))
        self.process.stdin.flush()
        status, self.failed_in = struct.unpack("<qq", self.receive(16))
        for start, data in zip(places, buffers, strict=True):
            found = self.receive(len(data))
            if start:
                ctypes.memmove(start, found, len(found))
        return status

    def receive(self, size: int) -> bytes:
        assert self.process.stdout is not None
        found = self.process.stdout.read(size)
        if len(found) < size:
            assert self.process.stderr is not None
            raise RuntimeError(f"the driver ended with {self.process.wait()}: {self.process.stderr.read().decode()[-2000:]}")
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def elsewhere(variant: Variant) -> Iterator[Driver]:
    """The native kernel's calls go to a variant."""
    with tempfile.TemporaryDirectory() as folder:
        driver, data_ptr, entry_point = Driver(variant, Path(folder)), Tensor.data_ptr, bindings.entry_point

        def recorded(x: Tensor) -> int:
            storage = x.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in driver.addresses:
                driver.addresses[storage.data_ptr()] = storage
                bisect.insort(driver.starts, storage.data_ptr())
            return data_ptr(x)

        project.panel.cache_clear()
        Tensor.data_ptr = recorded  # type: ignore[method-assign]
        bindings.entry_point = project.entry_point = driver.entry_point  # type: ignore[assignment]
        try:
            yield driver
        finally:
            Tensor.data_ptr = data_ptr  # type: ignore[method-assign]
            bindings.entry_point = project.entry_point = entry_point
            project.panel.cache_clear()
            driver.close()


def difference(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double() - exact).norm() / exact.norm().clamp(min=1e-6))


def train(layer: HyperGLU, x: Tensor, **options: Any) -> dict[str, Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x, **options)
    y.backward(torch.cos(torch.arange(y.numel(), dtype=torch.float64)).view(y.shape).to(y.dtype))
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters() if p.grad is not None}}


def compare_layer(layer: HyperGLU, x: Tensor, dtype: torch.dtype, **options: Any) -> float:
    layer, x = layer.to(dtype), x.to(dtype)
    found = train(layer, x, impl="native", **options)
    exact = train(layer.double(), x.double(), impl="dense", **options)
    largest = max(float(t.norm()) for t in exact.values())
    return max(
        float((t.double() - exact[name]).norm() / exact[name].norm().clamp(min=1e-3 * largest)) for name, t in found.items()
    )


def compare_steps(layer: HyperGLU, x: Tensor, dtype: torch.dtype = torch.float32) -> float:
    """Five tokens at once, then one after the other; past the window they go around a ring of its size."""
    layer, x = layer.to(dtype), x.to(dtype)
    with torch.no_grad():
        exact, cache = copy.deepcopy(layer).double()(x.double(), impl="dense"), layer.new_cache(x.shape[0], rewind=0)
        steps = [layer(part, cache=cache, impl="native") for part in x.split([5] + [1] * (x.shape[1] - 5), 1)]
        assert layer.explain(x[:, :1], cache=cache).kind == "step"
    return difference(torch.cat(steps, 1), exact)


def compare_model(dtype: torch.dtype, style: Style, *, codes: bool) -> float:
    """Three rows of tokens, one after the other."""
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocabulary=37, width=48, depth=2, length=20, style=style)).to(dtype).eval()
    model = quantize(model) if codes else model
    for norm in (m for m in model.modules() if isinstance(m, torch.nn.RMSNorm)):
        norm.eps = 1e-6  # torch's own depends on the type
    tokens = torch.randint(37, (3, 20))
    with torch.no_grad():
        exact, cache = copy.deepcopy(model).double()(tokens), model.new_cache(3)
        assert model.explain(tokens[:, :1], cache).startswith("model")
        found = torch.cat([model(token, cache=cache) for token in tokens.split(1, dim=1)], 1)
    return difference(found, exact)


def compare_problem(dtype: torch.dtype, **options: Any) -> float:
    problem = make_problem(**options).to(dtype)
    found, exact = run_problem(problem, "native"), run_problem(problem.to(torch.float64))
    largest = max(float(t.norm()) for t in exact.values())
    return max(
        float((found[name].detach().double() - t).norm() / t.norm().clamp(min=1e-3 * largest)) for name, t in exact.items()
    )


def compare_scan() -> float:
    made = torch.Generator().manual_seed(0)
    x, delta, B, C = (torch.randn(2, 37, n, generator=made, dtype=torch.float64) for n in (130, 130, 5, 5))
    A = -torch.rand(130, 5, generator=made, dtype=torch.float64)
    found = []
    for dtype, impl in ((torch.float32, "native"), (torch.float64, "dense")):
        leaves = [t.to(dtype).requires_grad_() for t in (x, delta.abs(), A, B, C)]
        y, last = selective_scan(*leaves, impl=impl)
        found.append([y, last, *torch.autograd.grad((y.sum() + last.sum()), leaves)])
    return max(difference(a, b.detach()) for a, b in zip(*found, strict=True))


def make_layer(kind: type[HyperGLU] = HyperGLU, **options: Any) -> HyperGLU:
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "qk_rank": 128, "vo_rank": 64, "op1_rank": 32, "op2_rank": 32} | options
    layer = kind(n_head=2, block_size=40, **sizes)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0, 0.15)
    return layer


def differences() -> dict[str, float]:
    """What the kernel computes wherever it runs now, beside the reference."""
    torch.set_num_threads(2)
    torch.manual_seed(1)
    x, single, half = torch.randn(2, 61, 64), torch.float32, torch.bfloat16
    odd = {"n_embd": 17, "qk_rank": 12, "vo_rank": 10, "op1_rank": 3, "op2_rank": 5}
    found = {
        "layer": compare_layer(make_layer(bias=True), x, single),
        "layer, relu": compare_layer(make_layer(HyperMLP), x, single),
        "packed": compare_layer(make_layer(), x[:1], single, cu_seqlens=[0, 20, 21, 61]),
        "odd widths": compare_layer(make_layer(**odd), x[..., :17], single),
        "steps": compare_steps(make_layer(bias=True), x),
        "steps, odd": compare_steps(make_layer(**odd, use_vo_gate=False, use_op1=False), x[:, :15, :17]),
        "steps in bfloat16": compare_steps(make_layer(bias=True), x, half),
        "steps with codes": compare_steps(quantize(make_layer(bias=True)), x),
        "model": compare_model(single, "llama", codes=False),
        "model with codes": compare_model(single, "gpt2", codes=True),
        "model in bfloat16": compare_model(half, "llama", codes=True),
        "strips": compare_problem(single, T=213, L=150, B=1),
        "few rows": compare_problem(single, T=3, S=70, L=70),
        "one row": compare_problem(single, T=1, S=1100, L=1090, B=1, H=1),  # whose blocks threads share
        "scan": compare_scan(),
        "bfloat16": compare_problem(half, T=150, L=90, B=1, diag=False),
        "layer in bfloat16": compare_layer(make_layer(), x, half),
    }
    most, native.MOST_TOKENS = native.MOST_TOKENS, -1
    try:
        found["projections"] = compare_layer(make_layer(bias=True), x, single)
    finally:
        native.MOST_TOKENS = most
    return found


def limit(name: str) -> float:
    """Of a difference. A layer rounds what it hands on to bfloat16, whoever computes; gradients that nearly cancel show it."""
    return {"layer in bfloat16": 0.1}.get(name, 1e-2 if "bfloat16" in name else 3e-6)


def main(names: list[str]) -> int:
    bad = 0
    for name in names or VARIANTS:
        obstacle = VARIANTS[name].obstacle()
        if obstacle is not None:
            print(f"{name:20} not run: {obstacle}")
            continue
        with elsewhere(VARIANTS[name]):
            found = differences()
        wrong = [what for what, error in found.items() if not error <= limit(what)]
        bad += bool(wrong)
        print(f"{name:20} {'wrong: ' + ', '.join(wrong) if wrong else 'right'}")
        print("".join(f"    {what:20} {error:.1e}\n" for what, error in found.items()), end="", flush=True)
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
