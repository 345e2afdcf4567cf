"""One token of each row through a whole language model in one call: whether it may be, asked once until the model changes.

The call computes what the modules compute (norms, HyperGLU or HyperMLP, feed-forwards, head), in float32 between weights of
float32, bfloat16 or 8 bits. Whatever the modules would show somebody else, or compute otherwise, takes their path.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from hypermlp.cache import Cache, commit_all, reserve_all
from hypermlp.mixers import decode
from hypermlp.mixers.decode import HOOKED, Prepared, takes, unreadable
from hypermlp.mixers.hyper import HyperGLU, HyperMLP
from hypermlp.mixers.int8 import DECODED, weights_of
from hypermlp.mixers.modules import OfThread, Watch, find_hooked, known
from hypermlp.mixers.route import BEFORE, INSIDE, replaced
from hypermlp.ops import dispatch
from hypermlp.ops.native.decode import BlockParts, ModelCall, Norm
from hypermlp.ops.observer import Observer, observer_of, transform

OVERRIDDEN = (*BEFORE, *INSIDE, "run")  # what someone may set on a module
logger = logging.getLogger("hypermlp.route")
for kind in (nn.Embedding, nn.RMSNorm, nn.LayerNorm, nn.ModuleList, HyperGLU, HyperMLP):
    known(kind)


class Parts(NamedTuple):
    """The parts of a language model."""

    embedding: Any  # modules; which they are is asked by `obstacle`
    positions: Any | None
    blocks: Any
    norm: Any
    head: Any


class ModelStep:
    """A model's call, laid out; or why it cannot be."""

    def __init__(self, model: nn.Module, parts: Parts) -> None:
        self.call: ModelCall | None = None
        self.why = obstacle(model, parts)
        if self.why is not None:
            return
        self.watch = Watch(model)
        self.mixers: list[HyperGLU] = [block.mixer for block in parts.blocks]
        self.dropping = [mixer for mixer in self.mixers if mixer.config.dropout]
        self.one_of_each = list({type(mixer): mixer for mixer in self.mixers}.values())
        self.choices = {(mixer.config.impl_default, mixer.config.aligner_kind) for mixer in self.mixers}
        self.specs = [mixer.cache_spec() for mixer in self.mixers]
        self.dtype: torch.dtype = parts.norm.weight.dtype
        self.attached: list[tuple[ref[Cache], ref[Tensor]]] = []
        try:
            self.call = lay_out(parts)
        except ValueError as error:
            self.why = f"parameters of other shapes than the model was made with ({error})"

    def holds(self) -> bool:
        """Whether it still is what would be laid out now."""
        return self.call is not None and self.watch.unchanged()

    def run(self, tokens: Tensor, layers: Sequence[Cache]) -> Tensor:
        """Logits (B 1 V) of tokens (B 1), which join the caches."""
        call, counts = self.call, [1] * tokens.shape[0]
        assert call is not None
        if call.batch != tokens.shape[0]:
            call.resize(tokens.shape[0])
            self.attached = []
        if call.arguments.positions:
            call.places_view[:] = layers[0].seen
        call.spans_view[:] = reserve_all(layers, counts)
        if not self._is_attached(layers):
            self.attached = []
            for own, layer in zip(call.layers, layers, strict=True):
                own.attach(layer.slots["k"], layer.slots["v"], layer.inputs)
            self.attached = [(ref(layer), ref(layer.slots["k"])) for layer in layers]
        for own, layer in zip(call.layers, layers, strict=True):
            own.arguments.tail = layer.tail
        logits = call.run(tokens if tokens.dtype is torch.int64 and tokens.is_contiguous() else tokens.long().contiguous())
        commit_all(layers, counts)
        return logits if self.dtype is torch.float32 else logits.to(self.dtype)

    def _is_attached(self, layers: Sequence[Cache]) -> bool:
        if len(self.attached) != len(layers):
            return False
        return all(own() is layer and k() is layer.slots["k"] for (own, k), layer in zip(self.attached, layers, strict=True))


_steps: OfThread[ModelStep] = OfThread()


def step(model: nn.Module, parts: Parts, tokens: Tensor, layers: Sequence[Cache]) -> Tensor | None:
    """Logits (B 1 V) of one token for each row (B 1), which join the caches; None where the modules must be called.

    Nothing has changed then, and the modules find whatever is wrong with the arguments.
    """
    why = find_obstacle(model, parts, tokens, layers)
    if not torch.compiler.is_compiling() and logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s", explain(why))
    if why is not None:
        return None
    try:
        return _steps.found[model].run(tokens, layers)
    except (IndexError, ValueError):  # no token, or a cache of another shape: the modules say what is wrong
        return None


def explain(why: str | None) -> str:
    return "model (native): one token for each row of a cache" if why is None else f"blocks: {why}"


def find_obstacle(model: nn.Module, parts: Parts, tokens: Tensor, layers: Sequence[Cache]) -> str | None:
    """Why this call goes through the modules; None if it is one of compiled code."""
    if observer_of(tokens) is Observer.TRACER or transform() is not None:
        return "a compiler, a mode, a transform or a tensor subclass sees every operation"
    if tokens.dim() != 2 or tokens.shape[1] != 1 or not tokens.shape[0]:
        return "one call takes one token for each row"
    if not tokens.is_cpu or tokens.is_floating_point() or len(layers) != len(parts.blocks):
        return "tokens or caches that are elsewhere, or that the modules refuse"
    found = _steps.get(model, partial(ModelStep, parts=parts))
    if found.why is not None:
        return found.why
    if torch.is_grad_enabled() and any(p.requires_grad for p in found.watch.parameters):
        return "gradients are recorded"
    return surroundings(found, tokens, layers)


def surroundings(found: ModelStep, tokens: Tensor, layers: Sequence[Cache]) -> str | None:
    """What about this one call the modules must see."""
    if torch.is_autocast_enabled("cpu"):
        return "autocast chooses the types"
    if any(mixer.training for mixer in found.dropping):
        return "dropout"
    own = next(filter(None, (replaced(mixer, (*BEFORE, *INSIDE)) for mixer in found.one_of_each)), None)
    if own is not None:
        return f"a layer has a method {own} of its own"
    for impl, aligner in found.choices:
        resolved = dispatch._resolve(impl, "cpu", str(found.dtype).removeprefix("torch."), aligner)
        if resolved != "native":
            return f"impl={resolved!r}"
    assert found.call is not None
    if found.call.arguments.positions and max(layers[0].seen) >= found.call.arguments.n_positions:
        return "no learned position is left"
    for layer, spec in zip(layers, found.specs, strict=True):
        if type(layer) is not Cache or layer.spec != spec or layer.batch_size != tokens.shape[0] or not takes(layer):
            return "a cache that is not of this model, or elsewhere"
        if layer.inputs.is_inference() and not torch.is_inference_mode_enabled():
            return "a cache made in inference mode"
    return None


def obstacle(model: nn.Module, parts: Parts) -> str | None:
    """What about the model only its modules know."""
    from hypermlp.models.lm import GELU, SwiGLU

    for block in parts.blocks:
        mixer, ffn = block.mixer, block.ffn
        if type(mixer) not in (HyperGLU, HyperMLP):
            return f"{type(mixer).__name__} is no layer that decodes in one call"
        if type(ffn) not in (SwiGLU, GELU):
            return f"{type(ffn).__name__} is no feed-forward of this package"
        why = Prepared(mixer).why
        if why is not None:
            return why
    hooked = find_hooked(model, DECODED)
    if hooked is not None:
        return f"{hooked} {HOOKED}"
    if any(name in vars(module) for module in model.modules() for name in OVERRIDDEN):
        return "a module with a method of its own"
    norms = [parts.norm, *(norm for block in parts.blocks for norm in (block.norm_mixer, block.norm_ffn))]
    embeddings = [parts.embedding, *([] if parts.positions is None else [parts.positions])]
    C = parts.embedding.weight.shape[1]
    if any(
        type(norm) not in (nn.RMSNorm, nn.LayerNorm) or norm.normalized_shape != (C,) or norm.weight is None for norm in norms
    ):
        return "a norm that is not over the model's width"
    if any(type(e) is not nn.Embedding or e.max_norm is not None for e in embeddings):
        return "an embedding that changes as it is read"
    linears = [weights_of(parts.head), *(m for block in parts.blocks for m in feed_forward(block))]
    linears += [weights_of(m) for block in parts.blocks for m in block.mixer.linears()]
    others = [t for block in parts.blocks for t in block.mixer.tensors().others]
    return unreadable(linears, [*others, *(p for m in (*norms, *embeddings) for p in m.parameters())])


def feed_forward(block: Any) -> list[Any]:
    """Weights of gate, up and down; GELU has no gate."""
    return [weights_of(getattr(block.ffn, name, None)) for name in ("gate", "up", "down")]


def norm_of(norm: Any) -> Norm:
    eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps  # what torch takes, also for bfloat16
    return Norm(norm.weight, getattr(norm, "bias", None), eps, isinstance(norm, nn.LayerNorm))


def lay_out(parts: Parts) -> ModelCall:
    blocks = [
        BlockParts(decode.lay_out(b.mixer), norm_of(b.norm_mixer), norm_of(b.norm_ffn), *feed_forward(b)) for b in parts.blocks
    ]
    positions, head = None if parts.positions is None else parts.positions.weight, weights_of(parts.head)
    assert head is not None
    return ModelCall(parts.embedding.weight, positions, blocks, norm_of(parts.norm), head)
