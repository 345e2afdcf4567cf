"""A pre-norm decoder around any mixer: embedding, blocks of mixer and feed-forward, head.

Letters: B batch, T time, C width, F inner width of the feed-forward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hypermlp.cache import Cache
from hypermlp.checks import at_least_one, choose_from, only_fields
from hypermlp.config import IGNORED, INIT_STD, Init, InitScale
from hypermlp.mixers import build_mixer, hybrid
from hypermlp.mixers.base import Mixer, as_bounds, check_cu_seqlens, check_mask
from hypermlp.mixers.initial import init_weight
from hypermlp.mixers.int8 import is_quantized
from hypermlp.mixers.lags import LagExtension, check_longer, fill
from hypermlp.mixers.modules import known
from hypermlp.models.step import Parts, explain, find_obstacle, step
from hypermlp.ops.observer import is_traced, transform

Style = Literal["llama", "gpt2", "nanogpt"]


def published_inner(width: int, style: Style = "llama") -> int:
    """Of the feed-forward: 8/3 of the width, rounded up to a multiple of 16 (352 at width 128), or 4 times the width."""
    return -(-(8 * width // 3) // 16) * 16 if style == "llama" else 4 * width


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a language model is made of; plain data, to and from JSON.

    Args:
        vocabulary: how many tokens there are.
        width: of embeddings, mixers and residual stream.
        depth: blocks of mixer and feed-forward.
        length: the longest context: lags of HyperGLU, rows of learned position embeddings.
        mixer: a name or a label; of a hybrid its pattern, such as "gated_deltanet*3+hyperglu", which is kept as several names.
            Several names alternate through the layers.
        size: of the mixers, see the registry, or one for each of several; None: as published.
        heads: of the mixers; None: as published, two for almost all. A mixer that has none refuses a number.
        init: how convolutions and lag factors begin (docs/layer.md).
        init_scale: "0.02", "torch" or "width", at which the weights of the mixers' linear layers begin (docs/layer.md).
        inner: width of the feed-forward; None: 8/3 of the width ("llama") or 4 times.
        style: "llama" has RMSNorm and SwiGLU, "gpt2" LayerNorm, GELU and learned position embeddings. "nanogpt" is GPT-2 as
            nanoGPT trains it: no biases, and projections to the residual stream begin at 0.02 / √(2 depth).
        tied: the head is the embedding.

    >>> ModelConfig(vocabulary=257, width=64, depth=2, length=128).inner
    176
    """

    vocabulary: int
    width: int
    depth: int
    length: int
    mixer: str | tuple[str, ...] = "hyperglu"
    size: int | tuple[int | None, ...] | None = None
    heads: int | None = None
    init: Init = "paper"
    init_scale: InitScale = "0.02"
    inner: int | None = None
    style: Style = "llama"
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "depth", "length"):
            at_least_one(name, getattr(self, name))
        if self.heads is not None:
            at_least_one("heads", self.heads)
        choose_from("style", self.style, get_args(Style))
        choose_from("init", self.init, get_args(Init))
        choose_from("init_scale", self.init_scale, get_args(InitScale))
        if not self.mixer:
            raise ValueError("mixer must be a name or label, or several of them")
        if self.inner is None:
            object.__setattr__(self, "inner", published_inner(self.width, self.style))
        if not isinstance(self.mixer, str):
            object.__setattr__(self, "mixer", tuple(self.mixer))
        elif hybrid.is_hybrid(self.mixer):
            hybrid.layers(self.mixer, self.depth)  # refuses a depth that is no multiple of the pattern's
            object.__setattr__(self, "mixer", hybrid.pattern(self.mixer))
        if isinstance(self.size, list | tuple):
            object.__setattr__(self, "size", tuple(self.size))
        hybrid.sizes_of(self.turn, self.size)

    @property
    def turn(self) -> tuple[str, ...]:
        """The mixers that alternate: one, or those of a hybrid."""
        return (self.mixer,) if isinstance(self.mixer, str) else self.mixer

    @property
    def mixers(self) -> tuple[str, ...]:
        """The mixer of every layer."""
        return tuple(name for name, _ in self.layers)

    @property
    def layers(self) -> list[tuple[str, int | None]]:
        """The mixer of every layer with its size."""
        turn = list(zip(self.turn, hybrid.sizes_of(self.turn, self.size), strict=True))
        return [turn[i % len(turn)] for i in range(self.depth)]

    @property
    def learned_positions(self) -> bool:
        """Whether there is an embedding for each place, and so none beyond `length`."""
        return self.style != "llama"

    def build_mixer(self, layer: int) -> Mixer:
        """The mixer of a layer.

        Args:
            layer: counted from the input.
        """
        name, size = self.layers[layer]
        options: dict[str, Any] = {"heads": self.heads, "init": self.init, "init_scale": self.init_scale}
        return build_mixer(name, self.width, self.length, size, **options)

    def replace(self, **changes: Any) -> ModelConfig:
        """The same configuration with some fields changed.

        Args:
            changes: field=value.
        """
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Its fields; without heads and init_scale where they are as usual, as in files from before they were a choice."""
        usual = {"heads": None, "init_scale": "0.02"}
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if name not in usual or value != usual[name]}

    @classmethod
    def of(cls, config: ModelConfig | Mapping[str, Any]) -> ModelConfig:
        """The configuration itself, or one made from a dictionary of its fields."""
        if isinstance(config, cls):
            return config
        if isinstance(config, Mapping):
            return cls.from_dict(config)
        raise ValueError(f"config is a {type(config).__name__}; give a ModelConfig, or a dictionary of its fields")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The inverse of to_dict; an unknown field is an error that lists the known ones."""
        only_fields(cls, "model", values)
        return cls(**values)


@known
class SwiGLU(nn.Module):
    """(silu(x W_gate) ⊙ x W_up) W_down."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


@known
class GELU(nn.Module):
    """gelu(x W_up) W_down, as in GPT-2."""

    def __init__(self, width: int, inner: int, *, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def new_norm(width: int, style: Style) -> nn.RMSNorm | nn.LayerNorm:
    return nn.RMSNorm(width) if style == "llama" else nn.LayerNorm(width, bias=style == "gpt2")


@known
class Block(nn.Module):
    """x + mixer(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, mixer: Mixer, inner: int, style: Style = "llama") -> None:
        super().__init__()
        self.norm_mixer, self.norm_ffn = new_norm(mixer.width, style), new_norm(mixer.width, style)
        self.mixer = mixer
        self.ffn = SwiGLU(mixer.width, inner) if style == "llama" else GELU(mixer.width, inner, bias=style == "gpt2")

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x + self.mixer(self.norm_mixer(x), **options)
        return x + self.ffn(self.norm_ffn(x))


class LanguageModel(nn.Module):
    """Tokens (B T) to logits (B T vocabulary).

    Args:
        config: sizes and mixers, a ModelConfig or a mapping of its fields.

    >>> model = LanguageModel(ModelConfig(vocabulary=257, width=32, depth=2, length=64, mixer=("hyperglu", "softmax")))
    >>> model(torch.zeros(1, 10, dtype=torch.long)).shape
    torch.Size([1, 10, 257])
    """

    def __init__(self, config: ModelConfig | Mapping[str, Any]) -> None:
        super().__init__()
        config = ModelConfig.of(config)
        assert config.inner is not None
        self.config = config
        self.gathers = True  # forward takes `at`
        self.checkpointing = False  # recompute each block in the backward pass instead of saving its activations
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width) if config.learned_positions else None
        self.blocks = nn.ModuleList(Block(config.build_mixer(i), config.inner, config.style) for i in range(config.depth))
        self.norm = new_norm(config.width, config.style)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._init_around_mixers()
        if config.tied:
            self.head.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        """Initialise all parameters again; a model made on the meta device needs to_empty first."""
        for module in self.modules():
            if isinstance(module, (Mixer, nn.RMSNorm, nn.LayerNorm)):
                module.reset_parameters()
        self._init_around_mixers()

    def _init_around_mixers(self) -> None:
        """Weights from N(0, 0.02²), biases zero; mixers have initialised themselves, but for nanoGPT's rule."""
        around: list[nn.Module] = [self.embedding, self.head, *([] if self.positions is None else [self.positions])]
        for block in self.blocks:
            assert isinstance(block, Block)
            around += [module for module in block.ffn.modules() if isinstance(module, nn.Linear)]
        for module in around:
            assert isinstance(module, (nn.Linear, nn.Embedding))
            nn.init.normal_(module.weight, 0, INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if self.config.style == "nanogpt":
            for block in self.blocks:
                assert isinstance(block, Block)
                fewer = math.sqrt(2 * self.config.depth)
                if isinstance(into := getattr(block.mixer, "o", None), nn.Linear):  # somebody's own mixer may lack it
                    init_weight(into.weight, self.config.init_scale, self.config.width, smaller=fewer)
                assert isinstance(block.ffn, GELU)
                init_weight(block.ffn.down.weight, smaller=fewer)

    def forward(
        self,
        tokens: Tensor,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        cache: ModelCache | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        """Logits (B T vocabulary), or with `at` those of some tokens (n vocabulary).

        Args:
            tokens: whole numbers (batch, time).
            attention_mask: (batch, time), nonzero at real tokens and 0 at padding, which may lie anywhere and changes nothing.
            cu_seqlens: borders of the documents packed into a batch of one row, [0, …, T]; each is computed as if alone.
            cache: made by new_cache; the tokens are then those that follow what the cache has seen.
            at: (batch, time), True where logits are wanted, in the order of the tokens. The others' are not computed: with a
                large vocabulary and few scored tokens the head is most of a model's work.
        """
        if cache is not None:
            self._check_cache(cache)
        if cache is not None and attention_mask is None and cu_seqlens is None and at is None:
            logits = step(self, self._parts(), tokens, cache.layers)
            if logits is not None:
                return logits
        cu_seqlens = as_bounds(cu_seqlens, tokens)
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(f"tokens are {tokens.dtype} {tuple(tokens.shape)}; they must be whole numbers (batch, time)")
        check_tokens(tokens, self.config.vocabulary)
        x = self.embedding(tokens)
        if self.positions is not None:
            seen = None if cache is None else cache.lengths
            x = x + self.positions(places(tokens, self.config.length, attention_mask, cu_seqlens, seen))
        options: dict[str, Any] = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens}
        for i, block in enumerate(self.blocks):
            if cache is not None:
                x = block(x, cache=cache.layers[i], **options)
            elif self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False, **options)
            else:
                x = block(x, **options)
        return self.head(self.norm(x if at is None else x[at]))

    def _check_cache(self, cache: ModelCache) -> None:
        if not isinstance(cache, ModelCache):
            raise ValueError(f"cache is a {type(cache).__name__}; make it with this model's new_cache")
        if len(cache.layers) != len(self.blocks):
            raise ValueError(
                f"the cache is one of {len(cache.layers)} layers, and this model has {len(self.blocks)}; make it with this "
                "model's new_cache"
            )

    def _parts(self) -> Parts:
        return Parts(self.embedding, self.positions, self.blocks, self.norm, self.head)

    def explain(self, tokens: Tensor, cache: ModelCache) -> str:
        """Which way decoding these tokens (B T) takes, "model" (one call of compiled code) or "blocks", and why.

        Nothing is computed. Which way a layer takes within a block says its own `explain`.

        Args:
            tokens: the next token of each row.
            cache: made by new_cache.
        """
        return explain(find_obstacle(self, self._parts(), tokens, cache.layers))

    def extended(self, length: int, lag_extension: LagExtension | None = None) -> LanguageModel:
        """A new model with these weights and a longer context, to be continued there.

        Args:
            length: the new one.
            lag_extension: "hold", "decay", "zero" or "fresh", what HyperGLU and HyperMLP have at the new lags (mixers/lags.py);
                rivals have no parameters of lags and need none. Learned positions cannot be extended.
        """
        if is_quantized(self):
            raise ValueError("a model is extended with its own weights; quantize it afterwards")
        check_longer("length", length, self.config.length)
        like = self.embedding.weight
        new = LanguageModel(self.config.replace(length=length)).to(like.device, like.dtype)
        fill(new, self.state_dict(), lag_extension)
        new.checkpointing = self.checkpointing
        return new.train(self.training)

    @property
    def has_cache(self) -> bool:
        """Whether all layers can continue from a cache; the identity layout cannot."""
        try:
            self.new_cache(1, max_len=1, device="meta")
        except ValueError:
            return False
        return True

    def new_cache(self, batch_size: int, max_len: int | None = None, **options: Any) -> ModelCache:
        """Empty caches of all layers for batch_size sequences; max_len and other options as in Mixer.new_cache."""
        mixers = (block.get_submodule("mixer") for block in self.blocks)
        return ModelCache([m.new_cache(batch_size, max_len, **options) for m in mixers if isinstance(m, Mixer)])


def check_tokens(tokens: Tensor, vocabulary: int) -> None:
    """Refuse ids that are no tokens, where reading them costs nothing: not on a GPU, nor while a graph is traced."""
    if tokens.device.type != "cpu" or not tokens.numel() or is_traced() or transform() is not None:
        return
    least, most = (int(bound) for bound in tokens.aminmax())
    if least < 0 or most >= vocabulary:
        raise ValueError(
            f"token {least if least < 0 else most} is outside the vocabulary, 0 to {vocabulary - 1}; use the tokenizer "
            "that the model was trained with"
        )


def places(
    tokens: Tensor, length: int, attention_mask: Tensor | None, cu_seqlens: Tensor | None, seen: Tensor | None = None
) -> Tensor:
    """Place of each token (B T …) in its own sequence (B T), for `length` learned position embeddings.

    seen (B): tokens that came before, in a cache.
    """
    place = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
    if attention_mask is not None:
        check_mask(tokens, attention_mask)
        place = ((attention_mask != 0).cumsum(1) - 1).clamp(min=0)
    if cu_seqlens is not None:
        check_cu_seqlens(tokens, cu_seqlens)
        begin = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff(), output_size=tokens.shape[1])
        place = place - begin
    if seen is not None:
        place = place + seen.to(tokens.device)[:, None]
    check_places(place, length)
    return place


def check_places(place: Tensor, length: int) -> None:
    if not torch.compiler.is_compiling() and place.numel() and int(place.max()) >= length:
        raise ValueError(
            f"position {int(place.max())} is beyond the {length} learned position embeddings; "
            'cut the input, or use style="llama", which has none'
        )


class ModelCache:
    """The caches of all layers, handled as one."""

    def __init__(self, layers: Sequence[Cache]) -> None:
        self.layers = list(layers)

    @property
    def batch_size(self) -> int:
        return self.layers[0].batch_size

    @property
    def lengths(self) -> Tensor:
        """Tokens that each row has seen (B), in the CPU's memory."""
        return self.layers[0].lengths

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def one_way(self) -> bool:
        """Whether some layer cannot crop."""
        return any(layer.one_way for layer in self.layers)

    def crop(self, length: int | Sequence[int]) -> None:
        """Cache.crop of all layers; raises, with nothing changed, if one of them cannot undo the tokens."""
        for layer in self.layers:
            layer.check_crop(length)
        for layer in self.layers:
            layer.crop(length)

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        self.layers = [layer.select(index) for layer in self.layers]

    def select(self, rows: Tensor | Sequence[int]) -> ModelCache:
        return ModelCache([layer.select(rows) for layer in self.layers])

    def clone(self) -> ModelCache:
        return ModelCache([layer.clone() for layer in self.layers])

    @staticmethod
    def stack(caches: Sequence[ModelCache]) -> ModelCache:
        return ModelCache([Cache.stack(layers) for layers in zip(*(c.layers for c in caches), strict=True)])

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{i}.{name}": t for i, layer in enumerate(self.layers) for name, t in layer.state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a saved state; raises, with nothing changed, if it is not of this kind of model."""
        loaded = [layer.clone() for layer in self.layers]
        for i, layer in enumerate(loaded):
            start = f"{i}."
            layer.load_state_dict({name.removeprefix(start): t for name, t in state.items() if name.startswith(start)})
        self.layers = loaded


def token_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy (nats) of logits (… vocabulary) at targets of the same places (…); IGNORED does not count."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction=reduction)


def count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def match_inner_width(target: int, build: Callable[[int], nn.Module], start: int) -> int:
    """The feed-forward width at which build(width) has as many parameters as `target`, as nearly as whole widths allow."""
    base = count_parameters(build(start))
    slope = count_parameters(build(start + 1)) - base
    return max(1, start + round((target - base) / slope))
