"""Messages that a user should see once: which implementation was chosen and why, what is being compiled, what is missing.

They go to the logger "hypermlp"; where the program has set up no logging of its own they appear on stderr.
"""

from __future__ import annotations

import functools
import logging
import shutil
import sys
import textwrap

logger = logging.getLogger("hypermlp")


class Stderr(logging.Handler):
    """To the stderr of the moment, which a live display replaces to keep itself whole."""

    def emit(self, record: logging.LogRecord) -> None:
        print(for_terminal(self.format(record)), file=sys.stderr, flush=True)


def for_terminal(text: str) -> str:
    """A message for stderr: where that is a terminal, its lines are broken between words; a pipe gets it whole."""
    return broken(text, shutil.get_terminal_size().columns) if sys.stderr.isatty() else text


def broken(text: str, width: int) -> str:
    """Lines at most so wide, broken between words alone: what is one word, such as a path, stays whole and can be copied."""
    lines = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.split("\n"))
    return "\n".join("\n".join(parts) for parts in lines)


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
