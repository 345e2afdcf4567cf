"""A trained layer with more lags: how the new ones are initialised.

    hold     A, B and D of the longest trained lag
    decay    the same, falling linearly to zero at the longest new lag
    zero     nothing, A = B = 0 and D = 0 (Lemma C.6): the layer computes what it did, a window of its old size
    fresh    the initial values of a new layer: lags that no training has seen

Lag ℓ is at index L−1−ℓ, so new lags come in front. For inputs of up to the old length all four compute the same as before, to
rounding: a context of n tokens reads the last n indices.

Letters: H heads, L lags, R rank, n new lags.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from hypermlp.checks import choose_from
from hypermlp.mixers.hyper import HyperGLU, SequenceMixing

LagExtension = Literal["hold", "decay", "zero", "fresh"]


def extend_layer(layer: HyperGLU, block_size: int, lag_extension: LagExtension) -> HyperGLU:
    """A new layer with these parameters and a longer block_size.

    Args:
        layer: the trained one, which stays as it is.
        block_size: lags of the new one.
        lag_extension: what the further lags get: "hold", "decay", "zero" or "fresh", as explained above.

    >>> short = HyperGLU(n_embd=16, n_head=2, block_size=8)
    >>> long, x = extend_layer(short, 32, "zero"), torch.randn(1, 20, 16)
    >>> torch.allclose(long(x), short(x), atol=1e-5)  # a window of eight tokens, still
    True
    """
    check_longer("block_size", block_size, layer.config.block_size)
    like = layer.q.weight
    new = type(layer)(layer.config.replace(block_size=block_size)).to(like.device, like.dtype)
    fill(new, layer.state_dict(), lag_extension)
    return new.train(layer.training)


def check_longer(name: str, length: int, trained: int) -> None:
    if length < trained:
        raise ValueError(f"{name} ({length}) must be at least the trained one, {trained}; a shorter input needs no other model")


@torch.no_grad()
def fill(model: nn.Module, trained: Mapping[str, Tensor], lag_extension: LagExtension | None) -> None:
    """Copy `trained` into a newly made model of the same kind whose layers may have more lags.

    lag_extension: what the further lags get; None refuses them. Other parameters whose number depends on the length, such as
    learned position embeddings, are refused: they mean nothing beyond the places they were trained for.
    """
    if lag_extension is not None:
        choose_from("lag_extension", lag_extension, get_args(LagExtension))
    own = model.state_dict(keep_vars=True)
    wrong = sorted(own.keys() ^ trained.keys())
    if wrong:
        raise ValueError(f"the weights are those of another model: {', '.join(wrong[:3])} is missing or unknown")
    lags = find_lags(model)
    for name, tensor in own.items():
        old = trained[name].to(tensor.device, tensor.dtype)
        if old.shape == tensor.shape:
            tensor.detach().copy_(old)
        elif name not in lags:
            raise ValueError(
                f"{name} is {tuple(old.shape)} in the trained model and would be {tuple(tensor.shape)}: only the lags of "
                'HyperGLU and HyperMLP can be extended. A model with learned positions (style="gpt2") keeps its length'
            )
        else:
            check_extension(name, *lags[name], lag_extension)
            tensor[:, tensor.shape[1] - old.shape[1] :] = old
            if lag_extension not in (None, "fresh"):
                mixing = lags[name][1]
                unit = float(mixing.shortcut) if name.endswith("diag") else 0.0  # D = shortcut + diag
                tensor[:, : tensor.shape[1] - old.shape[1]] = further(old, tensor.shape[1], unit, lag_extension)


def find_lags(model: nn.Module) -> dict[str, tuple[HyperGLU, SequenceMixing]]:
    """Names of all parameters that belong to lags, and whose they are."""
    found = {}
    for place, layer in model.named_modules():
        if isinstance(layer, HyperGLU):
            for op in ("op1", "op2"):
                mixing = getattr(layer, op)
                if mixing is not None:
                    for name in ("A", "B", "diag"):
                        found[f"{place}.{op}.{name}".removeprefix(".")] = layer, mixing
    return found


def check_extension(name: str, layer: HyperGLU, mixing: SequenceMixing, lag_extension: LagExtension | None) -> None:
    if lag_extension is None:
        raise ValueError(
            f"{name} has parameters for {layer.config.lags} lags, more than were trained; choose with lag_extension how "
            f"to initialise the new ones: {', '.join(get_args(LagExtension))}"
        )
    if layer.config.aligner_kind != "offset":
        raise ValueError(f"{name} counts places, not lags (aligner_kind={layer.config.aligner_kind!r}): it has no extension")
    if mixing.shortcut and mixing.diag is None and lag_extension in ("decay", "zero"):
        raise ValueError(
            f"lag_extension={lag_extension!r} needs a diagonal beside the shortcut, which would be 1 at every lag, and {name} "
            "has none; try hold or fresh"
        )


def further(old: Tensor, length: int, unit: float, lag_extension: LagExtension) -> Tensor:
    """The values (H n …) of the lags in front of those of `old` (H L …); with `unit` added they are to be held or fall."""
    n = length - old.shape[1]
    last = (old[:, :1] + unit).expand(-1, n, *old.shape[2:])
    keep = {
        "hold": torch.ones(n),
        "decay": torch.arange(n) / n,
        "zero": torch.zeros(n),
    }[lag_extension].to(old)
    return last * keep.view(n, *[1] * (old.dim() - 2)) - unit
