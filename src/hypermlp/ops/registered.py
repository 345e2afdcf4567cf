"""How an implementation becomes one opaque node for torch.compile and autograd.

An implementation with a hand-written backward provides two functions over flat tensors, forward and backward; `register` makes
a function of a MixCall out of them. Letters as in ops/types.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from hypermlp import notice
from hypermlp.ops import reference
from hypermlp.ops.observer import Observer, needs_gradient, observer_of
from hypermlp.ops.types import MixCall, Mixing, Spec, compute_dtype, no_autocast

LIBRARY = torch.library.Library("hypermlp", "FRAGMENT")


class Inputs(NamedTuple):
    """The operator's tensors. Both mixings act as y ↦ y ⊙ base + ((y left) ⊙ control) rightᵀ; R2, transposed, has left = B."""

    q: Tensor  # B T G K
    k: Tensor  # B S G K
    v: Tensor  # B S H V
    left1: Tensor | None  # G L R
    right1: Tensor | None
    base1: Tensor | None  # G L
    control1: Tensor | None  # B T G R
    left2: Tensor | None  # H L R
    right2: Tensor | None
    base2: Tensor | None  # H L
    control2: Tensor | None  # B T H R
    spans: Tensor | None  # n 5

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """All but the spans, in order."""
        return self[:-1]

    def with_differentiable(self, tensors: Iterable[Tensor | None]) -> Inputs:
        """Others in the place of all but the spans."""
        return Inputs._make((*tensors, self.spans))

    @property
    def goes_around(self) -> bool:
        """Whether a span goes beyond the last slot and on with the first."""
        return self.spans is not None and bool((self.spans[:, 4] > self.k.shape[1]).any())

    def refuse_rings(self) -> None:
        """Raise a ValueError where a hand-written gradient would not see all slots."""
        if self.goes_around:
            raise ValueError(f'spans go around {self.k.shape[1]} slots, as in a cache: only impl="dense" has their gradients')


class Call(NamedTuple):
    """One call of the operator, and the only place where it becomes flat arguments of a torch operator, and back."""

    inputs: Inputs
    spec: Spec
    chunk: int | None

    def flat(self) -> tuple[Any, ...]:
        return (*self.inputs, *(getattr(self.spec, name) for name in SPEC_TYPES), self.chunk)

    @classmethod
    def from_flat(cls, arguments: Sequence[Any]) -> Call:
        tensors, options = arguments[: len(Inputs._fields)], arguments[len(Inputs._fields) :]
        *choices, chunk = options
        return cls(Inputs(*tensors), Spec(**dict(zip(SPEC_TYPES, choices, strict=True))), chunk)


# Field of Spec → its type in an operator's schema; words are strings there.
SPEC_TYPES = {
    f.name: {"bool": "bool", "int": "SymInt", "float": "float"}.get(str(f.type), "str") for f in dataclasses.fields(Spec)
}
TENSOR_SCHEMA = ", ".join(f"Tensor{'' if name in 'qkv' else '?'} {name}" for name in Inputs._fields)
CALL_SCHEMA = f"{TENSOR_SCHEMA}, {', '.join(f'{kind} {name}' for name, kind in SPEC_TYPES.items())}, SymInt? chunk"


class Forward(Protocol):
    def __call__(self, inputs: Inputs, spec: Spec, chunk: int | None) -> tuple[Tensor, ...]:
        """o (B T H V) in q's type, ρ (B T H) in the compute type, and what else the backward takes."""


# Takes d_o, what the forward gave, and inputs, spec, chunk. Gives the gradients of inputs.differentiable, in order and types.
Backward = Callable[..., list[Tensor | None]]


class Unrolled(NamedTuple):
    """Where a compiler may see an implementation's steps, to fuse them."""

    on: Callable[[torch.device], bool]
    fits: Callable[[Inputs, Spec, int | None], bool]  # few enough steps for this call


Mix = Callable[[MixCall], Tensor]


def register(
    name: str,
    forward: Forward,
    backward: Backward,
    *,
    also_saved: Sequence[Callable[[Inputs], Tensor]] = (),
    infer: Callable[[Inputs, Spec, int | None], Tensor] | None = None,
    unrolled: Unrolled | None = None,
) -> Mix:
    """Define the operators hypermlp::name and hypermlp::name_backward; returns the function that calls them.

    also_saved: what the forward gives beside o and ρ, as functions that make empty tensors of the same shapes. infer: o alone,
    called where nobody differentiates, as hypermlp::name_infer where somebody traces; the forward, if None. unrolled: which
    plain batches a compiler sees in steps, by the operator hypermlp::name_steps; none, if None.
    """
    outputs = ["o", "rho", *(f"saved{n}" for n in range(len(also_saved)))]

    def compute(call: Call) -> tuple[Tensor, ...]:
        with no_autocast(call.inputs.q):
            return forward(*call)

    def compute_backward(d_o: Tensor, made: Sequence[Tensor], call: Call) -> list[Tensor | None]:
        with no_autocast(d_o):
            return backward(d_o, *made, *call)

    def backward_op(d_o: Tensor, *arguments: Any) -> list[Tensor]:
        found = compute_backward(d_o, arguments[: len(outputs)], Call.from_flat(arguments[len(outputs) :]))
        return [d_o.new_empty(0) if g is None else g for g in found]

    def fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
        inputs = Call.from_flat(arguments).inputs
        q, v = inputs.q, inputs.v
        B, T, H, V = q.shape[0], q.shape[1], v.shape[2], v.shape[3]
        rho = q.new_empty(B, T, H, dtype=compute_dtype(q.dtype))
        return q.new_empty(B, T, H, V), rho, *(make(inputs) for make in also_saved)

    def fake_backward(d_o: Tensor, *arguments: Any) -> list[Tensor]:
        wanted = Call.from_flat(arguments[len(outputs) :]).inputs.differentiable
        return [d_o.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted]

    def inferred(call: Call) -> Tensor:
        with no_autocast(call.inputs.q):
            return forward(*call)[0] if infer is None else infer(*call)

    def define(suffix: str, more: Sequence[str], made: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
        schema = f"({', '.join([*(f'Tensor {x}' for x in more), CALL_SCHEMA])}) -> {made}"
        operator = torch.library.custom_op(f"hypermlp::{name}{suffix}", run, mutates_args=(), schema=schema)
        operator.register_fake(fake)
        return operator

    results = f"({', '.join('Tensor' for _ in outputs)})"
    opaque = define("", (), results, lambda *arguments: compute(Call.from_flat(arguments)), fake_forward)
    opaque_backward = define("_backward", ("d_o", *outputs), "Tensor[]", backward_op, fake_backward)
    opaque_infer = None
    if infer is not None:
        run, fake = lambda *x: inferred(Call.from_flat(x)), lambda *x: fake_forward(*x)[0]
        opaque_infer = define("_infer", (), "Tensor", run, fake)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors, *ctx.options = Call.from_flat(inputs)
        ctx.save_for_backward(*output, *tensors)

    def unpack(ctx: Any) -> tuple[tuple[Tensor, ...], Call]:
        saved = ctx.saved_tensors  # once: under activation checkpointing a second look is refused
        return saved[: len(outputs)], Call(Inputs(*saved[len(outputs) :]), *ctx.options)

    def differentiate(ctx: Any, d_o: Tensor, *_: Tensor) -> tuple[Any, ...]:
        made, call = unpack(ctx)
        wanted = call.inputs.differentiable
        if torch.is_grad_enabled():
            grads = gradients_of_gradients(call, d_o)
        else:
            found = opaque_backward(d_o, *made, *call.flat())
            grads = [None if x is None else g for x, g in zip(wanted, found, strict=True)]
        return (*grads, *(None for _ in call.flat()[len(wanted) :]))

    opaque.register_autograd(differentiate, setup_context=save)

    class Eager(torch.autograd.Function):
        """The same where autograd alone observes, without the dispatch of operators, most of a small call's time."""

        @staticmethod
        def forward(ctx: Any, spec: Spec, chunk: int | None, *tensors: Tensor | None) -> Tensor:
            ctx.options = (spec, chunk)
            made = compute(Call(Inputs._make(tensors), spec, chunk))
            ctx.save_for_backward(*made, *tensors)
            return made[0]

        @staticmethod
        def backward(ctx: Any, d_o: Tensor) -> tuple[Any, ...]:
            made, call = unpack(ctx)
            found = gradients_of_gradients(call, d_o) if torch.is_grad_enabled() else compute_backward(d_o, made, call)
            return (None, None, *found, None)

    def steps(*arguments: Any) -> Tensor:
        call = Call.from_flat(arguments)
        varying = any(isinstance(n, torch.SymInt) for x in call.inputs if x is not None for n in x.shape)
        if varying or unrolled is None or not unrolled.fits(*call):
            return cast("Tensor", opaque(*arguments)[0])
        return cast("Tensor", Eager.apply(call.spec, call.chunk, *call.inputs))

    if unrolled is not None:
        LIBRARY.define(f"{name}_steps({CALL_SCHEMA}) -> Tensor")
        LIBRARY.impl(f"{name}_steps", steps, "CompositeImplicitAutograd")  # a compiler takes it apart, and its gradient

    def mix(asked: MixCall) -> Tensor:
        call = Call(flatten(asked), asked.spec, asked.chunk)
        observer = observer_of(*call.inputs)
        if observer is Observer.TRACER:
            if opaque_infer is not None and not needs_gradient(*call.inputs):
                return cast("Tensor", opaque_infer(*call.flat()))
            if unrolled is not None and asked.spans is None and torch.compiler.is_compiling() and unrolled.on(asked.q.device):
                return cast("Tensor", getattr(torch.ops.hypermlp, f"{name}_steps")(*call.flat()))
            return opaque(*call.flat())[0]
        if observer is Observer.AUTOGRAD:
            return cast("Tensor", Eager.apply(call.spec, call.chunk, *call.inputs))
        return inferred(call)

    return mix


def owned(forward: Forward, backward: Backward) -> Callable[[Inputs, Spec], Tensor]:
    """The operator for one reader that gives d_o away, so that its memory is used again; for eager calls.

    Where gradients are recorded, the reader finds those of the operator's inputs itself and gives no d_o.
    """

    class Owned(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, spec: Spec, *tensors: Tensor | None) -> Tensor:
            ctx.spec = spec
            o, rho, *more = forward(Inputs._make(tensors), spec, None)
            assert not more
            ctx.save_for_backward(rho, *tensors)
            ctx.set_materialize_grads(False)
            return o

        @staticmethod
        def backward(ctx: Any, d_o: Tensor | None) -> tuple[Any, ...]:
            if d_o is None:  # the reader has seen to it
                return (None,) * (1 + len(Inputs._fields))
            rho, *tensors = ctx.saved_tensors
            return (None, *backward(d_o, None, rho, Inputs._make(tensors), ctx.spec, None, overwrite=True), None)

    return lambda inputs, spec: cast("Tensor", Owned.apply(spec, *inputs))


def flatten(call: MixCall) -> Inputs:
    """The tensors of a call, one by one."""
    mixings = *flatten_mixing(call.routing, False), *flatten_mixing(call.reading, True)
    return Inputs(call.q, call.k, call.v, *mixings, call.spans)


def flatten_mixing(mixing: Mixing | None, transpose: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """left, right, base and control."""
    if mixing is None:
        return None, None, None, None
    left, right = (mixing.B, mixing.A) if transpose else (mixing.A, mixing.B)
    return left, right, mixing.baseline(), mixing.control


def reference_mix(inputs: Inputs, spec: Spec) -> Tensor:
    """reference.mix of flattened inputs."""
    i, routing, reading = inputs, None, None
    if i.left1 is not None and i.right1 is not None and i.control1 is not None:
        routing = Mixing(i.left1, i.right1, i.control1, i.base1, shortcut=False)
    if i.left2 is not None and i.right2 is not None and i.control2 is not None:
        reading = Mixing(i.right2, i.left2, i.control2, i.base2, shortcut=False)
    return reference.mix(i.q, i.k, i.v, routing, reading, spec, i.spans)


# The derivatives that a hand-written gradient does not provide.


def gradients_of_gradients(call: Call, d_o: Tensor) -> list[Tensor | None]:
    """The operator's gradients where they are recorded themselves (create_graph=True)."""

    def dense(*replaced: Tensor) -> Tensor:
        return reference_mix(call.inputs.with_differentiable(replaced), call.spec)

    return gradients_with_graph(dense, call.inputs.differentiable, (d_o,))


def gradients_with_graph(
    compute: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor | None], d_outputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients of compute(*inputs), in plain steps that autograd can differentiate again."""
    notice.once("second derivatives are computed in plain steps, with memory that grows with the square of the context")
    fresh = [None if x is None else x.view_as(x) for x in inputs]  # so that no path leads from one input to another
    wanted = [x for x in fresh if x is not None and x.requires_grad]
    made = compute(*fresh)
    outputs = made if isinstance(made, tuple) else (made,)
    pairs = [(y, d_y) for y, d_y in zip(outputs, d_outputs, strict=True) if y.requires_grad]  # others depend on nothing wanted
    if not pairs:
        return [None for _ in fresh]
    found = iter(
        torch.autograd.grad([y for y, _ in pairs], wanted, [d_y for _, d_y in pairs], create_graph=True, allow_unused=True)
    )
    return [next(found) if x is not None and x.requires_grad else None for x in fresh]
