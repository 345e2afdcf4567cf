"""The caches of all layers as transformers' generate handles them."""

from __future__ import annotations

import torch
from torch import Tensor

from hypermlp.cache import Cache as LayerCache
from hypermlp.mixers.base import Mixer
from hypermlp.models.hf.library import Cache
from hypermlp.models.lm import ModelCache


class HyperCache(Cache):
    """The caches of all layers, each made on the layer's device when its first tokens come."""

    def __init__(self, one_way: bool) -> None:
        super().__init__(layers=[])
        self.one_way = one_way  # some layer cannot forget its last tokens
        self.memory = ModelCache([])
        self.columns = 0  # of input that have gone through, padding included

    def layer(self, index: int, mixer: Mixer, x: Tensor) -> LayerCache:
        """The cache of one layer, for the tokens x (B T C) that it is about to read."""
        if index == len(self.memory.layers):
            self.memory.layers.append(mixer.new_cache(x.shape[0], device=x.device))
        return self.memory.layers[index]

    def seen(self, rows: int) -> Tensor:
        """Tokens that each of the rows has seen (B), on the host."""
        return self.memory.lengths if self.is_initialized else torch.zeros(rows, dtype=torch.int64, device="cpu")

    def __len__(self) -> int:
        return len(self.memory.layers)

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
        return bool(self.memory.layers)

    def reset(self) -> None:
        self.memory, self.columns = ModelCache([]), 0

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
