"""HyperMLP and HyperGLU: attention read as a two-layer MLP whose hidden layer is the context."""

from hypermlp.config import HyperGLUConfig
from hypermlp.mixers.hyper import HyperGLU, HyperMLP

__all__ = ["HyperGLU", "HyperGLUConfig", "HyperMLP", "__version__"]

__version__ = "0.1.0"
