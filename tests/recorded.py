"""Outputs and gradients of many layers, bit by bit: what a change of structure changed, and whether for the worse.

    python tests/recorded.py write before.pt      # on the code before
    python tests/recorded.py compare before.pt    # on the code after, on the same machine and with the same number of threads

Where bits differ in float32, both are compared with the reference in float64. Bits depend on the processor and on torch, so
nothing recorded is kept in the repository.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from hypermlp import HyperGLU, LanguageModel, ModelConfig, build_mixer
from hypermlp.mixers import MIXERS
from hypermlp.ops.types import compute_dtype

Fields = dict[str, object]
LAYERS: dict[str, Fields] = {
    "glu": {},
    "relu": {"attn_kind": "relu"},
    "l2": {"attn_norm": "l2"},
    "bias": {"bias": True},
    "no_gate_vo": {"use_vo_gate": False},
    "no_gate_qk": {"use_qk_gate": False},
    "no_conv": {"use_kv_conv": False},
    "no_op1": {"use_op1": False},
    "no_op2": {"use_op2": False},
    "bare": {"use_op1": False, "use_op2": False, "use_kv_conv": False, "use_qk_gate": False, "use_vo_gate": False},
    "shared": {"op1_per_head": False, "op2_per_head": False},
    "rope": {"use_rope": True},
    "gate_none": {"gate_act": "none"},
    "diagonal_only": {"op1_shortcut": False},
}
SIZES = ((64, 2, 40), (64, 2, 300), (96, 3, 17), (256, 1, 600), (320, 1, 300))  # width, batch, tokens
IMPLS = ("auto", "dense", "chunked")


def layer(width: int, fields: Fields, dtype: torch.dtype = torch.float32) -> HyperGLU:
    torch.manual_seed(0)
    made = HyperGLU(n_embd=width, n_head=2, block_size=256, **fields)
    with torch.no_grad():
        for p in made.parameters():
            p.normal_(0, 0.2 if p.dim() > 1 else 0.1)
    return made.to(dtype)


Recorded = dict[str, Tensor]  # outputs, and gradients by "d " and what they are of


def whole(module: torch.nn.Module, x: Tensor, **options: object) -> Recorded:
    """y, and the gradients of x and of every parameter."""
    x = x.clone().requires_grad_()
    y = module(x, **options)
    wanted = {"x": x, **dict(module.named_parameters())}
    grads = torch.autograd.grad(y.to(compute_dtype(y.dtype)).square().sum(), list(wanted.values()), allow_unused=True)
    return {"y": y.detach(), **{f"d {name}": g for name, g in zip(wanted, grads, strict=True) if g is not None}}


def decoded(module: torch.nn.Module, x: Tensor, pieces: tuple[int, ...], impl: str | None = None) -> Recorded:
    with torch.no_grad():
        cache = module.new_cache(x.shape[0])  # type: ignore[operator]
        parts = x[:, : sum(pieces)].split(list(pieces), dim=1)
        options = {} if impl is None else {"impl": impl}
        return {f"y{i}": module(part, cache=cache, **options) for i, part in enumerate(parts)}


Case = tuple[str, Callable[[], Recorded], Callable[[], Recorded] | None]  # the last: the reference in float64


def cases() -> Iterator[Case]:
    for name, fields in LAYERS.items():
        for width, batch, time in SIZES:
            x = torch.randn(batch, time, width, generator=torch.Generator().manual_seed(time))

            def run(fields: Fields = fields, x: Tensor = x, dtype: torch.dtype = torch.float32, **options: object) -> Recorded:
                return whole(layer(x.shape[2], fields, dtype), x.to(dtype), **options)

            def exact(x: Tensor = x, run: Callable[..., Recorded] = run, **options: object) -> Recorded:
                return run(x=x, dtype=torch.float64, impl="dense", **options)

            def steps(
                fields: Fields = fields, x: Tensor = x, dtype: torch.dtype = torch.float32, impl: str = "auto"
            ) -> Recorded:
                return decoded(layer(x.shape[2], fields, dtype), x.to(dtype), (5, 1, 1, 3, 1), impl)

            for impl in IMPLS:
                yield f"{name} {width} {time} {impl}", partial(run, impl=impl), exact
            padding = (torch.arange(time) >= torch.arange(batch)[:, None]).long()
            packing = torch.tensor([0, 5, time // 2, time])
            yield f"{name} {width} {time} padded", partial(run, attention_mask=padding), partial(exact, attention_mask=padding)
            yield (
                f"{name} {width} {time} packed",
                partial(run, x=x[:1], cu_seqlens=packing),
                partial(exact, x[:1], cu_seqlens=packing),
            )
            yield f"{name} {width} {time} no_grad", partial(inferred, fields, x), exact
            yield f"{name} {width} {time} cached", steps, partial(steps, dtype=torch.float64, impl="dense")
        x = torch.randn(2, 300, 64, generator=torch.Generator().manual_seed(1))
        for dtype in (torch.bfloat16, torch.float64):
            yield f"{name} {dtype}", lambda f=fields, x=x, d=dtype: whole(layer(64, f, d), x.to(d)), None
            yield f"{name} {dtype} cached", lambda f=fields, x=x, d=dtype: decoded(layer(64, f, d), x.to(d), (5, 1, 1)), None
        yield f"{name} autocast", lambda f=fields, x=x: autocast(f, x), None
        yield f"{name} beyond block_size", lambda f=fields, x=x: decoded(layer(64, f), x, (250, *(1,) * 40)), None
    for mixer in sorted(MIXERS):
        x = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(2))

        def made(mixer: str = mixer) -> torch.nn.Module:
            torch.manual_seed(0)
            return build_mixer(mixer, 64, 64)

        yield f"mixer {mixer}", lambda x=x, made=made: whole(made(), x), None
        yield f"mixer {mixer} packed", lambda x=x, made=made: whole(made(), x[:1], cu_seqlens=torch.tensor([0, 9, 50])), None
        yield f"mixer {mixer} cached", lambda x=x, made=made: decoded(made(), x, (5, 1, 1, 3)), None
    yield "language model", model, None


def inferred(fields: Fields, x: Tensor) -> Recorded:
    """y as it is without gradients."""
    with torch.no_grad():
        return {"y": layer(x.shape[2], fields)(x)}


def autocast(fields: Fields, x: Tensor) -> Recorded:
    with torch.autocast("cpu", torch.bfloat16):
        return whole(layer(64, fields), x)


def model() -> Recorded:
    torch.manual_seed(0)
    net = LanguageModel(ModelConfig(vocabulary=31, width=64, depth=2, length=64))
    logits, named = net(torch.arange(40).view(2, 20) % 31), dict(net.named_parameters())
    grads = torch.autograd.grad(logits.square().sum(), list(named.values()))
    return {"y": logits.detach(), **{f"d {name}": g for name, g in zip(named, grads, strict=True)}}


def off(found: Recorded, expected: Recorded) -> float:
    """The largest relative difference of a tensor."""
    return max(float((found[name].double() - t.double()).norm() / (t.double().norm() + 1e-30)) for name, t in expected.items())


def main() -> int:
    action, path = sys.argv[1:]
    if action == "write":
        torch.save({name: run() for name, run, _ in cases()}, path)
        return 0
    before, counts, ratios, worse = torch.load(path), Counter[str](), [], []
    for name, run, exact in cases():
        new, old = run(), before.pop(name, None)
        if old is None or new.keys() != old.keys():
            counts["not recorded before"] += 1
            continue
        same = {part for part, t in new.items() if torch.equal(t, old[part])}
        outputs = {part for part in new if not part.startswith("d ")}
        kind = "equal" if len(same) == len(new) else "outputs equal, gradients not" if outputs <= same else "outputs differ"
        counts[kind] += 1
        if kind == "equal":
            continue
        text = f"{name}: {kind}, by up to {off(new, old):.1e}"
        if exact is not None:
            reference = {part: t for part, t in exact().items() if part in new}
            errors = off(old, reference), off(new, reference)
            text += f"; from the reference {errors[0]:.1e} before, {errors[1]:.1e} after"
            ratios.append(math.log(errors[1] / errors[0]))
            worse += [name] if errors[1] > 2 * errors[0] + 1e-6 else []
        print(text)
    print(*(f"{number} {kind}" for kind, number in counts.items()), f"{len(before)} gone", sep=", ")
    middle = math.exp(sum(ratios) / max(1, len(ratios)))
    print(f"distance from the reference, after to before: {middle:.2f}; clearly further are {', '.join(worse) or 'none'}")
    return int(bool(worse or before))


if __name__ == "__main__":
    sys.exit(main())
