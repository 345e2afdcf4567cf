"""Ctrl-C and SIGTERM: noted, so that a program does not end in the middle of a line."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def stop_signals(message: str | None = None) -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM in a list, which the work looks at where it can stop.

    message: printed on stderr at the first of them, at once.
    """
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals  # only the main thread can handle signals
        return

    def collect(number: int, frame: Any) -> None:
        signals.append(number)
        if message is not None and len(signals) == 1:
            with contextlib.suppress(OSError, RuntimeError):  # a closed terminal; or stderr was being written to
                print(f"hypermlp: {message}", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, collect) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """A process started meanwhile ignores Ctrl-C from its first moment on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
