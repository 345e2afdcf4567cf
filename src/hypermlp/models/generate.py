"""Generation: one token after another, greedy or sampled, through a cache or, without one, the whole context each time.

Letters: B batch, T time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hypermlp.models.lm import LanguageModel


@torch.no_grad()
def stream(
    model: LanguageModel,
    prompt: Tensor,
    count: int,
    *,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """`count` new tokens (B) after the prompt (B T), each as soon as it is known; temperature 0 takes the likeliest.

    The context may grow past the model's length: HyperGLU slides.

    Args:
        model: in eval mode, if it has dropout.
        prompt: tokens (B T), at least one each.
        count: how many tokens follow.
        attention_mask: (B T), 0 at padding, which may lie anywhere and changes nothing.
        temperature: 0, or what logits are divided by before a token is drawn.
        top_k: draw from so many of the likeliest tokens.
        top_p: draw from the likeliest tokens that together have this probability.
        seed: of the draws.
        use_cache: False computes the whole context again for every token, for models without a cache (LanguageModel.has_cache).
    """
    check_sampling(prompt, temperature, top_k, top_p)
    if use_cache and not model.has_cache:
        raise ValueError("this model has no cache (the identity layout has none); give use_cache=False")
    generator = torch.Generator(prompt.device).manual_seed(seed)
    cache = model.new_cache(prompt.shape[0], max_len=prompt.shape[1] + count) if use_cache else None
    logits = model(prompt, attention_mask=attention_mask, cache=cache)
    if attention_mask is None:
        last = logits[:, -1]
    else:
        place = torch.arange(prompt.shape[1], device=prompt.device)
        newest = torch.where(attention_mask != 0, place, -1).amax(1)  # the last real token of each row
        last = logits[torch.arange(len(prompt), device=prompt.device), newest]
    for i in range(count):
        token = choose(last, temperature, top_k, top_p, generator)
        yield token
        if i + 1 == count:
            return
        if cache is not None:
            last = model(token[:, None], cache=cache)[:, -1]
            continue
        prompt = torch.cat([prompt, token[:, None]], 1)
        if attention_mask is not None:
            attention_mask = torch.cat([attention_mask, torch.ones_like(attention_mask[:, :1])], 1)
        last = model(prompt, attention_mask=attention_mask)[:, -1]


def generate(model: LanguageModel, prompt: Tensor, count: int, **options: Any) -> Tensor:
    """The new tokens (B count) after the prompt (B T).

    Args:
        model: a language model, in eval mode if it has dropout.
        prompt: tokens (B T), at least one each.
        count: how many tokens follow.
        options: attention_mask, temperature, top_k, top_p, seed and use_cache, as in `stream`.
    """
    tokens = list(stream(model, prompt, count, **options))
    return torch.stack(tokens, 1) if tokens else prompt[:, :0]


def choose(logits: Tensor, temperature: float, top_k: int | None, top_p: float, generator: torch.Generator) -> Tensor:
    """One token (B) from logits (B vocabulary)."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p < 1:
        probability, order = logits.softmax(-1).sort(-1, descending=True)
        beyond = probability.cumsum(-1) - probability >= top_p  # tokens after those that already make up top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def check_sampling(prompt: Tensor, temperature: float, top_k: int | None, top_p: float) -> None:
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise ValueError(f"the prompt has shape {tuple(prompt.shape)}; it must be (batch, time) with at least one token")
    if temperature < 0:
        raise ValueError(f"temperature ({temperature}) must be at least 0; 0 takes the likeliest token")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k ({top_k}) must be at least 1")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p ({top_p}) must be above 0 and at most 1")
