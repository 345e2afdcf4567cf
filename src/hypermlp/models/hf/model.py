"""The backbone: from tokens to hidden states, with the signature of transformers' own models.

Letters: B batch, T time, C width.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypermlp.mixers.base import Mixer
from hypermlp.mixers.int8 import is_quantized
from hypermlp.mixers.lags import LagExtension, check_longer, fill
from hypermlp.mixers.modules import known
from hypermlp.mixers.weights import Weights
from hypermlp.models.hf.cache import HyperCache
from hypermlp.models.hf.config import HyperConfig
from hypermlp.models.hf.documents import Documents, find_documents
from hypermlp.models.hf.folder import AUTO_MAP, write_modelling_file
from hypermlp.models.hf.library import BaseModelOutputWithPast, GradientCheckpointingLayer, PreTrainedModel, initialization
from hypermlp.models.lm import Block, LanguageModel, check_places, check_tokens, places


@known
class HyperBlock(Block, GradientCheckpointingLayer):
    """A Block that transformers can recompute in the backward pass, and keeps whole on one device."""

    @classmethod
    def of(cls, block: Block) -> HyperBlock:
        """The same parts, not copies."""
        own = cls.__new__(cls)
        own.__dict__.update(block.__dict__)
        return own

    def forward(
        self,
        x: Tensor,
        *,
        past: HyperCache | None = None,
        layer: int = 0,
        weights: Weights | None = None,
        **options: Any,
    ) -> Tensor:
        assert isinstance(self.mixer, Mixer)
        listed = {"weights": weights} if self.mixer.gives_weights else {}
        if past is None:
            return super().forward(x, **options, **listed)
        if past.waits:
            past.read_later(partial(self, **options), self.mixer, x)
            return super().forward(x, **options, **listed)
        cache = past.layer(layer, self, self.mixer, x, options.get("attention_mask"))
        return super().forward(x, cache=cache, **options, **listed)


class HyperPreTrainedModel(PreTrainedModel):
    """What all models of this kind share: how they begin, and how they are saved."""

    config_class = HyperConfig
    config: HyperConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True  # what is not "eager", where mixers with weights compute them; see HyperModel.forward
    _can_compile_fullgraph = True
    _no_split_modules = ["HyperBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past", "past_key_values"]  # noqa: RUF012
    _input_embed_layer = "embedding"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """What a checkpoint lacks begins as in a new model; a new model has initialised its blocks itself."""
        index, place = find_module(self.base_model.get_submodule("blocks"), module)
        if index is None:
            super()._init_weights(module)
            return
        missing = [n for n, p in module.named_parameters(recurse=False) if not getattr(p, "_is_hf_initialized", False)]
        if missing:
            plain = self.config.plain()
            one = LanguageModel(plain.replace(depth=1, vocabulary=1, mixer=plain.mixers[index]))
            new = one.blocks[0].get_submodule(place)
            for name in missing:
                initialization.copy_(module.get_parameter(name), new.get_parameter(name))

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path | None,
        *arguments: Any,
        lag_extension: LagExtension | None = None,
        **options: Any,
    ) -> Any:
        """As in every model; with length=… a longer context than it was trained for.

        lag_extension: "hold", "decay", "zero" or "fresh", what HyperGLU and HyperMLP get at the new lags (mixers/lags.py).
        """
        folder, config = pretrained_model_name_or_path, options.get("config")
        length = options.pop("length", getattr(config, "length", None))
        if length is None or folder is None:
            return super().from_pretrained(folder, *arguments, **options)
        where = {name: options[name] for name in ("revision", "token", "cache_dir", "subfolder") if name in options}
        trained = HyperConfig.from_pretrained(folder, **where).length
        if isinstance(config, HyperConfig) and config.length != trained:  # an Auto class has put the length there
            options["config"] = copy.deepcopy(config)
            options["config"].length = trained
        model = super().from_pretrained(folder, *arguments, **options)
        return model if length == trained else model.extended(length, lag_extension)

    def extended(self, length: int, lag_extension: LagExtension | None = None) -> Any:
        """A new model with these weights and a longer context, as LanguageModel.extended makes one."""
        if getattr(self, "hf_device_map", None) or getattr(self, "is_quantized", False):
            raise ValueError("a model is extended on one device and unquantised; load it without device_map and quantization")
        check_longer("length", length, self.config.length)
        like = next(self.parameters())
        config = copy.deepcopy(self.config)
        config.length = length
        new: Any = type(self)(config)
        new.to(like.device, like.dtype)
        fill(new, self.state_dict(), lag_extension)
        return new.train(self.training)

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, is_main_process: bool = True, **options: Any
    ) -> None:
        """As in every model; also writes the file that lets tools without this package's name load it."""
        if is_quantized(self):
            raise ValueError("transformers cannot load int8 codes of hypermlp.quantize: save the model before it is quantised")
        self.config.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, is_main_process=is_main_process, **options)
        if is_main_process:
            write_modelling_file(Path(save_directory))


@known
class HyperModel(HyperPreTrainedModel):
    """A LanguageModel's parts without its head: tokens (B T) to hidden states (B T C)."""

    def __init__(self, config: HyperConfig) -> None:
        super().__init__(config)
        net = LanguageModel(config.plain())
        self._take(net)
        self.gradient_checkpointing = False
        for p in self.parameters():
            if not p.is_meta:
                p._is_hf_initialized = True  # type: ignore[attr-defined]
        self.post_init()

    def _take(self, net: LanguageModel) -> None:
        """The parts of `net`, not copies."""
        self.embedding, self.positions, self.norm = net.embedding, net.positions, net.norm
        self.blocks = nn.ModuleList(HyperBlock.of(block) for block in net.blocks if isinstance(block, Block))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: HyperCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache_position: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Hidden states (B T C) after the last norm.

        Args:
            input_ids: tokens (B T); or inputs_embeds (B T C), their embeddings.
            attention_mask: (B T, with a cache B past+T), nonzero = real token; padding changes nothing, wherever it lies.
            position_ids: (B T) or (1 T). Where positions restart a document begins, and each is computed as if alone
                (padding-free batches). With a cache, positions follow from what it has seen.
            past_key_values: a HyperCache, see generation_cache. Gradients pass through the first tokens that it is given, and
                are refused for later ones.
            use_cache: return a cache; by default config.use_cache. None is made while gradient checkpointing trains, for packed
                documents, and by default in a compiled graph.
            output_attentions: also return how much each token takes from each token of its past (B heads T past+T), from every
                layer: the weights of softmax attention, the readout weights w of HyperGLU and HyperMLP, which may be negative.
                Other mixers have none. Outputs are then computed from them; so they are with attn_implementation="eager".
            output_hidden_states: also return the input of every block and the output of the model.
            cu_seq_lens_q: borders of the documents in all rows laid end to end, [0, …, B*T], as data collators give them; saves
                looking at position_ids.
            cache_position, others: accepted, as other models do, and without effect.
        """
        keep_weights = self._keeps_weights(output_attentions)
        x = self._embedded(input_ids, inputs_embeds)
        mask = new_mask(x, attention_mask)
        documents = None
        if past_key_values is None:
            documents = self._documents(x, mask, position_ids, cu_seq_lens_q)
        past = self._past(past_key_values, use_cache, documents)
        if self.positions is not None:
            x = x + self.positions(self._places(x, mask, position_ids, cu_seq_lens_q, past))
        options: dict[str, Tensor | None] = {"attention_mask": mask}
        if documents is not None:
            x, options = documents.pack(x), {"cu_seqlens": documents.cu_seqlens}
        keep_states = self._wants(output_hidden_states, "output_hidden_states")
        eager = keep_weights or self.config._attn_implementation == "eager"
        if keep_weights and documents is not None:
            raise ValueError(
                "output_attentions is for one sequence in each row: leave it unset for packed documents (positions restart)"
            )
        columns = attention_mask if keep_weights and attention_mask is not None and not bool(attention_mask.all()) else None
        states, weights = [x], [Weights(columns) if eager else None for _ in self.blocks]
        for i, block in enumerate(self.blocks):
            states.append(block(states[-1], past=past, layer=i, weights=weights[i], **options))
            if not keep_states:
                del states[0]
        states[-1] = self.norm(states[-1])
        if documents is not None:
            states = [documents.unpack(state) for state in states]
        if past is not None:
            past.count(x.shape[1])
        output = BaseModelOutputWithPast(
            last_hidden_state=states[-1],  # type: ignore[arg-type]
            past_key_values=past,
            hidden_states=tuple(states) if keep_states else None,  # type: ignore[arg-type]
            attentions=tuple(w.shown for w in weights if w is not None) if keep_weights else None,  # type: ignore[misc]
        )
        return output if self._wants(return_dict, "return_dict") else output.to_tuple()

    def _wants(self, given: bool | None, name: str) -> bool:
        return bool(getattr(self.config, name, False) if given is None else given)

    def _keeps_weights(self, output_attentions: bool | None) -> bool:
        wanted = self._wants(output_attentions, "output_attentions")
        if wanted and not all(mixer.gives_weights for mixer in self.mixers):
            names = ", ".join(sorted(set(self.config.plain().mixers)))
            raise ValueError(
                f"output_attentions is not available: not all mixers of this model ({names}) have weights of single tokens, as "
                "softmax attention, HyperGLU and HyperMLP have; leave it unset"
            )
        return wanted

    def _embedded(self, tokens: Tensor | None, embedded: Tensor | None) -> Tensor:
        if (tokens is None) == (embedded is None):
            raise ValueError("give input_ids or inputs_embeds, one of the two")
        if embedded is not None:
            return embedded
        assert tokens is not None
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(f"input_ids are {tokens.dtype} {tuple(tokens.shape)}; they must be whole numbers (batch, time)")
        check_tokens(tokens, getattr(self.embedding, "num_embeddings", self.config.vocabulary))
        return self.embedding(tokens)

    def _documents(
        self, x: Tensor, mask: Tensor | None, position: Tensor | None, cu_seqlens: Tensor | None
    ) -> Documents | None:
        if cu_seqlens is not None:
            return Documents(cu_seqlens, x.shape[0])
        if position is None:
            return None
        if position.dim() != 2 or position.shape[1] != x.shape[1] or position.shape[0] not in (1, x.shape[0]):
            raise ValueError(f"position_ids have shape {tuple(position.shape)}; they must be (batch, time) or (1, time)")
        return find_documents(position.expand(x.shape[:2]), mask)

    def _past(self, given: HyperCache | None, use_cache: bool | None, documents: Documents | None) -> HyperCache | None:
        if given is not None:
            check_cache(given)
            if self.training and self.gradient_checkpointing:
                raise ValueError("a cache cannot be used while gradient checkpointing trains: call model.eval() first")
            return given
        by_default = self.config.use_cache and not torch.compiler.is_compiling()
        wanted = by_default and self.has_cache if use_cache is None else use_cache
        checkpointed = self.training and self.gradient_checkpointing
        return self.generation_cache() if wanted and not checkpointed and documents is None else None

    def _places(
        self, x: Tensor, mask: Tensor | None, position: Tensor | None, cu_seqlens: Tensor | None, past: HyperCache | None
    ) -> Tensor:
        """Rows of the learned position embeddings (B T)."""
        if position is not None:
            place = position[:, -x.shape[1] :].expand(x.shape[:2]).clamp(min=0)
            check_places(place, self.config.length)
            return place
        if cu_seqlens is not None:
            return places(x.flatten(0, 1)[None], self.config.length, None, cu_seqlens).view(x.shape[:2])
        return places(x, self.config.length, mask, None, None if past is None else past.seen(x.shape[0]))

    @property
    def mixers(self) -> list[Mixer]:
        return [mixer for mixer in (block.get_submodule("mixer") for block in self.blocks) if isinstance(mixer, Mixer)]

    @property
    def has_cache(self) -> bool:
        """Whether every mixer can decode step by step."""
        try:
            return all(mixer.cache_spec() for mixer in self.mixers)
        except ValueError:
            return False

    def generation_cache(self) -> HyperCache:
        """An empty cache, for `past_key_values` of generate and forward."""
        if not self.has_cache:
            names = ", ".join(sorted(set(self.config.plain().mixers)))
            raise ValueError(f"this model ({names}) has a mixer without a cache; generate and call it with use_cache=False")
        return HyperCache(any(mixer.cache_spec().one_way for mixer in self.mixers))


def check_cache(given: Any) -> None:
    if not isinstance(given, HyperCache):
        raise ValueError(
            f"past_key_values ({type(given).__name__}) must be a HyperCache, which keeps what these mixers need: leave it "
            "unset, or make it with model.generation_cache(). Keys and values cannot be put before the text: instead of "
            "prefix tuning, use PromptTuningConfig or a LoraConfig"
        )


def find_module(blocks: nn.Module, module: nn.Module) -> tuple[int | None, str]:
    """Which block a module is part of, and its name there."""
    for index, block in enumerate(blocks.children()):
        for name, own in block.named_modules():
            if own is module:
                return index, name
    return None, ""


def new_mask(x: Tensor, mask: Tensor | None) -> Tensor | None:
    """The part of the mask that is about the new tokens x (B T C); None where it hides nothing."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] < x.shape[1]:
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask ({found}) must be (batch, time), nonzero = real token, for all tokens so far: give the mask of "
            "padding. Who sees whom is fixed by the mixers; packed documents have position_ids that restart, or cu_seq_lens_q"
        )
    mask = mask[:, mask.shape[1] - x.shape[1] :]
    return mask if torch.compiler.is_compiling() or not bool(mask.all()) else None
