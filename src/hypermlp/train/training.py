"""One update of any model, in one process or many, that can stop after any step and resume later with the same bits.

Learning rate, data and random numbers are functions of the step, so model and optimiser are all there is to save. The loss of
an update is the mean over the counted targets of its whole batch, however that is divided into passes and processes.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hypermlp.batch import Batch
from hypermlp.config import IGNORED
from hypermlp.errors import RunError
from hypermlp.eval_mode import evaluating
from hypermlp.mixers.base import Cut
from hypermlp.models.lm import token_loss
from hypermlp.models.parallel import in_blocks
from hypermlp.models.saved import weights
from hypermlp.train.blocks import fill_blocks, without_blocks
from hypermlp.train.distributed import World, no_sync, reshard, unwrapped
from hypermlp.train.optimisation import Recipe, parameter_groups

MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps of every parameter


class NotFinite(RunError):
    """An update with a loss or a gradient that is not finite; the model is as it was before."""

    def __init__(self, what: str, step: int) -> None:
        super().__init__(f"{what} of step {step} is not finite; start again with a lower train.lr or a longer train.warmup")
        self.reason = f"{what} of step {step} is not finite"


@dataclass(frozen=True, kw_only=True)
class Step:
    """An update, and the evaluation after it where there was one."""

    step: int  # updates so far
    tokens: int  # seen so far, if all batches were as large
    loss: float  # before the update
    lr: float
    grad_norm: float  # before clipping
    tokens_per_second: float
    validation: float | None = None  # loss
    sample: str | None = None

    def record(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


class Training:
    """A model, its optimiser, and how many updates they have had.

    Args:
        model: on the device of `world` and spread over its processes (distributed.py: distribute).
        recipe: how it is updated.
        world: the processes; None: this one alone.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, world: World | None = None) -> None:
        self.model, self.recipe, self.world, self.step = model, recipe, world or World(), 0
        self.autocast = recipe.precision == "bfloat16" and not isinstance(model, FSDPModule)  # which has a policy of its own
        self.gathers = getattr(unwrapped(model), "gathers", False)  # logits are computed where targets count
        groups = parameter_groups(model, recipe.weight_decay, decayed=recipe.decayed)
        self.optimiser = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=fusible(model))
        for p in model.parameters():  # as its first step would do, so that there is always the same to save
            self.optimiser.state[p] = {"step": torch.tensor(0.0), **{name: torch.zeros_like(p) for name in MOMENTS}}

    def update(self, passes: Sequence[Batch]) -> Step:
        """One update from this process's share of the batch."""
        begin = time.perf_counter()
        rank = self.world.rank // self.world.along("tp")
        self.seed(((self.recipe.seed * 1_000_003 + self.step) * 65_537 + rank) % 2**63)
        passes = self.world.own(passes)
        counted, seen = self.world.sum(*count(passes))
        rate = self.recipe.rate(self.step)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        try:
            loss = self.differentiate(passes, counted)
            norm = self.clip()
            for what, value in (("the loss", loss), ("the gradient", norm)):
                if not math.isfinite(value):
                    raise NotFinite(what, self.step + 1)
            self.optimiser.step()
        finally:  # an update that fails leaves no gradients to the next one
            self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return Step(
            step=self.step,
            tokens=self.step * int(seen),
            loss=loss,
            lr=rate,
            grad_norm=norm,
            tokens_per_second=seen / (time.perf_counter() - begin),
        )

    def differentiate(self, passes: Sequence[Batch], counted: float) -> float:
        """The mean loss over `counted` targets of all processes; its gradients are left in the parameters."""
        parts = []
        for i, one in enumerate(passes):
            with no_sync(self.model) if i + 1 < len(passes) else nullcontext():
                part = self.total_loss(one) / max(counted, 1)
                (part * self.world.along("dp", "cp")).backward()  # gradients are averaged over these, and should be summed
            parts.append(part.detach())
        return self.world.sum(float(torch.stack(parts).sum()))[0]

    def seed(self, number: int) -> None:
        """Of the random numbers within an update. (torch.manual_seed keeps a list of calls for GPUs that are never used.)"""
        if self.world.device.type == "cpu":
            torch.default_generator.manual_seed(number)
        else:
            torch.manual_seed(number)

    def clip(self) -> float:
        """The norm of the gradient before it is clipped."""
        parameters = list(self.model.parameters())
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        size = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if self.recipe.clip is not None and size + 1e-6 > self.recipe.clip:  # else the factor would be 1
            nn.utils.clip_grads_with_norm_(parameters, self.recipe.clip, norm)
        return size

    def total_loss(self, one: Batch) -> Tensor:
        """Summed over the counted targets."""
        inputs, targets, bounds = one
        device = self.world.device
        own_loss = getattr(self.model, "summed_loss", None)  # of a model whose outputs are no logits
        if own_loss is not None:
            with self.precision():
                return cast(Tensor, own_loss(inputs.to(device), targets.to(device)).float())
        options = {} if bounds is None else {"cu_seqlens": bounds.to(device)}
        counted = targets != IGNORED
        if self.gathers and not counted.all():
            options["at"], targets = counted.to(device), targets[counted]
        with self.precision():
            logits = self.model(inputs.to(device), **options)
        return token_loss(logits.float(), targets.to(device), reduction="sum")

    def precision(self) -> torch.autocast:
        """The context in which the model computes."""
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.autocast)

    @torch.no_grad()
    def evaluate(self, passes: Sequence[Batch]) -> float:
        """Mean loss over the counted targets of all processes, in eval mode."""
        passes = self.world.own(passes)
        with evaluating(self.model):
            total = sum(float(self.total_loss(one)) for one in passes)
        total, counted = self.world.sum(total, count(passes)[0])
        return total / max(counted, 1)

    def state(self) -> dict[str, Tensor]:
        """All that a checkpoint needs beside the step; the tensors are those in use, but for joined ones (blocks.py)."""
        found, stacked = self.tensors()
        return found | {name: without_blocks(found[name], cut) for name, cut in stacked.items()}

    def restore(self, load: Callable[[dict[str, Tensor]], int]) -> None:
        """Continue from a checkpoint, which `load` fills into a state, and whose step it returns."""
        state = self.state()
        step = load(state)
        found, stacked = self.tensors()
        for name, cut in stacked.items():
            fill_blocks(found[name], state[name], cut)
        self.resume(step)

    def resume(self, step: int) -> None:
        """Continue after `step`, with the state of that step filled in."""
        self.step = step
        for state in self.optimiser.state.values():
            state["step"].fill_(step)

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Cut]]:
        """All tensors of model and optimiser in use, and those that join several projections."""
        reshard(self.model)
        model = unwrapped(self.model)
        found = {f"model.{name}": tensor for name, tensor in weights(model).items()}
        for name, p in model.named_parameters():
            found |= {f"optimiser.{name}.{moment}": self.optimiser.state[p][moment] for moment in MOMENTS}
        kinds = ("model.{}", *(f"optimiser.{{}}.{moment}" for moment in MOMENTS))
        return found, {kind.format(name): cut for name, cut in sorted(in_blocks(model).items()) for kind in kinds}


def fusible(model: nn.Module) -> bool:
    """Whether AdamW may update all parameters in one call on the CPU, where a loop over small ones costs more than they do."""
    return all(type(p) is nn.Parameter and p.device.type == "cpu" for p in model.parameters())


def count(passes: Sequence[Batch]) -> tuple[int, int]:
    """Targets that count, and all tokens."""
    counted = sum(int((targets != IGNORED).sum()) for _, targets, _ in passes)
    return counted, sum(inputs.numel() for inputs, _, _ in passes)
