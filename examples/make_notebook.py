"""Write the notebooks from their scripts, with their cells executed: first_steps.ipynb and streaming.ipynb.

python examples/make_notebook.py [FOLDER]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

SCRIPTS = [Path(__file__).with_name(f"{name}.py") for name in ("first_steps", "streaming")]


def cells(script: str) -> list[tuple[str, str]]:
    """Kind and text of each cell of a script with `# %%` lines."""
    found = []
    for kind, text in re.findall(r"^# %%( \[markdown\])?\n(.*?)(?=^# %%|\Z)", script, re.M | re.S):
        found.append(("markdown", re.sub(r"^# ?", "", text.strip(), flags=re.M)) if kind else ("code", text.strip()))
    return found


def make(script: str) -> nbformat.NotebookNode:
    new = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    made = [new[kind](text, id=f"cell-{i}") for i, (kind, text) in enumerate(cells(script))]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def execute(notebook: nbformat.NotebookNode) -> None:
    """Run it, and drop what differs from run to run."""
    NotebookClient(notebook, timeout=300, km=AsyncKernelManager(kernel_name="python3", transport="ipc")).execute()
    for cell in notebook.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


if __name__ == "__main__":
    for script in SCRIPTS:
        notebook = make(script.read_text(encoding="utf-8"))
        execute(notebook)
        nbformat.write(notebook, Path(sys.argv[1] if len(sys.argv) > 1 else script.parent) / f"{script.stem}.ipynb")
