"""How the weights of linear layers begin: the scale is a choice of a model and of a study, like the learning rate."""

from __future__ import annotations

import torch
from torch import Tensor

from hypermlp.config import INIT_STD, InitScale


@torch.no_grad()
def init_weight(
    weight: Tensor,
    scale: InitScale = "0.02",
    width: int | None = None,
    *,
    smaller: float = 1.0,
    generator: torch.Generator | None = None,
) -> None:
    """Draw the weight (out, in) of a linear layer at a scale; the one place that knows what the scales are.

    Args:
        weight: to be filled.
        scale: see config.InitScale.
        width: of the model, for the scale "width".
        smaller: what its numbers are divided by.
        generator: of random numbers; None: torch's own.
    """
    if scale == "torch":
        bound = weight.shape[1] ** -0.5 / smaller
        weight.uniform_(-bound, bound, generator=generator)
        return
    if scale == "width" and width is None:
        raise ValueError('init_scale="width" needs the width of the model')
    std = INIT_STD if width is None or scale == "0.02" else width**-0.5
    weight.normal_(0, std / smaller, generator=generator)
