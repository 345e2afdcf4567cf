"""Published kernels for the rivals, used where they are installed: on a GPU a rival should run in its fastest form.

flash-linear-attention (fla) has the recurrences with a matrix-valued state, GSA, PaTH and HGRN; mamba_ssm has Mamba's scan.
They serve whole sequences in bfloat16 or float16 on CUDA; everything else (float32, documents packed into a row, single tokens,
transforms of functions, exported graphs) is computed by our own code. HYPERMLP_KERNELS=own turns them off. Like those kernels
themselves, this way has first derivatives in reverse mode only. How arguments are passed on is tested on a CPU against plain
functions of the same signatures; it has not been run on a GPU.

Letters: B batch, T time, H heads, K key width, V value width, M slots, E channels, N state width.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hypermlp import notice
from hypermlp.checks import choose_from
from hypermlp.ops.observer import transform

SWITCH = "HYPERMLP_KERNELS"
HALF = (torch.bfloat16, torch.float16)
MOST_KEYS = 256  # widest head that the kernels take
PATH_WIDTHS = (16, 32, 64, 128)
WHERE = {
    "chunk_simple_gla": "fla.ops.simple_gla",
    "chunk_gla": "fla.ops.gla",
    "chunk_delta_rule": "fla.ops.delta_rule",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "chunk_kda": "fla.ops.kda",
    "chunk_dplr_delta_rule": "fla.ops.generalized_delta_rule",
    "chunk_gsa": "fla.ops.gsa",
    "parallel_path_attn": "fla.ops.path_attn",
    "fused_recurrent_hgrn": "fla.ops.hgrn",
    "selective_scan_fn": "mamba_ssm.ops.selective_scan_interface",
}


@functools.cache
def find(name: str) -> Callable[..., Any] | None:
    """A kernel by name; None where its package is not installed, or does not work here."""
    try:
        found: Callable[..., Any] | None = getattr(import_module(WHERE[name]), name, None)
    except Exception:  # these packages fail in many ways where the GPU or triton is not what they expect
        return None
    return found


def kernel(name: str, x: Tensor, begins: Tensor | None) -> Callable[..., Any] | None:
    """The kernel that serves inputs like x (B T …), None where our own code does; the choice is reported once."""
    setting = os.environ.get(SWITCH) or "auto"
    choose_from(SWITCH, setting, ("auto", "own"))
    if setting == "own" or not on_gpu(x) or half(x) not in HALF or begins is not None:
        return None
    if x.shape[1] < 2 or transform() is not None or torch.compiler.is_exporting():
        return None
    found = find(name)
    if found is not None:
        notice.once(f"kernel={name} (CUDA, {half(x)}, {WHERE[name].split('.')[0]} is installed; {SWITCH}=own turns it off)")
    return found


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def half(x: Tensor) -> torch.dtype:
    """The type that a product of x would have."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


def cast(x: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [t.to(half(x)).contiguous() for t in tensors]


def start(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.float().contiguous()


def recurrence(steps: Any, state: Tensor | None, begins: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """ops.recurrence by a kernel; None where none serves. q comes scaled; the state is B H K V on both sides."""
    q, k, v, g, a, b, beta = steps
    if q.shape[-1] > MOST_KEYS:
        return None
    if a is None:
        name = "chunk_gla" if g is not None and g.dim() == 4 else "chunk_simple_gla"
    elif b is not None:
        name = "chunk_dplr_delta_rule"
    else:
        name = "chunk_delta_rule" if g is None else "chunk_gated_delta_rule" if g.dim() == 3 else "chunk_kda"
    if (a is not None and b is None and beta is None) or (name == "chunk_dplr_delta_rule" and (g is None or g.dim() == 3)):
        return None
    run = kernel(name, q, begins)
    if run is None:
        return None
    options: dict[str, Any] = {"scale": 1.0, "initial_state": start(state), "output_final_state": True}
    options["q"], options["k"], options["v"] = cast(q, q, k, v)
    if b is not None:
        options["a"], options["b"] = cast(q, a, b)
        options["gk"] = g.float()
    elif a is not None:  # k is β times the key that the rule corrects along
        options["k"], options["beta"] = cast(q, k / beta.clamp(min=torch.finfo(torch.float32).tiny), beta[..., 0])
    if g is not None and b is None:
        options["g"] = g.float()
    o, last = run(**options)
    return o.to(q.dtype), last


def gsa(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor, state: tuple[Tensor, Tensor] | None, begins: Tensor | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Gated slot attention: o (B T H V) and the states (B H K M, B H M V)."""
    run = kernel("chunk_gsa", q, begins) if max(q.shape[-1], s.shape[-1]) <= MOST_KEYS else None
    if run is None:
        return None
    first = None if state is None else (state[0].float().contiguous(), state[1].float().contiguous())
    own = cast(q, q, k, v, s)
    o, (keys, values) = run(*own, g.float(), scale=1.0, initial_state=first, output_final_state=True)
    return o.to(q.dtype), keys, values


def path(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor | None:
    """PaTH attention of whole sequences, o (B T H V)."""
    fits = q.shape[-1] in PATH_WIDTHS and v.shape[-1] in PATH_WIDTHS
    run = kernel("parallel_path_attn", q, None) if fits else None
    if run is None:
        return None
    o, _ = run(*cast(q, q, k, v), w.float().contiguous(), beta.float().contiguous(), scale=q.shape[-1] ** -0.5)
    found: Tensor = o.to(q.dtype)
    return found


def scan(g: Tensor, x: Tensor, state: Tensor | None, begins: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """h_t = e^{g_t} h_{t−1} + x_t for x (B T E)."""
    run = kernel("fused_recurrent_hgrn", x, begins) if x.dim() == 3 else None
    if run is None:
        return None
    h, last = run(x.contiguous(), g.float().contiguous(), initial_state=start(state), output_final_state=True)
    return h.to(x.dtype), last


def selective_scan(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None, begins: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Mamba's scan, time last on their side; it begins from nothing, and its last state (B N E here) has no gradient."""
    run = kernel("selective_scan_fn", x, begins) if state is None else None
    if run is None:
        return None
    u, step, b, c = (t.to(half(x)).mT.contiguous() for t in (x, delta, B, C))  # B E T, B E T, B N T, B N T
    y, last = run(u, step, A.float().contiguous(), b, c, return_last_state=True)
    return y.mT.to(x.dtype), last.mT.float()
