"""What a training run will cost, before it starts: parameters, operations, memory, time."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hypermlp.batch import Batch
from hypermlp.bench import flops, memory
from hypermlp.models.lm import Block, LanguageModel, ModelConfig, count_parameters
from hypermlp.runs.configs import build_without_memory
from hypermlp.train.config import RunConfig
from hypermlp.train.distributed import World
from hypermlp.train.language import language_model, new_training
from hypermlp.train.training import Training

LARGEST_TRIAL = {"cpu": 2e11, "cuda": 2e13}  # operations that are measured: a few seconds


@dataclass(frozen=True, kw_only=True)
class RunCost:
    parameters: dict[str, int]  # by component
    steps: int
    tokens: int
    processes: int
    flops: dict[str, float]  # of the run
    uncounted: tuple[str, ...]  # mixers whose mixing is not in them
    memory: dict[str, float]  # bytes in each process
    seconds: float  # of the run, on as many machines like this one as there are processes
    measured: str  # what that is scaled up from


def estimate_cost(config: RunConfig, processes: int = 1) -> RunCost:
    """Only the seconds, and the memory of activations, are measured; on the device that would be used."""
    share = config.train.share(processes)
    parameters = by_component(build_without_memory(config.model))
    total = sum(parameters.values())
    needed, uncounted = operations(config.model, config.data.context)
    holders = processes if config.train.parallel == "fsdp" else 1  # of one copy of the model
    found = measure(config, total)
    return RunCost(
        parameters=parameters,
        steps=config.train.steps,
        tokens=config.tokens,
        processes=processes,
        flops={name: value * config.tokens for name, value in needed.items()},
        uncounted=uncounted,
        memory={
            "parameters": 4 * total / holders,
            "gradients": 4 * total / holders,
            "optimiser": 8 * total / holders,
            "activations": activations(config, found.block_bytes),
        },
        seconds=config.train.steps * share * config.data.context * found.seconds,
        measured=found.what,
    )


def by_component(model: LanguageModel) -> dict[str, int]:
    """Parameters of the embedding, mixers, feed-forwards and the rest."""
    found: Counter[str] = Counter()
    for module, name in ((model.embedding, "embedding"), (model.positions, "positions")):
        found[name] += count_parameters(module) if module is not None else 0
    for block in model.blocks:
        assert isinstance(block, Block)
        for part, name in ((block.mixer, "mixers"), (block.ffn, "feed-forwards"), (block.norm_mixer, "norms")):
            found[name] += count_parameters(part)
        found["norms"] += count_parameters(block.norm_ffn)
    found["norms"] += count_parameters(model.norm)
    found["head"] += 0 if model.config.tied else count_parameters(model.head)
    return {name: n for name, n in found.items() if n}


def operations(config: ModelConfig, context: int) -> tuple[dict[str, float], tuple[str, ...]]:
    """Of training on one token: six for every weight that multiplies it, and three times the mixing of a forward pass."""
    model = build_without_memory(config)
    idle = sum(count_parameters(m) for m in (model.embedding, model.positions) if m is not None)
    active = count_parameters(model) - idle + (count_parameters(model.head) if config.tied else 0)
    mixing, uncounted = 0.0, []
    for block, name in zip(model.blocks, config.mixers, strict=True):
        mixer = block.get_submodule("mixer")
        found = flops.work(mixer, context)
        if found is None:
            uncounted.append(name)
        else:
            mixing += 2 * flops.TRAINING * found.mixing / context
    return {"weights, 6·N": 6.0 * active, "mixing": mixing}, tuple(dict.fromkeys(uncounted))


@dataclass(frozen=True)
class Measured:
    seconds: float  # per token
    block_bytes: float  # that one block keeps for the backward pass, per token
    what: str


def measure(config: RunConfig, parameters: int) -> Measured:
    """Time one step of the model, or of one period of its mixers where the whole would not fit or take too long.

    On a CPU in float32, since few CPUs compute in bfloat16 natively, and the others emulate it slowly.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    largest = LARGEST_TRIAL[device.type]
    train = config.train if device.type == "cuda" else dataclasses.replace(config.train, precision="float32")
    model, context = config.model, config.data.context
    each = sum(operations(model, context)[0].values())
    turn = len(model.turn)
    trial, time = model, context
    if 16 * parameters > memory.available() / 2 or each * context > largest:
        trial = model.replace(depth=turn)
    own = sum(operations(trial, context)[0].values())
    rows = max(1, min(train.micro, int(largest // (own * context))))
    if own * context > largest:
        time = max(1, int(largest // own))
        own = sum(operations(trial, time)[0].values())
    seconds, block_bytes = time_step(new_training(LanguageModel(trial), train, World(device=device)), rows, time)
    what = "the whole model" if trial.depth == model.depth else f"{trial.depth} of {model.depth} layers"
    what += f", {rows} × {time} tokens in {train.precision}"
    if trial.depth < model.depth or time < context:
        what += ", scaled up by operations"
    return Measured(seconds / (rows * time) * each / own, block_bytes, what)


def time_step(training: Training, rows: int, length: int) -> tuple[float, float]:
    """Seconds of an update, the faster of two, and the bytes per token that the first block keeps."""
    model = language_model(training)
    tokens = torch.randint(model.config.vocabulary, (rows, length))
    x = torch.randn(rows, length, model.config.width, device=training.world.device)
    kept = kept_bytes(model.blocks[0], x, training.autocast)
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        training.update([Batch(tokens, tokens)])
        seconds.append(time.perf_counter() - begin)
    return min(seconds), kept / tokens.numel()


def kept_bytes(block: nn.Module, x: Tensor, autocast: bool) -> int:
    """Bytes that autograd keeps of a forward pass, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            y = block(x.requires_grad_())
        total = sum(kept.values())  # as long as y is alive, addresses are unique
        del y
    return total


def activations(config: RunConfig, block_bytes: float) -> float:
    """Bytes that one pass keeps: of every block, or of one and the others' inputs; and the logits with their gradient."""
    model, tokens = config.model, config.train.micro * config.data.context
    blocks = model.depth * block_bytes
    if config.train.checkpointing:
        blocks = block_bytes + 4 * model.depth * model.width
    return tokens * (blocks + 8 * model.vocabulary)
