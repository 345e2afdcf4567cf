"""Models with a head: the next token, a class per sequence, a class per token.

Letters: B batch, T time, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hypermlp.models.hf.cache import HyperCache, HyperStaticCache
from hypermlp.models.hf.config import HyperConfig
from hypermlp.models.hf.library import (
    CausalLMOutputWithPast,
    GenerationMixin,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from hypermlp.models.hf.model import HyperModel, HyperPreTrainedModel, check_cache, new_mask
from hypermlp.models.lm import LanguageModel
from hypermlp.models.step import Parts, step


class HyperForCausalLM(HyperPreTrainedModel, GenerationMixin):
    """The language model: tokens (B T) to logits (B T V)."""

    accepts_loss_kwargs = True
    _tied_weights_keys = {"head.weight": "model.embedding.weight"}  # noqa: RUF012
    _tp_plan = {"head": "colwise_gather_output"}  # noqa: RUF012
    _fsdp_plan = {"head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: HyperConfig) -> None:
        super().__init__(config)
        self.model = HyperModel(config)
        self.head: nn.Module = nn.Linear(config.width, config.vocabulary, bias=False)
        self.post_init()

    @classmethod
    def wrap(cls, net: LanguageModel) -> HyperForCausalLM:
        """The same parts, not copies."""
        with torch.device("meta"):
            model = cls(HyperConfig(**net.config.to_dict()))
        model.model._take(net)
        model.head = net.head
        return model.train(net.training)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: HyperCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache_position: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits (B T V), and with labels (B T, -100 = does not count) the mean loss of each next token.

        logits_to_keep: compute logits of the last so many tokens only, or of the places in a tensor; 0: of all. The other
        arguments are those of HyperModel, and of the loss (num_items_in_batch: divide by this count, over several batches).
        """
        given = (inputs_embeds, labels, output_attentions, output_hidden_states, others.get("cu_seq_lens_q"))
        plain = any(option is not None for option in given) or not isinstance(logits_to_keep, int)
        if past_key_values is not None and input_ids is not None and not plain:
            logits = self._decode(input_ids, attention_mask, past_key_values)
            if logits is not None:
                fast = CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)  # type: ignore[arg-type]
                return fast if self.model._wants(return_dict, "return_dict") else fast.to_tuple()
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **others,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocabulary, **others)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def _decode(self, tokens: Tensor, mask: Tensor | None, past: HyperCache) -> Tensor | None:
        """Logits (B 1 V) of one token for each row in one call (models/step.py); None where the modules must be called."""
        net = self.model
        alone = net.positions is None and isinstance(past, HyperCache) and past.is_initialized and not past.waits
        if not alone or past.is_compileable or tokens.shape[1:] != (1,) or new_mask(tokens, mask) is not None:
            return None
        if self.config.output_hidden_states or self.config.output_attentions or self.training:
            return None
        logits = step(self, Parts(net.embedding, None, net.blocks, net.norm, self.head), tokens, past.memory.layers)
        if logits is not None:
            past.count(1)
        return logits

    def generation_cache(self) -> HyperCache:
        """An empty cache, for `past_key_values` of generate and forward."""
        return self.model.generation_cache()

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *arguments: Any
    ) -> None:
        if generation_config.cache_implementation not in (None, "dynamic", "static"):
            raise ValueError(
                f"cache_implementation ({generation_config.cache_implementation!r}) must be left unset: this model has a cache "
                'of its own, of fixed size where its mixers have a window or a state ("static": one that compiled steps take)'
            )
        if self.training and self.model.gradient_checkpointing:
            generation_config.use_cache = model_kwargs["use_cache"] = False
        given = model_kwargs.get("past_key_values")
        if given is not None:
            check_cache(given)
            if not generation_config.is_assistant:
                given.stop_past_recording()  # assisted decoding asks for it anew
        elif generation_config.use_cache is not False and generation_config.cache_implementation != "static":
            cache = model_kwargs["past_key_values"] = self.generation_cache()
            if generation_config.is_assistant:
                cache.activate_past_recording()
            return
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *arguments)  # type: ignore[misc]

    def _prepare_static_cache(
        self, cache_implementation: str, batch_size: int, max_cache_len: int, *arguments: Any, **options: Any
    ) -> HyperStaticCache:
        """With room for as many tokens as any cache of before, so that what was compiled serves again."""
        for mixer in self.model.mixers:
            mixer.new_cache(1, max_len=1, device="meta", fixed=True)  # says why not
        self._previous_max_cache_length = max(max_cache_len, getattr(self, "_previous_max_cache_length", 0))
        return HyperStaticCache(self._previous_max_cache_length)

    def create_masks_for_generate(self, inputs_embeds: Tensor, attention_mask: Tensor | None, **others: Any) -> Tensor | None:
        """What generate gives compiled steps: the mask of the new tokens; None where all are real, which is one graph then."""
        return new_mask(inputs_embeds, attention_mask)

    def generate_batch(self, *arguments: Any, **options: Any) -> Any:
        """Not of this model: transformers' continuous batching keeps keys and values in pages, in its own layout."""
        raise ValueError(
            "generate_batch keeps keys and values in pages of its own, which these mixers do not use: call generate with a "
            "padded batch, whose rows may end at different lengths"
        )

    init_continuous_batching = continuous_batching_context_manager = generate_batch

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.head = new_embeddings


class HyperForSequenceClassification(GenericForSequenceClassification, HyperPreTrainedModel):
    """A class per sequence, read from the last token that is no padding."""


class HyperForTokenClassification(GenericForTokenClassification, HyperPreTrainedModel):
    """A class per token."""
