"""The authors' import path: `from hyperglu import HyperGLU, HyperGLUConfig` runs their quick-start unchanged."""

from hypermlp import *  # noqa: F403
