"""A training small enough to be killed often, and processes to kill.

As a program (`python small.py SCENARIO FOLDER`) it is the clean parent of such processes: it has imported everything and
computed nothing yet, so its forks start at once.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from hypermlp.batch import Batch
from hypermlp.models.generate import generate
from hypermlp.models.lm import LanguageModel, ModelConfig
from hypermlp.runs.configs import configure
from hypermlp.runs.train import start
from hypermlp.train.checkpoint import Checkpoints, complete
from hypermlp.train.distributed import World, join
from hypermlp.train.language import TrainConfig, new_training, train
from hypermlp.train.metrics import Metrics
from hypermlp.train.training import Training, count

MODEL = ModelConfig(vocabulary=31, width=16, depth=2, length=12, mixer=("hyperglu", "softmax"))
TRAIN = TrainConfig(steps=8, batch=8, micro=2, lr=3e-3, warmup=2, evaluate_every=4, save_every=2, sample=5)


def config(**changes: object) -> TrainConfig:
    return TrainConfig(**{**TRAIN.__dict__, **changes})


def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(MODEL)


def rows(step: int, count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step; each row leaves out another number of targets."""
    tokens = torch.randint(MODEL.vocabulary, (count, 13), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].clone()
    for row in range(count):
        targets[row, : (5 * row) % 11] = -100
    return tokens[:, :-1], targets


def share(step: int, how: TrainConfig, world: World) -> list[Batch]:
    """A process's part of a batch."""
    inputs, targets = (part.chunk(world.along("dp"))[world.batch_rank].split(how.micro) for part in rows(step))
    return [Batch(x, y) for x, y in zip(inputs, targets, strict=True)]


def write(net: LanguageModel) -> str:
    return " ".join(map(str, generate(net, torch.tensor([[1, 2, 3]]), 5)[0].tolist()))


def go_on(
    folder: Path, how: TrainConfig = TRAIN, world: World | None = None, until: int | None = None, pause: float = 0.0
) -> Training:
    """Train in a folder, from its last checkpoint if it has one, to the end or step `until`."""
    world = (world or World()).arranged(how.mesh)
    training = new_training(model(), how, world)
    checkpoints = Checkpoints(folder / "checkpoints", world, keep=how.keep, files={"config.json": described()})
    latest = checkpoints.latest()
    if latest is not None:
        training.restore(partial(checkpoints.load, latest))
    metrics = Metrics(folder / "metrics.jsonl", training.step) if world.main else None
    steps = train(
        training,
        how,
        lambda step: share(step, how, world),
        checkpoints,
        metrics,
        validation=share(10**6, how, world),
        sample=write,
        stopping=lambda: training.step == until,
    )
    for _ in steps:
        time.sleep(pause)
    if metrics is not None:
        metrics.close()
    return training


def described() -> str:
    return json.dumps({"model_type": "hypermlp", **MODEL.to_dict()})


def contents(checkpoint: Path) -> dict[str, bytes]:
    """Every tensor of a checkpoint that one process wrote, bit by bit. (The order in the file's head is left to chance.)"""
    (shard,) = checkpoint.glob("*.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(shard).items()}


# Processes


def fork(work: Callable[[], object], **environment: str) -> int:
    pid = os.fork()
    if pid == 0:
        os.environ.update(environment)
        try:
            work()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return pid


def succeed(*pids: int) -> None:
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0


def together(work: Callable[[World], object], count: int = 2) -> None:
    """Run `work` in so many processes that know each other, as torchrun would."""
    succeed(*start_together(work, count))


def start_together(work: Callable[[World], object], count: int) -> list[int]:
    """The same, without waiting for them."""

    def joined() -> None:
        with join() as world:
            work(world)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [fork(joined, RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in range(count)]


def scenario(name: str, folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, name, str(folder)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def kills(folder: Path) -> None:
    """An undisturbed run, and others that are killed, ten times in all, before they may end."""
    how = config(steps=12, save_every=1, keep=2)
    chance = random.Random(0)
    succeed(fork(lambda: go_on(folder / "undisturbed", how)))
    counted = number = 0
    while counted < 10:
        out = folder / f"killed-{number}"
        begin = time.monotonic()
        while True:
            pid = fork(lambda: go_on(out, how, pause=0.02))  # noqa: B023  (used at once)
            time.sleep(chance.uniform(0, 1.5) if counted < 10 else 0)
            if counted < 10 and os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                counted += 1
            elif counted >= 10:
                succeed(pid)
                break
            else:
                break
        assert time.monotonic() - begin < 300
        number += 1


def distributed(folder: Path) -> None:
    """The same training by one process, by two in both ways, and by one and two in turns."""
    two = config(micro=2)
    succeed(fork(lambda: go_on(folder / "one")))
    for parallel in ("ddp", "fsdp"):
        how = config(parallel=parallel)
        together(lambda world: go_on(folder / parallel, how, world))  # noqa: B023  (used at once)
    both = config(parallel="fsdp", checkpointing=True, asynchronous=True, precision="bfloat16")
    together(lambda world: go_on(folder / "half", both, world))
    together(lambda world: go_on(folder / "two-one", two, world, until=3))
    succeed(fork(lambda: go_on(folder / "two-one")))
    succeed(fork(lambda: go_on(folder / "one-two", until=3)))
    together(lambda world: go_on(folder / "one-two", two, world))


def meshes(folder: Path) -> None:
    """The same training by processes that share heads and sequences, and by one mesh after the other, also killed."""
    succeed(fork(lambda: go_on(folder / "one")))
    how = {mesh: config(mesh=mesh) for mesh in ("tp=2", "cp=2", "dp=2,tp=2", "cp=2,tp=2")}
    for mesh, processes in (("tp=2", 2), ("cp=2", 2), ("cp=2,tp=2", 4)):
        together(lambda world: go_on(folder / mesh, how[mesh], world), processes)  # noqa: B023  (used at once)
    turns = folder / "turns"
    together(lambda world: go_on(turns, how["dp=2,tp=2"], world, until=2), 4)
    succeed(fork(lambda: go_on(turns, until=4)))
    together(lambda world: go_on(turns, how["tp=2"], world, until=6))
    together(lambda world: go_on(turns, how["cp=2,tp=2"], world), 4)
    killed = folder / "killed"
    slow = config(mesh="dp=2,tp=2", save_every=1, asynchronous=True)
    pids = start_together(lambda world: go_on(killed, slow, world, pause=0.5), 4)
    while len(complete(killed / "checkpoints")) < 2:
        time.sleep(0.05)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    (folder / "killed.json").write_text(json.dumps([path.name for path in complete(killed / "checkpoints")]))
    together(lambda world: go_on(killed, slow, world), 4)


def validation(folder: Path) -> None:
    """Validation losses of one model at the start of runs that divide their work differently, as files."""
    text = folder / "text.txt"
    text.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(2000)))

    def write_loss(name: str, micro: int, world: World | None = None) -> None:
        small = ("model.width=16", "model.depth=1", "data.context=16", "train.batch=8", "train.evaluate_batches=3")
        config = configure("tiny", [*small, f"data.corpus={text}", f"train.micro={micro}"])
        run = start(config, folder / name, world, loggers=())
        loss = run.training.evaluate(run.validation)
        targets = run.world.sum(count(run.validation)[0])[0]
        (folder / f"{name}.json").write_text(json.dumps({"loss": loss, "targets": targets}))

    succeed(fork(lambda: write_loss("one", 8)))
    succeed(fork(lambda: write_loss("one-micro", 1)))
    together(lambda world: write_loss("two", 4, world))
    together(lambda world: write_loss("two-micro", 2, world))


if __name__ == "__main__":
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # as every optimiser's first step does: once here, not in every fork
    {"kills": kills, "distributed": distributed, "meshes": meshes, "validation": validation}[sys.argv[1]](Path(sys.argv[2]))
