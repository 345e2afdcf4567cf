"""Prepare a corpus and show it: progress while it tokenises, counts afterwards."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from hypermlp.data import shards
from hypermlp.data.corpus import SPLITS, Corpus
from hypermlp.data.text import find_source
from hypermlp.data.tokenizers import find_tokenizer
from hypermlp.provenance import provenance
from hypermlp.report.terminal import say

SHOWN = 10  # names of skipped files


def run_prepare(
    console: Console, source: str, out: Path, *, tokenizer: str, end: str | None, field: str, validation: float, workers: int
) -> Corpus:
    """Prepare a corpus on this console; leaves shards and index.json in `out`."""
    found = find_source(source, field=field, validation=validation)
    for reason, skipped in found.skipped.items():
        names = ", ".join(skipped[:SHOWN]) + ("" if len(skipped) <= SHOWN else ", …")
        say(console, f"Skipped {reason} ({len(skipped)}): {names}", "yellow")
    if tokenizer.startswith("bpe:"):
        say(console, f"training the tokenizer {tokenizer}")
    chosen = find_tokenizer(tokenizer, found, end)
    say(
        console,
        f"{found.name}: {found.size / 1e6:.1f} MB, tokenizer {chosen.name} of {chosen.vocabulary:,} tokens, "
        f"{workers} worker{'s' if workers > 1 else ''}",
    )
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        shown = bar.add_task("tokenising", total=found.size)

        def tell(progress: shards.ShardProgress) -> None:
            counts = f"documents {progress.documents:,}, tokens {progress.tokens:,}"
            bar.update(shown, completed=progress.read, description=counts)
            if not console.is_terminal:
                say(console, f"{progress.read / max(progress.total, 1):.0%}   {counts}")

        corpus = shards.prepare(found, out, chosen, workers=workers, progress=tell, provenance=provenance())
    for name in SPLITS:
        tokens = corpus.split(name)
        say(console, f"  {name:<10} documents {len(tokens.ends):>12,}   tokens {len(tokens):>14,}")
        if not len(tokens):
            say(console, f"  (nothing to {'train on' if name == 'train' else 'validate with'}; choose another --validation)")
    say(console, f"Corpus: {out}")
    return corpus
