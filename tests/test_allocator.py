"""Freed memory: kept for the next step, or given back at once."""

import subprocess
import sys

import pytest

STEPS = """
import resource, torch
from hypermlp import allocator
{how}
def step():
    tensors = [torch.ones(5_000_000) for _ in range(6)]  # 20 MB each
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Pages that a step has to ask the system for, once it has been done before."""
    done = subprocess.run([sys.executable, "-c", STEPS.format(how=how)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone can be told, and only Linux has it")
def test_a_step_takes_the_memory_that_the_last_one_freed() -> None:
    assert faults("allocator.keep_freed_memory()") < 100
    assert faults("allocator.return_freed_memory()") > 6 * 100
