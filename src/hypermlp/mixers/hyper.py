"""HyperGLU and HyperMLP: project, mix along features and sequence, read out.

Letters: B batch, T time, C width, H heads, G routing heads (2H for GLU), K and V widths of a head, R mixing rank, L block_size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp import ops
from hypermlp.cache import Cache, CacheSpec
from hypermlp.checks import divisible
from hypermlp.collectives import RowShare
from hypermlp.config import INIT_STD, HyperGLUConfig
from hypermlp.mixers import fast, registers, rotary
from hypermlp.mixers.authors import authors_name, from_authors, to_authors
from hypermlp.mixers.base import Cut, Mixer, Tokens
from hypermlp.mixers.initial import init_weight
from hypermlp.mixers.int8 import weights_of
from hypermlp.mixers.lora import AdaptedLinear
from hypermlp.mixers.modules import known
from hypermlp.mixers.parts import CausalConv, decay_bank, heads, whole
from hypermlp.mixers.route import BEFORE, FLOW, INSIDE, Route, choose_route
from hypermlp.ops import dispatch, pointwise
from hypermlp.ops.parameters import LayerParameters, LayerShape


@known
class SequenceMixing(nn.Module):
    """Parameters of R(x_t) = D + A Diag(s_t) Bᵀ for all heads; lag ℓ is at index L−1−ℓ."""

    def __init__(self, config: HyperGLUConfig, op: Literal["op1", "op2"], heads: int) -> None:
        super().__init__()
        options = {name.removeprefix(f"{op}_"): value for name, value in config.to_dict().items()}
        sets, L, R = heads if options["per_head"] else 1, config.lags, options["rank"]
        self.heads, self.shortcut, self.init_std, self.init = heads, options["shortcut"], options["init_std"], config.init
        self.A, self.B = nn.Parameter(torch.empty(sets, L, R)), nn.Parameter(torch.empty(sets, L, R))
        self.diag = nn.Parameter(torch.empty(sets, L)) if options["use_diag"] else None
        self.control = nn.Linear(config.n_embd, heads * R)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """A and B from N(0, init_std²), the diagonal zero; for "decays", A is a bank of decays, the same in all heads."""
        if self.init == "paper":
            self.A.normal_(0, self.init_std, generator=generator)
        else:
            self.A.copy_(decay_bank(*self.A.shape[1:]))
        self.B.normal_(0, self.init_std, generator=generator)
        if self.diag is not None:
            self.diag.zero_()

    def forward(self, given: Tensor, activate: Callable[[Tensor], Tensor] | None = None) -> ops.Mixing:
        """R for inputs x (B T C) and the activation of their controls, or, without one, for activated controls s (B T H*R).

        A forward, so that hooks which bring offloaded parameters run, and whatever wraps this module is called.
        """
        control = given if activate is None else activate(self.control(given))
        A: Tensor = self.A
        B: Tensor = self.B
        diag: Tensor | None = self.diag
        if A.shape[0] != self.heads:
            A, B = A.expand(self.heads, -1, -1), B.expand(self.heads, -1, -1)
            diag = None if diag is None else diag.expand(self.heads, -1)
        return ops.Mixing(A, B, heads(control, self.heads, A.shape[2]), diag, self.shortcut)


class Projected(NamedTuple):
    """What a layer computes from its input before it mixes."""

    q: Tensor  # B T G K, rotated and gated
    k: Tensor  # B T G K, rotated
    v: Tensor  # B T H V
    gate_vo: Tensor | None  # B T H*V, before its activation
    routing: ops.Mixing | None
    reading: ops.Mixing | None


class HyperGLU(Mixer):
    """The paper's layer, from x (B T C) to y (B T C); config.attn_kind="relu" makes it HyperMLP.

    The projection back to the residual stream is `o`, of which code that scales such projections at the beginning (as GPT-2
    does, by 1 / √(2 layers)) finds the mark NANOGPT_SCALE_INIT.

    Args:
        config: a HyperGLUConfig (help(HyperGLUConfig) explains its options), or a dictionary of its fields.
        fields: the options by name, instead of a configuration or to change some of it.

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
        self.n_head = config.n_head
        self.gives_weights = not config.registers  # which are no tokens
        self.q = nn.Linear(C, config.qk_rank, bias=config.bias)
        self.k = nn.Linear(C, config.qk_rank, bias=config.bias)
        self.v = nn.Linear(C, config.vo_rank, bias=config.bias)
        self.o = nn.Linear(config.vo_rank, C, bias=config.bias)
        self.o.NANOGPT_SCALE_INIT = 1  # type: ignore[assignment]  # a mark, as nanoGPT-like initialisers look for
        self.conv_k = CausalConv(C, config.conv_kernel_size, config.init) if config.use_kv_conv else None
        self.conv_v = CausalConv(C, config.conv_kernel_size, config.init) if config.use_kv_conv else None
        self.gate_qk = nn.Linear(C, config.qk_rank) if config.use_qk_gate else None
        self.gate_vo = nn.Linear(C, config.vo_rank) if config.use_vo_gate else None
        self.registers = nn.Parameter(torch.empty(config.registers, C)) if config.registers else None
        self.op1 = SequenceMixing(config, "op1", config.routing_heads) if config.use_op1 else None
        self.op2 = SequenceMixing(config, "op2", config.n_head) if config.use_op2 else None
        self.spec = ops.Spec(
            kind=config.attn_kind,
            norm=config.attn_norm,
            aligner=config.aligner_kind,
            causal=config.do_masking,
            block_size=config.lags,
            eps=config.norm_eps,
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Weights from N(0, 0.02²) or at another scale (begin_at), biases and diagonals zero; convolutions and factors as
        config.init says.

        "paper" is appendix L, as released.

        Args:
            generator: of the random numbers; None: torch's own.
        """
        if generator is None and any(hasattr(p, "placements") for p in self.parameters()):  # divided between processes
            super().reset_parameters()
            return
        if self.registers is not None:
            self.registers.normal_(0, INIT_STD, generator=generator)
        for module in self.modules():
            if isinstance(module, AdaptedLinear):
                module.reset_adapter(generator)
            if isinstance(module, nn.Linear):
                init_weight(module.weight, self.init_scale, self.width, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, (CausalConv, SequenceMixing)):
                module.reset_parameters(generator)

    def mix(self, tokens: Tokens, cache: Cache | None, impl: str | None = None, chunk_T: int | None = None) -> Tensor:
        """y (B T C) for tokens.x (B T C), by the route that suits the call.

        Args:
            tokens: the input, prepared.
            cache: as in forward.
            impl: "auto", "dense", "chunked", "native" or "triton", instead of config.impl_default.
            chunk_T: rows of a strip for "chunked", instead of config.chunk_T.

        torch.func transforms and forward-mode differentiation take the dense implementation, whatever impl says; so do second
        derivatives (create_graph=True).
        """
        chunk = self.config.chunk_T if chunk_T is None else chunk_T
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk_T ({chunk}) must be a whole number of at least 1, or None")
        route = choose_route(self, tokens, cache, impl if tokens.weights is None else "dense")
        if route.kind != "modules":
            return fast.RUN[route.kind](self, tokens, cache, route.impl, chunk)
        p = self.project(tokens, None if cache is None else cache.history(), route.impl)
        call = self.arrange(tokens, cache, p.q, p.k, p.v, p.routing, p.reading, chunk)
        keep = None if tokens.weights is None else partial(tokens.weights.keep, tokens=tokens, spans=call.spans, cache=cache)
        o = dispatch.compute(route.impl, call, keep)
        return self.read_out(o, p.gate_vo, route.impl)

    def explain(self, x: Tensor, *, cache: Cache | None = None, impl: str | None = None, **given: Any) -> Route:
        """Which way a call with these arguments takes through the layer, and why; nothing is computed.

        Args:
            x, cache, impl: as in forward.
            given: attention_mask or cu_seqlens, as in forward.

        >>> layer = HyperGLU(n_embd=64, n_head=2, block_size=128)
        >>> layer.explain(torch.randn(2, 100, 64), impl="dense").kind
        'modules'
        """
        return choose_route(self, self.prepare(x, cache=cache, **given), cache, impl)

    def project(self, tokens: Tokens, history: Tensor | None, impl: str) -> Projected:
        """Queries, keys, values, gates and controls of `tokens`.

        Args:
            tokens: the input, prepared.
            history: the inputs before them (B W−1 C), for the convolutions; None: nothing came before.
            impl: what computes convolutions and gates, as route.impl names it.
        """
        x, G, H = tokens.x, self.config.routing_heads, self.config.n_head
        x_k = x_v = x
        if self.conv_k is not None and self.conv_v is not None:
            x_k, x_v = pointwise.convs(x, self.conv_k(), self.conv_v(), tokens.document_position, history, impl=impl)
        K, V = self.config.head_key_width, self.config.head_value_width
        q, k = heads(self.q(x), G, K), heads(self.k(x_k), G, K)
        if self.config.use_rope:
            # As in the released code, coordinate e has frequency e mod K/2, although it pairs with e ± 1.
            angle = rotary.angles(tokens.position, k.shape[-1], self.config.rope_base)
            angle = torch.cat([angle, angle], dim=-1)
            q, k = rotary.rotate(q, angle), rotary.rotate(k, angle)
        if self.gate_qk is not None:
            q = self._gated(q.flatten(2), whole(self.gate_qk(x), G * K), impl).unflatten(-1, (G, K))
        return Projected(
            q=q,
            k=k,
            v=heads(self.v(x_v), H, V),
            gate_vo=None if self.gate_vo is None else whole(self.gate_vo(x), H * V),
            routing=None if self.op1 is None else self.op1(x, self._activated),
            reading=None if self.op2 is None else self.op2(x, self._activated),
        )

    def arrange(
        self,
        tokens: Tokens,
        cache: Cache | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        routing: ops.Mixing | None,
        reading: ops.Mixing | None,
        chunk: int | None,
    ) -> ops.MixCall:
        """The operator's call: which slots exist, and those that a cache holds already.

        Args:
            tokens, cache, chunk: as in mix.
            q, k, v, routing, reading: of the tokens, as in Projected.
        """
        # A causal row never sees the zeros behind its sequence, so padding needs spans only where lengths matter.
        spans = tokens.spans if tokens.packed or self.spec.aligner == "identity" else None
        if self.registers is not None:
            k, v, spans = registers.join(*self.register_slots(), tokens, cache, k, v)
        elif cache is not None:
            slots, spans = cache.append({"k": k, "v": v}, tokens.x, tokens.counts(), ring=True)
            k, v = slots["k"], slots["v"]
        return ops.MixCall(q, k, v, routing, reading, self.spec, spans, chunk)

    def register_slots(self) -> tuple[Tensor, Tensor]:
        """k (1 n G K) and v (1 n H V) of the registers, the oldest first; no convolution reaches them."""
        assert self.registers is not None
        x, G, H = self.registers.flip(0)[None], self.config.routing_heads, self.config.n_head
        k, v = self.k(x).unflatten(-1, (G, -1)), self.v(x).unflatten(-1, (H, -1))
        if self.config.use_rope:
            angle = rotary.angles(torch.arange(-x.shape[1], 0, device=x.device)[None], k.shape[-1], self.config.rope_base)
            k = rotary.rotate(k, torch.cat([angle, angle], dim=-1))
        return k, v

    def read_out(self, o: Tensor, gate: Tensor | None, impl: str) -> Tensor:
        """y (B T C) of the operator's o (B T H V) and the gate m2 before its activation; impl as in project."""
        o = o.flatten(2)
        if gate is not None:
            o = self._gated(o, gate, impl)
        if self.config.dropout:
            o = F.dropout(o, self.config.dropout, self.training)
        return self.o(o)

    def _activated(self, gate: Tensor) -> Tensor:
        return torch.sigmoid(gate) if self.config.gate_act == "sigmoid" else gate

    def _gated(self, x: Tensor, gate: Tensor, impl: str) -> Tensor:
        return pointwise.gate(x, gate, impl=impl) if self.config.gate_act == "sigmoid" else x * gate

    def linears(self) -> tuple[nn.Module | None, ...]:
        """The seven projections in the order of LayerParameters, and the readout."""
        controls = (None if op is None else op.control for op in (self.op1, self.op2))
        return self.q, self.gate_qk, *controls, self.k, self.v, self.gate_vo, self.o

    def tensors(self) -> LayerParameters:
        """All parameters by name, for code that reads them itself; codes of 8 bits as they are."""
        weights, _, biases = zip(*(weights_of(m) or (None,) * 3 for m in self.linears()), strict=True)
        convs = (None if m is None else m.weight for m in (self.conv_k, self.conv_v))
        mixings = (t for op in (self.op1, self.op2) for t in ((None,) * 3 if op is None else (op.A, op.B, op.diag)))
        return LayerParameters._make((*weights[:7], *biases[:7], *convs, *mixings, weights[7], biases[7]))

    def shape(self) -> LayerShape:
        """What is fixed about the layer beside its parameters."""
        shortcuts = (op is not None and op.shortcut for op in (self.op1, self.op2))
        return LayerShape(self.spec, self.config.n_head, self.config.routing_heads, *shortcuts)

    def cache_spec(self) -> CacheSpec:
        c = self.config
        if self.spec.aligner == "identity":
            raise ValueError(
                "the identity layout has no cache: its parameters shift whenever the input grows "
                '(use aligner_kind="offset", or generate with use_cache=False)'
            )
        return CacheSpec(
            slots={"k": (c.routing_heads, c.head_key_width), "v": (c.n_head, c.head_value_width)},
            window=c.lags,
            taps=c.conv_kernel_size if c.use_kv_conv else 1,
            width=self.width,
            rewind=max(32, c.block_size if c.block_size <= 128 else 0),
        )

    def cuts(self) -> dict[str, Cut]:
        routing = Cut(blocks=(1, 1) if self.config.attn_kind == "glu" else (1,))  # all gates, then all scales
        modules = {"q": routing, "k": routing, "gate_qk": routing, "v": Cut(), "gate_vo": Cut()}
        found = {f"{name}.{which}": cut for name, cut in modules.items() for which in ("weight", "bias")}
        for name, op, cut in (("op1", self.op1, routing), ("op2", self.op2, Cut())):
            found |= {f"{name}.control.{which}": cut for which in ("weight", "bias")}
            if op is not None and op.A.shape[0] == op.heads:
                found |= {f"{name}.{which}": cut for which in ("A", "B", "diag")}
        return {**found, "o.weight": Cut(dim=1)}

    def part(self, count: int) -> Self:
        c = self.config
        divisible("n_head", c.n_head, count, f"the {count} processes that share its heads (tp)")
        if c.dropout:
            raise ValueError(f"dropout ({c.dropout}) must be 0: each process would draw random numbers of its own")
        n_head, qk_rank = c.n_head // count, c.routing_heads // count * c.head_key_width
        with torch.device("meta"):
            part = type(self)(c.replace(n_head=n_head, qk_rank=qk_rank, vo_rank=n_head * c.head_value_width))
        return part.train(self.training)

    def mix_rows(self, x: Tensor, rows: RowShare) -> Tensor:
        c, spec = self.config, self.spec
        if spec.aligner == "identity" or c.dropout or c.registers:
            raise ValueError(
                'a sequence that processes share needs aligner_kind="offset", whose lags do not depend on the length, '
                "dropout=0, since each process would draw random numbers of its own, and registers=0; or set cp=1 and divide "
                "the batch (dp)"
            )
        impl = dispatch.resolve(c.impl_default, x)
        before = c.conv_kernel_size - 1 if c.use_kv_conv else 0
        two = rows.stacked(x, before)
        length = two.shape[1] - before
        place = F.pad(rows.places(length, x.device), (before, 0)).repeat_interleave(x.shape[0], 0)
        p = self.project(Tokens(two, place), None, impl)

        def mix(q: Tensor, k: Tensor, v: Tensor, *controls: Tensor) -> Tensor:
            k, v = rows.in_order(k), rows.in_order(v)
            found = []
            for i, end in rows.each(length):
                s = [control.chunk(2)[i] for control in controls]
                routing = None if p.routing is None else p.routing._replace(control=s.pop(0))
                reading = None if p.reading is None else p.reading._replace(control=s.pop(0))
                call = ops.MixCall(q.chunk(2)[i], k[:, :end], v[:, :end], routing, reading, spec, None, c.chunk_T)
                found.append(dispatch.compute(impl, call))
            return torch.cat(found)

        kept = (p.q, p.k, p.v, *(m.control for m in (p.routing, p.reading) if m is not None))
        o = rows.forgetful(mix, *(t[:, before:] for t in kept))
        gate = None if p.gate_vo is None else p.gate_vo[:, before:]
        return rows.side_by_side(self.read_out(o, gate, impl))

    def authors_state_dict(self) -> dict[str, Tensor]:
        """The parameters under the names and in the shapes of the authors' released code."""
        return {theirs: to_authors(theirs, value, self.config) for theirs, value in self._by_authors_name().items()}

    def load_authors_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load parameters saved by the authors' code; nothing is changed unless all of them fit.

        Args:
            state: what state_dict() of their layer gives, name → tensor.
        """
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
        if self.registers is not None:
            raise ValueError("the authors' code has no registers; set registers=0")
        return {authors_name(name): value for name, value in self.named_parameters()}

    def extra_repr(self) -> str:
        c = self.config
        return f"{c.attn_kind}, n_embd={c.n_embd}, n_head={c.n_head}, block_size={c.block_size}, qk_rank={c.qk_rank}"


FLOW.update({name: getattr(HyperGLU, name) for name in (*BEFORE, *INSIDE)})


class HyperMLP(HyperGLU):
    """The same layer with the ReLU activation, attn_kind="relu".

    Args:
        config, fields: as HyperGLU takes them.
    """

    def __init__(self, config: HyperGLUConfig | Mapping[str, Any] | None = None, **fields: Any) -> None:
        super().__init__(HyperGLUConfig.of(config, **{**fields, "attn_kind": "relu"}))
