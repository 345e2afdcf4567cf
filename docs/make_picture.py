"""Draws docs/layer.png: one HyperGLU head at work, every panel computed by the layer itself.

python docs/make_picture.py
"""

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from hypermlp import HyperGLU, HyperGLUConfig
from hypermlp.ops import reference

T, ROW = 20, 15
TIME = {place: str(place) for place in range(0, T, 5)}
LAG = {T - 1 - lag: str(lag) for lag in range(0, T, 5)}  # the newest slot, lag 0, is the last column
NEWEST = "lag ℓ (0: the token itself)"


def main() -> None:
    torch.manual_seed(3)
    layer = HyperGLU(HyperGLUConfig(n_embd=16, n_head=1, block_size=T, qk_rank=8, op1_rank=3, op2_rank=3))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(0, 0.55 if name.endswith((".A", ".B")) else 0.25 if name.endswith("diag") else 0.6)
        x = torch.randn(1, T, 16).cumsum(1) / 3
        captured = capture(layer, x)

    figure = Figure(figsize=(13, 3.25), layout="constrained")
    axes = figure.subplots(1, 5)
    show(axes[0], captured["time"], "scores z = q·k, in time order", TIME, "slot c", ylabel="row t")
    show(axes[1], captured["lag"], "the same memory, in lag order", LAG, NEWEST, ylabel="row t")
    show(axes[2], captured["mixing"], f"mixing R₁(x) at row {ROW}", LAG, "to lag ℓ", ylabel="from lag ℓ", rows=LAG)
    show(axes[3], captured["hidden"], "hidden layer h = z R₁", LAG, NEWEST, ylabel="row t")
    show(axes[4], captured["active"], "selected: softplus(h′) ⊙ relu(h / ‖h‖)", LAG, NEWEST, ylabel="row t")
    figure.savefig(Path(__file__).parent / "layer.png", dpi=130)


def capture(layer: HyperGLU, x: Tensor) -> dict[str, Tensor]:
    """The gate head's scores, mixing and hidden layer, from the functions of ops/reference.py."""
    from hypermlp.mixers.base import gather_tokens

    made = layer.project(gather_tokens(x), None, "dense")
    q, k, routing = made.q, made.k, made.routing
    layout = reference.make_layout(1, T, T, layer.spec, None, x.device)
    z = torch.einsum("btgk,bsgk->bgts", q, k)
    lag = torch.where(layout.exists, z.gather(3, layout.slot.clamp(min=0)[:, None].expand_as(z)), 0)
    h = reference.apply(routing, lag, layout)
    gate, scale = h[0, 0], h[0, 1]
    active = torch.nn.functional.softplus(scale) * torch.relu(gate / gate.norm(dim=-1, keepdim=True))
    low_rank = routing.A[0] @ torch.diag(routing.control[0, ROW, 0]) @ routing.B[0].T
    exists = layout.exists[0, 0]
    blank = torch.tensor(float("nan"))
    return {
        "time": torch.where(torch.ones(T, T).tril().bool(), z[0, 0], blank),
        "lag": torch.where(exists, lag[0, 0], blank),
        "mixing": low_rank + torch.diag(1 + routing.diag[0]),
        "hidden": torch.where(exists, gate, blank),
        "active": torch.where(exists & (active > 0), active, blank),
    }


def show(
    ax: Axes, values: Tensor, title: str, columns: dict[int, str], xlabel: str, *, ylabel: str, rows: dict[int, str] = TIME
) -> None:
    """A panel with ticks on both axes and a key of its colours; white: no such slot, or not selected."""
    limit = values[~values.isnan()].abs().quantile(0.97).item()
    image = ax.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    ax.set_title(title, fontsize=9)
    ax.set_xlabel(xlabel, fontsize=8)
    ax.set_ylabel(ylabel, fontsize=8)
    ax.set_xticks(list(columns), labels=list(columns.values()), fontsize=7)
    ax.set_yticks(list(rows), labels=list(rows.values()), fontsize=7)
    key = ax.figure.colorbar(image, ax=ax, orientation="horizontal", shrink=0.75, aspect=18, extend="both")
    key.set_ticks([-limit, 0, limit], labels=[f"−{limit:.1f}", "0", f"{limit:.1f}"], fontsize=7)


if __name__ == "__main__":
    main()
