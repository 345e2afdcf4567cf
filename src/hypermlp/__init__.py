"""HyperMLP and HyperGLU: attention read as a two-layer MLP whose hidden layer is the context.

The layer is imported at once; the names of models and rivals are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hypermlp.config import HyperGLUConfig
from hypermlp.mixers.hyper import HyperGLU, HyperMLP

if TYPE_CHECKING:
    from hypermlp.cache import Cache
    from hypermlp.mixers import Mixer, build_mixer
    from hypermlp.mixers.int8 import quantize
    from hypermlp.models.generate import generate
    from hypermlp.models.lm import LanguageModel, ModelConfig
    from hypermlp.models.parallel import make_mesh, own_rows, parallelize
    from hypermlp.models.saved import load_model, save_model
    from hypermlp.train.optimisation import muon_parameters, parameter_groups

__all__ = [
    "Cache",
    "HyperGLU",
    "HyperGLUConfig",
    "HyperMLP",
    "LanguageModel",
    "Mixer",
    "ModelConfig",
    "__version__",
    "build_mixer",
    "generate",
    "load_model",
    "make_mesh",
    "muon_parameters",
    "own_rows",
    "parallelize",
    "parameter_groups",
    "quantize",
    "save_model",
]

__version__ = "0.1.0"

_LATER = {
    "Cache": "hypermlp.cache",
    "LanguageModel": "hypermlp.models.lm",
    "Mixer": "hypermlp.mixers",
    "ModelConfig": "hypermlp.models.lm",
    "build_mixer": "hypermlp.mixers",
    "generate": "hypermlp.models.generate",
    "load_model": "hypermlp.models.saved",
    "make_mesh": "hypermlp.models.parallel",
    "muon_parameters": "hypermlp.train.optimisation",
    "own_rows": "hypermlp.models.parallel",
    "parallelize": "hypermlp.models.parallel",
    "parameter_groups": "hypermlp.train.optimisation",
    "quantize": "hypermlp.mixers.int8",
    "save_model": "hypermlp.models.saved",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'hypermlp' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
