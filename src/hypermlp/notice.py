"""Messages that a user should see once: which implementation was chosen and why, what is being compiled, what is missing.

They go to the logger "hypermlp"; where the program has set up no logging of its own they appear on stderr.
"""

from __future__ import annotations

import functools
import logging
import sys

logger = logging.getLogger("hypermlp")


class Stderr(logging.Handler):
    """To the stderr of the moment, which a live display replaces to keep itself whole."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


@functools.cache
def once(message: str) -> None:
    """Log `message` the first time in this process."""
    if not logger.hasHandlers():
        handler = Stderr()
        handler.setFormatter(logging.Formatter("hypermlp: %(message)s"))
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    logger.info(message)
