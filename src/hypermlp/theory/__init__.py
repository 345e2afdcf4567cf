"""The paper's numbered statements, each with a check that can fail; importing this package enters all of them, in order."""

from __future__ import annotations

from hypermlp.theory import (
    appendix_b,
    appendix_c,
    appendix_c_geometry,
    appendix_d,
    appendix_d_kernel,
    appendix_e,
    appendix_f,
    appendix_g,
    appendix_h,
    appendix_i,
    main_text,
)
from hypermlp.theory.registry import STATEMENTS, Instance, Result, Statement, run, select

__all__ = [
    "STATEMENTS",
    "Instance",
    "Result",
    "Statement",
    "appendix_b",
    "appendix_c",
    "appendix_c_geometry",
    "appendix_d",
    "appendix_d_kernel",
    "appendix_e",
    "appendix_f",
    "appendix_g",
    "appendix_h",
    "appendix_i",
    "main_text",
    "run",
    "select",
]
