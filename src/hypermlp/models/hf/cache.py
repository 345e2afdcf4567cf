"""The caches of all layers as transformers' generate handles them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hypermlp.cache import Cache as LayerCache
from hypermlp.mixers.base import Mixer
from hypermlp.models.hf.library import Cache
from hypermlp.models.lm import ModelCache


class Unread(NamedTuple):
    """What a block has read and its cache has not."""

    block: Callable[..., Tensor]  # x and its cache to y; called whole, since hooks of its own may bring the parameters
    mixer: Mixer
    x: Tensor  # B T C


class HyperCache(Cache):
    """The caches of all layers, each made on the layer's device when its first tokens come.

    Caches hold no gradients. Tokens that come while gradients are recorded are therefore read without them, and once more, into
    the cache, when somebody asks for it: a training step, whose cache nobody looks at, does not pay for one.
    """

    def __init__(self, one_way: bool) -> None:
        super().__init__(layers=[])
        self.one_way = one_way  # some layer cannot forget its last tokens
        self.columns = 0  # of input that have gone through, padding included
        self._read, self._unread = ModelCache([]), list[Unread]()

    @property
    def memory(self) -> ModelCache:
        unread, self._unread = self._unread, []
        with torch.no_grad():
            for block, mixer, x in unread:
                self._read.layers.append(mixer.new_cache(x.shape[0], device=x.device))
                block(x, cache=self._read.layers[-1])
        return self._read

    @property
    def waits(self) -> bool:
        """Whether the next tokens are to be read later: they are the first ones, and gradients are recorded."""
        return self.columns == 0 and torch.is_grad_enabled()

    def read_later(self, block: Callable[..., Tensor], mixer: Mixer, x: Tensor) -> None:
        self._unread.append(Unread(block, mixer, x.detach()))

    def __getstate__(self) -> dict[str, object]:
        """A copy holds what has been read, and no layers of the model."""
        return {**self.__dict__, "_read": self.memory, "_unread": []}

    def layer(self, index: int, mixer: Mixer, x: Tensor) -> LayerCache:
        """The cache of one layer, for the tokens x (B T C) that it is about to read."""
        layers = self.memory.layers
        if index == len(layers):
            layers.append(mixer.new_cache(x.shape[0], device=x.device))
        return layers[index]

    def seen(self, rows: int) -> Tensor:
        """Tokens that each of the rows has seen (B), on the host."""
        return self.memory.lengths if self.is_initialized else torch.zeros(rows, dtype=torch.int64, device="cpu")

    def __len__(self) -> int:
        return len(self._read.layers) + len(self._unread)

    def __repr__(self) -> str:
        return f"HyperCache(columns={self.columns}, layers={len(self)})"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # none

    @property
    def batch_size(self) -> int:
        return self.memory.batch_size if self.is_initialized else -1

    @property
    def is_croppable(self) -> bool:
        return not self.one_way

    @property
    def is_initialized(self) -> bool:
        return bool(self._read.layers or self._unread)

    def reset(self) -> None:
        self._read, self._unread, self.columns = ModelCache([]), [], 0

    def activate_past_recording(self) -> None:
        """Assisted decoding announces that it will crop."""
        if self.one_way:
            raise ValueError(
                "assisted decoding takes tokens back, and a recurrent mixer cannot: generate without assistant, or use mixers "
                "that keep their past token by token, such as hyperglu or softmax"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens of every row."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop ({tokens_to_remove}) takes how many tokens to forget as a negative number")
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        self.memory.crop([max(0, seen + tokens_to_remove) for seen in self.memory.lengths.tolist()])
        self.columns = max(0, self.columns + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_initialized:
            self.memory.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))
