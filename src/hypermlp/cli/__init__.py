"""The command line: one module per group of commands. Parsing only; what is printed is made in `report`."""

from __future__ import annotations

import sys

from hypermlp.cli import bench, mixers, models, studies
from hypermlp.cli.app import app

__all__ = ["app", "bench", "main", "mixers", "models", "studies"]


def main() -> None:
    """Entry point: a user's mistake ends in one line, not in a traceback."""
    try:
        app()
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"hypermlp: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        print("hypermlp: stopped", file=sys.stderr)
        raise SystemExit(130) from None
