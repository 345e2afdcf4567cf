"""The registry: name → task, in the order in which tables show them. A new task is one file and one line here.

How it is shown goes to report/shown.py.
"""

from __future__ import annotations

from hypermlp.tasks.base import Examples, Material, Rows, Scale, Setting, Sizes, Task
from hypermlp.tasks.copying import COPYING
from hypermlp.tasks.forecast import FORECAST
from hypermlp.tasks.groups import GROUP_WORDS
from hypermlp.tasks.languages import LANGUAGES
from hypermlp.tasks.listops import LISTOPS
from hypermlp.tasks.mad import MAD
from hypermlp.tasks.mqar import MQAR
from hypermlp.tasks.pixels import PIXELS
from hypermlp.tasks.regbench import REGBENCH

__all__ = ["TASKS", "Examples", "Material", "Rows", "Scale", "Setting", "Sizes", "Task"]

TASKS: dict[str, Task] = {
    **MAD,
    **MQAR,
    "regbench": REGBENCH,
    "group-words": GROUP_WORDS,
    **LANGUAGES,
    **COPYING,
    **LISTOPS,
    **PIXELS,
    **FORECAST,
}
