"""What a training step takes where processes share sequences (cp): memory of each process, bytes sent, seconds.

    python -m hypermlp.bench.parallel --out results/bench/parallel.json

Every process is one of this machine, and all of them talk over its loopback network (gloo). Bytes are what the kernel says that
a process's sockets have sent; `count` is what they should be. Seconds mean little where processes share the cores.
"""

from __future__ import annotations

import argparse
import os
import socket
import struct
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from hypermlp.allocator import return_freed_memory
from hypermlp.bench.memory import peak, reset_peak
from hypermlp.config import TAPS, HyperGLUConfig
from hypermlp.files import read_json, write_json
from hypermlp.models.lm import LanguageModel, ModelConfig, count_parameters, token_loss
from hypermlp.models.parallel import make_mesh, own_rows, parallelize
from hypermlp.provenance import provenance

BYTES, VOCABULARY = 4, 256
GLOO = 2  # its reduce_scatter is an all-reduce that throws the other shares away; NCCL's sends half of that
ACKNOWLEDGED = 120  # where struct tcp_info has tcpi_bytes_acked


def sent() -> int:
    """Bytes that the TCP sockets of this process have sent and others have received."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, ACKNOWLEDGED)[0]
        except OSError:  # no TCP, or closed meanwhile
            continue
    return total


def count(config: ModelConfig, batch: int, length: int, processes: int) -> int:
    """Bytes that each process should send in a step: of what is gathered or reduced, all but its own share.

    k and v are gathered, once more in backward, and their gradients reduced; so are the parameters of blocks. Those around the
    blocks are kept between forward and backward. Convolutions of HyperGLU look back on a few inputs of other pieces.
    """
    model = LanguageModel(config)
    share = (processes - 1) / processes
    kv = halo = 0
    for name in config.mixers:
        hyper = name == "hyperglu"
        ranks = HyperGLUConfig(n_embd=config.width, n_head=2, block_size=length)
        kv += batch * length * (int(ranks.qk_rank or 0) + int(ranks.vo_rank or 0) if hyper else 2 * config.width)
        halo += batch * 2 * processes * (TAPS - 1) * config.width if hyper else 0
    inside = count_parameters(model.blocks)
    around = count_parameters(model) - inside
    gathered, reduced = 2 * kv + halo + 2 * inside + around, kv + halo + inside + around
    return round(share * BYTES * (gathered + GLOO * reduced))


def measure(rank: int, processes: int, port: int, config: ModelConfig, batch: int, length: int, out: str) -> None:
    """One process of a step; the first says what the busiest one took."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(processes)}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    warnings.simplefilter("ignore", FutureWarning)
    return_freed_memory()
    dist.init_process_group("gloo")
    found = take_step(config, batch, length)
    if rank == 0:
        write_json(Path(out), {**found, "count": count(config, batch, length, processes)})
    dist.destroy_process_group()


def take_step(config: ModelConfig, batch: int, length: int) -> dict[str, float]:
    """What the busiest of all processes needs and sends for one step, after a short one that opens connections."""
    torch.manual_seed(0)
    processes = dist.get_world_size()
    mesh, model = make_mesh({"cp": processes}), LanguageModel(config)
    parallelize(model, mesh)

    def step(length: int) -> None:
        tokens = own_rows(torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0)), mesh)
        model.zero_grad(set_to_none=True)
        token_loss(model(tokens), tokens).backward()

    step(64 * processes)
    model.zero_grad(set_to_none=True)
    dist.barrier()
    before, memory, begin = sent(), reset_peak(), time.perf_counter()
    step(length)
    seconds, memory = time.perf_counter() - begin, peak() - memory
    time.sleep(0.2)  # what is on its way
    said = sent() - before
    dist.barrier()
    worst = torch.tensor([memory, said, seconds], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return {"memory": int(worst[0]), "sent": int(worst[1]), "seconds": float(worst[2])}


def run(config: ModelConfig, batch: int, length: int, processes: int) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        spawn(measure, (processes, port, config, batch, length, str(out)), nprocs=processes)
        return read_json(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", default="hyperglu,softmax", help="one model of each is measured")
    parser.add_argument("--processes", default="1,2,4", help="how many share the sequences")
    parser.add_argument("--shape", default="1,8192,256", help="batch, tokens, width")
    parser.add_argument("--depth", type=int, default=4, help="blocks")
    parser.add_argument("--out", type=Path, help="a file for the numbers")
    given = parser.parse_args()
    batch, length, width = map(int, given.shape.split(","))
    rows = []
    for mixer in given.mixers.split(","):
        config = ModelConfig(vocabulary=VOCABULARY, width=width, depth=given.depth, length=length, mixer=mixer)
        for processes in map(int, given.processes.split(",")):
            found = run(config, batch, length, processes)
            rows.append({"mixer": mixer, "processes": processes, **found})
            first = rows[-1]["memory"] / next(r["memory"] for r in rows if r["mixer"] == mixer)
            print(
                f"{mixer:12} {processes} processes  {found['memory'] / 2**20:7.0f} MiB each ({first:.2f})  "
                f"{found['sent'] / 2**20:7.1f} MiB sent, counted {found['count'] / 2**20:7.1f}  {found['seconds']:6.2f} s",
                flush=True,
            )
    if given.out is not None:
        settings = {"batch": batch, "tokens": length, "width": width, "depth": given.depth}
        write_json(given.out, {"settings": settings, "provenance": provenance(), "rows": rows})


if __name__ == "__main__":
    main()
