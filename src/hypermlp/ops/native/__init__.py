"""The operator and what surrounds it in compiled C++ for the CPU."""

from hypermlp.ops.native.bindings import is_addressable
from hypermlp.ops.native.build import Library, cache_folder, library
from hypermlp.ops.native.kernels import (
    SCAN_ROWS,
    convs_backward,
    convs_forward,
    gate_backward,
    gate_forward,
    gates_backward,
    gates_forward,
    mix,
    mix_owned,
    scan_backward,
    scan_forward,
    scan_inputs,
    ungate,
)
from hypermlp.ops.native.layer import MOST_TOKENS, layer_backward, layer_forward, step
from hypermlp.ops.native.project import fits, project_backward, project_forward

__all__ = [
    "MOST_TOKENS",
    "SCAN_ROWS",
    "Library",
    "cache_folder",
    "convs_backward",
    "convs_forward",
    "fits",
    "gate_backward",
    "gate_forward",
    "gates_backward",
    "gates_forward",
    "is_addressable",
    "layer_backward",
    "layer_forward",
    "library",
    "mix",
    "mix_owned",
    "project_backward",
    "project_forward",
    "scan_backward",
    "scan_forward",
    "scan_inputs",
    "step",
    "ungate",
]
