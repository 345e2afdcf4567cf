"""HyperGLU and HyperMLP: project, mix along features and sequence, read out.

Letters: B batch, T time, C width, H heads, G routing heads (2H for GLU), K and V widths of a head, R mixing rank, L block_size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp import ops
from hypermlp.cache import Cache, CacheSpec
from hypermlp.config import HyperGLUConfig, Init
from hypermlp.mixers import rotary
from hypermlp.mixers.authors import authors_name, from_authors, to_authors
from hypermlp.mixers.base import Mixer, Tokens, as_bounds, check_input, gather_tokens
from hypermlp.mixers.parts import INIT_STD, CausalConv, decay_bank
from hypermlp.mixers.projections import apply_linears, is_long, is_plain, is_plain_linear, join_linears, watched
from hypermlp.ops import layer, native, pointwise


class SequenceMixing(nn.Module):
    """Parameters of R(x_t) = D + A Diag(s_t) Bᵀ for all heads; lag ℓ is at index L−1−ℓ."""

    def __init__(
        self,
        width: int,
        heads: int,
        length: int,
        rank: int,
        *,
        per_head: bool,
        diag: bool,
        shortcut: bool,
        init_std: float,
    ) -> None:
        super().__init__()
        sets = heads if per_head else 1
        self.heads, self.shortcut, self.init_std = heads, shortcut, init_std
        self.A = nn.Parameter(torch.empty(sets, length, rank))
        self.B = nn.Parameter(torch.empty(sets, length, rank))
        self.diag = nn.Parameter(torch.empty(sets, length)) if diag else None
        self.control = nn.Linear(width, heads * rank)

    @torch.no_grad()
    def reset_parameters(self, init: Init, generator: torch.Generator | None = None) -> None:
        """A and B from N(0, init_std²), the diagonal zero; for "decays", A is a bank of decays, the same in all heads."""
        if init == "paper":
            self.A.normal_(0, self.init_std, generator=generator)
        else:
            self.A.copy_(decay_bank(*self.A.shape[1:]))
        self.B.normal_(0, self.init_std, generator=generator)
        if self.diag is not None:
            self.diag.zero_()

    def operator(self, control: Tensor) -> ops.Mixing:
        """R for controls s (B T H*R), after their activation."""
        return self(control)

    def forward(self, control: Tensor) -> ops.Mixing:
        """operator, in a forward so that hooks which bring offloaded parameters run."""
        A: Tensor = self.A
        B: Tensor = self.B
        diag: Tensor | None = self.diag
        if A.shape[0] != self.heads:
            A, B = A.expand(self.heads, -1, -1), B.expand(self.heads, -1, -1)
            diag = None if diag is None else diag.expand(self.heads, -1)
        return ops.Mixing(A, B, control.unflatten(-1, (self.heads, -1)), diag, self.shortcut)


class Projected(NamedTuple):
    """What a layer computes from its input before it mixes."""

    q: Tensor  # B T G K, rotated and gated
    k: Tensor  # B T G K, rotated
    v: Tensor  # B T H V
    gate_vo: Tensor | None  # B T H*V, before its activation
    routing: ops.Mixing | None
    reading: ops.Mixing | None
    in_nodes: bool = False  # ops/layer.py made it, and may make the readout


class HyperGLU(Mixer):
    """The paper's layer, from x (B T C) to y (B T C); config.attn_kind="relu" makes it HyperMLP.

    config: a HyperGLUConfig (help(HyperGLUConfig) explains its options), or a dictionary of its fields; or give the fields by
    name. The projection back to the residual stream is `o`, of which code that scales such projections at the beginning (as
    GPT-2 does, by 1 / √(2 layers)) finds the mark NANOGPT_SCALE_INIT.

    >>> layer = HyperGLU(n_embd=64, n_head=2, block_size=128)
    >>> layer(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])
    """

    def __init__(self, config: HyperGLUConfig | Mapping[str, Any] | None = None, **fields: Any) -> None:
        super().__init__()
        config = HyperGLUConfig.of(config, **fields)
        assert config.qk_rank is not None
        assert config.vo_rank is not None
        self.config = config
        self.width = C = config.n_embd
        self.q = nn.Linear(C, config.qk_rank, bias=config.bias)
        self.k = nn.Linear(C, config.qk_rank, bias=config.bias)
        self.v = nn.Linear(C, config.vo_rank, bias=config.bias)
        self.o = nn.Linear(config.vo_rank, C, bias=config.bias)
        self.o.NANOGPT_SCALE_INIT = 1  # type: ignore[assignment]  # a mark, as nanoGPT-like initialisers look for
        self.conv_k = CausalConv(C, config.conv_kernel_size) if config.use_kv_conv else None
        self.conv_v = CausalConv(C, config.conv_kernel_size) if config.use_kv_conv else None
        self.gate_qk = nn.Linear(C, config.qk_rank) if config.use_qk_gate else None
        self.gate_vo = nn.Linear(C, config.vo_rank) if config.use_vo_gate else None
        self.op1 = self._sequence_mixing("op1", config.routing_heads) if config.use_op1 else None
        self.op2 = self._sequence_mixing("op2", config.n_head) if config.use_op2 else None
        self.spec = ops.Spec(
            kind=config.attn_kind,
            norm=config.attn_norm,
            aligner=config.aligner_kind,
            causal=config.do_masking,
            block_size=config.block_size,
            eps=config.norm_eps,
        )
        self.reset_parameters()

    def _sequence_mixing(self, op: str, heads: int) -> SequenceMixing:
        def get(name: str) -> object:
            return getattr(self.config, f"{op}_{name}")

        return SequenceMixing(
            self.config.n_embd,
            heads,
            self.config.block_size,
            getattr(self.config, f"{op}_rank"),
            per_head=bool(get("per_head")),
            diag=bool(get("use_diag")),
            shortcut=bool(get("shortcut")),
            init_std=getattr(self.config, f"{op}_init_std"),
        )

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Weights from N(0, 0.02²), biases and diagonals zero; convolutions and low-rank factors as config.init says.

        "paper" is appendix L, as released.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, INIT_STD, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, (CausalConv, SequenceMixing)):
                module.reset_parameters(self.config.init, generator)

    def forward(
        self,
        x: Tensor,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        cache: Cache | None = None,
        impl: str | None = None,
        chunk_T: int | None = None,
    ) -> Tensor:
        """y (B T C) for x (B T C); row t depends on the last block_size tokens up to t.

        Args:
            x: the input (batch, time, n_embd), in the type of the parameters or under torch.autocast.
            attention_mask: (batch, time), nonzero at real tokens and 0 at padding, which may lie anywhere. Real tokens get
                what they would get without the padding; y is zero at padding. Not an additive mask.
            cu_seqlens: borders of the documents packed into a batch of one row, [0, …, T]; each is computed as if alone.
            cache: made by new_cache. x are then the tokens that follow those the cache has seen; it is updated in place, and
                no gradients are recorded.
            impl: "auto", "dense", "chunked", "native" or "triton", instead of config.impl_default.
            chunk_T: rows of a strip for "chunked", instead of config.chunk_T.

        torch.func transforms and forward-mode differentiation take the dense implementation, whatever impl says; so do second
        derivatives (create_graph=True).
        """
        cu_seqlens = as_bounds(cu_seqlens, x)
        check_input(x, self.width, next(self.parameters()), attention_mask, cu_seqlens, cache)
        chunk = self.config.chunk_T if chunk_T is None else chunk_T
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk_T ({chunk}) must be a whole number of at least 1, or None")
        impl = ops.resolve(impl or self.config.impl_default, x, self.spec.aligner)
        if cache is None:
            y = self._run_whole(x, impl) if attention_mask is None and cu_seqlens is None else None
            if y is not None:
                return y
            tokens = gather_tokens(x, attention_mask, cu_seqlens)
            return tokens.restore(self.mix(tokens, None, impl, chunk))
        cache.check(x, self.cache_spec())
        if impl == "native" and x.shape[1] == 1 and attention_mask is None:
            y = self._native_step(x, cache)
            if y is not None:
                return y
        with torch.no_grad():
            tokens = gather_tokens(x, attention_mask, None, cache)
            return tokens.restore(self.mix(tokens, cache, impl, chunk))

    def mix(self, tokens: Tokens, cache: Cache | None, impl: str = "auto", chunk: int | None = None) -> Tensor:
        p = self.project(tokens, None if cache is None else cache.history(), impl)
        k, v = p.k, p.v
        if cache is not None:
            slots, spans = cache.append({"k": k, "v": v}, tokens.x, tokens.counts())
            k, v = slots["k"], slots["v"]
        else:
            # A causal row never sees the zeros behind its sequence, so padding needs spans only where lengths matter.
            spans = tokens.spans if tokens.packed or self.spec.aligner == "identity" else None
        operands = (p.q, k, v, p.routing, p.reading, self.spec, spans, chunk)
        drops = self.config.dropout and self.training
        if p.in_nodes and p.gate_vo is not None and not drops:
            return layer.mix_and_read(impl, *operands, gate=p.gate_vo, weight=self.o.weight, bias=self.o.bias)
        o = self._gated(ops.compute(impl, *operands).flatten(2), p.gate_vo, impl)
        if self.config.dropout:
            o = F.dropout(o, self.config.dropout, self.training)
        (y,) = apply_linears([(o, self.o)], impl)
        return y

    def _run_whole(self, x: Tensor, impl: str) -> Tensor | None:
        """y in one call of the native kernel, for plain sequences of few tokens; None where the layer is not the usual one."""
        if impl != "native" or not self._in_nodes(x, impl):
            return None
        if x.shape[0] * x.shape[1] > native.MOST_TOKENS:  # not asked before: a compiled graph is for any length
            return None
        c, op1, op2 = self.config, self.op1, self.op2
        drops = c.dropout and self.training
        if self.gate_vo is None or drops or not (c.op1_per_head and c.op2_per_head):
            return None
        assert op1 is not None
        assert op2 is not None
        if not (is_plain(op1, SequenceMixing) and is_plain(op2, SequenceMixing)):
            return None
        mixings = (op1.A, op1.B, op1.diag, op2.A, op2.B, op2.diag)
        parameters = (*self._weights(), *mixings, self.o.weight, self.o.bias)
        if not native.fits(x, parameters[:7]) or not native.is_plain(x, *parameters):
            return None
        if not all(t is None or t.is_contiguous() for t in parameters):
            return None
        form = native.Form(self.spec, c.n_head, c.routing_heads, op1.shortcut, op2.shortcut)
        return layer.run_whole(x, parameters, form)

    def _native_step(self, x: Tensor, cache: Cache) -> Tensor | None:
        """One token for each row in one call of the native kernel; None where something about the layer is not plain."""
        if watched(x) or not x.shape[0] or x.stride(2) != 1 or not native.is_plain(x, cache.inputs, *cache.slots.values()):
            return None
        parameters = self._step_parameters()
        arguments = None if parameters is None else parameters.arguments()
        if arguments is None:
            return None
        ones = [1] * x.shape[0]
        cache.claim(ones)
        spans = [[b, 0, 1, begin, end] for b, (begin, end) in enumerate(zip(cache.begin, cache.end, strict=True))]
        slots, history = cache.slots, cache.history()
        y = native.step(x, slots["k"], slots["v"], torch.tensor(spans, device="cpu"), history, arguments, self.spec)
        cache.remember(x.detach(), ones)
        return y

    def _step_parameters(self) -> native.StepParameters | None:
        controls = [None if op is None else op.control for op in (self.op1, self.op2)]
        linears = [self.q, self.k, self.v, self.gate_qk, self.gate_vo, *controls, self.o]
        plain = all(m is None or is_plain_linear(m) for m in linears)
        shared = any(op is not None and op.A.shape[0] != op.heads for op in (self.op1, self.op2))
        drops = self.training and self.config.dropout > 0
        if not plain or shared or drops or self.config.use_rope or self.config.gate_act != "sigmoid":
            return None
        convs = None if self.conv_k is None or self.conv_v is None else (self.conv_k.weight, self.conv_v.weight)
        mixings = (None if op is None else (op.A, op.B, op.diag, op.shortcut) for op in (self.op1, self.op2))
        pairs = (None if m is None else (m.weight, m.bias) for m in linears)
        return native.StepParameters._make((*pairs, convs, *mixings))

    def cache_spec(self) -> CacheSpec:
        c = self.config
        if self.spec.aligner == "identity":
            raise ValueError(
                'the identity layout has no cache: its parameters shift whenever the input grows (use aligner_kind="offset")'
            )
        assert c.qk_rank is not None
        assert c.vo_rank is not None
        return CacheSpec(
            slots={"k": (c.routing_heads, c.qk_rank // c.routing_heads), "v": (c.n_head, c.vo_rank // c.n_head)},
            window=c.block_size,
            taps=c.conv_kernel_size if c.use_kv_conv else 1,
            width=self.width,
            rewind=max(32, c.block_size if c.block_size <= 128 else 0),
        )

    def project(self, tokens: Tokens, history: Tensor | None, impl: str) -> Projected:
        """Queries, keys, values, gates and controls; `history` (B W−1 C) are the inputs before them, for the convolutions."""
        x, G, H = tokens.x, self.config.routing_heads, self.config.n_head
        position = tokens.position if tokens.packed else None  # all other sequences begin at 0, or in the history
        if self._in_nodes(x, impl):
            return self._arrange(layer.project(x, self._weights(), position, history, use=pointwise.kernels_for(impl, x)))
        x_k = x_v = x
        if self.conv_k is not None and self.conv_v is not None:
            x_k, x_v = pointwise.convs(x, self.conv_k(), self.conv_v(), position, history, impl=impl)
        made = self._joined(x, impl)
        if made is None:
            made = self._separate(x, impl)
        k, v = apply_linears([(x_k, self.k), (x_v, self.v)], impl)
        k = k.unflatten(-1, (G, -1))
        q = made["q"].unflatten(-1, (G, -1))
        if self.config.use_rope:
            # As in the released code, coordinate e has frequency e mod K/2, although it pairs with e ± 1.
            angle = rotary.angles(tokens.position, k.shape[-1], self.config.rope_base)
            angle = torch.cat([angle, angle], dim=-1)
            q, k = rotary.rotate(q, angle), rotary.rotate(k, angle)
        if "gate_qk" in made:
            q = self._gated(q.flatten(2), made["gate_qk"], impl).unflatten(-1, (G, -1))
        return Projected(
            q=q,
            k=k,
            v=v.unflatten(-1, (H, -1)),
            gate_vo=made.get("gate_vo"),
            routing=None if self.op1 is None else self.op1.operator(made["s1"]),
            reading=None if self.op2 is None else self.op2.operator(made["s2"]),
        )

    def _in_nodes(self, x: Tensor, impl: str) -> bool:
        """Whether projections and readout may be a node of autograd each: the usual layer, eager, nobody listening."""
        c = self.config
        if self.op1 is None or self.op2 is None or self.gate_qk is None or c.use_rope or c.gate_act != "sigmoid":
            return False
        if impl == "dense" or watched(x) or not (torch.is_grad_enabled() or is_long(x)):
            return False
        modules = (self.q, self.k, self.v, self.o, self.gate_qk, self.gate_vo, self.op1.control, self.op2.control)
        convs = (self.conv_k, self.conv_v)
        return all(m is None or is_plain(m, nn.Linear) for m in modules) and all(
            m is None or is_plain(m, CausalConv) for m in convs
        )

    def _weights(self) -> layer.Projections:
        assert self.op1 is not None
        assert self.op2 is not None
        linears = (self.q, self.gate_qk, self.op1.control, self.op2.control, self.k, self.v, self.gate_vo)
        weights = (None if m is None else m.weight for m in linears)
        biases = (None if m is None else m.bias for m in linears)
        convs = (None if m is None else m.weight for m in (self.conv_k, self.conv_v))
        return layer.Projections._make((*weights, *biases, *convs))

    def _arrange(self, made: layer.Projected) -> Projected:
        assert self.op1 is not None
        assert self.op2 is not None
        G, H = self.config.routing_heads, self.config.n_head
        return Projected(
            q=made.q.unflatten(-1, (G, -1)),
            k=made.k.unflatten(-1, (G, -1)),
            v=made.v.unflatten(-1, (H, -1)),
            gate_vo=made.gate_vo,
            routing=self.op1.operator(made.s1),
            reading=self.op2.operator(made.s2),
            in_nodes=True,
        )

    def _joined(self, x: Tensor, impl: str) -> dict[str, Tensor] | None:
        """q (gated), s1, s2 and the readout gate of the usual layer on a long input, in two products and a pass; else None."""
        c = self.config
        if self.op1 is None or self.op2 is None or self.gate_qk is None or c.use_rope or c.gate_act != "sigmoid":
            return None
        modules = (self.q, self.gate_qk, self.op1.control, self.op2.control)
        joined = join_linears(x, modules)
        if joined is None:
            return None
        q, s1, s2 = pointwise.gates(joined, [m.out_features for m in modules], impl=impl)
        return {"q": q, "s1": s1, "s2": s2} | ({} if self.gate_vo is None else {"gate_vo": self.gate_vo(x)})

    def _separate(self, x: Tensor, impl: str) -> dict[str, Tensor]:
        """The same for any layer and input, q not yet gated."""
        control1, control2 = (None if op is None else op.control for op in (self.op1, self.op2))
        parts = {"q": self.q, "gate_qk": self.gate_qk, "gate_vo": self.gate_vo, "s1": control1, "s2": control2}
        used = {name: module for name, module in parts.items() if module is not None}
        made = dict(zip(used, apply_linears([(x, module) for module in used.values()], impl), strict=True))
        if self.config.gate_act == "sigmoid":
            made |= {name: torch.sigmoid(made[name]) for name in ("s1", "s2") if name in made}
        return made

    def _gated(self, x: Tensor, gate: Tensor | None, impl: str) -> Tensor:
        if gate is None:
            return x
        return pointwise.gate(x, gate, impl=impl) if self.config.gate_act == "sigmoid" else x * gate

    def authors_state_dict(self) -> dict[str, Tensor]:
        """The parameters under the names and in the shapes of the authors' released code."""
        return {theirs: to_authors(theirs, value, self.config) for theirs, value in self._by_authors_name().items()}

    def load_authors_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load parameters saved by the authors' code; nothing is changed unless all of them fit."""
        wanted = self._by_authors_name()
        missing, unknown = sorted(set(wanted) - set(state)), sorted(set(state) - set(wanted))
        if missing or unknown:
            raise ValueError(
                f"the state does not fit this configuration: missing {missing}, unknown {unknown}; "
                "the configuration must have the options it was trained with"
            )
        loaded = {name: from_authors(name, state[name], wanted[name]) for name in wanted}
        with torch.no_grad():
            for name, value in loaded.items():
                wanted[name].copy_(value)

    def _by_authors_name(self) -> dict[str, nn.Parameter]:
        return {authors_name(name): value for name, value in self.named_parameters()}

    def extra_repr(self) -> str:
        c = self.config
        return f"{c.attn_kind}, n_embd={c.n_embd}, n_head={c.n_head}, block_size={c.block_size}, qk_rank={c.qk_rank}"


class HyperMLP(HyperGLU):
    """The same layer with the ReLU activation, attn_kind="relu"."""

    def __init__(self, config: HyperGLUConfig | Mapping[str, Any] | None = None, **fields: Any) -> None:
        super().__init__(HyperGLUConfig.of(config, **{**fields, "attn_kind": "relu"}))
