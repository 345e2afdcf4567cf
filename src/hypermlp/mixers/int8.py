"""Linear layers whose weights are codes of 8 bits: a quarter of the bytes, and decoding is little but reading weights.

Letters: I width of inputs, O of outputs.
"""

from __future__ import annotations

from collections import ChainMap
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.mixers.modules import KNOWN, Kinds, is_unhooked
from hypermlp.ops.parameters import LinearWeights

MOST = 127  # largest code
CODES = ".codes"  # how the names of saved codes end
AnyModule = TypeVar("AnyModule", bound=nn.Module)


class Int8Linear(nn.Module):
    """y = x Wᵀ + b with W = codes · scale, a scale for each output; nothing of it is trained.

    codes (O I) are int8; scale and bias (O) have the type that it computes in, which `to` changes.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        if not bool(torch.isfinite(weight).all()):
            raise ValueError("a weight is not finite, so it cannot be quantised; find out what made it so")
        largest = weight.float().abs().amax(dim=1)
        scale = torch.where(largest > 0, largest / MOST, 1.0).to(weight.dtype)
        codes = (weight.float() / scale.float()[:, None]).round().clamp(-MOST, MOST).to(torch.int8)
        self.codes, self.scale = (nn.Parameter(t, requires_grad=False) for t in (codes, scale))
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """W (O I) in the type of the scale."""
        return self.codes.to(self.scale.dtype) * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


DECODED: Kinds = ChainMap[type[nn.Module], Any]({Int8Linear: Int8Linear.forward}, KNOWN)  # what decoding in one call reads


def quantize(model: AnyModule) -> AnyModule:
    """The model itself, with the weights of its linear layers as int8 codes (weight-only, a scale for each output).

    It is for inference: the weights are no longer trained. Embeddings, norms, convolutions and factors keep their type, and so
    does what is computed; quantize(model.bfloat16()) takes the fewest bytes. A head that was tied to the embedding gets weights
    of its own. Layers that are hooked, subclassed or wrapped stay as they are. save_model and load_model keep the codes.

    >>> model = quantize(nn.Sequential(nn.Linear(8, 4)))
    >>> model[0].codes.dtype
    torch.int8
    """
    for name, child in list(model.named_children()):
        if type(child) is nn.Linear and is_unhooked(child):
            setattr(model, name, Int8Linear(child).train(child.training))
        else:
            quantize(child)
    return model


def is_quantized(model: nn.Module) -> bool:
    """Whether `quantize` made any of its layers."""
    return any(isinstance(module, Int8Linear) for module in model.modules())


def weights_of(module: nn.Module | None) -> LinearWeights | None:
    """What a linear layer multiplies with, codes as they are; None where there is no layer."""
    if module is None:
        return None
    if isinstance(module, Int8Linear):
        return LinearWeights(module.codes, module.scale, module.bias)
    assert isinstance(module, nn.Linear)
    return LinearWeights(module.weight, None, module.bias)
