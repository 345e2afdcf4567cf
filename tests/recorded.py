"""Outputs and gradients of many layers, bit by bit: the proof that a change of structure changed no number.

    python tests/recorded.py write before.pt      # on the code before
    python tests/recorded.py compare before.pt    # on the code after, on the same machine and with the same number of threads

Bits depend on the processor and on torch, so nothing recorded is kept in the repository.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hypermlp import HyperGLU, LanguageModel, ModelConfig, build_mixer
from hypermlp.mixers import MIXERS

LAYERS = {
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


def layer(width: int, fields: dict[str, object], dtype: torch.dtype = torch.float32) -> HyperGLU:
    torch.manual_seed(0)
    made = HyperGLU(n_embd=width, n_head=2, block_size=256, **fields)
    with torch.no_grad():
        for p in made.parameters():
            p.normal_(0, 0.2 if p.dim() > 1 else 0.1)
    return made.to(dtype)


def whole(module: torch.nn.Module, x: Tensor, **options: object) -> list[Tensor]:
    """y, and the gradients of x and of every parameter."""
    x = x.clone().requires_grad_()
    y = module(x, **options)
    grads = torch.autograd.grad(y.float().square().sum(), [x, *module.parameters()], allow_unused=True)
    return [y.detach(), *(g for g in grads if g is not None)]


def decoded(module: torch.nn.Module, x: Tensor, pieces: tuple[int, ...]) -> list[Tensor]:
    with torch.no_grad():
        cache = module.new_cache(x.shape[0])  # type: ignore[operator]
        return [module(part, cache=cache) for part in x[:, : sum(pieces)].split(list(pieces), dim=1)]


def cases() -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    for name, fields in LAYERS.items():
        for width, batch, time in SIZES:
            x = torch.randn(batch, time, width, generator=torch.Generator().manual_seed(time))
            for impl in IMPLS:
                yield f"{name} {width} {time} {impl}", lambda f=fields, x=x, i=impl: whole(layer(x.shape[2], f), x, impl=i)
            with_mask = (torch.arange(time) >= torch.arange(batch)[:, None]).long()
            yield (
                f"{name} {width} {time} padded",
                lambda f=fields, x=x, m=with_mask: whole(layer(x.shape[2], f), x, attention_mask=m),
            )
            bounds = torch.tensor([0, 5, time // 2, time])
            yield (
                f"{name} {width} {time} packed",
                lambda f=fields, x=x, c=bounds: whole(layer(x.shape[2], f), x[:1], cu_seqlens=c),
            )
            yield f"{name} {width} {time} no_grad", lambda f=fields, x=x: [layer(x.shape[2], f)(x).detach(), inferred(f, x)]
            pieces = (5, 1, 1, 3, 1)
            yield f"{name} {width} {time} cached", lambda f=fields, x=x, p=pieces: decoded(layer(x.shape[2], f), x, p)
        x = torch.randn(2, 300, 64, generator=torch.Generator().manual_seed(1))
        for dtype in (torch.bfloat16, torch.float64):
            yield f"{name} {dtype}", lambda f=fields, x=x, d=dtype: whole(layer(64, f, d), x.to(d))
            yield f"{name} {dtype} cached", lambda f=fields, x=x, d=dtype: decoded(layer(64, f, d), x.to(d), (5, 1, 1))
        yield f"{name} autocast", lambda f=fields, x=x: autocast(f, x)
        yield f"{name} beyond block_size", lambda f=fields, x=x: decoded(layer(64, f), x, (250, *(1,) * 40))
    for mixer in sorted(MIXERS):
        x = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(2))

        def made(mixer: str = mixer) -> torch.nn.Module:
            torch.manual_seed(0)
            return build_mixer(mixer, 64, 64)

        yield f"mixer {mixer}", lambda x=x, made=made: whole(made(), x)
        yield f"mixer {mixer} packed", lambda x=x, made=made: whole(made(), x[:1], cu_seqlens=torch.tensor([0, 9, 50]))
        yield f"mixer {mixer} cached", lambda x=x, made=made: decoded(made(), x, (5, 1, 1, 3))
    yield "language model", model


def inferred(fields: dict[str, object], x: Tensor) -> Tensor:
    with torch.no_grad():
        return layer(x.shape[2], fields)(x)


def autocast(fields: dict[str, object], x: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return whole(layer(64, fields), x)


def model() -> list[Tensor]:
    torch.manual_seed(0)
    net = LanguageModel(ModelConfig(vocabulary=31, width=64, depth=2, length=64))
    logits = net(torch.arange(40).view(2, 20) % 31)
    return [logits.detach(), *torch.autograd.grad(logits.square().sum(), list(net.parameters()))]


def main() -> int:
    action, path = sys.argv[1:]
    made = {name: run() for name, run in cases()}
    if action == "write":
        torch.save(made, path)
        return print(f"{len(made)} cases recorded") or 0
    before = torch.load(path)
    changed = 0
    for name in sorted(before.keys() | made.keys()):
        old, new = before.get(name), made.get(name)
        if old is None or new is None or len(old) != len(new):
            changed += 1
            print(f"{name}: {'missing' if new is None else 'new' if old is None else 'another number of tensors'}")
        elif not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(old, new, strict=True)):
            changed += 1
            off = max(float((a - b).abs().max() / (a.abs().max() + 1e-30)) for a, b in zip(old, new, strict=True) if a.numel())
            print(f"{name}: changed by up to {off:.1e}")
    print(f"{len(made) - changed} of {len(made)} cases are equal to the bit")
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main())
