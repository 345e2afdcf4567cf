"""What happens where a kernel does not fit onto a GPU: the whole call again with smaller tiles.

Kernels of a phase (forward, backward, decode) share the layout of their scratch, so all of them get smaller together, and the
next call of the same sizes begins with the tiles that did fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from triton.runtime.errors import OutOfResources

from hypermlp import notice
from hypermlp.ops.registered import Inputs
from hypermlp.ops.triton import device
from hypermlp.ops.triton.tiles import MOST_STEPS

P = ParamSpec("P")
Result = TypeVar("Result")
taken: dict[tuple[Any, ...], int] = {}  # steps down that a phase needed, by its sizes


def sizes(phase: str, inputs: Inputs) -> tuple[Any, ...]:
    """What tiles depend on."""
    ranks = [0 if x is None else x.shape[2] for x in (inputs.left1, inputs.left2)]
    limits = device.current.limits(str(inputs.q.device))
    return phase, limits.architecture, str(inputs.q.dtype), inputs.q.shape[3], inputs.v.shape[3], *ranks


def steps(kernel: str, inputs: Inputs) -> int:
    """How many steps smaller than the rule's a kernel's tile must be."""
    return taken.get(sizes(kernel.partition("_")[0], inputs), 0)


def smaller_if_needed(phase: str) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Repeat a call with smaller tiles as long as a kernel does not fit."""

    def decorate(compute: Callable[P, Result]) -> Callable[P, Result]:
        @functools.wraps(compute)
        def fitting(*args: P.args, **kwargs: P.kwargs) -> Result:
            for _ in range(MOST_STEPS + 1):
                try:
                    return compute(*args, **kwargs)
                except OutOfResources as error:
                    step_down(phase, next(x for x in (*args, *kwargs.values()) if isinstance(x, Inputs)), error)
            raise AssertionError("step_down raises at the smallest tile")

        return fitting

    return decorate


def step_down(phase: str, inputs: Inputs, error: OutOfResources) -> None:
    key = sizes(phase, inputs)
    _, _, dtype, K, V, *ranks = key
    where = f"{dtype.removeprefix('torch.')}, keys {K}, values {V} and rank {max(ranks)} wide, on {inputs.q.device}"
    if taken.get(key, 0) == MOST_STEPS:
        raise ValueError(
            f'the Triton kernels do not fit with the smallest tiles ({where}): {error} Use impl="chunked".'
        ) from error
    taken[key] = taken.get(key, 0) + 1
    notice.once(f"smaller tiles for the Triton {phase} ({where}): {error}")
