"""Draws docs/skew.png: how a lag tile is made of two time tiles, computed as the kernels do it.

python docs/make_skew_picture.py
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

N = 8  # rows and columns of a tile
FIRST = 8  # position of the first row; tile 1 begins one slot behind it


def main() -> None:
    i, j = np.arange(N)[:, None], np.arange(N)[None, :]
    slots = [np.broadcast_to(FIRST + 1 - (1 - n) * N + j, (N, N)) for n in (0, 1)]
    rotated = [np.take_along_axis(tile, (i + j) % N, 1) for tile in slots]
    lag_tile = np.where(i + j < N, rotated[0], rotated[1])
    lags = FIRST + i - lag_tile
    assert (lags == lags[:1]).all(), "a lag has one column"

    figure = Figure(figsize=(13, 3.1), layout="constrained")
    axes = figure.subplots(1, 5)
    show(axes[0], slots[0], "time tile 0: the slot of each place")
    show(axes[1], slots[1], "time tile 1")
    show(axes[2], rotated[0], "tile 0, row i turned by i")
    show(axes[3], rotated[1], "tile 1, row i turned by i")
    show(axes[4], lag_tile, "lag tile: where(i + j < N, 0, 1)")
    axes[4].set_xticks(range(N), [str(lag) for lag in lags[0]])
    axes[4].set_xlabel("lag, the same in every row")
    figure.savefig(Path(__file__).parent / "skew.png", dpi=110)


def show(axis: Axes, slots: NDArray[np.int64], title: str) -> None:
    axis.imshow(slots, cmap="viridis", vmin=1, vmax=2 * N)
    for (row, column), slot in np.ndenumerate(slots):
        axis.text(column, row, str(slot), ha="center", va="center", fontsize=7, color="white" if slot < 11 else "black")
    axis.set_title(title, fontsize=9)
    axis.set_yticks(range(N), [str(FIRST + row) for row in range(N)])
    axis.set_ylabel("position of the row", fontsize=8)
    axis.set_xticks([])


if __name__ == "__main__":
    main()
