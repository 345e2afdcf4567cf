"""Softmax attention on torch's fused kernel, with every option of Table 1: the rival that every claim is measured against.

Letters: B batch, T time, S slots, C width, H heads, K and V widths of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.cache import Cache, CacheSpec
from hypermlp.checks import at_least_one, choose_from, divisible
from hypermlp.collectives import RowShare
from hypermlp.config import ROPE_BASE, TAPS, Init
from hypermlp.mixers import rotary
from hypermlp.mixers.base import Cut, Mixer, Tokens, is_split, visible_slots
from hypermlp.mixers.initial import init_weight
from hypermlp.mixers.modules import join_linears
from hypermlp.mixers.parts import CausalConv, RMSNorm
from hypermlp.ops import dispatch, pointwise
from hypermlp.ops.observer import ordinary, transform
from hypermlp.ops.types import by_document, compute_dtype


class AttentionInputs(NamedTuple):
    """What a layer computes from its input before it attends."""

    q: Tensor  # B T H K, rotated and gated
    k: Tensor  # B T H K, rotated
    v: Tensor  # B T H V
    gate_vo: Tensor | None  # B T H*V, before its activation


class SoftmaxAttention(Mixer):
    """Causal multi-head attention with rotary embedding, 4 C² parameters; its options mean what they mean in HyperGLU.

    Args:
        width: C, of inputs and outputs.
        n_head: heads.
        qk_rank, vo_rank: widths of q and k, and of v, over all heads; None: the layer's width.
        use_rope, rope_base, use_kv_conv, use_qk_gate, use_vo_gate: as in HyperGLUConfig.
        use_qk_norm: whether queries and keys are normalised in every head before they are rotated (Henry et al., 2020).
        init: how the convolutions begin.
    """

    splits_by_head = True
    counted_by_head = ("n_head", "qk_rank", "vo_rank")
    split_plan: ClassVar[Mapping[str, str]] = dict.fromkeys(("q", "k", "v", "gate_qk", "gate_vo"), "colwise") | {"o": "rowwise"}
    gives_weights = True

    def __init__(
        self,
        width: int,
        n_head: int = 2,
        *,
        qk_rank: int | None = None,
        vo_rank: int | None = None,
        use_rope: bool = True,
        rope_base: float = ROPE_BASE,
        use_kv_conv: bool = False,
        use_qk_gate: bool = False,
        use_vo_gate: bool = False,
        use_qk_norm: bool = False,
        init: Init = "paper",
    ) -> None:
        super().__init__()
        choose_from("init", init, get_args(Init))
        qk_rank = width if qk_rank is None else qk_rank
        vo_rank = width if vo_rank is None else vo_rank
        for name, rank in (("qk_rank", qk_rank), ("vo_rank", vo_rank)):
            at_least_one(name, rank)
        divisible("qk_rank", qk_rank, 2 * n_head if use_rope else n_head, f"{'2 * ' if use_rope else ''}n_head ({n_head})")
        divisible("vo_rank", vo_rank, n_head, f"n_head ({n_head})")
        self.width, self.n_head, self.qk_rank, self.vo_rank = width, n_head, qk_rank, vo_rank
        self.use_rope, self.rope_base = use_rope, rope_base
        self.q, self.k = nn.Linear(width, qk_rank, bias=False), nn.Linear(width, qk_rank, bias=False)
        self.v, self.o = nn.Linear(width, vo_rank, bias=False), nn.Linear(vo_rank, width, bias=False)
        self.conv_k = CausalConv(width, TAPS, init) if use_kv_conv else None
        self.conv_v = CausalConv(width, TAPS, init) if use_kv_conv else None
        self.gate_qk = nn.Linear(width, qk_rank) if use_qk_gate else None
        self.gate_vo = nn.Linear(width, vo_rank) if use_vo_gate else None
        self.norm_q = RMSNorm(qk_rank // n_head) if use_qk_norm else None
        self.norm_k = RMSNorm(qk_rank // n_head) if use_qk_norm else None
        for module in (m for m in self.modules() if isinstance(m, (nn.Linear, CausalConv))):
            if isinstance(module, CausalConv):
                module.reset_parameters()
                continue
            init_weight(module.weight)
            if module.bias is not None:
                nn.init.normal_(module.bias, 0, 0)  # zero, but drawn: a seed's weights stay what they were

    def mix(self, tokens: Tokens, cache: Cache | None) -> Tensor:
        impl = self._pointwise_impl(tokens.x)
        q, k, v, gate_vo = self.project(tokens, None if cache is None else cache.history(), impl)
        spans = tokens.spans if tokens.packed else None
        if cache is not None:
            if k.shape[2] != cache.slots["k"].shape[2]:
                raise ValueError(
                    f"this layer computes {k.shape[2]} heads here, and the cache is made for {cache.slots['k'].shape[2]}: "
                    "generate with use_cache=False"
                )
            slots, spans = cache.append({"k": k, "v": v}, tokens.x, tokens.counts())
            k, v = slots["k"].to(q.dtype), slots["v"].to(q.dtype)
        if tokens.weights is not None:
            w = tokens.weights.keep(attention_weights(q, k, spans), tokens, spans, cache)
            o = torch.einsum("bhts,bshv->bthv", w, v)
        elif tokens.packed:
            assert spans is not None
            o = attend_packed(q, k, v, spans)
        else:
            o = attend(q, k, v, spans)
        o = o.flatten(2)
        if gate_vo is not None:
            o = pointwise.gate(o, gate_vo, impl=impl)
        return self.o(o)

    def project(self, tokens: Tokens, history: Tensor | None, impl: str) -> AttentionInputs:
        """Queries, keys, values and gates; tokens, history and impl as in HyperGLU.project."""
        made = self._linears(tokens, history, impl)
        K, V = self.qk_rank // self.n_head, self.vo_rank // self.n_head
        q, k, v = (whole_heads(made[name], width) for name, width in (("q", K), ("k", K), ("v", V)))  # B T H K or V
        if not q.shape[2] == k.shape[2] == v.shape[2]:
            raise ValueError(
                f"q, k and v have {q.shape[2]}, {k.shape[2]} and {v.shape[2]} heads: split or prune all of them in the same way"
            )
        if self.norm_q is not None and self.norm_k is not None:
            q, k = self.norm_q(q), self.norm_k(k)
        if self.use_rope:
            angle = rotary.angles(tokens.position, q.shape[-1], self.rope_base).repeat_interleave(2, dim=-1)
            q, k = rotary.rotate(q, angle), rotary.rotate(k, angle)
        if "gate_qk" in made:
            q = pointwise.gate(q.flatten(2), made["gate_qk"], impl=impl).unflatten(-1, (-1, K))
        return AttentionInputs(q, k, v, made.get("gate_vo"))

    def cuts(self) -> dict[str, Cut]:
        columns = (f"{name}.{which}" for name in ("q", "k", "v", "gate_qk", "gate_vo") for which in ("weight", "bias"))
        return {**dict.fromkeys(columns, Cut()), "o.weight": Cut(dim=1)}

    def mix_rows(self, x: Tensor, rows: RowShare) -> Tensor:
        impl = self._pointwise_impl(x)
        before = 0 if self.conv_k is None else TAPS - 1
        two = rows.stacked(x, before)
        length = two.shape[1] - before
        place = F.pad(rows.places(length, x.device), (before, 0)).repeat_interleave(x.shape[0], 0)
        p = self.project(Tokens(two, place), None, impl)

        def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = rows.in_order(k), rows.in_order(v)
            return torch.cat([attend(q.chunk(2)[i], k[:, :end], v[:, :end]) for i, end in rows.each(length)])

        o = rows.forgetful(mix, *(t[:, before:] for t in (p.q, p.k, p.v))).flatten(2)
        if p.gate_vo is not None:
            o = pointwise.gate(o, p.gate_vo[:, before:], impl=impl)
        return rows.side_by_side(self.o(o))

    def _pointwise_impl(self, x: Tensor) -> str:
        """What computes convolutions and gates, chosen as in HyperGLU; a layer with neither needs no kernel."""
        if self.conv_k is None and self.gate_qk is None and self.gate_vo is None:
            return "dense"
        return dispatch.resolve("auto", x)

    def _linears(self, tokens: Tokens, history: Tensor | None, impl: str) -> dict[str, Tensor]:
        """q, k, v and the gates before their activation (B T …); all that is made from x itself in one product."""
        x = tokens.x
        parts = {"q": self.q, "gate_qk": self.gate_qk, "gate_vo": self.gate_vo}
        if self.conv_k is None:
            parts |= {"k": self.k, "v": self.v}
        used = {name: module for name, module in parts.items() if module is not None}
        joined = join_linears(x, list(used.values()))
        outputs = [m(x) for m in used.values()] if joined is None else joined.split([m.out_features for m in used.values()], -1)
        made = dict(zip(used, outputs, strict=True))
        if self.conv_k is not None and self.conv_v is not None:
            position = tokens.position if tokens.packed else None  # all other sequences begin at 0, or in the history
            x_k, x_v = pointwise.convs(x, self.conv_k(), self.conv_v(), position, history, impl=impl)
            made |= {"k": self.k(x_k), "v": self.v(x_v)}
        return made

    def _computed_heads(self) -> int:
        """Of this process: a tensor parallel plan leaves it some of the heads, and so the cache."""
        weight: Any = self.k._parameters.get("weight")
        if is_split(self.k):
            weight = weight.to_local()
        in_rows = weight is not None and weight.shape[1:] == (self.width,)  # else packed, or gathered before the layer runs
        return weight.shape[0] * self.n_head // self.qk_rank if in_rows else self.n_head

    def cache_spec(self) -> CacheSpec:
        heads = self._computed_heads()
        slots = {"k": (heads, self.qk_rank // self.n_head), "v": (heads, self.vo_rank // self.n_head)}
        return CacheSpec(slots=slots, taps=1 if self.conv_k is None else TAPS, width=self.width, rewind=32)


def whole_heads(x: Tensor, width: int) -> Tensor:
    """B T H*K → B T H K, for K = width and as many heads as there are: fewer where projections are split or pruned by heads."""
    if x.shape[-1] % width:
        raise ValueError(
            f"a projection gives {x.shape[-1]} numbers per token, and heads are {width} wide: split or prune it by whole heads"
        )
    return x.unflatten(-1, (-1, width))


def attend(q: Tensor, k: Tensor, v: Tensor, spans: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ / √K) v over the slots up to each row's own: q (B T H K), k (B S H K), v (B S H V) to o (B T H V)."""
    T, S, K, V = q.shape[1], k.shape[1], k.shape[-1], v.shape[-1]
    whole = False  # a branch, not a comparison's value: traced lengths would give a symbol, which the fused kernels refuse
    if T == S:  # nothing came before; the lengths are not compared with numbers, so that exported ones stay free
        whole = True
    visible = visible_slots(q, S, spans)[:, None] if spans is not None or (not whole and T > 1) else None
    # The fused kernels take one width alone. Zeros change nothing, and without the kernel there would be a T × S matrix.
    q, k, v = (F.pad(t, (0, max(K, V) - t.shape[-1])) if K != V else t for t in (q, k, v))
    with nullcontext() if transform() is None and ordinary(q) else plain_attention():
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=visible,
            is_causal=visible is None and whole,
            scale=K**-0.5,
        )  # B H T V
    return o[..., :V].transpose(1, 2)


def attention_weights(q: Tensor, k: Tensor, spans: Tensor | None = None) -> Tensor:
    """The softmax(q kᵀ / √K) of attend (B H T S), in plain steps."""
    scores = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
    visible = visible_slots(q, k.shape[1], spans)[:, None]
    scores = scores.to(compute_dtype(q.dtype)).masked_fill(~visible, float("-inf"))
    return scores.softmax(-1).to(q.dtype)


def plain_attention() -> AbstractContextManager[None]:
    """Attention in plain steps: fused kernels know no distributed tensors, and first derivatives in reverse mode only."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)


def attend_packed(q: Tensor, k: Tensor, v: Tensor, spans: Tensor) -> Tensor:
    """attend within each document of `spans`."""
    if torch.compiler.is_compiling() or spans.is_meta or not len(spans):  # the lengths are not known
        return attend(q, k, v, spans)
    return by_document(attend, spans, q, k, v)
