"""The command line: one module per group of commands. Parsing only; what is printed is made in `report`."""

from __future__ import annotations

import os
import sys

import torch

from hypermlp.cli import analysis, bench, mixers, models, studies, theory
from hypermlp.cli.app import DEBUG, app
from hypermlp.errors import RunError
from hypermlp.notice import for_terminal

__all__ = ["analysis", "app", "bench", "main", "mixers", "models", "studies", "theory"]


def main() -> None:
    """Entry point: a user's mistake ends in one line, a defect of ours (and with --debug everything) in a traceback."""
    try:
        app(prog_name="hypermlp")
    except KeyboardInterrupt as error:
        print(for_terminal(f"hypermlp: stopped: {error}".removesuffix(": ")), file=sys.stderr)
        raise SystemExit(130) from None
    except (ValueError, OSError, ImportError, RunError) as error:
        if os.environ.get(DEBUG):
            raise
        print(for_terminal(f"hypermlp: {error}"), file=sys.stderr)
        raise SystemExit(1) from error
    except Exception as error:
        error.add_note(
            "This machine has too little free memory for it; a smaller batch, context or model needs less."
            if out_of_memory(error)
            else "If no file of yours is to blame, this is a defect: please report it with what `hypermlp info` prints."
        )
        raise


def out_of_memory(error: Exception) -> bool:
    """torch has a class of its own for GPUs only."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
