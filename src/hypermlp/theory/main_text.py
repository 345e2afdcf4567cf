"""Section 2 of the paper: the statements of the main text, on the real layers."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.mixers.hyper import HyperGLU
from hypermlp.theory.appendix_c import extended_pair, telling
from hypermlp.theory.appendix_c_geometry import bends
from hypermlp.theory.appendix_f import DEPENDS, null_direction, update_space, updates
from hypermlp.theory.appendix_h import added_atoms, no_mixing, ungated
from hypermlp.theory.geometry import random_plane
from hypermlp.theory.registry import Instance, printed, relative, statement
from hypermlp.theory.setting import activations, heads, hidden, make_static, measured_mixing, own_context, read


@statement(
    "2.1",
    "Theorem",
    "A head is a two-layer MLP over slots made from the context",
    says="The layer's output is σ(x W1) W2 summed over heads, which is 1/ρ(h) Σ α(x; u_i)₊ β(x; v_i) over all slots, "
    "or the same sum without ₊ over the active ones, with u_i = Σ_j R1_ji X_j and v_i = Σ_j R2_ji X_j.",
    assumes="one scalar ρ > 0 per row; L1 depends on the token x alone.",
    control="rotary embeddings: the score then depends on the lag, and no L1(x) gives it",
)
def decomposition(case: Instance) -> float:
    layer, X = case.layer(use_rope=case.broken), case.normal(case.integer(3, 12), 6)
    t, out = len(X), own_context(layer, X)
    two_layer = pool = active = torch.zeros(6, dtype=torch.float64)
    for head in heads(layer, X[0], X):
        h = head.x @ (head.L1 @ X.T @ head.R1)
        two_layer = two_layer + F.relu(h / (h.square().sum() + head.eps).sqrt()) @ (head.R2.T @ X @ head.L2.T)
        u = torch.stack([sum((head.R1[j, i] * X[j] for j in range(t)), torch.zeros(6)) for i in range(t)])
        v = torch.stack([sum((head.R2[j, i] * X[j] for j in range(t)), torch.zeros(6)) for i in range(t)])
        alpha, beta = u @ (head.x @ head.L1), v @ head.L2.T
        pool = pool + alpha.clamp(min=0) @ beta / head.rho
        active = active + alpha[alpha > 0] @ beta[alpha > 0] / head.rho
    return max(relative(out, found) for found in (two_layer, pool, active))


@statement(
    "2.2",
    "Corollary",
    "Static routing is polyhedral, dynamic routing is warped",
    says="Over a plane of queries the boundaries of a static head are straight lines; those of a head whose mixing "
    "sees the query are curved.",
    assumes="a context that does not contain the query; for the second part controls that do depend on it.",
    control="the dynamic head with control and gate weights 0",
    tolerance=1e-8,
    instances=5,
    blind="every head of this form has it, also with wrong parameters; C.12, C.14 and H.7 say where the boundaries are.",
)
def warped_routing(case: Instance) -> float:
    layer, X = case.layer(n_head=1), case.normal(5, 6)
    plane = random_plane(6, case.generator)
    static = make_static(copy.deepcopy(layer))

    def bend(m: HyperGLU) -> float:
        return max(bends(lambda places: hidden(m, plane.points(places), X)[:, 0], 5))

    return bend(static) + float(bend(static if case.broken else layer) < 1e-6)


@statement(
    "2.3",
    "Theorem",
    "In lag order, older tokens can be made to have no effect",
    says="A HyperGLU with p = −1 and A = B = 0 beyond lag t gives the output of its newest t tokens alone, whatever is older.",
    assumes="R_T = P R_t Pᵀ (Lemma C.6), ρ blind to zeros, no convolution in front of k and v.",
    control="parameters beyond t merely sliced, so that the shortcut stays",
)
def truncation(case: Instance) -> float:
    short, long, t, T = extended_pair(case, keep_diagonal=case.broken, attn_kind="glu")
    X = telling(case, long, T)
    return relative(own_context(long, X), own_context(short, X[:t]))


@printed(
    "2.3",
    "Footnote 4 and section J.1 say that slicing parameters of a maximum length is “realizing the canonical prefix "
    "embedding” R_T = P R_t Pᵀ. It realises the converse, R_t = Pᵀ R_T P: a longer context does use its further lags, "
    "and since D = I + p starts at p = 0, older tokens do change the output.",
)
def sliced(case: Instance) -> float:
    layer, x, t, T = case.layer(), case.normal(6), 5, 12
    full, part = measured_mixing(layer, 1, x, T), measured_mixing(layer, 1, x, t)
    assert relative(full[:t, :t], part) < 1e-12
    return relative(F.pad(part, (0, T - t, 0, T - t)), full)


@printed(
    "2.3",
    "With the published convolutions in front of k and v (kernel 4) the invariance fails: the keys and values of the "
    "three oldest kept tokens contain older ones.",
)
def convolved(case: Instance) -> float:
    short, long, t, T = extended_pair(case, attn_kind="glu", use_kv_conv=True)
    X = case.normal(T, 6)
    return relative(own_context(long, X), own_context(short, X[:t]))


@statement(
    "2.4",
    "Proposition",
    "HyperGLU: the gate selects, the scale only weighs",
    says="The active slots of a HyperGLU are those with h_gate > 0, each weighs softplus(h_scale) h_gate/ρ(h_gate), "
    "and other keys in the scale branch change no active set.",
    assumes="the factor of the scale branch is positive, as softplus is.",
    control="h_scale itself for a factor",
)
def decoupled(case: Instance) -> float:
    layer, x, X = case.layer(attn_kind="glu"), case.normal(4, 6), case.normal(case.integer(4, 12), 6)
    gate, scale = hidden(layer, x, X).chunk(2, dim=1)
    rho = (gate.square().sum(-1, keepdim=True) + layer.config.norm_eps).sqrt()
    expected = F.softplus(scale) * gate.relu() / rho
    found = scale * gate.relu() / rho if case.broken else activations(layer, x, X)
    flips = ((found > 0) != (gate > 0)).sum()
    half = layer.k.out_features // 2
    layer.k.weight[half:] = case.normal(half, 6)
    flips = flips + ((activations(layer, x, X) > 0) != (gate > 0)).sum()
    return float(flips) + relative(found, expected)


@statement(
    "2.5",
    "Theorem",
    "Rank of the readout limits the update, rank of the routing only its inputs",
    says="With d_vo = r the update lies in a fixed r-dimensional subspace; with d_qk = r and fixed weights it is a "
    "function of x L, with L of r columns.",
    assumes="rank W2 ≤ r, respectively rank W1 ≤ r with W1 and W2 independent of x.",
    control="ranks larger than the r that is claimed",
    blind=DEPENDS,
)
def asymmetry(case: Instance) -> float:
    r, more = 2, 2 if case.broken else 0
    narrow = case.layer(n_head=1, vo_rank=r + more)
    spectrum = torch.linalg.svdvals(updates(case, narrow))
    layer, X, x = make_static(case.layer(n_head=1, qk_rank=r + more)), case.normal(6, 6), case.normal(6, 6)
    L = torch.linalg.svd(layer.q.weight).Vh[:r]  # r directions of the query
    return float(spectrum[r] / spectrum[0]) + relative(read(layer, x @ L.T @ L, X), read(layer, x, X))


@statement(
    "2.6 (i)",
    "Proposition",
    "Compress QK rather than VO",
    says="With d_vo = 2 the updates of a HyperMLP span 2 dimensions, with d_qk = 2 and d_vo = d all d; and the query "
    "acts on a fixed context only through x W_q, x W_M1, x W_M2, x W_S1 and x W_S2.",
    assumes="no bias in W_o.",
    control="a bias in W_o, which adds a direction",
    blind=DEPENDS,
)
def allocation(case: Instance) -> float:
    few = updates(case, case.layer(vo_rank=2, bias=case.broken), 20)
    many = updates(case, case.layer(qk_rank=2, bias=case.broken), 40)
    spans = [int(torch.linalg.matrix_rank(found, rtol=1e-9)) for found in (few, many)]
    return float(abs(spans[0] - 2) + abs(spans[1] - 6)) + conditioning(case, everything=True)


def conditioning(case: Instance, *, everything: bool) -> float:
    """How the update changes with a step of the query that x W_q does not see; `everything`: nor gates and controls."""
    ranks = {"n_embd": 16, "n_head": 1, "qk_rank": 2, "vo_rank": 4, "block_size": 6}
    layer, X, x = case.layer(**ranks), case.normal(6, 16), case.normal(4, 16)
    modules = [layer.q, layer.gate_qk, layer.gate_vo, *(op.control for op in (layer.op1, layer.op2) if op)]
    weights = [m.weight for m in modules[: None if everything else 1] if m is not None]
    return relative(read(layer, x + 2 * null_direction(case, *weights), X), read(layer, x, X))


@printed(
    "2.6 (i)",
    "That shrinking QK “primarily restricts routing/conditioning”, to d_qk variables, holds for fixed weights (F.5) "
    "and not for HyperMLP: its gates and controls see the query past W_q, so a step δ with δ W_q = 0 changes the "
    "update.",
)
def seen_past_q(case: Instance) -> float:
    return conditioning(case, everything=False)


def peft_names() -> tuple[Any, Any]:
    """LoraConfig and inject_adapter_in_model; what other packages log while they are imported is no concern of the reader's."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        from peft import LoraConfig, inject_adapter_in_model
    finally:
        logging.disable(before)
    return LoraConfig, inject_adapter_in_model


def adapted(case: Instance, layer: HyperGLU, target: str, rank: int) -> HyperGLU:
    """The layer with a rank-r LoRA of PEFT on one of its projections, with random weights."""
    LoraConfig, inject_adapter_in_model = peft_names()
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=[target], init_lora_weights=False)
    made = inject_adapter_in_model(config, copy.deepcopy(layer))
    assert isinstance(made, HyperGLU)
    for name, p in made.named_parameters():
        if "lora_" in name:
            p.data = case.normal(*p.shape)
    return made.requires_grad_(False).eval()


def lora_change(case: Instance, target: str, **changes: object) -> tuple[Tensor, Tensor]:
    """What a rank-1 LoRA changes in the outputs of a two-head layer (40 12), and a basis of Col(W_o)."""
    layer = case.layer(n_embd=12, vo_rank=8, **changes)
    with_lora = adapted(case, layer, target, 1)
    X = case.normal(40, 8, 12)
    return own_context(with_lora, X) - own_context(layer, X), update_space(layer)


def span(vectors: Tensor) -> int:
    return int((torch.linalg.svdvals(vectors) > 1e-9).sum())


@statement(
    "2.6 (ii)",
    "Proposition",
    "LoRA and gates on the readout side",
    says="A rank-r LoRA (PEFT) on o changes the output by vectors of one r-dimensional space, the only change that "
    "leaves Col(W_o); on v, without a gate, by at most r dimensions per head, inside Col(W_o); on q or k inside "
    "Col(W_o), not confined to r dimensions. A gate between v and o changes no score.",
    assumes="the adapter sits on the readout side.",
    control="the adapter meant for o put on q",
    needs="peft",
    instances=2,
    blind=DEPENDS,
)
def readout_side(case: Instance) -> float:
    on_o, basis = lora_change(case, "q" if case.broken else "o")
    wrong = float(max(0, span(on_o) - 1) + abs(span(on_o - on_o @ basis @ basis.T) - 1))
    on_v, basis = lora_change(case, "v", use_vo_gate=False)
    wrong += float(max(0, span(on_v) - 2) + span(on_v - on_v @ basis @ basis.T))
    for target in ("q", "k"):
        change, basis = lora_change(case, target)
        wrong += float(span(change - change @ basis @ basis.T) + (span(change) <= 1))
    layer, x, X = case.layer(), case.normal(4, 6), case.normal(7, 6)
    before = hidden(layer, x, X)
    assert layer.gate_vo is not None
    layer.gate_vo.weight.copy_(case.normal(*layer.gate_vo.weight.shape))
    return wrong + relative(hidden(layer, x, X), before)


@printed(
    "2.6 (ii)",
    "“Adds up to r new update directions” is exact for o alone. A rank-r LoRA on v adds no direction outside Col(W_o); "
    "inside it has r per head; and behind the published gate M2(x) its row space turns with x, so that over many "
    "inputs it spans more.",
)
def values_behind_a_gate(case: Instance) -> float:
    change, _ = lora_change(case, "v")
    return float(max(0, span(change) - 2))


@statement(
    "2.6 (iii)",
    "Proposition",
    "Linear attention does not select",
    says="With L2Norm alone for an activation every slot of the pool is read, with the sign and size of its score over ρ(h).",
    assumes="no gate: σ = L2Norm.",
    control="ReLU in place",
)
def no_selection(case: Instance) -> float:
    layer, x, X = case.layer(use_op2=False), case.normal(3, 6), case.normal(case.integer(4, 12), 6)
    found = read(layer, x, X) if case.broken else ungated(layer, x, X)
    expected = []
    for q in x:
        parts = [(head.alpha / head.rho)[:, None] * head.beta for head in heads(layer, q, X)]
        expected.append(torch.stack(parts).sum((0, 1)))
    return relative(found, torch.stack(expected))


@statement(
    "2.6 (iv)",
    "Proposition",
    "Registers enlarge the pool",
    says="k registers widen the hidden layer from t to t + k and, without mixing, add exactly the atoms (R_i, R_i).",
    assumes="R1 = R2 = I, t + k ≤ block_size.",
    control="sequence mixing",
)
def more_registers(case: Instance) -> float:
    layer, k = no_mixing(case, block_size=16), case.integer(1, 5)
    X, learned = case.normal(case.integer(3, 8), 6), case.normal(k, 6)
    width = hidden(layer, X[:1], torch.cat([X, learned])).shape[-1] - hidden(layer, X[:1], X).shape[-1]
    return abs(width - k) + added_atoms(layer, X, learned)
