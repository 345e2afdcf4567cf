"""The operator and what surrounds it in compiled C++ for the CPU.

kernels: the operator, convolutions, gates, scans. project, layer: all projections, or a whole layer, in one call. decode: one
token through a layer or a whole language model. bindings: the border to the compiled code; build compiles it.
"""

from hypermlp.ops.native import decode, kernels, layer, project
from hypermlp.ops.native.bindings import is_addressable
from hypermlp.ops.native.build import cache_folder, library
from hypermlp.ops.native.kernels import mix
from hypermlp.ops.native.layer import MOST_TOKENS
from hypermlp.ops.native.project import fits

__all__ = ["MOST_TOKENS", "cache_folder", "decode", "fits", "is_addressable", "kernels", "layer", "library", "mix", "project"]
