"""Compiled Triton kernels in tests. This process runs Triton's interpreter, so they are compiled and executed in a child.

A test hands a module-level function and plain arguments to `in_child` and gets its plain result; what it raises is raised here.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any


def start_child() -> None:
    """One thread, and uninitialised memory full of NaN, so that an element nobody wrote shows."""
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def ready() -> bool:
    return os.environ.get("TRITON_INTERPRET") != "1"


@functools.cache
def child(interpreting: bool) -> ProcessPoolExecutor:
    """One process for all tests of this one, which keeps what it has compiled."""
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=start_child)
    atexit.register(pool.shutdown)
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1" if interpreting else "0"  # the child takes over the environment as it starts
    try:
        assert pool.submit(ready).result() != interpreting
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    return pool


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    return child(False).submit(function, *arguments).result()


def in_interpreting_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """In a process that may crash: the interpreter does not check where a kernel reads."""
    try:
        return child(True).submit(function, *arguments).result()
    except BrokenProcessPool:
        child.cache_clear()
        raise
