"""The paper's claims in minutes: six small models on two MAD tasks, and what their mixing has learned about lags.

Every claim is a comparison of two models that differ in the one thing it is about (verdicts/claims.py judges them):

    R-cg-q-12o, R-cg-q     HyperMLP, and the same layer without mixing along the sequence
    G-cg-q-12o, S-pc       HyperGLU, and softmax attention with rotary embedding and convolutions
    R-12o!, R-12!          mixing by lag, and the same by place in the input

Letters: B batch, T time, C width, H heads, R mixing rank, L block_size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hypermlp.analysis.capture import capture
from hypermlp.config import IGNORED
from hypermlp.files import Record
from hypermlp.mixers.hyper import HyperGLU, SequenceMixing
from hypermlp.studies import mad
from hypermlp.studies.mad import TaskJob, TaskStudy
from hypermlp.studies.task_models import save_task_model
from hypermlp.studies.worker import RunContext, Work
from hypermlp.tasks.mad_settings import MADSetting, spell

MIXERS = ("G-cg-q-12o", "R-cg-q-12o", "S-pc", "R-cg-q", "R-12o!", "R-12!")
SHOWN = MIXERS[0]  # whose lag kernels are kept
READERS = (MIXERS[0], MIXERS[2])  # of which is kept what their answers read
TASKS = ("selective-copying", "noisy-recall")
DIGITS = 4  # of a kernel in the record


class DemoStudy(TaskStudy):
    """A study on tasks whose records of HyperGLU have its lag kernels besides, and which saves its models."""

    @property
    def work(self) -> Work:
        return train


def demo_study(*, quick: bool = False) -> DemoStudy:
    """Short sequences and narrow models, for as long as R-12o! needs; quick: fewer steps, to see that it works."""
    return DemoStudy(
        protocol="clean",
        tasks=TASKS,
        scale="baseline",
        width=32,
        batch=32,
        examples=3200,
        tests=320,
        epochs=None,
        steps=dict(zip(TASKS, (150, 200) if quick else (500, 1200), strict=True)),
        rates=(4e-3,),
        decays=(0.0,),
        changes={
            "selective-copying": {"seq_len": 48, "num_tokens_to_copy": 8},
            "noisy-recall": {"seq_len": 32, "vocab_size": 24, "noise_vocab_size": 8},
        },
    )


def train(job: TaskJob, context: RunContext | None = None) -> Record:
    """A run of a study on tasks; HyperGLU's record has its lag kernels besides, and those of READERS what they read.

    The models of the first seed stay in the study's folder, for the explorer.
    """
    model, record = mad.train_model(job, context)
    if context is not None and job.seed == 0:
        save_task_model(context.models, model.cpu(), job, record)
    if job.mixer in READERS:
        (test,) = mad.load_data(job.setting, job.seed, job.study.rules.validation).test["test"]
        if job.mixer == SHOWN:
            record["lag_kernels"] = lag_kernels(model.cpu(), test.inputs)
        record["reading"] = reading(model.cpu(), job.setting, test.inputs[0], test.targets[0])
    return record


@torch.no_grad()
def reading(model: nn.Module, setting: MADSetting, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """What the answers to one example (T) read, in the head of the last layer that adds most there.

    shares: [answer][token], the part of the head's output that each token's value makes (analysis/memory.py).
    """
    found = capture(model, inputs[None])
    opened = found.traces()[-1]
    assert opened is not None
    answers = (targets != IGNORED).nonzero().flatten().tolist()
    heads = [[opened.memory(token, head) for token in answers] for head in range(opened.n_head)]
    sizes = [sum(float(memory.output.norm()) for memory in memories) for memories in heads]
    head = sizes.index(max(sizes))
    shares = torch.zeros(len(answers), len(inputs), dtype=torch.float64)
    for row, memory in zip(shares, heads[head], strict=True):
        row[memory.place] = memory.token_shares
    guesses = found.logits[0].argmax(-1)
    return {
        "layer": len(found.mixers),
        "head": head + 1,
        "tokens": [spell(setting, token) for token in inputs.tolist()],
        "answers": answers,
        "right": [spell(setting, int(targets[place])) for place in answers],
        "given": [spell(setting, int(guesses[place])) for place in answers],
        "shares": rounded(shares),
    }


@torch.no_grad()
def lag_kernels(model: nn.Module, inputs: Tensor) -> list[dict[str, Any]]:
    """R1 and R2 of every layer, as lists by lag, 0 (the token itself) first.

    diagonal: D, by head. mixing: A Diag(s) Bᵀ, [from][to], of the head where it is largest; s is its mean over `inputs` (B T).
    """
    layers = [module for module in model.modules() if isinstance(module, HyperGLU)]
    seen: dict[nn.Module, Tensor] = {}  # B T C

    def keep(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        seen[layer] = arguments[0]

    hooks = [layer.register_forward_pre_hook(keep) for layer in layers]
    model(inputs)
    for hook in hooks:
        hook.remove()
    found = []
    for number, layer in enumerate(layers, 1):
        for name, op in (("R1", layer.op1), ("R2", layer.op2)):
            if op is not None:
                found.append({"layer": number, "operator": name, **kernel(op, seen[layer], transpose=name == "R2")})
    return found


def kernel(op: SequenceMixing, x: Tensor, *, transpose: bool) -> dict[str, Any]:
    """transpose: the operator takes lag j to lag i by its entry (i, j), as in w = a R2ᵀ."""
    mixing = op(torch.sigmoid(op.control(x)).mean((0, 1), keepdim=True))  # s: 1 1 H*R
    low_rank = (mixing.A * mixing.control[0, 0, :, None]) @ mixing.B.mT  # H L L
    head = int(low_rank.flatten(1).norm(dim=1).argmax())
    strongest = low_rank[head].mT if transpose else low_rank[head]
    diagonal = mixing.baseline()
    return {
        "head": head + 1,
        "diagonal": [] if diagonal is None else rounded(diagonal.flip(-1)),
        "mixing": rounded(strongest.flip(0, 1)),
    }


def rounded(values: Tensor) -> list[list[float]]:
    return [[round(value, DIGITS) for value in row] for row in values.tolist()]
