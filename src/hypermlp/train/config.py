"""All that decides what a training run computes, as plain data: a model, its text, and how it is trained."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hypermlp.models.lm import ModelConfig
from hypermlp.train.language import TrainConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text a model is trained on."""

    corpus: str  # "stdlib", a path, "debian:NAME", "hub:owner/name", or a folder with a prepared corpus
    tokenizer: str | None = None  # "bytes", "bpe:4096", or the path of a tokenizer.json; None: that of the prepared corpus
    context: int  # tokens of a training sequence
    documents: bool = False  # keep documents apart

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ValueError(f"data.context ({self.context}) must be at least 1")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All that decides what a training run computes; plain data."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig

    def __post_init__(self) -> None:
        if self.model.learned_positions and self.data.context > self.model.length:
            raise ValueError(
                f"data.context ({self.data.context}) must be at most model.length ({self.model.length}), "
                f"the number of learned position embeddings; give model.length={self.data.context}"
            )

    @property
    def tokens(self) -> int:
        """Of the whole run."""
        return self.train.steps * self.train.batch * self.data.context

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model.to_dict(), "data": dataclasses.asdict(self.data), "train": self.train.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        return cls(
            model=ModelConfig.from_dict(values["model"]),
            data=DataConfig(**values["data"]),
            train=TrainConfig(**values["train"]),
        )
