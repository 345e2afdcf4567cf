"""HyperGLUConfig: every choice of the layer, in the authors' names, checked when it is made.

Names follow the released code (README of LJC-FVNR/HyperMLP); the mathematics each one switches is in docs/maths.md.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hypermlp.checks import at_least_one, choose_from, divisible, only_fields

AttnKind = Literal["glu", "relu"]
AttnNorm = Literal["out_scale", "l2", "none"]
Aligner = Literal["offset", "identity"]
GateAct = Literal["sigmoid", "none"]
Init = Literal["paper", "decays"]
Impl = Literal["auto", "dense", "chunked", "native", "triton"]

END = "<|endoftext|>"  # the token that ends a document
INIT_STD = 0.02  # of weights, appendix L
# The standard deviation that the weights of mixers' linear layers begin with. torch: uniform, as nn.Linear begins, of
# 1 / √(3 inputs); width: 1 / √width of the model.
InitScale = Literal["0.02", "torch", "width"]
ROPE_BASE = 10000.0
TAPS = 4  # of convolutions, the current token included, appendix L
IGNORED = -100  # the target that losses and scores leave out, as torch's cross entropy does


@dataclass(frozen=True, kw_only=True)
class HyperGLUConfig:
    """Every option of a HyperGLU or HyperMLP layer, in the authors' names; frozen, and checked when it is made.

    >>> HyperGLUConfig(n_embd=64, n_head=2, block_size=128).qk_rank
    16

    Sizes:
        n_embd: width of the model.
        n_head: number of heads. HyperGLU has 2 * n_head routing heads, a gate and a scale for each head.
        block_size: L, the number of lags with parameters of their own. A longer input is a sliding window of L tokens.
        bias: whether q, k, v and o have biases. Gates and controls always have them.
        qk_rank: width of q and k over all heads. None: n_embd // 4.
        vo_rank: width of v over all heads. None: n_embd.
        registers: learned rows in front of every sequence, as further slots, as if they were older than its first
            token (appendix H.3). The layer has lags for them, too: block_size + registers in all.

    Activation:
        attn_kind: "glu" is softplus(h_scale) ⊙ relu(h_gate), HyperGLU; "relu" is relu(h), HyperMLP.
        attn_norm: "out_scale" divides the readout by ρ = √(Σ h² + norm_eps); "l2" divides h before the ReLU, which is equal;
            "none" does neither.
        norm_eps: ε of that norm.

    Which slots a row sees, and which parameter a slot meets:
        do_masking: True is causal; False is bidirectional and needs aligner_kind="identity".
        aligner_kind: "offset" lays the mixing parameters out by lag, newest last; "identity" by place in the input, the
            paper's ablation, which has no cache and no sliding window.

    Convolutions, rotary embedding, gates:
        use_kv_conv: depthwise causal convolutions of the input in front of k and of v.
        conv_kernel_size: their taps, the current token included.
        use_rope: rotary embedding of q and k.
        rope_base: its base.
        gate_act: "sigmoid" or "none" (the identity), for the gates and for the controls s of both mixing operators.
        use_qk_gate: gate m1 on q.
        use_vo_gate: gate m2 on the readout.
        dropout: share of the gated readout that is zeroed in training, before the projection o.

    Mixing along the sequence, R(x) = D + A Diag(s(x)) Bᵀ; op1 is R1 (before the activation), op2 is R2 (after it):
        use_op1, use_op2: whether there is such an operator.
        op1_rank, op2_rank: columns of A and B.
        op1_per_head, op2_per_head: parameters of A, B and the diagonal for each head, or one set for all heads.
        op1_use_diag, op2_use_diag: a learned diagonal as part of D.
        op1_shortcut, op2_shortcut: the identity as part of D.
        op1_do_masking, op2_do_masking: False only in a bidirectional layer, where it changes nothing.
        op1_init_std, op2_init_std: standard deviation of the initial A and B; with init="decays", of B alone.

    Initial values (docs/layer.md):
        init: "paper" begins as the released code does, all weights from N(0, 0.02²); "decays" begins the convolutions as
            torch's Conv1d does, and A as a bank of decaying exponentials.

    How it is computed:
        impl_default: "auto" picks the fastest that the device has; "dense" is the reference, with memory that grows as T²;
            "chunked" computes strips of rows in PyTorch, on any device; "native" is compiled for the CPU, "triton" for GPUs.
        chunk_T: rows of a strip for "chunked". None: chosen from the length of the context.
    """

    n_embd: int
    n_head: int
    block_size: int
    bias: bool = False

    attn_kind: AttnKind = "glu"
    attn_norm: AttnNorm = "out_scale"

    qk_rank: int | None = None
    vo_rank: int | None = None
    registers: int = 0

    do_masking: bool = True
    aligner_kind: Aligner = "offset"

    use_kv_conv: bool = True
    conv_kernel_size: int = TAPS

    use_rope: bool = False
    rope_base: float = ROPE_BASE

    gate_act: GateAct = "sigmoid"
    use_qk_gate: bool = True
    use_vo_gate: bool = True

    use_op1: bool = True
    op1_rank: int = 16
    op1_per_head: bool = True
    op1_use_diag: bool = True
    op1_shortcut: bool = True
    op1_do_masking: bool = True
    op1_init_std: float = INIT_STD

    use_op2: bool = True
    op2_rank: int = 16
    op2_per_head: bool = True
    op2_use_diag: bool = True
    op2_shortcut: bool = True
    op2_do_masking: bool = True
    op2_init_std: float = INIT_STD

    init: Init = "paper"

    impl_default: Impl = "auto"
    chunk_T: int | None = None

    norm_eps: float = 1e-12
    dropout: float = 0.0

    def __post_init__(self) -> None:
        self._check_types()
        if self.qk_rank is None:
            object.__setattr__(self, "qk_rank", self.n_embd // 4)
        if self.vo_rank is None:
            object.__setattr__(self, "vo_rank", self.n_embd)
        self._check_values()
        self._check_masking()

    @property
    def routing_heads(self) -> int:
        """Heads of q and k: HyperGLU has a gate and a scale for each head."""
        return 2 * self.n_head if self.attn_kind == "glu" else self.n_head

    @property
    def head_key_width(self) -> int:
        """Of q and k in a routing head."""
        assert self.qk_rank is not None
        return self.qk_rank // self.routing_heads

    @property
    def head_value_width(self) -> int:
        """Of v in a head."""
        assert self.vo_rank is not None
        return self.vo_rank // self.n_head

    @property
    def lags(self) -> int:
        """Lags with parameters of their own."""
        return self.block_size + self.registers

    def replace(self, **changes: Any) -> HyperGLUConfig:
        """The same configuration with some fields changed, checked again.

        Args:
            changes: field=value.
        """
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, config: HyperGLUConfig | Mapping[str, Any] | None = None, **fields: Any) -> HyperGLUConfig:
        """The configuration itself, or one made from a dictionary of its fields, with `fields` changed; or `fields` alone."""
        if isinstance(config, cls):
            return config.replace(**fields) if fields else config
        if config is None or isinstance(config, Mapping):
            return cls.from_dict({**(config or {}), **fields})
        raise ValueError(f"config is a {type(config).__name__}; give a HyperGLUConfig, or a dictionary of its fields")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HyperGLUConfig:
        """The inverse of to_dict; an unknown field is an error that lists the known ones."""
        only_fields(cls, "configuration", values)
        missing = sorted({"n_embd", "n_head", "block_size"} - set(values))
        if missing:
            raise ValueError(f"the configuration lacks {missing}; they have no default")
        return cls(**values)

    def to_json(self) -> str:
        """All fields as a JSON object."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> HyperGLUConfig:
        """The configuration that to_json wrote."""
        return cls.from_dict(json.loads(text))

    def _check_types(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kind = str(field.type)
            if kind == "bool" and not isinstance(value, bool):
                raise ValueError(f"{field.name} ({value!r}) must be True or False")
            if kind in ("int", "int | None"):
                if value is None and kind == "int | None":
                    continue
                if field.name == "registers" and value == 0 and not isinstance(value, bool):
                    continue
                at_least_one(field.name, value)
            if kind == "float" and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise ValueError(f"{field.name} ({value!r}) must be a number")

    def _check_values(self) -> None:
        choose_from("attn_kind", self.attn_kind, get_args(AttnKind))
        choose_from("attn_norm", self.attn_norm, get_args(AttnNorm))
        choose_from("aligner_kind", self.aligner_kind, get_args(Aligner))
        choose_from("gate_act", self.gate_act, get_args(GateAct))
        choose_from("init", self.init, get_args(Init))
        choose_from("impl_default", self.impl_default, get_args(Impl))
        assert self.qk_rank is not None
        assert self.vo_rank is not None
        if self.qk_rank < 1:
            raise ValueError(f"qk_rank defaults to n_embd // 4, which is 0 for n_embd ({self.n_embd}); give qk_rank")
        factor = "2 * n_head" if self.attn_kind == "glu" else "n_head"
        heads = self.routing_heads
        divisible("qk_rank", self.qk_rank, heads, f'{factor} ({heads}) for attn_kind="{self.attn_kind}"')
        divisible("vo_rank", self.vo_rank, self.n_head, f"n_head ({self.n_head})")
        if self.use_rope:
            divisible("qk_rank", self.qk_rank, 2 * heads, f"2 * routing heads ({2 * heads}) for use_rope=True")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout ({self.dropout}) must be at least 0 and less than 1")
        for name in ("norm_eps", "rope_base"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} ({getattr(self, name)}) must be positive and finite")
        for name in ("op1_init_std", "op2_init_std"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 0 and finite")

    def _check_masking(self) -> None:
        if self.registers and (self.aligner_kind == "identity" or not self.do_masking):
            raise ValueError(
                f'registers ({self.registers}) need aligner_kind="offset": in the identity layout they would shift the place '
                "of every token, and with it the parameters that it meets"
            )
        if not self.do_masking and self.aligner_kind == "offset":
            raise ValueError(
                'do_masking=False needs aligner_kind="identity": the offset layout holds only the past of each row, '
                "so there is no full matrix to leave unmasked"
            )
        for op in ("op1", "op2"):
            if self.do_masking and getattr(self, f"use_{op}") and not getattr(self, f"{op}_do_masking"):
                raise ValueError(
                    f"{op}_do_masking=False with do_masking=True is ill-defined: slots that do not exist would enter the "
                    f"norm and the readout (and leak the future in the identity layout); leave {op}_do_masking=True, or "
                    'use do_masking=False with aligner_kind="identity" for a bidirectional layer'
                )
