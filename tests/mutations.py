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
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch

import hypermlp.ops.triton as package
from executed import Case, emulated
from helpers import randn
from hypermlp.ops.registered import flatten
from hypermlp.ops.triton import device
from interpreter import flips, patched_once, rms, run

PREFIX = package.__name__ + "."
BOUND = 2e-2  # relative rms error that shows a fault


@dataclass(frozen=True)
class Fault:
    """A part of a kernel's source and what stands in its place; with no source, its program loses the first barrier."""

    file: str  # or the kernel whose program loses its barrier
    line: str
    instead: str
    case: Case
    interpreted: bool | None  # whether Triton's interpreter shows it too; None: it depends on what lies in memory


@contextmanager
def copied(file: str, line: str, instead: str) -> Iterator[dict[str, ModuleType]]:
    """The package's modules, imported anew from a copy in which one line differs."""
    path, kept = list(package.__path__), submodules()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "triton"
        shutil.copytree(path[0], copy)
        if line:
            text = (copy / file).read_text()
            assert line in text, f"{file} has no longer the line {line!r}"
            (copy / file).write_text(text.replace(line, instead))
        put_in_place({"device": kept["device"]})
        package.__path__ = [str(copy)]
        try:
            yield {name: importlib.import_module(PREFIX + name) for name in ("launch", "gradients", "stepping", "work")}
        finally:
            package.__path__ = path
            put_in_place(kept)


def submodules() -> dict[str, ModuleType]:
    """Those of the package that are imported."""
    return {name.removeprefix(PREFIX): module for name, module in sys.modules.items() if name.startswith(PREFIX)}


def put_in_place(modules: dict[str, ModuleType]) -> None:
    """Make these the imported ones: in sys.modules, and as attributes of the package."""
    for name in submodules():
        del sys.modules[PREFIX + name]
        delattr(package, name)
    for name, module in modules.items():
        sys.modules[PREFIX + name] = module
        setattr(package, name, module)


def worst_error(modules: dict[str, ModuleType], case: Case) -> float:
    """Of readout and gradients, or of a decoding step where the case has one row."""
    problem = case.problem().to(getattr(torch, case.dtype))
    inputs, exact = flatten(problem), problem.to(torch.float64)
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
        for name in ("LEAST_SCRATCH", "LEAST_TILES", "FAIR_SHARES"):
            setattr(modules["work"], name, 1)
    if not device.interpreted():
        with emulated(80, case.cut):
            yield
        return
    sized = device.Device()
    if case.cut:
        sized.limits = lambda name: device.Limits(0, 100, 1 << 12)
    with device.replaced(sized), patched_once():
        yield


def outcome(fault: Fault) -> str:
    """What computing with the fault shows: "wrong" numbers, the name of an exception, or "nothing".

    The interpreter has tiles of 16 × 16 and gets fewer rows, since it is slow.
    """
    case = replace(fault.case, T=min(fault.case.T, 40)) if device.interpreted() else fault.case
    hidden = nullcontext() if fault.line or device.interpreted() else without_barrier(fault.file)
    with copied(fault.file, fault.line, fault.instead) as modules, setting(case, modules), hidden:
        try:
            return "nothing" if worst_error(modules, case) < BOUND else "wrong"
        except Exception as error:
            return type(error).__name__
