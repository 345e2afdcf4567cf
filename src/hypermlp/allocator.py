"""Freed memory: kept for the next step, or given back at once. It holds for a whole process, so programs ask.

Only glibc listens; elsewhere nothing changes.
"""

from __future__ import annotations

import ctypes
import sys

# mallopt's numbers. Free bytes at the end of the heap go back from the first on; blocks from the second on are mapped singly.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """A training step takes the tensors that the last one freed; each page that went back to the system costs a fault."""
    mallopt(MMAP_THRESHOLD, 32 << 20)  # the most that glibc takes
    mallopt(TRIM_THRESHOLD, 1 << 30)


def return_freed_memory() -> None:
    """What is resident is then alive, as far as large blocks go."""
    mallopt(MMAP_THRESHOLD, 64 << 10)


def mallopt(name: int, value: int) -> None:
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(name, value)
