"""Pictures of routing: static and dynamic mixing, the paper's three examples, and a layer before and after training.

Letters: d width, t slots, n queries.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.config import HyperGLUConfig
from hypermlp.mixers.hyper import HyperGLU
from hypermlp.theory.appendix_i import example_field, example_layer, warped_halfspace
from hypermlp.theory.geometry import Partition, Plane, layer_field, partition, random_plane
from hypermlp.theory.registry import Instance
from hypermlp.theory.setting import hidden, make_static

KEYS, WIDTH = 5, 8  # of the recall that the small layer learns
STEPS = 400


@dataclass(frozen=True)
class Picture:
    """A partition, and what is to be seen on it."""

    partition: Partition
    caption: str
    statements: tuple[str, ...]  # numbers of the statements that it shows


def pictures(seed: int = 8) -> list[Picture]:
    """All pictures, in the order of the story: static, dynamic, the own token, the examples, a trained layer."""
    return [*mixing(seed), *examples(), *trained(seed)]


def mixing(seed: int) -> list[Picture]:
    """One layer of random parameters, one plane of queries, three ways to look."""
    case = Instance(seed)
    layer = case.layer(n_head=1, block_size=6)
    case.randomise(layer, 0.7)
    X, plane = case.normal(6, 6), random_plane(6, case.generator, radius=3.0)
    static = make_static(copy.deepcopy(layer))
    still = partition(lambda at: hidden(static, plane.points(at), X)[:, 0], radius=3.0, title="Static mixing")
    warped = partition(lambda at: hidden(layer, plane.points(at), X)[:, 0], radius=3.0, title="Dynamic mixing")
    own = partition(layer_field(static, X[1:].flip(0), plane), radius=3.0, title="Static mixing, the query in its own context")
    return [
        Picture(
            still,
            "Gates and controls do not see the query, and the context does not contain it: every boundary is a straight line.",
            ("2.2", "C.10", "C.12", "H.7"),
        ),
        Picture(
            warped,
            "The same layer, context and plane with controls and gates that see the query: the lines bend.",
            ("2.2", "C.13", "C.14", "H.8"),
        ),
        Picture(
            own,
            "The static layer again, in autoregressive use: the query is also the newest slot, and mixing carries its "
            "score x L xᵀ into all others. The boundaries are curved although nothing is dynamic.",
            ("C.10",),
        ),
    ]


def examples() -> list[Picture]:
    e1, e2 = torch.eye(2, dtype=torch.float64)
    first, X1 = warped_halfspace(3.0)
    w = torch.tensor([[1.5, -2.0]], dtype=torch.float64)
    second, X2 = example_layer((e1 - 0.6 * e2)[None], 0.5 * e1 + e2, w)
    sizes, steep = torch.tensor([[3.0], [-5.0], [3.0]]).double(), torch.tensor([[1.5], [4.0], [12.0]]).double()
    third, X3 = example_layer(sizes * e1, e2, steep * e1)
    return [
        Picture(
            partition(example_field(first, X1), title="Example 1"),
            "h = (x₁, x₂ + φ(3x₁)x₁): the half-plane of slot 2 has a bent edge, steeper on the right than on the left.",
            ("example 1", "I.2"),
        ),
        Picture(
            partition(example_field(second, X2), title="Example 2"),
            "Slot 2 is b + φ(x·w)a: its normal turns from b to b + a where x·w changes sign.",
            ("example 2",),
        ),
        Picture(
            partition(example_field(third, X3), title="Example 3, rank 3"),
            "g = x₂ + Σ a_k φ(c_k x₁)x₁ with a = 3, −5, 3 and c = 1.5, 4, 12: one boundary with several bends. The "
            "three slots that carry the a_k share the straight line.",
            ("example 3",),
        ),
    ]


def recall_batch(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences (n KEYS+1 WIDTH): tokens (key, value), then a noisy key alone; and the value that belongs to it."""
    half = WIDTH // 2
    keys = F.normalize(torch.randn(n, KEYS, half, generator=generator, dtype=torch.float64), dim=-1)
    values = torch.randn(n, KEYS, half, generator=generator, dtype=torch.float64)
    chosen = torch.randint(KEYS, (n,), generator=generator)
    noisy = keys[torch.arange(n), chosen] + 0.1 * torch.randn(n, half, generator=generator, dtype=torch.float64)
    query = torch.cat([noisy, torch.zeros_like(noisy)], dim=-1)[:, None]
    return torch.cat([torch.cat([keys, values], dim=-1), query], dim=1), values[torch.arange(n), chosen]


def recall_layer(seed: int) -> HyperGLU:
    """A HyperMLP of one head, as it is initialised, with controls and mixing large enough to be seen."""
    config = HyperGLUConfig(
        n_embd=WIDTH, n_head=1, block_size=KEYS + 1, qk_rank=WIDTH, attn_kind="relu", use_kv_conv=False, op1_rank=3, op2_rank=3
    )
    return Instance(seed).randomise(HyperGLU(config).double(), 0.3)


def recall_loss(layer: HyperGLU, n: int, generator: torch.Generator) -> Tensor:
    x, target = recall_batch(n, generator)
    return F.mse_loss(layer(x, impl="dense")[:, -1, WIDTH // 2 :], target)


def fresh_error(layer: HyperGLU, seed: int) -> float:
    """The mean squared error of sequences that training never saw, always the same ones."""
    return recall_loss(layer, 4096, torch.Generator().manual_seed(seed + 1)).item()


def train_recall(layer: HyperGLU, seed: int, steps: int = STEPS) -> None:
    """Teach it to recall by noisy keys."""
    generator = torch.Generator().manual_seed(seed)
    with torch.enable_grad():
        layer.requires_grad_()
        optimiser = torch.optim.Adam(layer.parameters(), lr=0.01)
        for _ in range(steps):
            optimiser.zero_grad()
            recall_loss(layer, 128, generator).backward()
            optimiser.step()
        layer.requires_grad_(False)


def trained(seed: int) -> list[Picture]:
    """The plane of queries through two keys of one context, before training and after it."""
    layer = recall_layer(seed)
    sequence, _ = recall_batch(1, torch.Generator().manual_seed(seed))
    context = sequence[0, :-1]
    keys = torch.cat([context[:, : WIDTH // 2], torch.zeros(KEYS, WIDTH // 2, dtype=torch.float64)], dim=1)
    axes = torch.linalg.qr(keys[:2].T).Q.T
    plane = Plane(torch.zeros(WIDTH, dtype=torch.float64), axes, 2.0)
    places = (keys[:2] @ axes.T).tolist()
    marks = [(a, b, f"key {i + 1}") for i, (a, b) in enumerate(places)]
    slots = ["the query itself", *(f"token {KEYS - i}" for i in range(KEYS))]

    def look(title: str) -> Partition:
        return partition(layer_field(layer, context, plane), title=title, slots=slots, marks=marks)

    first = look("Before training")
    before = fresh_error(layer, seed)
    train_recall(layer, seed)
    then, after = look("After training"), fresh_error(layer, seed)
    make_static(layer)
    still, fixed = look("After training, controls and gates fixed"), fresh_error(layer, seed)
    task = f"A HyperMLP of width {WIDTH} reads {KEYS} pairs of key and value and is then given a noisy key."
    return [
        Picture(first, f"{task} The plane holds keys 1 and 2 (dots). Mean squared error {before:.2f}.", ("2.2",)),
        Picture(
            then,
            f"The same after {STEPS} steps of training, mean squared error {after:.2f}: every slot is active on a disc around "
            "its key. The circles pass through the origin, as x·k − c|x|² = 0 does.",
            ("2.2", "H.8"),
        ),
        Picture(
            still,
            "The trained layer with only the biases of its gates and controls, not trained again: mean squared error "
            f"{fixed:.2f}. The circles stay: it is the query's own slot, mixed into the others, that bends them here, not "
            "mixing that depends on the query.",
            ("C.10",),
        ),
    ]
