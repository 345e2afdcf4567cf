"""Executes compiled GPU programs (PTX) on a CPU, with checks: of bounds, alignment, bytes nobody wrote, races.

Triton's interpreter runs the Python of a kernel. What runs on a GPU is what Triton makes of it, and a fault of the compiler, or
of a kernel that the compiler reads in another way than Python does, shows only there. `run` executes PTX on tensors, `Emulator`
takes the place of the GPU for this package's kernels.
"""

from hypermlp.testing.ptx.faults import Fault, Race, UnknownInstruction
from hypermlp.testing.ptx.launch import run

__all__ = ["Fault", "Race", "UnknownInstruction", "run"]
