"""The operator and what surrounds it in compiled C++ for the CPU."""

from hypermlp.ops.native.bindings import is_plain
from hypermlp.ops.native.build import Library, cache_folder, library
from hypermlp.ops.native.kernels import (
    SCAN_ROWS,
    StepParameters,
    convs_backward,
    convs_forward,
    gate_backward,
    gate_forward,
    gates_backward,
    gates_forward,
    linears,
    mix,
    mix_linked,
    scan_backward,
    scan_forward,
    scan_inputs,
    step,
    ungate,
)
from hypermlp.ops.native.layer import MOST_TOKENS, Form, layer_backward, layer_forward
from hypermlp.ops.native.project import fits, project_backward, project_forward

__all__ = [
    "MOST_TOKENS",
    "SCAN_ROWS",
    "Form",
    "Library",
    "StepParameters",
    "cache_folder",
    "convs_backward",
    "convs_forward",
    "fits",
    "gate_backward",
    "gate_forward",
    "gates_backward",
    "gates_forward",
    "is_plain",
    "layer_backward",
    "layer_forward",
    "library",
    "linears",
    "mix",
    "mix_linked",
    "project_backward",
    "project_forward",
    "scan_backward",
    "scan_forward",
    "scan_inputs",
    "step",
    "ungate",
]
