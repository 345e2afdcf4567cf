"""Mixers as layers of other people's models: zoology and mad-lab name a class, x-transformers gives arguments of its own.

The guides are in docs/clients. Letters: B batch, T time, C width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn

from hypermlp.config import Init, InitScale
from hypermlp.mixers.registry import build_mixer


class HostLayer(nn.Module):
    """A mixer by its name, made with what a host knows; x (B T C) to y (B T C).

    A host that initialises all layers that it finds (`model.apply`) leaves the mixer as its paper begins it.

    Args:
        d_model, dim: the width; zoology's word and mad-lab's.
        layer_idx: which layer it is; zoology says so, and nothing depends on it.
        max_length: the longest input: lags of HyperGLU.
        mixer: a registered name or a label.
        size, heads, init, init_scale: as in build_mixer.

    >>> HostLayer(d_model=32, layer_idx=0, max_length=64, mixer="hyperglu")(torch.zeros(1, 10, 32)).shape
    torch.Size([1, 10, 32])
    """

    def __init__(
        self,
        d_model: int | None = None,
        layer_idx: int | None = None,
        *,
        max_length: int,
        dim: int | None = None,
        mixer: str = "hyperglu",
        size: int | None = None,
        heads: int | None = None,
        init: Init = "paper",
        init_scale: InitScale = "0.02",
    ) -> None:
        super().__init__()
        width = d_model if dim is None else dim
        if width is None or (d_model is not None and dim is not None):
            raise ValueError(f"give the width once, as d_model ({d_model}) or as dim ({dim})")
        self.mixer = build_mixer(mixer, width, max_length, size, heads=heads, init=init, init_scale=init_scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Hosts initialise their layers by this name; the mixer is initialised already."""
        fn(self)
        return self

    def state_size(self, sequence_length: int = 2048, **_: Any) -> int:
        """Numbers that decoding keeps for one sequence, as zoology counts them."""
        return self.mixer.cache_spec().size(sequence_length)


class XTransformersLayer(HostLayer):
    """Replaces x_transformers' Attention."""

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        return_intermediates: bool = False,
        causal: bool | None = None,
        **given: Any,
    ) -> Any:
        unknown = sorted(name for name, value in given.items() if value is not None)
        if causal is False or unknown:
            raise ValueError(
                f"{', '.join(unknown) or 'causal=False'} is for x_transformers' own attention: leave the options that give it "
                "out of the Decoder, and generate with cache_kv=False"
            )
        y = self.mixer(x, attention_mask=mask)
        if not return_intermediates:
            return y
        from x_transformers.attend import Intermediates  # type: ignore[import-not-found]

        return y, Intermediates()


def replace_attention(model: nn.Module, *, max_length: int, mixer: str = "hyperglu", **options: Any) -> nn.Module:
    """The model (of x_transformers), with this mixer instead of every self-attention; options as in HostLayer."""
    replaced = 0
    for layers in [module for module in model.modules() if type(module).__name__ in ("AttentionLayers", "Decoder")]:
        for kind, entry in zip(layers.layer_types, layers.layers, strict=True):  # type: ignore[arg-type]
            if kind == "a":
                width = entry[1].to_q.in_features
                entry[1] = XTransformersLayer(width, max_length=max_length, mixer=mixer, **options)
                replaced += 1
    if not replaced:
        raise ValueError(f"{type(model).__name__} has no self-attention of x_transformers; give a model with a Decoder")
    return model
