"""Prints the results of `hypermlp table5` into docs/efficiency.md and README.md, and draws docs/efficiency.png.

python docs/make_efficiency.py
"""

import re
from pathlib import Path

from hypermlp.report.style import save
from hypermlp.report.table5 import document_blocks, mark, picture, read_folder

ROOT = Path(__file__).parent.parent


def main() -> None:
    records = read_folder(ROOT / "results" / "table5")
    made = document_blocks(records)
    save(picture(records["model-laptop"], records["growth-laptop"]), ROOT / "docs" / "efficiency.png")
    path = ROOT / "docs" / "efficiency.md"
    text = path.read_text()
    for name in re.findall(r"<!-- (?!end)(.*?) -->", text):
        before, after = text.split(f"<!-- {name} -->")
        text = before + mark(name, made[name]) + after.split("<!-- end -->", 1)[1]
    path.write_text(text)
    path = ROOT / "README.md"
    path.write_text(re.sub(r"^As a whole GPT-2 .*$", lambda found: made["summary"], path.read_text(), flags=re.M))


if __name__ == "__main__":
    main()
