"""Processes that know each other, for tests; forked from one that has imported torch and the package, once for all of them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

IMPORTED = ["torch._dynamo", "torch.distributed.tensor.parallel", "hypermlp.models.parallel", "hypermlp.mixers"]  # take long


def run_together(work: Callable[..., Any], count: int, folder: Path, *given: object) -> list[Any]:
    """What work(*given) gives in each of so many processes, which talk over gloo. Each writes it to a file of the folder."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_processes(begin, (work, count, port, str(folder), given), nprocs=count, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


def begin(rank: int, work: Callable[..., Any], count: int, port: int, folder: str, given: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo")
    torch.save(work(*given), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
