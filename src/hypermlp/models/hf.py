"""The language model as one of Hugging Face transformers: Auto classes, generate, Trainer, adapters.

    import hypermlp.models.hf  # registers model_type "hypermlp"; the one line that transformers needs
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

Folders are those of models/saved.py, in both directions: the same files, the same names of weights, no remote code. Needs
`pip install 'hypermlp[hf]'`; without it this module imports, and its classes say so when they are used.

Letters: B batch, T time, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.models.lm import LanguageModel, ModelCache, ModelConfig
from hypermlp.models.saved import MODEL_TYPE, TOKENIZER

if TYPE_CHECKING:
    from peft import LoraConfig

CURE = "this needs Hugging Face transformers: pip install 'hypermlp[hf]'"

try:
    import tokenizers
    import transformers
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        Cache,
        GenerationMixin,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
    )
    from transformers.modeling_outputs import CausalLMOutputWithPast
except ModuleNotFoundError as error:
    if error.name not in ("tokenizers", "transformers"):
        raise

    class Missing(type):
        """Of classes whose library is not installed: all that can be done with them is to learn the cure."""

        def __call__(cls, *arguments: Any, **options: Any) -> Any:
            raise ImportError(CURE)

        def __getattr__(cls, name: str) -> Any:
            raise ImportError(CURE)

    class PreTrainedConfig(metaclass=Missing):  # type: ignore[no-redef]
        pass

    Cache = PreTrainedModel = PreTrainedTokenizerFast = PreTrainedConfig  # type: ignore[assignment,misc]
    GenerationMixin = object  # type: ignore[assignment,misc]
    transformers = None  # type: ignore[assignment]

IGNORED = -100  # the label that does not count
END = "<|endoftext|>"


class HyperConfig(PreTrainedConfig):
    """The fields of ModelConfig."""

    model_type = MODEL_TYPE
    attribute_map = {  # noqa: RUF012  (as transformers has it)
        "vocab_size": "vocabulary",
        "hidden_size": "width",
        "num_hidden_layers": "depth",
        "max_position_embeddings": "length",
        "tie_word_embeddings": "tied",
    }
    vocabulary: int = 257
    width: int = 512
    depth: int = 8
    length: int = 1024
    mixer: str | list[str] | tuple[str, ...] = "hyperglu"
    size: int | None = None
    inner: int | None = None
    style: str = "llama"
    tied: bool = True

    def __post_init__(self, **options: Any) -> None:
        self.inner = self.plain().inner  # checks all fields, too
        super().__post_init__(**options)

    def plain(self) -> ModelConfig:
        return ModelConfig(**{name: getattr(self, name) for name in ModelConfig.__dataclass_fields__})

    def to_diff_dict(self) -> dict[str, Any]:
        """What config.json holds: as in the native format, and whether the weights are quantised."""
        kept = ("model_type", "quantization_config", *ModelConfig.__dataclass_fields__)
        return {name: value for name, value in super().to_diff_dict().items() if name in kept}


class HyperCache(Cache):
    """The caches of all layers, made when the first tokens come."""

    def __init__(self, one_way: bool) -> None:
        super().__init__(layers=[])
        self.one_way = one_way  # some layer cannot forget its last tokens
        self.memory: ModelCache | None = None
        self.columns = 0  # of input that have gone through, padding included

    def __len__(self) -> int:
        return 0 if self.memory is None else len(self.memory.layers)

    def __repr__(self) -> str:
        return f"HyperCache(columns={self.columns}, layers={len(self)})"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # none

    @property
    def batch_size(self) -> int:
        return -1 if self.memory is None else self.memory.batch_size

    @property
    def is_croppable(self) -> bool:
        return not self.one_way

    @property
    def is_initialized(self) -> bool:
        return self.memory is not None

    def reset(self) -> None:
        self.memory, self.columns = None, 0

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
        if tokens_to_remove == 0 or self.memory is None:
            return
        rows = [self.memory.select([row]) for row in range(self.memory.batch_size)]
        for row in rows:
            row.crop(max(0, int(row.lengths) + tokens_to_remove))
        self.memory = ModelCache.stack(rows)
        self.columns = max(0, self.columns + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.memory is not None:
            self.memory.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))


class HyperForCausalLM(PreTrainedModel, GenerationMixin):
    """A LanguageModel's parts under their own names, and its own forward: weights are called as in the native format."""

    config_class = HyperConfig
    config: HyperConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012
    _no_split_modules = ["Block"]  # noqa: RUF012

    _places = LanguageModel._places
    new_cache = LanguageModel.new_cache

    def __init__(self, config: HyperConfig) -> None:
        super().__init__(config)
        self.built = False
        net = LanguageModel(config.plain())
        self.positions: nn.Module | None = None
        for name, part in net.named_children():
            setattr(self, name, part)
        self.gradient_checkpointing = False
        self.post_init()
        self.built = True

    @classmethod
    def wrap(cls, net: LanguageModel) -> HyperForCausalLM:
        """The same parts, not copies."""
        with torch.device("meta"):
            model = cls(HyperConfig(**net.config.to_dict()))
        for name, part in net.named_children():
            setattr(model, name, part)
        return model.train(net.training)

    @property
    def checkpointing(self) -> bool:
        return self.gradient_checkpointing and self.training

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: HyperCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        inputs_embeds: None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits (B T V), and with labels (B T, -100 = does not count) the mean loss of each next token.

        attention_mask (B T, with a cache B past+T): padding changes nothing, wherever it lies. A cached forward records no
        gradients. The last three are here because adapters give them; they must be unset.
        """
        if inputs_embeds is not None or output_attentions or output_hidden_states:
            raise ValueError("this model takes input_ids alone, and gives logits and no attentions or hidden states")
        if past_key_values is None and use_cache and not self.training:
            past_key_values = self.generation_cache()
        logits = LanguageModel.forward(
            self,  # type: ignore[arg-type]
            input_ids,
            attention_mask=self._new_mask(input_ids, attention_mask),
            cache=self._memory(input_ids, past_key_values),
        )
        if past_key_values is not None:
            past_key_values.columns += input_ids.shape[1]
        loss = None if labels is None else next_token_loss(logits, labels, num_items_in_batch)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)  # type: ignore[arg-type]
        return output.to_tuple() if return_dict is False else output

    def _new_mask(self, tokens: Tensor, mask: Tensor | None) -> Tensor | None:
        """The part of the mask that is about the new tokens; None where it hides nothing."""
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] < tokens.shape[1]:
            found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"attention_mask ({found}) must be (batch, time), nonzero = real token, for all tokens so far")
        mask = mask[:, mask.shape[1] - tokens.shape[1] :]
        return mask if torch.compiler.is_compiling() or not bool(mask.all()) else None

    def _memory(self, tokens: Tensor, past: HyperCache | None) -> ModelCache | None:
        if past is None:
            return None
        if not isinstance(past, HyperCache):
            raise ValueError(f"past_key_values ({type(past).__name__}) must be a HyperCache; make it with generation_cache()")
        if past.memory is None:
            past.memory = self.new_cache(tokens.shape[0])  # type: ignore[misc]
        return past.memory

    def generation_cache(self) -> HyperCache:
        """An empty cache, for `past_key_values` of generate and forward."""
        return HyperCache(self.new_cache(1, device="meta").one_way)  # type: ignore[misc]

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *arguments: Any
    ) -> None:
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation ({generation_config.cache_implementation!r}) must be left unset: this model has a cache "
                "of its own, of fixed size where its mixers have a window or a state"
            )
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            cache = model_kwargs["past_key_values"] = self.generation_cache()
            if generation_config.is_assistant:
                cache.activate_past_recording()
            return
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *arguments)  # type: ignore[misc]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """A new model has initialised itself; what a checkpoint lacks gets what a new model would have there."""
        if not self.built:
            return
        place = next(name for name, own in self.named_modules() if own is module)
        new = LanguageModel(self.config.plain()).get_submodule(place)
        for name, value in module.named_parameters(recurse=False):
            if not getattr(value, "_is_hf_initialized", False):
                value.copy_(new.get_parameter(name))

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.head = new_embeddings


def next_token_loss(logits: Tensor, labels: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Cross entropy of label t+1 under the logits of token t: the mean, or the sum over a `count` of several batches."""
    targets = labels[:, 1:].flatten().to(logits.device)
    scores = logits[:, :-1].flatten(0, 1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if count is None:
        return F.cross_entropy(scores, targets, ignore_index=IGNORED)
    return F.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="sum") / count


class HyperTokenizer(PreTrainedTokenizerFast):
    """Reads the tokenizers of both formats; what it returns is an ordinary fast tokenizer."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *inputs: Any, **options: Any) -> Any:
        path = Path(pretrained_model_name_or_path) / TOKENIZER
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if "kind" in values:
            return fast_tokenizer(values)
        return PreTrainedTokenizerFast.from_pretrained(pretrained_model_name_or_path, *inputs, **options)


def fast_tokenizer(values: dict[str, Any]) -> PreTrainedTokenizerFast:
    """What a native tokenizer.json describes: the same tokens; its end of document also begins and pads."""
    if transformers is None:
        raise ImportError(CURE)
    end = values.get("end", END)
    file = byte_file() if values["kind"] == "bytes" else values["file"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(file)),
        bos_token=end,
        eos_token=end,
        pad_token=end,
        padding_side="left",
        split_special_tokens=True,  # what looks like the end of a document within a text is text
        clean_up_tokenization_spaces=False,
    )


def byte_file() -> dict[str, Any]:
    """A tokenizer.json of bytes: token i is byte i, 256 the end of document."""
    # The library shows each byte as a printable character: itself where it is one, else the next one from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={shown[byte]: byte for byte in range(256)}, merges=[]))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens([END])
    return json.loads(model.to_str())


def export(net: LanguageModel, folder: Path, tokenizer: dict[str, Any] | None = None) -> None:
    """Save for Hugging Face, tokenizer included; the native loader reads the folder too."""
    model = HyperForCausalLM.wrap(net)
    if tokenizer is not None:
        fast = fast_tokenizer(tokenizer)
        end = fast.eos_token_id
        model.generation_config = transformers.GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end)
        fast.save_pretrained(folder)
    model.save_pretrained(folder)


def lora_config(**changes: Any) -> LoraConfig:
    """Low-rank adapters on v and o, the readout, where the paper expects a small rank to do most (appendix H.6)."""
    try:
        from peft import LoraConfig
    except ModuleNotFoundError as error:
        raise ImportError("adapters need the peft library: pip install peft") from error
    return LoraConfig(**{"task_type": "CAUSAL_LM", "target_modules": ["v", "o"], **changes})


if transformers is not None:
    AutoConfig.register(MODEL_TYPE, HyperConfig, exist_ok=True)
    AutoModelForCausalLM.register(HyperConfig, HyperForCausalLM, exist_ok=True)
    AutoTokenizer.register(HyperConfig, fast_tokenizer_class=HyperTokenizer, exist_ok=True)
