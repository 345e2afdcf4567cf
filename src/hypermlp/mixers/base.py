"""The contract of every sequence mixer, and the one treatment of padding and packing that all of them share.

A mixer maps x (B T C) to y (B T C). Its laws (tests/mixers/test_laws.py runs them over the registry):

- causality: y[:, t] depends on x[:, :t+1] alone (unless the mixer says otherwise);
- padding: with `attention_mask` (B T, nonzero = real token) a row's real tokens get what they would get with the padding cut
  out, wherever it lies; y is zero at padding;
- packing: with `cu_seqlens` (n+1, from 0 to T, batch 1) each document gets what it would get alone;
- a batch equals its rows;
- cache: with `cache = mixer.new_cache(batch)` and mixer(x, cache=cache), any split of a sequence into chunks gives what one
  full forward gives; `attention_mask` then covers the new tokens. What a cache holds is detached: gradients of the tokens that
  fill an empty cache are those of a forward without it, and those of later tokens are refused (`with_cache`).

A mixer that remembers its past token by token has slots; one that condenses it has a state (mixers/recurrent.py).
"""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hypermlp.cache import Cache, CacheSpec
from hypermlp.checks import at_least_one, divisible
from hypermlp.collectives import RowShare
from hypermlp.config import InitScale
from hypermlp.fixed_cache import FixedCache
from hypermlp.mixers.initial import init_weight
from hypermlp.mixers.weights import Weights
from hypermlp.ops.observer import is_traced, transform
from hypermlp.ops.types import row_tables

Bounds = Tensor | Sequence[int] | None  # of documents packed into a row
COMPUTED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # types of numbers, not of codes


class Cut(NamedTuple):
    """How the heads of a layer divide a parameter along `dim`.

    blocks: relative sizes of what lies there one after the other, each divided by heads for itself, such as q, k and v.
    shared: which of the blocks all heads use; processes hold them in parts too, and bring them together to compute.
    """

    dim: int = 0
    blocks: tuple[int, ...] = (1,)
    shared: tuple[int, ...] = ()

    def sizes(self, rows: int) -> list[int]:
        """Of the blocks, where there are so many rows of all."""
        return [rows * block // sum(self.blocks) for block in self.blocks]


class Mixer(nn.Module, ABC):
    """A sequence mixer of width `width`. Subclasses define cache_spec and mix.

    Args:
        arguments, options: the subclass's own; another mixer can be made with the same ones (made_with).
    """

    width: int
    n_head: int  # where there are heads, with these widths of keys and values
    head_key_width: int
    head_value_width: int
    init_scale: InitScale = "0.02"  # of the weights of linear layers, see begin_at
    made_with: Callable[[], Mixer]  # makes another one with the same arguments
    splits_by_head: ClassVar[bool] = False  # whether projections may be split over processes, a head to each
    split_plan: ClassVar[Mapping[str, str]] = {}  # module → "colwise" or "rowwise", for transformers' tensor parallelism
    gives_weights: bool = False  # whether `mix` knows tokens.weights
    counted_by_head: ClassVar[tuple[str, ...]] = ("n_head",)  # attributes that fewer heads make smaller, their number first
    group: ProcessGroup | None = None  # of the processes that have this layer's heads between them; None: this one has all

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        mixer = super().__new__(cls)
        mixer.made_with = partial(cls, *arguments, **options)
        return mixer

    def begin_at(self, scale: InitScale) -> Self:
        """Draw the weights of linear layers at another scale, now and whenever the mixer begins again."""
        if scale != self.init_scale:
            self.made_with = partial(begin_at, self.made_with, scale)
            self.init_scale = scale
            for module in self.scaled():
                init_weight(module.weight, scale, self.width)
        return self

    def scaled(self) -> Iterator[nn.Linear]:
        """The linear layers whose scale is a choice; those with a class of their own have a rule of their own."""
        return (module for module in self.modules() if type(module) is nn.Linear)

    def reset_parameters(self) -> None:
        """Initialise all parameters again; what is on the meta device needs to_empty first."""
        with torch.device("cpu"):
            new = self.made_with()
        copy_parameters(new, self)

    def set_heads(self, width: int, n_head: int, value_width: int | None) -> int:
        """Heads whose keys together are as wide as the model; the width of their values together (None: the same).

        Args:
            width: of the model.
            n_head: how many heads.
            value_width: of all heads' values.
        """
        divisible("width", width, n_head, f"n_head ({n_head})")
        value_width = width if value_width is None else value_width
        self.width, self.n_head = width, n_head
        self.head_key_width, self.head_value_width = width // n_head, head_width(value_width, n_head)
        return value_width

    @abstractmethod
    def mix(self, tokens: Tokens, cache: Cache | None) -> Tensor:
        """y (B T C) for tokens.x (B T C). With a cache, tokens join what it holds (append, advance), without gradients.

        A mixer may take options of its own by name, which forward passes on.
        """

    @abstractmethod
    def cache_spec(self) -> CacheSpec:
        """What new_cache allocates."""

    def cuts(self) -> dict[str, Cut]:
        """Which parameters belong to single heads, and how; all others are shared by the heads. For tensor parallelism."""
        raise ValueError(
            f"{type(self).__name__} has no heads that can be divided: set tp=1 and divide its parameters and the "
            "batch instead (dp, or fully_shard)"
        )

    def part(self, count: int) -> Self:
        """A layer like this one with 1 / count of the heads, without values (on the meta device)."""
        cuts = self.cuts()
        first = self.counted_by_head[0]
        divisible(first, getattr(self, first), count, f"the {count} processes that share its heads (tp)")
        part = copy.deepcopy(self).to("meta")
        for name in self.counted_by_head:
            setattr(part, name, getattr(part, name) // count)
        for place, module in part.named_modules():
            for name, p in module._parameters.items():
                cut = cuts.get(f"{place}.{name}".removeprefix("."))
                if p is not None and cut is not None:
                    shape, sizes = list(p.shape), cut.sizes(p.shape[cut.dim])
                    for size in sizes:
                        divisible(f"each part of {place}.{name}", size, count, f"the {count} processes that share it (tp)")
                    shape[cut.dim] = sum(size if i in cut.shared else size // count for i, size in enumerate(sizes))
                    module._parameters[name] = nn.Parameter(p.new_empty(shape))
        return part

    def mix_rows(self, x: Tensor, rows: RowShare) -> Tensor:
        """y (B T C) where x (B T C) are this process's rows of longer sequences. For context parallelism."""
        raise ValueError(
            f"{type(self).__name__} cannot share a sequence between processes: set cp=1 and divide the batch instead (dp). "
            "HyperGLU, HyperMLP, softmax attention and recurrent mixers can"
        )

    def forward(
        self,
        x: Tensor,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Bounds = None,
        cache: Cache | None = None,
        weights: Weights | None = None,
        **options: Any,
    ) -> Tensor:
        """y (B T C) for x (B T C).

        Args:
            x: the input (batch, time, width), in the type of the parameters or under torch.autocast.
            attention_mask: (batch, time), nonzero at real tokens and 0 at padding, which may lie anywhere. Real tokens get
                what they would get without the padding; y is zero at padding. Not an additive mask.
            cu_seqlens: borders of the documents packed into a batch of one row, [0, …, T]; each is computed as if alone.
            cache: made by new_cache. x are then the tokens that follow those the cache has seen; it is updated in place, and
                keeps no gradients (see with_cache).
            weights: gets how much each token takes from each token of its past, where a mixer has such weights; y is then
                computed from them, see mixers/weights.py.
            options: of the mixer's own `mix`; HyperGLU's are impl and chunk_T.
        """
        tokens = self.prepare(x, attention_mask, cu_seqlens, cache)._replace(weights=weights)
        if isinstance(cache, FixedCache):
            with torch.no_grad():
                cache.note(tokens.order, x.shape[1])
        if weights is not None and not self.gives_weights:
            raise ValueError(
                f"{type(self).__name__} has no weights of single tokens to give: leave weights unset, or use softmax "
                "attention, HyperGLU or HyperMLP"
            )
        try:
            return tokens.restore(with_cache(self, partial(self.mix, tokens, **options), cache, tokens.x))
        except (RuntimeError, ValueError) as error:
            change = find_change(self, tokens.x)
            if change is None:
                raise
            raise ValueError(f"{change} ({error})") from error

    def prepare(
        self, x: Tensor, attention_mask: Tensor | None = None, cu_seqlens: Bounds = None, cache: Cache | None = None
    ) -> Tokens:
        """The arguments of forward, checked, with padding removed and documents marked.

        Args:
            x, attention_mask, cu_seqlens, cache: as in forward.
        """
        cu_seqlens = as_bounds(cu_seqlens, x)
        if not torch.compiler.is_compiling() and torch.distributed.is_available() and torch.distributed.is_initialized():
            refuse_context_parallel()
            if not self.splits_by_head:
                refuse_tensor_parallel(self)
        check_input(x, self.width, floating_parameter(self), attention_mask, cu_seqlens)
        if cache is not None and not (torch.compiler.is_compiling() and isinstance(cache, FixedCache)):
            check_cache(cache, x, self.cache_spec(), cu_seqlens)
        return gather_tokens(x, attention_mask, cu_seqlens, cache)

    def new_cache(
        self,
        batch_size: int,
        max_len: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        rewind: int | None = None,
        *,
        fixed: bool = False,
    ) -> Cache:
        """An empty cache for decoding.

        Args:
            batch_size: sequences, one in each row.
            max_len: tokens that it has room for from the start, so that none of them waits for memory, and no more than a
                window ever needs; None: it grows as needed.
            dtype, device: of what it holds; None: the parameters'.
            rewind: how many tokens cache.crop can always undo; None: the mixer's default.
            fixed: room for max_len tokens and no more, for steps that torch.compile makes one graph of (fixed_cache.py).
        """
        like = floating_parameter(self)
        if like is None:  # nothing, or quantised weights alone
            like = torch.empty(0, device=next((t.device for t in (*self.parameters(), *self.buffers())), None))
        device, dtype, spec = torch.device(device or like.device), dtype or like.dtype, self.cache_spec()
        if fixed:
            return FixedCache(spec, batch_size, max_len=max_len, dtype=dtype, device=device)
        return Cache.new(spec, batch_size, rewind=rewind, max_len=max_len, dtype=dtype, device=device)

    def state_size(self, batch_size: int, length: int) -> int:
        """Bytes that decoding keeps for batch_size sequences of `length` tokens."""
        return self.new_cache(batch_size, max_len=length, device="meta").nbytes


def head_width(value_width: int, n_head: int) -> int:
    """The width of one head's values, from that of all heads together."""
    at_least_one("value_width", value_width)
    divisible("value_width", value_width, n_head, f"n_head ({n_head})")
    return value_width // n_head


def begin_at(make: Callable[[], Mixer], scale: InitScale) -> Mixer:
    return make().begin_at(scale)


def find_change(mixer: Mixer, x: Tensor) -> str | None:
    """What other software changed in a mixer or its input, and the cure; None if nothing."""
    named = dict(mixer.named_parameters())
    if any(hasattr(t, "placements") for t in (x, *named.values())):
        return (
            f"{type(mixer).__name__} does not take these distributed tensors: give plain ones, and divide parameters with "
            "fully_shard, which brings them together before a layer runs"
        )
    with torch.device("meta"):
        new = mixer.made_with()
    for name, p in new.named_parameters():
        if name in named and named[name].shape != p.shape and named[name].numel():
            return (
                f"{name} is {tuple(named[name].shape)}, and this layer was made for {tuple(p.shape)}: make a layer of the "
                "width that is meant, and load the parameters into it"
            )
    return None


@torch.no_grad()
def copy_parameters(source: nn.Module, into: nn.Module) -> None:
    """Copy parameters by name, also into those that are divided between processes."""
    for name, p in into.named_parameters():
        value = source.get_parameter(name).detach().to(p.device, p.dtype)
        if hasattr(p, "placements"):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value, p.device_mesh, p.placements)  # type: ignore[attr-defined]
        p.copy_(value)


def with_cache(mixer: nn.Module, mix: Callable[[Cache | None], Tensor], cache: Cache | None, x: Tensor) -> Tensor:
    """mix(cache), with gradients wherever they are exact.

    A cache holds numbers without their history. So the first tokens are computed twice where gradients are recorded, once with
    gradients and once into the cache; the gradients of later tokens would lack a part, and refuse to be computed.
    """
    if cache is None:
        return mix(None)
    recorded = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in mixer.parameters()))
    with torch.no_grad():
        begins = recorded and not any(cache.seen)
        y = mix(cache)
    if not recorded:
        return y
    return mix(None) if begins else RefuseGradient.apply(y, *(p for p in (x, *mixer.parameters()) if p.requires_grad))


class RefuseGradient(torch.autograd.Function):
    """y as it is; asking for gradients through it raises an error that says why there are none."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *sources: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *d_y: Tensor) -> tuple[Any, ...]:
        raise ValueError(
            "gradients do not pass through a cache that had seen tokens before: call the model on the whole sequence without a "
            "cache (use_cache=False) to differentiate, or under torch.no_grad() to decode"
        )


def floating_parameter(module: nn.Module) -> Tensor | None:
    """The first parameter whose numbers are what the module computes with; None where all are quantised, or there are none."""
    return next((p for p in module.parameters() if p.dtype in COMPUTED), None)


class Tokens(NamedTuple):
    """A batch in which every sequence is contiguous and starts at its own first token."""

    x: Tensor  # B T C, real tokens first in every row, zeros behind them
    place: Tensor | None = None  # 1 T or B T: see position; None: counted from `seen`
    seen: Tensor | None = None  # B: tokens of each row that a cache has seen
    spans: Tensor | None = None  # n 5, see ops.types.dense_spans; None: every row is one whole sequence
    order: Tensor | None = None  # B T: where each token of x came from
    packed: bool = False
    weights: Weights | None = None  # wanted by the caller, and computed with

    @property
    def position(self) -> Tensor:
        """Place of each token in its own sequence (1 T or B T), −1 at padding."""
        if self.place is not None:
            return self.place
        place = torch.arange(self.x.shape[1], device=self.x.device)
        return place[None] if self.seen is None else place + self.seen.to(self.x.device)[:, None]

    @property
    def document_position(self) -> Tensor | None:
        """The same where documents are packed; None where sequences begin at 0, or in a cache's history."""
        return self.place if self.packed else None

    @property
    def begins(self) -> Tensor | None:
        """Where a packed document begins (1 T); None where every row is one sequence."""
        return self.position == 0 if self.packed else None

    @property
    def padding(self) -> Tensor | None:
        """Which places hold padding (B T); None where there is none."""
        return None if self.order is None else self.position < 0

    def counts(self) -> list[int]:
        """Real tokens of each row."""
        B, T, _ = self.x.shape
        return [T] * B if self.spans is None else self.spans[:, 2].tolist()

    def restore(self, y: Tensor) -> Tensor:
        """y (B T C) in the order of the caller's input, zero at padding."""
        if self.order is None:
            return y
        y = y.masked_fill(self.position[..., None] < 0, 0)
        return torch.zeros_like(y).scatter(1, self.order[..., None].expand_as(y), y)


def gather_tokens(
    x: Tensor, attention_mask: Tensor | None = None, cu_seqlens: Tensor | None = None, cache: Cache | None = None
) -> Tokens:
    """Remove padding and mark documents. Shapes are static and no value is read, so it compiles and needs no synchronisation.

    With a cache, positions continue from what it has seen.
    """
    B, T, _ = x.shape
    if cu_seqlens is None and attention_mask is None:
        return Tokens(x, seen=None if cache is None else cache.lengths)
    place = torch.arange(T, device=x.device)
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(torch.int64)
        begin, end = bounds[:-1], bounds[1:]
        spans = torch.stack([torch.zeros_like(begin), begin, end, begin, end], dim=1)
        position = place - begin.repeat_interleave(end - begin, output_size=T)
        return Tokens(x, position[None], spans=spans, packed=True)
    assert attention_mask is not None
    real = attention_mask != 0
    order = torch.argsort((~real).to(torch.int8), dim=1, stable=True)
    length = real.sum(1)
    position = torch.where(place < length[:, None], place, -1)  # B T
    x = x.gather(1, order[..., None].expand_as(x)).masked_fill(position[..., None] < 0, 0)
    if cache is not None:
        position = torch.where(position < 0, -1, position + cache.lengths.to(x.device)[:, None])
    zero, entry = torch.zeros_like(length), torch.arange(B, device=x.device)
    spans = torch.stack([entry, zero, length, zero, length], dim=1)
    return Tokens(x, position, spans=spans, order=order)


def visible_slots(rows: Tensor, slots: int, spans: Tensor | None) -> Tensor:
    """Which of the slots each row (B T …) may look at (1|B T S); a row in no span sees the first, as softmax needs one."""
    start, _, position = row_tables(rows.shape[0], rows.shape[1], slots, spans, rows.device)
    slot = torch.arange(slots, device=rows.device)
    return (slot >= start[..., None]) & (slot <= position[..., None].clamp(min=0))


def as_bounds(bounds: Bounds, x: Tensor) -> Tensor | None:
    """cu_seqlens as a tensor beside x."""
    if bounds is None or isinstance(bounds, Tensor):
        return bounds
    try:
        return torch.as_tensor(bounds, device=x.device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"cu_seqlens is a {type(bounds).__name__}; give a tensor or a list of whole numbers") from None


def refuse_context_parallel() -> None:
    """torch's context_parallel gives each process a piece of every sequence, and makes one function of torch's know of it."""
    torchs = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if torchs is not None and F.scaled_dot_product_attention in getattr(torchs, "_replaced_functions", ()):
        raise ValueError(
            "context_parallel splits sequences between processes, and this mixer needs whole ones: positions, lags and states "
            "would restart in every piece. Split the batch instead (DistributedDataParallel, fully_shard)"
        )


def is_split(module: nn.Module) -> bool:
    """Whether a tensor parallel plan split its weight, and has each process get its part of the output.

    torch's plans do so by a hook, transformers' by a forward of their own.
    """
    places = [getattr(p, "placements", ()) for p in module._parameters.values() if p is not None]
    planned = bool(module._forward_hooks) or "forward" in module.__dict__
    return planned and any(place.is_shard() for place in chain.from_iterable(places))


def refuse_tensor_parallel(mixer: nn.Module) -> None:
    for name, module in mixer.named_modules():
        if is_split(module):
            raise ValueError(
                f"{name or 'the layer'} is split over processes, and {type(mixer).__name__} computes all of its heads in one: "
                "leave its modules out of the tensor parallel plan (fully_shard divides them; softmax attention may be split)"
            )


def check_input(
    x: Tensor, width: int, like: Tensor | None, attention_mask: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> None:
    """Raise a ValueError, with a remedy, for inputs that a mixer of this width, with parameters like `like`, cannot take."""
    if not isinstance(x, Tensor):
        symbolic = "; torch.fx.symbolic_trace cannot follow a mixer, use torch.export" if isinstance(x, torch.fx.Proxy) else ""
        raise ValueError(f"x is a {type(x).__name__}; give a tensor (batch, time, n_embd = {width}){symbolic}")
    if x.dim() != 3 or x.shape[2] != width:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be (batch, time, n_embd = {width})")
    if not x.is_floating_point():
        raise ValueError(f"x has dtype {x.dtype}; a mixer takes floating-point vectors, embed the tokens first")
    if (
        like is not None and x.device != like.device and not like.is_meta
    ):  # an offloaded parameter is on meta until its module is called
        raise ValueError(f"x is on {x.device} and the layer on {like.device}; move one with .to(...)")
    if like is not None and x.dtype != like.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"x is {x.dtype} and the layer {like.dtype}; cast one with .to(...), or run under torch.autocast")
    if attention_mask is not None and cu_seqlens is not None:
        raise ValueError("give attention_mask (padding) or cu_seqlens (packing), not both: a packed input has no padding")
    if attention_mask is not None:
        check_mask(x, attention_mask)
    if cu_seqlens is not None:
        check_cu_seqlens(x, cu_seqlens)


def check_cache(cache: Cache, x: Tensor, spec: CacheSpec, cu_seqlens: Tensor | None = None) -> None:
    """Raise a ValueError for what is no cache of a mixer that needs `spec`, or cannot take x."""
    if cu_seqlens is not None:
        raise ValueError("give cache or cu_seqlens, not both: a cache keeps one sequence in each row of the batch")
    if not isinstance(cache, Cache):
        raise ValueError(f"cache is a {type(cache).__name__}; make it with this layer's new_cache")
    cache.check(x, spec)


def check_mask(x: Tensor, mask: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise ValueError(f"attention_mask is a {type(mask).__name__}; it must be a tensor (batch, time), nonzero = real")
    if mask.shape != x.shape[:2]:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; it must be (batch, time) = {tuple(x.shape[:2])}, nonzero = real"
        )
    if mask.device != x.device:
        raise ValueError(f"attention_mask is on {mask.device} and x on {x.device}; move it with .to(x.device)")
    if not mask.is_floating_point() or mask.is_meta or is_traced() or transform() is not None:
        return
    other = mask[(mask != 0) & (mask != 1)]
    if other.numel():
        raise ValueError(
            f"attention_mask holds {other[0].item():g}: it says which tokens are real (1) and which are padding (0) and is not "
            "added to scores; give mask == 0 for an additive mask of 0 and -inf"
        )


def check_cu_seqlens(x: Tensor, bounds: Tensor) -> None:
    if x.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs a batch of 1, x has {x.shape[0]}; flatten the documents into one row")
    if bounds.dim() != 1 or bounds.numel() == 0 or bounds.is_floating_point() or bounds.dtype == torch.bool:
        raise ValueError(
            f"cu_seqlens must be a whole-number tensor of shape (n + 1,), not {bounds.dtype} {tuple(bounds.shape)}"
        )
    if bounds.device != x.device:
        raise ValueError(f"cu_seqlens is on {bounds.device} and x on {x.device}; move it with .to(x.device)")
    if torch.compiler.is_compiling() or bounds.is_meta:
        return  # there are no values
    values = bounds.tolist()
    if values[0] != 0 or values[-1] != x.shape[1]:
        raise ValueError(f"cu_seqlens must run from 0 to the {x.shape[1]} tokens of x, not from {values[0]} to {values[-1]}")
    if any(b <= a for a, b in pairwise(values)):
        raise ValueError(f"cu_seqlens must increase from entry to entry: {values}")
