"""Which operations the FLOPs of the paper's Table 5 are: each row put together again from the sizes that give its figure.

The counter is torch.profiler's (with_flops=True): it knows matrix products, and additions and multiplications of tensors, by
the names of torch's operators. What runs inside a fused kernel is not counted, so FlashAttention and the kernels of
flash-linear-attention cost nothing; and there is no head. docs/efficiency.md says what follows.
"""

from __future__ import annotations

from typing import NamedTuple

D, DEPTH, TIME, HEADS = 768, 12, 1024, 12  # GPT-2 small
FEED_FORWARD = 8 * D * D
PROJECTIONS = 4 * D * D  # q, k, v, o
ALL_PAIRS = 2 * TIME * D  # scores and readout of one row with every slot, later ones included
AROUND = 2 * D  # additions of a block's two residuals
HYPER_BLOCK = 64  # rows of a block in the authors' layer


class Seen(NamedTuple):
    """What is counted of one layer's mixer, per token."""

    products: int  # multiply-adds of matrix products
    single: int  # additions and multiplications of single numbers
    single_backward: int | None = None  # None: as many as forward
    why: str = ""


SEEN = {
    "HyperGLU": Seen(
        3 * D * D + 3 * D * D // 4 + 96 * D + (D // 4 + 128 + 64 + D) * (TIME + HYPER_BLOCK) // 2,
        9440,
        15622,
        "projections, and the mixing in blocks of 64 rows with all slots before a block's end; the multiplications of the "
        "released code, whose additions run in a Triton kernel",
    ),
    "RWKV7": Seen(PROJECTIONS + 2 * D * (64 + 64 + 128), 3 * D, why="low ranks of 64, 64 and 128; the recurrence is a kernel"),
    "LinAttn": Seen(PROJECTIONS, 6 * D, why="four projections; the recurrence is a kernel"),
    "HGRN2": Seen(PROJECTIONS, 0, why="four projections; the recurrence is a kernel"),
    "SM(Naive)": Seen(
        PROJECTIONS + ALL_PAIRS, HEADS * TIME + 6 * D, why="all T × T pairs, masked ones included, and their scaling"
    ),
    "SM(Flash)": Seen(PROJECTIONS, 0, why="four projections; attention is a kernel"),
    "GLA": Seen(
        PROJECTIONS + ALL_PAIRS + D * HEADS,
        HEADS * TIME + 3 * D,
        why="a T × T form in plain PyTorch with one decay per head, not the chunked kernel",
    ),
    "Mamba": Seen(3 * D * D + 32 * D, D, why="an inner width of 768, half the published one, B and C; the scan is a kernel"),
    "GSA": Seen(PROJECTIONS + D * D, 0, why="five projections: 64 slots in each of 12 heads; the recurrence is a kernel"),
    "PaTH": Seen(PROJECTIONS + 64 * D + D * HEADS, 0, why="reflections of rank 32 and their strengths; attention is a kernel"),
}


def flops_per_token(seen: Seen) -> tuple[float, float]:
    """Forward and training, as the counter reports them; the positions are added to the embedding once."""
    products = 2 * DEPTH * (seen.products + FEED_FORWARD)
    forward = DEPTH * (AROUND + seen.single) + D
    backward = DEPTH * (AROUND + (seen.single if seen.single_backward is None else seen.single_backward))
    return float(products + forward), float(3 * products + forward + backward)
