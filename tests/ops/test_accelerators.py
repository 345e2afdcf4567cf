"""What accelerators get where the Triton kernels cannot run: strips in few, large operations, which torch.compile can fuse.

No accelerator is needed: CPU tensors are treated as an accelerator's, and the meta device stands for one where only the
operations count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_reference_comparison import OPTIONS, PACKED, compare, each_kind, each_layout
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import Problem, assert_same, error, make_layer, make_problem, randn, run_layer, run_problem
from hypermlp.ops import chunked, sizing
from hypermlp.ops.registered import Call, Inputs, flatten

SMALL = sizing.ACCELERATOR._replace(elements=3000, shortest=5, least=2)  # several strips and parts of a batch at these sizes
ALIKE = sizing.ACCELERATOR._replace(shortest=12)  # two strips of a whole batch of 24 tokens


@pytest.fixture
def treat_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[sizing.Sizing], None]:
    """Have CPU tensors treated as those of a device with such a sizing."""
    return lambda suited: monkeypatch.setattr(sizing, "of", lambda device: suited)


class Record(TorchDispatchMode):
    """The operations of a call, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, list[Tensor], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "_unsafe_view" not in str(func) and isinstance(out, Tensor):
            self.operations.append((func, [x for x in args if isinstance(x, Tensor)], out))
        return out

    def named(self, *words: str) -> list[tuple[Any, list[Tensor], Any]]:
        return [entry for entry in self.operations if any(word in str(entry[0]) for word in words)]


def record(problem: Problem) -> tuple[Record, Record]:
    """Forward and backward."""
    inputs = flatten(problem)
    with torch.no_grad():
        with Record() as forward:
            o, rho = chunked.forward(inputs, problem.spec, None)
        with Record() as backward:
            chunked.backward(torch.ones_like(o), o, rho, inputs, problem.spec, None)
    return forward, backward


def without_values(problem: Problem) -> Problem:
    return problem.with_leaves({name: t.to("meta") for name, t in problem.leaves().items()})


def layer_sized(T: int, B: int, dtype: torch.dtype) -> Problem:
    """A layer of width 768 with two heads of rank 16, without values."""
    problem = make_problem(T, L=T, B=B, ranks=(16, 16)).to(dtype)
    wide = {"q": (B, T, 4, 192), "k": (B, T, 4, 192), "v": (B, T, 2, 384)}
    return without_values(problem.with_leaves(problem.leaves() | {n: torch.empty(*s, dtype=dtype) for n, s in wide.items()}))


# Values


@pytest.mark.usefixtures("poisoned")
@each_kind
@each_layout
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_strips_of_this_size_equal_the_reference(options: dict, layout: dict, kind: str, treat_as: Callable) -> None:
    treat_as(SMALL)
    compare(make_problem(37, L=20 if layout == {} else 37, B=3, kind=kind, **layout, **options), "chunked", None)


@pytest.mark.usefixtures("poisoned")
@each_layout
def test_spans(layout: dict, treat_as: Callable) -> None:
    treat_as(SMALL)
    compare(make_problem(40, L=20 if layout == {} else 40, spans=torch.tensor(PACKED), **layout), "chunked", None)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("options", [{}, {"diag": False, "shortcut": False}])
def test_devices_that_read_what_they_overwrite(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """On MPS, beta=0 does not keep NaN out of a product: no such product is asked for."""
    monkeypatch.setattr(chunked, "IGNORE_WHAT_WAS_THERE", ())
    problem = make_problem(23, L=20, **options)
    compare(problem, "chunked", 5)

    class NoZeroBeta(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert (kwargs or {}).get("beta", 1) != 0
            return func(*args, **(kwargs or {}))

    with NoZeroBeta():
        record(problem)


# Types


def products(problem: Problem) -> set[torch.dtype]:
    return {x.dtype for made in record(problem) for _, given, _ in made.named("aten.bmm", "aten.baddbmm") for x in given}


def positive_gates(T: int) -> Problem:
    """Where no rounding turns a gate's sign, at which a gradient jumps."""
    leaves = {name: t.abs() for name, t in make_problem(T, L=T).leaves().items()}
    return make_problem(T, L=T).with_leaves({**leaves, "v": leaves["v"] - 0.8})


def test_bfloat16_is_multiplied_as_it_is_and_summed_in_float32(treat_as: Callable) -> None:
    treat_as(ALIKE)
    problem = positive_gates(24).to(torch.bfloat16)
    assert products(problem) == {torch.bfloat16}
    forward, backward = record(problem)
    assert {out.dtype for _, _, out in forward.named("vector_norm")} == {torch.float32}
    assert {out.dtype for _, _, out in backward.named("aten.add_", "aten.sum")} == {torch.float32}
    assert_same(run_problem(problem, "chunked"), run_problem(problem.to(torch.float64)), 1.5e-2)


def test_float16_has_the_range_of_float32(treat_as: Callable) -> None:
    """Scores of thousands, whose products do not fit into float16."""
    treat_as(ALIKE)
    problem = make_problem(17, L=20)
    problem = problem.replace(q=300 * problem.q, v=0.1 * problem.v).to(torch.float16)
    assert products(problem) == {torch.float32}
    assert_same(run_problem(problem, "chunked"), run_problem(problem.to(torch.float64)), 4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_cpu_computes_half_precision_in_float32(dtype: torch.dtype) -> None:
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert products(make_problem(9, L=9).to(dtype)) == {expected}


def test_gpus_without_units_for_bfloat16_do_not_multiply_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((7, 5), torch.float32), ((8, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert sizing.of(torch.device("cuda")).product_dtype(torch.bfloat16) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_that_cancel_are_as_exact_as_the_reference(dtype: torch.dtype) -> None:
    """With keys of width one a ReLU row's norm cancels the gradient of its query: what remains is rounding."""
    problem = make_problem(11, L=16, kind="relu")
    problem = problem.replace(q=problem.q[..., :1], k=problem.k[..., :1]).to(dtype)
    exact = run_problem(problem.to(torch.float64))["d q"]
    assert exact.norm() < 1e-6
    found, dense = (error(run_problem(problem, impl)["d q"], exact) for impl in ("chunked", "dense"))
    assert found <= 4 * dense


# Sizes


@pytest.mark.parametrize("dtype, forward, backward", [(torch.float32, 120, 300), (torch.bfloat16, 120, 335)])
def test_a_layer_takes_a_few_hundred_operations(dtype: torch.dtype, forward: int, backward: int) -> None:
    counts = [len(made.operations) for made in record(layer_sized(1024, 8, dtype))]
    assert counts[0] <= forward
    assert counts[1] <= backward


def test_the_cpu_keeps_its_small_strips() -> None:
    problem = make_problem(130, L=130, B=3)
    heights = {made[2].shape[1] for made in record(problem)[0].named("aten.bmm.default")}
    assert max(heights) <= 3 * sizing.CPU.tallest


def largest(problem: Problem) -> int:
    return max(out.numel() for made in record(problem) for _, _, out in made.operations)


def test_memory_is_linear_in_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    small = sizing.ACCELERATOR._replace(elements=1 << 15, shortest=32)
    monkeypatch.setattr(sizing, "of", lambda device: small)
    sizes = {T: largest(without_values(make_problem(T, L=T))) for T in (128, 256, 512)}
    assert sizes[512] <= 2.2 * sizes[256] <= 5 * sizes[128]
    assert sizes[512] <= 4 * small.elements  # of a buffer for GLU's backward


def test_the_height_shrinks_so_that_a_buffer_keeps_its_size() -> None:
    suited = sizing.ACCELERATOR
    for heads, slots in ((32, 1024), (4, 1 << 15), (32, 1 << 15), (256, 8192)):
        height = suited.height(None, slots, slots, heads)
        assert suited.least <= height < slots
        assert heads * height * (slots + height) <= suited.elements
        assert suited.together(height, slots, 4) >= heads // 4  # the whole batch
    assert suited.height(None, 1 << 20, 1 << 20, 4096) == suited.least
    assert suited.height(100, 1024, 1024, 4096) == 100


def test_a_window_bounds_the_buffer() -> None:
    spec = make_problem(4, L=512).spec
    assert sizing.ACCELERATOR.columns(1 << 15, spec) == 512
    assert sizing.CPU.columns(1 << 15, spec) == 1 << 15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_plain_batch_is_computed_without_asking_for_values(dtype: torch.dtype) -> None:
    """The meta device has none: whoever asked would wait for a GPU."""
    record(without_values(make_problem(600, L=500).to(dtype)))
    packed = without_values(make_problem(40, L=40).to(dtype)).replace(spans=torch.tensor(PACKED, device="meta"))
    with pytest.raises(NotImplementedError, match="meta"):
        record(packed)


# torch.compile


class Compiled:
    """Keeps the graphs that it is given, and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def keep(self, graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        from functorch.compile import make_boxed_func

        self.graphs.append(graph)
        return make_boxed_func(graph.forward)

    def backend(self) -> Any:
        return aot_autograd(fw_compiler=self.keep, bw_compiler=self.keep)

    def run(self, problem: Problem, **options: Any) -> dict[str, Tensor]:
        leaves = {name: t.detach().clone().requires_grad_() for name, t in problem.leaves().items()}

        def readout(*tensors: Tensor) -> Tensor:
            return problem.with_leaves(dict(zip(leaves, tensors, strict=True))).mix("chunked")

        o = torch.compile(readout, backend=self.backend(), fullgraph=True, **options)(*leaves.values())
        found = torch.autograd.grad(o, list(leaves.values()), randn(*o.shape, seed=99, dtype=o.dtype))
        return {"o": o.detach(), **{f"d {name}": g for name, g in zip(leaves, found, strict=True)}}

    def targets(self) -> list[str]:
        return [str(node.target) for graph in self.graphs for node in graph.graph.nodes if node.op == "call_function"]

    def saved(self) -> list[int]:
        """Elements of what the forward gives: o, and what it keeps."""
        given = next(node for node in self.graphs[0].graph.nodes if node.op == "output").args[0]
        return [node.meta["val"].numel() for node in given if isinstance(node, torch.fx.Node)]


@pytest.fixture
def compiled() -> Iterator[Compiled]:
    torch._dynamo.reset()
    yield Compiled()
    torch._dynamo.reset()


OPAQUE = ["hypermlp.chunked.default", "hypermlp.chunked_backward.default"]


@pytest.mark.parametrize("case", [{}, {"kind": "relu", "diag": False, "shortcut": False, "aligner": "identity"}])
def test_a_compiler_sees_the_steps_of_a_plain_batch(case: dict, compiled: Compiled, treat_as: Callable) -> None:
    treat_as(ALIKE)
    problem = make_problem(24, L=24, **case).to(torch.float32)
    assert_same(compiled.run(problem), run_problem(problem, "chunked"), 1e-6)
    targets = compiled.targets()
    assert not [t for t in targets if "hypermlp" in t]
    assert len([t for t in targets if "bmm" in t]) > 30
    assert max(compiled.saved()) <= max(t.numel() for t in problem.leaves().values())  # nothing of size T × S


def test_the_same_in_bfloat16_under_autocast(compiled: Compiled, treat_as: Callable) -> None:
    treat_as(ALIKE)
    problem = make_problem(9, L=9).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = compiled.run(problem)
    assert_same(found, run_problem(problem, "chunked"), 1e-6)
    assert not [t for t in compiled.targets() if "hypermlp" in t]


@pytest.mark.parametrize("why", ["spans", "lengths that vary", "many strips", "the CPU"])
def test_where_steps_cannot_be_unrolled_one_operator_stays(why: str, compiled: Compiled, treat_as: Callable) -> None:
    if why != "the CPU":
        treat_as(ALIKE._replace(shortest=8, share=8) if why == "many strips" else ALIKE)
    problem = make_problem(40, L=40, spans=torch.tensor(PACKED) if why == "spans" else None).to(torch.float32)
    found = compiled.run(problem, dynamic=True if why == "lengths that vary" else None)
    assert_same(found, run_problem(problem, "chunked"), 1e-6)
    assert [t for t in compiled.targets() if "hypermlp" in t] == OPAQUE


def test_the_operator_of_steps_is_well_behaved(treat_as: Callable) -> None:
    treat_as(ALIKE)
    problem = make_problem(5, L=5, B=1, H=1).to(torch.float32)
    inputs = (None if t is None else t.detach().requires_grad_() for t in flatten(problem))
    arguments = Call(Inputs._make(inputs), problem.spec, None).flat()
    torch.library.opcheck(torch.ops.hypermlp.chunked_steps.default, arguments)


def test_a_layer_compiles_and_trains(compiled: Compiled, treat_as: Callable) -> None:
    treat_as(ALIKE)
    layer = make_layer(dtype=torch.float32)
    x, d_y = (randn(2, 9, 16, seed=s, dtype=torch.float32) for s in (1, 2))
    expected = run_layer(layer, x, d_y, impl="chunked")
    layer.compile(backend=compiled.backend(), fullgraph=True)
    assert_same(run_layer(layer, x, d_y, impl="chunked"), expected, 1e-5)
    assert not [t for t in compiled.targets() if "hypermlp.chunked" in t]


def test_second_derivatives(treat_as: Callable) -> None:
    treat_as(ALIKE)
    found = {}
    for impl in ("chunked", "dense"):
        problem = make_problem(7, L=7)
        q = problem.q.clone().requires_grad_()
        (d_q,) = torch.autograd.grad(problem.replace(q=q).mix(impl).square().sum(), q, create_graph=True)
        (found[impl],) = torch.autograd.grad(d_q.square().sum(), q)
    assert_same(found["chunked"], found["dense"])
