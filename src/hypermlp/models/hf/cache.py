"""The caches of all layers as transformers' generate handles them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hypermlp.cache import Cache as LayerCache
from hypermlp.fixed_cache import FixedCache
from hypermlp.mixers.base import Mixer
from hypermlp.models.hf.library import Cache, StaticCache
from hypermlp.models.lm import ModelCache


class Unread(NamedTuple):
    """What a block has read and its cache has not."""

    block: Callable[..., Tensor]  # x and its cache to y; called whole, since hooks of its own may bring the parameters
    mixer: Mixer
    x: Tensor  # B T C


@dataclass
class BlockHistory:
    """What a block has read since its cache was as in `base`, so that a state can go back: it is computed again from there."""

    base: LayerCache
    calls: list[tuple[Callable[..., Tensor], Tensor, Tensor | None]] = field(default_factory=list)  # block, x (B T C), mask

    def after(self, columns: int) -> LayerCache:
        """The cache after the first `columns` of what has been read; the base is used up."""
        cache = self.base
        for block, x, mask in self.calls:
            n = min(columns, x.shape[1])
            if n:
                block(x[:, :n], cache=cache, attention_mask=None if mask is None else mask[:, :n])
            columns -= n
        return cache


class HyperCache(Cache):
    """The caches of all layers, each made on the layer's device when its first tokens come.

    A state cannot forget its last tokens. Where it must be able to (assisted decoding asks for it), `crop` computes it again
    from the place of the last crop; until the next one all inputs of such layers are kept.

    Caches hold no gradients. Tokens that come while gradients are recorded are therefore read without them, and once more, into
    the cache, when somebody asks for it: a training step, whose cache nobody looks at, does not pay for one.
    """

    def __init__(self, one_way: bool) -> None:
        Cache.__init__(self, layers=[])
        self.one_way = one_way  # some layer cannot forget its last tokens
        self.columns = 0  # of input that have gone through, padding included
        self._read, self._unread = ModelCache([]), list[Unread]()
        self.records: dict[int, BlockHistory] | None = None  # of layers that cannot forget; None: nobody will crop

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
        """A copy holds what has been read, and no layers of the model; it goes back no further than here."""
        return {**self.__dict__, "_read": self.memory, "_unread": [], "records": None if self.records is None else {}}

    def layer(
        self, index: int, block: Callable[..., Tensor], mixer: Mixer, x: Tensor, mask: Tensor | None = None
    ) -> LayerCache:
        """The cache of one layer, whose block is about to read the tokens x (B T C), some of which a mask (B T) may hide."""
        layers = self.memory.layers
        if index == len(layers):
            layers.append(mixer.new_cache(x.shape[0], device=x.device))
        if self.records is not None and layers[index].one_way:
            if index not in self.records:
                self.records[index] = BlockHistory(layers[index].clone())
            self.records[index].calls.append((block, x.detach(), mask))
        return layers[index]

    def count(self, columns: int) -> None:
        """So many columns of input have gone through."""
        self.columns += columns

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
        return not self.one_way or self.records is not None

    @property
    def is_initialized(self) -> bool:
        return bool(self._read.layers or self._unread)

    def reset(self) -> None:
        self._read, self._unread, self.columns = ModelCache([]), [], 0
        self._begin_records()

    def activate_past_recording(self) -> None:
        """Make `crop` possible from here on, where states would not allow it; assisted decoding announces that it will crop."""
        if self.one_way and self.records is None:
            self.records = {}

    def stop_past_recording(self) -> None:
        self.records = None

    def _begin_records(self) -> None:
        if self.records is not None:
            self.records = {}

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens of every row."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop ({tokens_to_remove}) takes how many tokens to forget as a negative number")
        if not self.is_initialized:
            return
        if self.records is not None:
            self._go_back(-tokens_to_remove)
        elif tokens_to_remove < 0:
            self.memory.crop([max(0, seen + tokens_to_remove) for seen in self.memory.lengths.tolist()])
        self.columns = max(0, self.columns + tokens_to_remove)

    @torch.no_grad()
    def _go_back(self, columns: int) -> None:
        """Take back so many columns of input: recorded layers are computed again, all others forget."""
        assert self.records is not None
        layers = self.memory.layers
        read = min((sum(x.shape[1] for _, x, _ in record.calls) for record in self.records.values()), default=0)
        if columns > read:
            raise ValueError(f"cannot crop by {columns} tokens: a state goes back to the last crop at most, {read} tokens ago")
        for index, record in self.records.items():
            layers[index] = record.after(read - columns) if columns else layers[index]
            self.records[index] = BlockHistory(layers[index].clone())
        if columns:
            left = layers[next(iter(self.records))].seen
            for index in set(range(len(layers))) - set(self.records):
                layers[index].crop(left)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_initialized:
            self.memory.reorder(beam_idx)
            self._begin_records()

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))


class HyperStaticCache(HyperCache, StaticCache):
    """The same of a fixed size (cache_implementation="static"), whose steps compile to one graph; see fixed_cache.py."""

    def __init__(self, max_cache_len: int) -> None:
        super().__init__(one_way=True)
        self.max_cache_len = max_cache_len
        self.counted: Tensor | None = None  # columns, where the first layer is

    waits = False  # nothing is read later: gradients do not pass

    def layer(
        self, index: int, block: Callable[..., Tensor], mixer: Mixer, x: Tensor, mask: Tensor | None = None
    ) -> LayerCache:
        layers = self._read.layers
        if index == len(layers):
            layers.append(mixer.new_cache(x.shape[0], max_len=self.max_cache_len, device=x.device, fixed=True))
            if self.counted is None:
                self.counted = torch.zeros((), dtype=torch.int64, device=x.device)
        return layers[index]

    def count(self, columns: int) -> None:
        assert self.counted is not None
        self.counted.add_(columns)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.counted is None else int(self.counted)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.max_cache_len

    @property
    def is_compileable(self) -> bool:
        return True

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for layer in self._read.layers:
            layer.reorder(beam_idx)

    def reset(self) -> None:
        for layer in self._read.layers:
            assert isinstance(layer, FixedCache)
            layer.clear()
        if self.counted is not None:
            self.counted.zero_()

    def activate_past_recording(self) -> None:
        raise ValueError("assisted decoding takes tokens back, which a static cache cannot: leave cache_implementation unset")

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("a static cache takes no tokens back: leave cache_implementation unset")
