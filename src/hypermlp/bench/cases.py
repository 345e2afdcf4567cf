"""Who is measured: one layer, built by name at one shape, with its forward and its training step."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.bench import flops
from hypermlp.cache import Cache
from hypermlp.config import AttnKind, HyperGLUConfig
from hypermlp.errors import RunError
from hypermlp.mixers import HyperGLU, HyperMLP, Mixer, SoftmaxAttention, build_mixer, own
from hypermlp.mixers.base import Tokens
from hypermlp.models.budget import match
from hypermlp.models.lm import count_parameters

# Of outputs and of gradients against the reference, norm-wise. In bfloat16 gradients jump where rounding moves a hidden unit
# across the kink of the ReLU, and what a sum of rounded numbers leaves of a small one says little.
TOLERANCE = {"float32": (1e-4, 1e-4), "bfloat16": (2e-2, 2e-1)}
SMALL = {"float32": 1e-30, "bfloat16": 1e-3}  # norms below this share of the largest count as that much
DECODED = 80  # tokens that are decoded one by one as a check: more than one chunk of the recurrent mixers


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer at one shape, before it is built."""

    name: str
    batch: int
    time: int
    width: int
    size: int | None = None  # of the mixer, see the registry; None: as published
    note: str = ""  # why it has not as many parameters as the baseline, where it was to have
    chunk: int | None = None
    against: str | None = None  # path of the authors' file
    dtype: str = "float32"  # of weights and inputs: float32 or bfloat16


@dataclass(frozen=True, kw_only=True)
class BuiltCase:
    """A built case."""

    case: Case
    layer: nn.Module
    call: Callable[[Tensor], Tensor]
    oracle: Callable[[Tensor], Tensor]  # the same mathematics, dense or token by token
    flops: int | None  # of a forward; None: nobody has counted
    longest_check: int = 200  # tokens

    def input(self, batch: int, time: int) -> Tensor:
        x = torch.randn(batch, time, self.case.width, generator=torch.Generator().manual_seed(0))
        return x.to(getattr(torch, self.case.dtype))

    def forward(self, x: Tensor) -> None:
        with torch.no_grad():
            self.call(x)

    def train_step(self, x: Tensor) -> None:
        """Forward and backward, with the gradients of the input and of all parameters."""
        self.layer.zero_grad(set_to_none=True)
        leaf = x.detach().requires_grad_()
        self.call(leaf).sum().backward()

    @property
    def parameters(self) -> int:
        return count_parameters(self.layer)

    @property
    def state_bytes(self) -> int | None:
        """What decoding keeps of one sequence; None: it cannot decode."""
        try:
            return self.layer.state_size(1, self.case.time) if isinstance(self.layer, Mixer) else None
        except ValueError:
            return None

    def check(self) -> None:
        """Wrong results are never timed: outputs must be the oracle's, and gradients where it has them."""
        x = self.input(2, min(self.case.time, self.longest_check))
        found: list[list[Tensor | None]] = []
        for function in (self.call, self.oracle):
            leaf = x.clone().requires_grad_()
            self.layer.zero_grad(set_to_none=True)
            y = function(leaf)
            found.append([y.detach()])
            if y.requires_grad:
                (y * torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype)).sum().backward()
                found[-1] += [leaf.grad, *(p.grad for p in self.layer.parameters() if p.grad is not None)]
        self.layer.zero_grad(set_to_none=True)
        output, gradient = TOLERANCE[self.case.dtype]
        small = SMALL[self.case.dtype] * max(float(t.norm()) for t in found[1] if t is not None)
        for index, (got, want) in enumerate(zip(*found, strict=False)):  # the authors' layer: output and input gradient
            assert got is not None
            assert want is not None
            error = float((got.float() - want.float()).norm() / want.float().norm().clamp(min=small))
            if not error < (gradient if index else output):
                raise RunError(f"{self.case.name} differs from the reference by {error:.1e}; it will not be timed")


def hyper_config(case: Case, kind: AttnKind) -> HyperGLUConfig:
    return HyperGLUConfig(n_embd=case.width, n_head=2, block_size=case.time, attn_kind=kind, qk_rank=case.size)


def build_hyper(case: Case, kind: AttnKind, impl: str) -> BuiltCase:
    config = hyper_config(case, kind)
    layer = (HyperGLU if kind == "glu" else HyperMLP)(config)
    return BuiltCase(
        case=case,
        layer=layer,
        call=lambda x: layer(x, impl=impl, chunk_T=case.chunk),
        oracle=lambda x: layer(x, impl="dense"),
        flops=flops.forward(layer, case.batch, case.time),
    )


class NaiveSoftmax(SoftmaxAttention):
    """Softmax attention written out, with its T × T matrices."""

    def mix(self, tokens: Tokens, cache: Cache | None) -> Tensor:
        if cache is not None:
            return super().mix(tokens, cache)
        q, k, v, _ = self.project(tokens, None, "dense")
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.mT) * q.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        o = F.softmax(scores.masked_fill(future, float("-inf")), -1) @ v
        return self.o(o.transpose(1, 2).flatten(2))


def build_softmax(case: Case, heads: int, fused: bool) -> BuiltCase:
    layer, naive = (kind(case.width, heads, use_rope=False) for kind in (SoftmaxAttention, NaiveSoftmax))
    for name, module in layer.named_children():
        setattr(naive, name, module)
    work = flops.forward(layer, case.batch, case.time)
    return BuiltCase(case=case, layer=layer, call=layer if fused else naive, oracle=naive, flops=work)


def build_named(case: Case) -> BuiltCase:
    """A mixer by its registered name or label, or the user's own."""
    own.adopt([case.name])
    return built_case(case, build_mixer(case.name, case.width, case.time, case.size))


def built_case(case: Case, layer: Mixer) -> BuiltCase:
    """The oracle of a mixer without a dense implementation is its decoding."""
    work = flops.forward(layer, case.batch, case.time)
    if isinstance(layer, HyperGLU):
        return BuiltCase(case=case, layer=layer, call=layer, oracle=lambda x: layer(x, impl="dense"), flops=work)

    @torch.no_grad()
    def decode(x: Tensor) -> Tensor:
        cache = layer.new_cache(x.shape[0], max_len=x.shape[1])
        return torch.cat([layer(token, cache=cache) for token in x.split(1, dim=1)], dim=1)

    return BuiltCase(case=case, layer=layer, call=layer, oracle=decode, flops=work, longest_check=DECODED)


def build_authors(case: Case) -> BuiltCase:
    """The released layer, from the file that the user named, with our parameters."""
    if case.against is None:
        raise ValueError("the authors' layer needs against=PATH, their hyperglu.py")
    module = load_file(Path(case.against))
    config = hyper_config(case, "glu")
    ours = HyperGLU(config)
    known = {field.name for field in dataclasses.fields(module.HyperGLUConfig)}  # ours has more, at defaults of no effect
    shared = {name: value for name, value in config.to_dict().items() if name in known}
    theirs = module.HyperGLU(module.HyperGLUConfig(**shared | {"impl_default": "chunked", "chunk_T": case.chunk or 128}))
    theirs.load_state_dict(ours.authors_state_dict())
    return BuiltCase(
        case=case,
        layer=theirs,
        call=theirs,
        oracle=lambda x: ours(x, impl="dense"),
        flops=flops.forward(ours, case.batch, case.time),
    )


def load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("authors_hyperglu", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file; against= takes the path of the authors' hyperglu.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


BUILDERS: dict[str, Callable[[Case], BuiltCase]] = {
    "hyperglu native": lambda case: build_hyper(case, "glu", "native"),
    "hyperglu chunked": lambda case: build_hyper(case, "glu", "chunked"),
    "hyperglu dense": lambda case: build_hyper(case, "glu", "dense"),
    "hypermlp native": lambda case: build_hyper(case, "relu", "native"),
    "hypermlp chunked": lambda case: build_hyper(case, "relu", "chunked"),
    "softmax sdpa 2 heads": lambda case: build_softmax(case, 2, fused=True),
    "softmax sdpa 12 heads": lambda case: build_softmax(case, 12, fused=True),
    "softmax naive": lambda case: build_softmax(case, 2, fused=False),
    "authors": build_authors,
}
BASELINE = "softmax sdpa 2 heads"


def build(case: Case) -> BuiltCase:
    """An implementation that BUILDERS has, or any mixer by name (build_named)."""
    torch.manual_seed(0)
    built = BUILDERS.get(case.name, build_named)(case)
    built.layer.to(getattr(torch, case.dtype))
    return built


def matched(case: Case) -> Case:
    """The same with as many parameters as softmax attention, or a note that says why not."""
    mixer = case.name.split()[0] if case.name in BUILDERS else case.name
    own.adopt([mixer])
    found = match("hyperglu" if mixer == "authors" else mixer, case.width, case.time)
    return replace(case, size=found.layer_size, note=found.note)


def reason_to_leave_out(case: Case) -> str | None:
    """Why a mixer does not take part at a shape; None if it does."""
    if case.name == "softmax sdpa 12 heads" and case.width % 12:
        return f"12 heads do not divide width {case.width}"
    if case.name == "authors" and case.against is None:
        return "needs against="
    if case.name == "authors" and case.dtype != "float32":
        return f"its reference is not computed in {case.dtype}"
    quadratic = {"hyperglu dense": 40, "softmax naive": 4}.get(case.name)  # score matrices alive at once
    if quadratic and quadratic * case.batch * 2 * case.time**2 * 4 > 2e9:
        return "its T × T matrices would need more than 2 GB"
    return None
