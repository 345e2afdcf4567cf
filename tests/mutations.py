"""Faults seeded into copies of the Triton kernels, and whether computing with such a copy shows them.

`outcome` runs in either process: in the child of compiled.py the kernels are executed as compiled, in one with
TRITON_INTERPRET=1 they are interpreted.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch

import hypermlp.ops.triton as package
from executed import Case, emulated
from helpers import Problem, randn
from hypermlp.ops.registered import Inputs, flatten_mixing
from hypermlp.ops.triton import device
from interpreter import flips, patched_once, rms, run

BOUND = 2e-2  # relative rms error that shows a fault


@dataclass(frozen=True)
class Fault:
    """A part of a kernel's source and what stands in its place; with no source, its program loses the first barrier."""

    file: str  # or the kernel whose program loses its barrier
    line: str
    instead: str
    case: Case
    interpreted: bool  # whether Triton's interpreter shows it too


@contextmanager
def copied(file: str, line: str, instead: str) -> Iterator[dict[str, ModuleType]]:
    """The package's modules, imported anew from a copy in which one line differs."""
    prefix, path = package.__name__ + ".", list(package.__path__)
    kept = {name: module for name, module in sys.modules.items() if name.startswith(prefix)}
    renewed = [name for name in kept if name != prefix + "device"]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "triton"
        shutil.copytree(path[0], copy)
        if line:
            text = (copy / file).read_text()
            assert line in text, f"{file} has no longer the line {line!r}"
            (copy / file).write_text(text.replace(line, instead))
        for name in renewed:
            del sys.modules[name]
            delattr(package, name.removeprefix(prefix))
        package.__path__ = [str(copy)]
        try:
            yield {name: importlib.import_module(prefix + name) for name in ("launch", "gradients", "stepping", "work")}
        finally:
            package.__path__ = path
            for name in [name for name in sys.modules if name.startswith(prefix)]:
                del sys.modules[name]
            sys.modules.update(kept)
            for name, module in kept.items():
                setattr(package, name.removeprefix(prefix), module)


def flat(problem: Problem) -> Inputs:
    return Inputs(
        problem.q, problem.k, problem.v, *flatten_mixing(problem.routing, False), *flatten_mixing(problem.reading, True),
        problem.spans,
    )  # fmt: skip


def worst_error(modules: dict[str, ModuleType], case: Case) -> float:
    """Of readout and gradients, or of a decoding step where the case has one row."""
    problem = case.problem().to(getattr(torch, case.dtype))
    inputs, exact = flat(problem), problem.to(torch.float64)
    if case.T == 1:
        return rms(modules["stepping"].decode(inputs, problem.spec), exact.mix("dense"))
    d_o = randn(*problem.q.shape[:2], *problem.v.shape[2:], seed=99).to(problem.q.dtype)
    d_o = torch.where(flips(problem).any(-1).transpose(1, 2)[..., None], 0, d_o)
    made = modules["launch"].forward(inputs, problem.spec, None)
    found = modules["gradients"].backward(d_o, *made, inputs, problem.spec, None)
    expected = run(exact, "dense", d_o)
    names = ("q", "k", "v", "R1.A", "R1.B", None, "R1.control", "R2.B", "R2.A", None, "R2.control")
    pairs = [
        (made[0], expected["o"]),
        *((g, expected[f"d {n}"]) for n, g in zip(names, found, strict=True) if n and g is not None),
    ]
    return max(rms(a, b) for a, b in pairs)


@contextmanager
def without_barrier(kernel: str) -> Iterator[None]:
    """A compiled program without the first of its barriers, as if the compiler had forgotten it."""
    from hypermlp.testing.ptx import emulator

    compile_once = emulator.compile_once

    def changed(launch: object, arch: int) -> object:
        made = compile_once(launch, arch)
        return made if launch.name != kernel else made._replace(ptx=made.ptx.replace("bar.sync", "// bar.sync", 1))

    with patch.object(emulator, "compile_once", changed):
        yield


@contextmanager
def setting(case: Case, modules: dict[str, ModuleType]) -> Iterator[None]:
    """Execution or, in a process that interprets, Triton's interpreter; cut as the case wants it."""
    if case.cut:
        modules["work"].LEAST_SCRATCH = modules["work"].LEAST_TILES = 1
    if not device.interpreted():
        with emulated(80, "reverse", case.cut):
            yield
        return
    sized = device.Device()
    if case.cut:
        sized.limits = lambda name: device.Limits(0, 100, 1 << 12)
    with device.replaced(sized), patched_once():
        yield


def outcome(fault: Fault) -> str:
    """What computing with the fault shows: "wrong" numbers, the name of an exception, or "nothing"."""
    hidden = nullcontext() if fault.line or device.interpreted() else without_barrier(fault.file)
    with copied(fault.file, fault.line, fault.instead) as modules, setting(fault.case, modules), hidden:
        try:
            return "nothing" if worst_error(modules, fault.case) < BOUND else "wrong"
        except Exception as error:
            return type(error).__name__
