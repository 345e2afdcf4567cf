"""Writes the tables of docs/theory.md: the statements, and which seeded faults each notices (about a minute).

python docs/make_theory.py
"""

from pathlib import Path

from hypermlp.report.markdown import fill
from hypermlp.report.theory import faults_markdown, markdown
from hypermlp.theory import select
from hypermlp.theory.faults import noticed

if __name__ == "__main__":
    path = Path(__file__).parent / "theory.md"
    entries = select([])
    found = {entry.number: names for entry, names in noticed(entries)}
    made = {"statements": markdown(entries).strip(), "faults": faults_markdown(found).strip()}
    path.write_text(fill(path.read_text(), made))
