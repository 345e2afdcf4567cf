"""Names and shapes of parameters in the authors' released code, to load and to write its files."""

from __future__ import annotations

from torch import Tensor

from hypermlp.config import HyperGLUConfig

# The authors apply both operators as (y U ⊙ s) Vt. R1 multiplies from the right, so U = A and Vt = Bᵀ; R2 is transposed.
AUTHORS_NAMES = {
    "o.": "c_proj.",
    "conv_k.weight": "conv1.conv.weight",
    "conv_v.weight": "conv2.conv.weight",
    "gate_qk.": "left_gate.",
    "gate_vo.": "right_gate.",
    "op1.control.": "control1.",
    "op2.control.": "control2.",
    "op1.A": "op.mix.U",
    "op1.B": "op.mix.Vt",
    "op1.diag": "op.mix.d",
    "op2.B": "op2.mix.U",
    "op2.A": "op2.mix.Vt",
    "op2.diag": "op2.mix.d",
}


def authors_name(name: str) -> str:
    for ours, theirs in AUTHORS_NAMES.items():
        if name.startswith(ours):
            return theirs + name[len(ours) :]
    return name


def to_authors(name: str, value: Tensor, config: HyperGLUConfig) -> Tensor:
    value = value.detach().clone()
    if ".conv." in name:
        return value[:, None]
    if ".mix." not in name:
        return value
    value = value.mT.contiguous() if name.endswith("Vt") else value
    per_head = config.op2_per_head if name.startswith("op2.") else config.op1_per_head
    return value if per_head else value[0]  # one set for all heads has no head axis there; ours keeps an axis of one


def from_authors(name: str, value: Tensor, parameter: Tensor) -> Tensor:
    if ".conv." in name and value.dim() == 3:
        value = value[:, 0]
    if ".mix." in name:
        value = value.mT if name.endswith("Vt") else value
        value = value[None] if value.dim() == parameter.dim() - 1 else value
    if value.shape != parameter.shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; this configuration needs {tuple(parameter.shape)}")
    return value
