"""A decoder that forecasts: segments of a series are its tokens, and each predicts the next (as in the authors' WAVE).

Letters: B rows (a channel of a window each), L look-back, s horizon and length of a segment, N segments, C width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.config import INIT_STD
from hypermlp.mixers.base import Mixer
from hypermlp.models.lm import Block

EPS = 1e-6  # beside the deviation of a look-back


class Forecaster(nn.Module):
    """Rows of a channel's number and its look-back (B 1+L) to forecasts (B s).

    Each row is normalised by itself: less the mean of its last s values, divided by the deviation of all. The look-back is cut
    into segments of s values, the first one filled up with its first value; a segment, its place and its channel make a token.
    """

    def __init__(
        self,
        channels: int,
        lookback: int,
        horizon: int,
        width: int,
        depth: int,
        inner: int,
        make_mixer: Callable[[], Mixer],
    ) -> None:
        super().__init__()
        self.lookback, self.horizon = lookback, horizon
        self.segments = -(-lookback // horizon)
        self.embedding = nn.Linear(horizon, width)
        self.channels, self.places = nn.Embedding(channels, width), nn.Embedding(self.segments, width)
        self.norm_in, self.norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.blocks = nn.ModuleList(Block(make_mixer(), inner) for _ in range(depth))
        self.head = nn.Linear(width, horizon)
        for module in (self.embedding, self.head, self.channels, self.places):
            nn.init.normal_(module.weight, 0, INIT_STD)
        for linear in (self.embedding, self.head):
            nn.init.zeros_(linear.bias)

    def forward(self, rows: Tensor) -> Tensor:
        segments, centre, scale = self.normalise(rows[:, 1:])
        return self.predict(segments, rows[:, 0])[:, -1] * scale + centre

    def normalise(self, series: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Segments (B N s) of normalised rows, and what was taken away: centre and scale (B 1)."""
        centre = series[:, -self.horizon :].mean(1, keepdim=True)
        scale = series.std(1, keepdim=True, correction=0) + EPS
        missing = self.segments * self.horizon - self.lookback
        whole = torch.cat([series[:, :1].expand(-1, missing), series], 1)
        return ((whole - centre) / scale).unflatten(1, (self.segments, self.horizon)), centre, scale

    def predict(self, segments: Tensor, channel: Tensor) -> Tensor:
        """The segment that follows each (B N s), normalised."""
        x = self.embedding(segments) + self.places.weight + self.channels(channel.long())[:, None]
        x = self.norm_in(x)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))

    def summed_loss(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Squared errors of the forecasts (B s), summed, and as often the mean one of the segments that are known already."""
        segments, centre, scale = self.normalise(rows[:, 1:])
        predicted = self.predict(segments, rows[:, 0])
        loss = F.mse_loss(predicted[:, -1] * scale + centre, targets, reduction="sum")
        if self.segments > 1:
            loss = loss + targets.numel() * F.mse_loss(predicted[:, :-1], segments[:, 1:])
        return loss
