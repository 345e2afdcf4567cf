"""The plain way in: this PTX, on this grid, with these arguments."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hypermlp.testing.ptx.execution import Counts, Order, execute, global_memory
from hypermlp.testing.ptx.memory import place_tensors


def run(
    ptx: str, grid: tuple[int, ...], arguments: Sequence[Tensor | int | float], *, shared: int = 0, order: Order = "together"
) -> Counts:
    """Execute PTX on CPU tensors, in place.

    Args:
        ptx: text with one entry.
        grid: programs along x, y and z.
        arguments: one per parameter of the entry, in its order; the last ones may be left out and are then 0.
        shared: bytes of dynamic shared memory.
        order: "together", "forward", "reverse" or the seed of a random order (see execution.py).
    """
    tensors = {f"argument {n}": value for n, value in enumerate(arguments) if isinstance(value, Tensor)}
    elsewhere = [name for name, tensor in tensors.items() if tensor.device.type != "cpu"]
    if elsewhere:
        raise ValueError(f"{', '.join(elsewhere)} must be on the CPU, where the emulator runs; call .cpu()")
    memory = global_memory(ptx)
    places = place_tensors(memory, tensors)
    values = [places[f"argument {n}"] if isinstance(x, Tensor) else x for n, x in enumerate(arguments)]
    return execute(ptx, grid, values, memory, shared, order)
