"""One token of each row in one call of the compiled code: through a layer, or through a whole language model.

What a call needs is laid out once (LayerCall, ModelCall). From then on a token fills in numbers and allocates nothing but its
result. Whoever keeps such a call keeps its tensors alive, and asks whether they still are what they were (Watch).

Letters as in ops/types.py; C width, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypermlp.ops.native.bindings import STRUCTURES, call, pointer, thread_pool, view
from hypermlp.ops.native.layer import dimensions, operator_arguments
from hypermlp.ops.parameters import LayerParameters, LayerShape, LinearWeights

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # of weights, as hm_linear has them
COMPUTED = (torch.float32, torch.bfloat16)  # of everything else


def linear(m: LinearWeights | None, n_out: int, n_in: int) -> ctypes.Structure:
    """hm_linear; the weight must be (n_out n_in)."""
    made = STRUCTURES["hm_linear"](n_out=n_out, n_in=n_in)
    if m is None:
        return made
    beside = next((t.dtype for t in (m.scale, m.bias) if t is not None), torch.float32)
    made.w, made.kind = pointer(m.weight, (n_out, n_in), m.weight.dtype), KINDS[m.weight.dtype]
    made.scale, made.bias = pointer(m.scale, (n_out,), beside), pointer(m.bias, (n_out,), beside)
    made.half = is_half(beside)
    return made


def is_half(dtype: torch.dtype) -> bool:
    if dtype not in COMPUTED:
        raise ValueError(f"decoding in one call reads float32 and bfloat16, and not {dtype}")
    return dtype is torch.bfloat16


class LayerCall:
    """hm_step_args for a layer: its parameters, and then the cache of a stream.

    Args:
        p: the parameters, in float32 or bfloat16; weights of linear layers may be codes.
        linears: the seven projections in the order of p, and the readout, with the scales of codes.
        shape: what is fixed about the layer.
    """

    def __init__(self, p: LayerParameters, linears: Sequence[LinearWeights | None], shape: LayerShape) -> None:
        assert p.q is not None
        assert p.v is not None
        W, H, G, K, V, rank1, rank2, L = dimensions(p, shape)
        mix, C, key_width, value_width = operator_arguments(p, shape), p.q.shape[1], G * K, H * V
        mix.T = 1
        rest = next((t.dtype for t in p.others if t is not None), torch.float32)
        factors1, factors2 = (G, L, rank1), (H, L, rank2)
        mix.A1, mix.B1, mix.diag1 = pointer(p.A1, factors1, rest), pointer(p.B1, factors1, rest), pointer(p.diag1, (G, L), rest)
        mix.A2, mix.B2, mix.diag2 = pointer(p.A2, factors2, rest), pointer(p.B2, factors2, rest), pointer(p.diag2, (H, L), rest)
        a = self.arguments = STRUCTURES["hm_step_args"](mix=mix, C=C, W=W, half_rest=is_half(rest))
        a.conv_k, a.conv_v = pointer(p.conv_k, (C, W), rest), pointer(p.conv_v, (C, W), rest)
        widths = (key_width, key_width, G * rank1, H * rank2, key_width, value_width, value_width)
        a.w[:] = [linear(m, n, C) for m, n in zip(linears[:7], widths, strict=True)] + [linear(linears[7], C, value_width)]
        self.mix = a.mix
        self.kept = p, linears  # what it points into

    def attach(self, k: Tensor, v: Tensor, inputs: Tensor) -> None:
        """The cache: k (B S G K), v (B S H V), and a ring of inputs (B keep C); float32 or bfloat16, all alike."""
        a, m, (B, S), dtype = self.arguments, self.mix, k.shape[:2], k.dtype
        m.B, m.S, m.n_spans, m.half = B, S, B, is_half(dtype)
        m.k, m.v = view(k, (B, S, m.G, m.K), dtype), view(v, (B, S, m.H, m.V), dtype)
        a.keep = inputs.shape[1]
        a.inputs = pointer(inputs, (B, a.keep, a.C if a.keep else inputs.shape[2]), dtype)
        a.inputs_b = a.keep * a.C

    def run(self, x: Tensor, spans: Tensor, tail: int) -> Tensor:
        """One token for each row, x (B 1 C); spans (B 5) as cache.reserve gives them, and the place of x among the inputs."""
        a, m = self.arguments, self.mix
        single = x.float().contiguous()
        y = torch.empty_like(single)
        m.spans, a.tail = pointer(spans, (m.B, 5), torch.int64), tail
        m.nthreads, m.parallel = torch.get_num_threads(), thread_pool()
        a.x, a.y = pointer(single, (m.B, 1, a.C)), pointer(y, (m.B, 1, a.C))
        call("hm_step", a)
        return y.to(x.dtype)


class Norm(NamedTuple):
    """An RMSNorm, or a LayerNorm, which is centred."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool

    def arguments(self, C: int) -> ctypes.Structure:
        dtype = torch.float32 if self.weight is None else self.weight.dtype
        return STRUCTURES["hm_norm"](
            pointer(self.weight, (C,), dtype), pointer(self.bias, (C,), dtype), self.eps, self.centred, is_half(dtype)
        )


class BlockParts(NamedTuple):
    """A block of a language model: a layer's call, norms and feed-forward."""

    mixer: LayerCall
    norm_mixer: Norm
    norm_ffn: Norm
    gate: LinearWeights | None
    up: LinearWeights
    down: LinearWeights


class ModelCall:
    """hm_model_args for a language model, and what it says of the caches of a batch."""

    def __init__(
        self, embedding: Tensor, positions: Tensor | None, blocks: Sequence[BlockParts], norm: Norm, head: LinearWeights
    ) -> None:
        V, C = embedding.shape
        dtype = embedding.dtype
        made = (STRUCTURES["hm_block"] * len(blocks))()
        for one, parts in zip(made, blocks, strict=True):
            one.mixer = parts.mixer.arguments
            one.norm_mixer, one.norm_ffn = parts.norm_mixer.arguments(C), parts.norm_ffn.arguments(C)
            inner = len(parts.up.weight)
            one.gate, one.up, one.down = linear(parts.gate, inner, C), linear(parts.up, inner, C), linear(parts.down, C, inner)
            parts.mixer.arguments, parts.mixer.mix = one.mixer, one.mixer.mix  # attached where the model reads it
        a = self.arguments = STRUCTURES["hm_model_args"](C=C, V=V, depth=len(blocks), half=is_half(dtype))
        a.embedding = pointer(embedding, (V, C), dtype)
        if positions is not None:
            a.positions, a.n_positions = pointer(positions, (len(positions), C), dtype), len(positions)
        a.norm, a.head, a.blocks = norm.arguments(C), linear(head, V, C), ctypes.addressof(made)
        self.layers = [parts.mixer for parts in blocks]
        self.kept: Any = (made, embedding, positions, blocks, norm, head)
        self.batch = -1
        self.spans = self.places = torch.empty(0, dtype=torch.int64, device="cpu")

    def resize(self, batch: int) -> None:
        """Room for the spans and places of so many rows."""
        self.batch = self.arguments.B = batch
        self.spans = torch.zeros(len(self.layers), batch, 5, dtype=torch.int64, device="cpu")
        self.places = torch.zeros(batch, dtype=torch.int64, device="cpu")
        self.spans_view, self.places_view = self.spans.numpy(), self.places.numpy()
        self.arguments.places = pointer(self.places, (batch,), torch.int64)
        for layer, spans in zip(self.layers, self.spans, strict=True):
            layer.mix.spans = pointer(spans, (batch, 5), torch.int64)

    def run(self, tokens: Tensor) -> Tensor:
        """Logits (B 1 V) of tokens (B 1) in float32; IndexError where one is outside the vocabulary."""
        a = self.arguments
        logits = torch.empty(a.B, 1, a.V, dtype=torch.float32, device="cpu")
        a.tokens, a.logits = pointer(tokens, (a.B, 1), torch.int64), pointer(logits, (a.B, 1, a.V))
        a.nthreads, a.parallel = torch.get_num_threads(), thread_pool()
        call("hm_model", a)
        return logits
