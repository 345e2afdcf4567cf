"""The table and the page say what the checks found, failures included."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hypermlp.cli import app
from hypermlp.report import theory as report
from hypermlp.report.theory_map import THREADS, base, html_map, links_of
from hypermlp.theory import STATEMENTS, gallery, run, select
from hypermlp.theory.faults import FAULTS, noticed
from hypermlp.theory.numbered import NUMBERED
from hypermlp.theory.registry import FAILS

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "theory.md").read_text()

FEW = ["C.1", "C.9", "C.12", "example 1"]


def printed(only: list[str], width: int = 80) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=width)
    good = report.show_theory(console, only, None)
    return good, console.file.getvalue()


def test_table_fits_a_terminal_and_tells_every_verdict() -> None:
    good, text = printed(FEW)
    assert good
    assert "…" not in text.split("worst error: ")[0], "nothing is cut off at 80 columns"
    assert re.search(r"Lemma C.1 +10 +\S+e-16 +\S+e-\d\d +✓ holds\b", text)
    assert re.search(r"Corollary C.12 .*✓ holds, corrected", text)
    assert re.search(r"Proposition C.9 \(ii\) +– proof only", text)
    assert re.search(r"^Example 1 |\bExample 1 +5", text, re.M)
    assert "4 of 4 checks hold and fail under their control; 1 proof only; 1 corrected." in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_few_statements_are_printed_in_full() -> None:
    text = " ".join(printed(["C.12"])[1].split())
    for part in (STATEMENTS["C.12"].says, STATEMENTS["C.12"].printed[0].says, "error of the printed statement: 1.0e+00"):
        assert " ".join(part.split()) in text


def test_a_failure_is_told_and_ends_the_command_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STATEMENTS, "C.1", replace(STATEMENTS["C.1"], check=lambda case: 0.5))
    good, text = printed(["C.1"])
    assert not good
    assert re.search(r"Lemma C.1 .*✗ fails", text)
    assert "0 of 1 checks hold and fail under their control; 1 fails" in text
    done = CliRunner().invoke(app, ["theory", "C.1"])
    assert done.exit_code == 1


def test_the_command_takes_lists_and_refuses_unknown_numbers() -> None:
    done = CliRunner().invoke(app, ["theory", "C.1,C.2", "G.1"])
    assert done.exit_code == 0, done.output
    assert "3 of 3" in done.output
    assert isinstance(CliRunner().invoke(app, ["theory", "Q.9"]).exception, ValueError)


def test_the_command_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "pictures", lambda: gallery.examples())  # the others are drawn in tests/theory
    out = tmp_path / "page.html"
    # as `hypermlp theory --out PAGE` with one statement
    done = CliRunner().invoke(app, f"theory C.1 --out {out}")
    assert done.exit_code == 0, done.output
    assert "Lemma C.1" in out.read_text()
    assert "1 of 1 checks hold" in done.output
    page = out.read_text()
    assert "<h1>The theory of HyperMLP, run: C.1</h1>" in page, "a page of one statement says so"
    shown = [picture for picture in gallery.examples() if "C.1" in picture.statements]
    assert page.count('<svg class="partition"') == len(shown), "and has its pictures alone"


class Reader(HTMLParser):
    """Balanced tags, ids and links."""

    VOID = ("meta", "link", "br", "hr", "img", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if tag == "a":
            self.links.append(str(found["href"]))
        assert "src" not in found, "the page loads nothing"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_is_complete_in_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [run(entry, 1) for entry in select(FEW)]
    results.append(replace(results[0], statement=STATEMENTS["H.7"], verdict=FAILS, error=0.3, printed=(1.0,)))
    page = report.write_page(results, gallery.examples(), tmp_path / "deep" / "theory.html").read_text()
    reader = Reader()
    reader.feed(page)
    assert not reader.open
    assert len(set(reader.ids)) == len(reader.ids)
    inside = {link.removeprefix("#") for link in reader.links}
    assert all(link.startswith("#") for link in reader.links)
    assert inside <= set(reader.ids), "links to statements that were not run"
    assert "s-example-1" in inside
    for result in results:
        assert result.statement.says in reader.text
        assert all(item.says in reader.text for item in result.statement.printed)
    assert page.count('<svg class="partition"') == 3
    assert "✗ fails" in reader.text
    assert re.search(r"run\s+4 of 5 statements of the paper that were computed here hold", reader.text), "the first sentence"
    assert "http" not in page
    assert len(page) < 2_000_000


def test_document_has_a_row_for_every_statement() -> None:
    """The table of docs/theory.md is what docs/make_theory.py writes."""
    rows = [line for line in DOCUMENT.split("## All statements")[1].splitlines() if line.startswith("| ")]
    assert rows == report.markdown(select([])).splitlines()
    assert len(rows) == len(STATEMENTS) + 2


def test_document_counts_what_there_is() -> None:
    checks = [entry for entry in STATEMENTS.values() if entry.check]
    checked = {base(entry.number) for entry in checks}
    for sentence in (
        f"numbers {len(NUMBERED) - 3} statements and three examples. Of these {len(NUMBERED)}, {len(checked)} are checks here",
        f"so there are {len(checks)} checks",
        f"notice each of {len(FAULTS)} faults",
    ):
        assert sentence in " ".join(DOCUMENT.split())
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"checks {len(checked)} of the paper's {len(NUMBERED)} numbered statements" in readme


def test_map_has_every_number_once_and_its_links() -> None:
    placed = [number for boxes in THREADS.values() for numbers in boxes.values() for number in numbers]
    assert sorted(placed) == sorted(NUMBERED)
    results = [run(STATEMENTS[number], 1) for number in ("C.1", "C.2", "C.4", "C.12")]
    results[1] = replace(results[1], verdict=FAILS)
    page = html_map(results)
    for word, number in (("holds", "C.1"), ("fails", "C.2"), ("listed", "C.4"), ("corrected", "C.12"), ("open", "C.13")):
        assert f'class="node {word}" data-number="{number}"' in page
    assert 'data-number="C.2" data-cites="C.1"' in page
    assert links_of("C.1", {"C.2"}) == '<p class="note">used by <a href="#s-C-2">C.2</a></p>'
    assert "rests on 2.5" in links_of("2.6 (i)", set())


def test_faults_are_told_with_reasons() -> None:
    console = Console(file=io.StringIO(), width=100)
    assert report.show_theory(console, ["C.2", "B.2"], None, faults=True)
    text = " ".join(console.file.getvalue().split())
    assert "normalisation left out 1 B.2" in text
    assert "R1 left out 0" in text
    assert f"C.2 notices nothing: {STATEMENTS['C.2'].blind}" in text
    found = {entry.number: names for entry, names in noticed([STATEMENTS["B.2"]])}
    assert "| normalisation left out | 1 | B.2 |" in report.faults_markdown(found).splitlines()
