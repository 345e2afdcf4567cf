"""What is here: this machine, the mixers, their labels and budgets."""

from __future__ import annotations

from typing import Annotated

import typer

from hypermlp.cli.app import app
from hypermlp.cli.options import Length, Width
from hypermlp.report.terminal import new_console, say


@app.command()
def info() -> None:
    """Versions, device, which implementation would be chosen, and which way calls take through a layer; with reasons."""
    import torch

    from hypermlp.mixers import HyperGLU
    from hypermlp.ops import choose
    from hypermlp.ops.native import cache_folder
    from hypermlp.ops.triton.device import would_use
    from hypermlp.provenance import machine

    console = new_console()
    values = {name: "none" if value is None else str(value) for name, value in machine().items()}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values["device"] = device
    for dtype in ("float32", "bfloat16", "float64"):
        choice = choose("auto", device, dtype)
        values[f"implementation, {dtype}"] = f"{choice.impl} ({choice.reason})"
    layer = HyperGLU(n_embd=256, n_head=2, block_size=1024).to(device)
    for name, time in (("1 token and a cache", 1), ("128 tokens", 128), ("1024 tokens", 1024)):
        cache = layer.new_cache(1) if time == 1 else None
        route = layer.explain(torch.empty(1, time, 256, device=device), cache=cache)
        values[f"route, {name}"] = f"{route.kind} ({route.why})"
    if device != "cuda":
        values["on an NVIDIA GPU"] = would_use()
    values["compiled kernels in"] = str(cache_folder())
    for name, value in values.items():
        say(console, f"{name:<26} {value}")


@app.command()
def mixers(width: Width = 768, length: Length = 1024) -> None:
    """Every mixer by its name: where it comes from, its parameters, and the bytes that decoding keeps."""
    from hypermlp.report.budget import show_mixers

    show_mixers(new_console(), width, length)


@app.command()
def explain(
    label: Annotated[str, typer.Argument(help="A label of Table 1's grammar, such as G-cg-q-12o.")],
    width: Width = 768,
    length: Length = 1024,
) -> None:
    """What a label of Table 1 means, letter by letter, and where its parameters are."""
    from hypermlp.report.budget import show_explanation

    show_explanation(new_console(), label, width, length)


@app.command()
def budget(
    width: Width = 768,
    length: Length = 1024,
    config: Annotated[
        str | None, typer.Option(help="Whole models instead: what each has in 340m-15b or 1.3b-100b (Table 2).")
    ] = None,
) -> None:
    """Parameters of all labels and rivals by component, and the sizes at which they equal softmax attention's."""
    from hypermlp.report.budget import show_budget, show_models

    if config is None:
        show_budget(new_console(), width, length)
    else:
        show_models(new_console(), config)
