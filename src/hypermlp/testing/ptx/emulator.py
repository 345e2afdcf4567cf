"""Triton kernels executed as compiled, on the memory of CPU tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from hypermlp.ops.triton.device import Device, Limits
from hypermlp.ops.triton.specialise import Launch, describe
from hypermlp.testing.ptx.compiler import Compiled, compile_ptx, same_program
from hypermlp.testing.ptx.execution import Counts, Order, execute, global_memory
from hypermlp.testing.ptx.memory import place_tensors

PROCESSORS, CACHE = 4, 1 << 20  # of the GPU that is emulated: few and small, as fits small tests
compiled: dict[Any, Compiled] = {}


class LaunchShape(NamedTuple):
    """What the compiler is told about a program's threads and pipelines."""

    warps: int
    stages: int


class Emulator(Device):
    """Stands in for a GPU of an architecture such as 80: `with device.replaced(Emulator(80)): …`.

    Every launch is noted in `launches`: the kernel's name, its PTX and what it took.
    """

    def __init__(self, arch: int = 80, order: Order = "together") -> None:
        self.arch, self.order = arch, order
        self.launches: list[tuple[str, str, Counts]] = []

    def obstacle(self, device: str, dtype: str) -> str | None:
        return None if device.partition(":")[0] == "cpu" else f"on {device}: the emulator executes on the memory of CPU tensors"

    def name(self, device: str) -> str:
        return f"emulated sm_{self.arch}"

    def limits(self, device: str) -> Limits:
        return Limits(self.arch, PROCESSORS, CACHE)

    def start(
        self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any], used: Any
    ) -> None:
        launch = describe(kernel.__name__, kernel, grid, used, arguments, constants)
        program = compile_once(launch, self.arch)
        memory = global_memory(program.ptx)
        given = {n: value for n, value in zip(kernel.arg_names, arguments, strict=False) if launch.signature[n] != "constexpr"}
        places = place_tensors(memory, {name: value for name, value in given.items() if isinstance(value, Tensor)})
        values = [places[name] if isinstance(value, Tensor) else value for name, value in given.items()]
        took = execute(program.ptx, grid, values, memory, program.shared, self.order)
        self.launches.append((launch.name, program.ptx, took))

    def run(
        self, kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int = 4, stages: int = 3, **constants: Any
    ) -> None:
        """Execute any Triton kernel, in place. arguments: in its order; constants: those that are tl.constexpr."""
        self.start(kernel, grid, arguments, constants, LaunchShape(warps, stages))

    def programs(self) -> set[str]:
        """The different programs that ran, without the names of their architecture.

        Two emulators that ran the same ones for the same calls have covered both architectures with either run.
        """
        return {same_program(ptx) for _, ptx, _ in self.launches}


def compile_once(launch: Launch, arch: int) -> Compiled:
    constants = tuple(sorted((name, str(value)) for name, value in launch.constants.items()))
    signature = tuple(launch.signature.items())
    key = launch.kernel, signature, constants, launch.divisible, launch.warps, launch.stages, arch
    if key not in compiled:
        compiled[key] = compile_ptx(launch, arch)
    return compiled[key]
