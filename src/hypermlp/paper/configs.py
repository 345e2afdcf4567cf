"""The language models that the paper trains, as configurations."""

from __future__ import annotations

from hypermlp.files import TOKENIZER
from hypermlp.models.lm import ModelConfig
from hypermlp.train.config import DataConfig, RunConfig
from hypermlp.train.language import TrainConfig


def fineweb(width: int, tokens: float) -> RunConfig:
    """The language models of section 3: FineWeb-Edu, the LLaMA-2 tokenizer, half a million tokens per update.

    Layers, feed-forward and an untied head are those of the protocols that the paper follows (published.py).
    """
    context, batch = 4096, 128
    update = batch * context
    return RunConfig(
        model=ModelConfig(
            vocabulary=32000, width=width, depth=24, length=context, inner=-(-(8 * width // 3) // 256) * 256, tied=False
        ),
        data=DataConfig(corpus="hub:HuggingFaceFW/fineweb-edu", tokenizer=TOKENIZER, context=context),
        train=TrainConfig(
            steps=round(tokens / update),
            batch=batch,
            micro=4,
            lr=4e-4,
            warmup=round(1e9 / update),
            precision="bfloat16",
            checkpointing=True,
            evaluate_every=500,
            save_every=500,
            asynchronous=True,
        ),
    )


PAPER: dict[str, RunConfig] = {
    # Table 1: nanoGPT's own defaults (its train.py and config/train_gpt2.py; model.py without biases, residual projections
    # scaled, weight decay on all that has two dimensions), of whose 600,000 steps the paper takes 80 × 500.
    "nanogpt-owt2": RunConfig(
        model=ModelConfig(vocabulary=50304, width=768, depth=12, length=1024, style="nanogpt"),
        data=DataConfig(corpus="openwebtext2", tokenizer=TOKENIZER, context=1024),
        train=TrainConfig(
            steps=40_000,
            batch=480,
            micro=12,
            lr=6e-4,
            warmup=2000,
            decay=600_000,
            decayed="two-dimensional",
            precision="bfloat16",
            parallel="ddp",
            evaluate_every=500,
            evaluate_batches=5,
            save_every=500,
            asynchronous=True,
        ),
    ),
    # Table 2
    "340m-15b": fineweb(1024, 15e9),
    "1.3b-100b": fineweb(2048, 100e9),
}
