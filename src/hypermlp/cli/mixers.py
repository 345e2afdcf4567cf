"""What is here: this machine, the mixers, their labels and budgets."""

from __future__ import annotations

from typing import Annotated

import typer

from hypermlp.cli.app import app, shows_tables
from hypermlp.cli.console import open_console
from hypermlp.cli.options import complete, mixer_names
from hypermlp.report.terminal import Column, show_table


@app.command()
@shows_tables
def mixers(
    label: Annotated[
        str | None,
        typer.Argument(
            help="A mixer's name (gla); a label of Table 1 (G-cg-q-12o), explained letter by letter; a hybrid "
            "(gated_deltanet*3+hyperglu), layer by layer; or a size of Table 2's models, 340m-15b or 1.3b-100b.",
            autocompletion=complete(mixer_names),
        ),
    ] = None,
    budget: Annotated[
        bool,
        typer.Option(
            "--budget", help="Show where each mixer's parameters are, and at which size it has as many as softmax attention."
        ),
    ] = False,
    width: Annotated[int, typer.Option(min=16, help="Width of the layer.")] = 768,
    length: Annotated[int, typer.Option(min=1, help="Longest context.")] = 1024,
) -> None:
    """List every mixer: where it comes from, its parameters, the bytes that decoding keeps. With a label, explain it."""
    from hypermlp.mixers import MIXERS
    from hypermlp.mixers.hybrid import is_hybrid
    from hypermlp.mixers.labels import SAME
    from hypermlp.paper.published import SIZES
    from hypermlp.report.budget import show_budget, show_explanation, show_hybrid, show_mixers, show_models

    console = open_console()
    if label in SIZES:
        show_models(console, label)
    elif label is not None and is_hybrid(label):
        show_hybrid(console, label, width, length)
    elif budget or (label in MIXERS and label not in SAME):
        show_budget(console, width, length, None if label is None else [label])
    elif label is not None:
        show_explanation(console, SAME.get(label, label), width, length)
    else:
        show_mixers(console, width, length)


@app.command()
@shows_tables
def info() -> None:
    """Show versions, the device, which implementation a layer uses here, and why."""
    import torch

    from hypermlp.mixers import HyperGLU
    from hypermlp.models.bundled import bundled_models
    from hypermlp.ops import choose
    from hypermlp.ops.native import cache_folder
    from hypermlp.ops.triton.device import would_use
    from hypermlp.provenance import machine

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
    for name, about in bundled_models().items():
        values[name] = f"{about['what']}; {about['parameters']:,} parameters, comes with the package"
    heads = [Column("what"), Column("here", left=True, wraps=True)]
    show_table(open_console(), "", heads, list(values.items()))
