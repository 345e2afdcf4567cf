"""What the checks of the theory found: a table on the console, and a page with every sentence and the pictures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import isinf
from pathlib import Path

from markupsafe import Markup
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hypermlp.files import refuse_foreign, write_own
from hypermlp.provenance import machine
from hypermlp.report.theory_map import anchor, html_map, joined, link_to, links_of
from hypermlp.theory import Result, Statement, run, select
from hypermlp.theory.faults import FAULTS, JUNK, noticed
from hypermlp.theory.gallery import Picture, pictures
from hypermlp.theory.registry import FAILS, HOLDS, LISTED, NOT_RUN, TOOTHLESS

HERE = Path(__file__).parent
STYLE_FILES, SCRIPT_FILES = ("page.css", "theory.css"), ("theory_map.js",)
COLUMNS = ("statement", "runs", "worst error", "slack", "control", "verdict")
SIGNS = {HOLDS: "✓", FAILS: "✗", TOOTHLESS: "✗", NOT_RUN: "?"} | dict.fromkeys(LISTED, "–")
STYLES = {HOLDS: "green", FAILS: "bold red", TOOTHLESS: "bold red", NOT_RUN: "yellow"} | dict.fromkeys(LISTED, "dim")
INTRODUCTION = (
    "What the paper (Lu and Yang, 2026) numbers, in our words. What claims something that can be computed is checked on random "
    "instances in double precision, on the real layer wherever it speaks of one, and again with its assumption broken, where "
    "the check must fail. Definitions, assumptions and what only a proof can decide are listed."
)
LEGEND = (
    "worst error: the largest over the instances. slack: of an inequality, the smallest bound ÷ value that was found. control: "
    "the smallest error when the assumption is broken; it must be above the tolerance. corrected: the printed statement fails "
    "on an instance, and the sentence that is checked differs from it."
)
PARTS = {
    "2": "Section 2: the main text",
    "B": "Appendix B: setting",
    "C": "Appendix C: memory and geometry",
    "D": "Appendix D: measures and the tangent kernel",
    "E": "Appendix E: dictionaries",
    "F": "Appendix F: layout and budget",
    "G": "Appendix G: cost",
    "H": "Appendix H: implications",
    "I": "Appendix I: function classes",
    "example": "Examples of appendix I",
}


def show_theory(console: Console, only: Iterable[str], page: Path | None, *, faults: bool = False, force: bool = False) -> bool:
    """Run the checks and print what they found; whether nothing failed.

    page: where to write the page, if anywhere. faults: also seed faults in the operator and tell which statements notice them.
    """
    only = list(only)
    chosen = select(only)
    if page is not None:
        refuse_foreign(page, force=force)  # before minutes of work
    results = run_all(console, chosen)
    console.print(results_table(results))
    if len(chosen) <= 4:
        for result in results:
            console.print(card(result))
    else:
        show_corrections(console, results)
    console.print(summary(results), style="bold", highlight=False)
    if faults:
        show_faults(console, chosen)
    if page is not None:
        with console.status("drawing"):
            about = {entry.number for entry in chosen}
            shown = [picture for picture in pictures() if about & set(picture.statements)]
            write_page(results, shown, page, only, force=force)
        console.print(f"{page.stat().st_size / 1e6:.1f} MB: {page}", highlight=False, soft_wrap=True)
    return not any(result.verdict in (FAILS, TOOTHLESS) for result in results)


def run_all(console: Console, chosen: Sequence[Statement]) -> list[Result]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for entry in chosen:
            progress.update(task, description=entry.name)
            results.append(run(entry))
            progress.advance(task)
    return results


def cells(result: Result) -> list[str]:
    """The columns of a result, as text."""
    entry = result.statement
    verdict = f"{SIGNS[result.verdict]} {result.verdict}"
    if result.verdict in (*LISTED, NOT_RUN):
        return [entry.name, "", "", "", "", f"{verdict}, {result.reason}" if result.reason else verdict]
    slack = "" if isinf(result.slack) else f"{result.slack:.2f}"
    errors = [f"{result.error:.1e}" if result.error else "0", slack, f"{result.control:.1e}"]
    return [entry.name, str(result.instances), *errors, f"{verdict}, corrected" if entry.printed else verdict]


def results_table(results: Sequence[Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=LEGEND, caption_justify="left", caption_style="dim")
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in COLUMNS[1:5] else "left", no_wrap=name != "verdict")
    for result in results:
        found = cells(result)
        table.add_row(*found[:-1], Text(found[-1], STYLES[result.verdict]))
    return table


def card(result: Result) -> Text:
    """A statement in full."""
    entry = result.statement
    lines = [(f"{entry.name}. {entry.title}", "bold"), (entry.says, "")]
    if entry.check is not None:
        lines += [(f"Assumes: {entry.assumes}", ""), (f"Control: {entry.control}.", "")]
        lines.append((f"An error above {entry.tolerance:.0e} is a failure.", "dim"))
    lines += [(f"{name}: {text}", "dim") for name, text in remarks(entry).items()]
    for item, error in zip(entry.printed, result.printed or [None] * len(entry.printed), strict=True):
        shown = "" if error is None else f" (error of the printed statement: {error:.1e})"
        lines.append((f"As printed: {item.says}{shown}", "yellow"))
    return Text("\n").join([*(Text(text, style) for text, style in lines), Text("")])


def remarks(entry: Statement) -> dict[str, str]:
    """What a check does not test, and why."""
    found = {"By definition": entry.trivial, "Blind to faults of the operator": entry.blind}
    return {name: text for name, text in found.items() if text}


def show_faults(console: Console, chosen: Sequence[Statement]) -> None:
    """Seed each fault in the operator, and tell which statements notice it."""
    with console.status("seeding faults"):
        found = {entry.number: names for entry, names in noticed(chosen)}
    table = Table("fault of the operator", "noticed by", "statements", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, numbers in by_fault(found).items():
        table.add_row(name, str(len(numbers)), ", ".join(numbers))
    console.print(table)
    blind = [entry for entry in chosen if entry.check is not None and set(found[entry.number]) <= {JUNK}]
    for entry in blind:
        words = "junk alone" if found[entry.number] else "nothing"
        console.print(Text.assemble((f"{entry.number}  ", "bold"), f"notices {words}: {entry.blind or 'no reason is given'}"))


def by_fault(found: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """For each fault the statements that notice it; given the faults of each statement."""
    return {name: [number for number, names in found.items() if name in names] for name in FAULTS}


def faults_markdown(found: Mapping[str, Sequence[str]]) -> str:
    """Which statements notice each fault, as a Markdown table; given the faults of each statement."""
    rows = ["| fault | noticed by | statements |", "| --- | ---: | --- |"]
    rows += [f"| {name} | {len(numbers)} | {', '.join(numbers)} |" for name, numbers in by_fault(found).items()]
    return "\n".join(rows) + "\n"


def show_corrections(console: Console, results: Sequence[Result]) -> None:
    """What is false or imprecise as printed."""
    found = [result for result in results if result.statement.printed]
    if not found:
        return
    console.print("False or imprecise as printed, each with an instance that shows it:", style="bold")
    for result in found:
        for item in result.statement.printed:
            console.print(Text.assemble((f"{result.statement.number}  ", "bold"), item.says), soft_wrap=False)
    console.print()


def summary(results: Sequence[Result]) -> str:
    counts = Counter(result.verdict for result in results)
    checked = sum(counts[v] for v in (HOLDS, FAILS, TOOTHLESS))
    parts = [f"{counts[HOLDS]} of {checked} checks hold and fail under their control"]
    parts += [f"{counts[v]} {v}" for v in (FAILS, TOOTHLESS, NOT_RUN, *LISTED) if counts[v]]
    corrected = sum(bool(result.statement.printed) for result in results)
    if corrected:
        parts.append(f"{corrected} corrected")
    return "; ".join(parts) + "."


def lead(results: Sequence[Result]) -> str:
    """What was found, in a sentence."""
    counts = Counter(result.verdict for result in results)
    checked = sum(counts[v] for v in (HOLDS, FAILS, TOOTHLESS))
    return (
        f"{counts[HOLDS]} of {checked} statements of the paper that were computed here hold on every random instance, and fail "
        "once their assumption is broken."
    )


def markdown(entries: Sequence[Statement]) -> str:
    """All statements as a Markdown table, without running them."""
    rows = ["| statement | what is checked | control | as printed |", "| --- | --- | --- | --- |"]
    for entry in entries:
        word = entry.unchecked or ("corrected" if entry.printed else "")
        rows.append(f"| {entry.name} | {cell_text(entry.says)} | {cell_text(entry.control)} | {word} |")
    return "\n".join(rows) + "\n"


def cell_text(text: str) -> str:
    return re.sub(r"([|_*])", r"\\\1", text)


def write_page(
    results: Sequence[Result], shown: Sequence[Picture], out: Path, only: Sequence[str] = (), *, force: bool = False
) -> Path:
    """One page, complete in itself; only: what was asked for, if not everything."""
    parts: dict[str, list[Result]] = {}
    for result in results:
        parts.setdefault(re.split(r"[. ]", result.statement.number)[0], []).append(result)
    known = {result.statement.number for result in results}
    titles = {"map": "Map", "pictures": "Pictures", "results": "Results"} | {f"part-{name}": PARTS[name] for name in parts}
    note = Markup('<p class="note">{}</p>').format
    sections = {"map": html_map(results), "pictures": gallery(shown, known), "results": html_table(results) + note(LEGEND)}
    if not shown:
        del sections["pictures"], titles["pictures"]
    title = ": ".join(["The theory of HyperMLP, run", *([", ".join(only)] if only else [])])
    sections |= {f"part-{name}": joined(html_card(r, known) for r in found) for name, found in parts.items()}
    body = [
        Markup("<h1>{}</h1>").format(title),
        Markup('<p class="lead">{}</p>').format(lead(results)),
        Markup('<p class="soft">{}</p>').format(f"{INTRODUCTION} In numbers: {summary(results)}"),
        Markup("<nav>{}</nav>").format(joined(Markup('<a href="#{}">{}</a>').format(*item) for item in titles.items())),
        *(Markup('<h2 id="{}">{}</h2>{}').format(name, titles[name], section) for name, section in sections.items()),
        note(origin()),
    ]
    style, script = ("".join((HERE / name).read_text() for name in names) for names in (STYLE_FILES, SCRIPT_FILES))
    write_own(
        out,
        '<!DOCTYPE html>\n<html lang="en-GB"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>hypermlp: theory</title>'
        f"<style>\n{style}</style></head>\n<body><main>{chr(10).join(body)}</main>\n<script>\n{script}</script></body></html>\n",
        force=force,
    )
    return out


def gallery(shown: Sequence[Picture], known: Collection[str]) -> Markup:
    """The pictures, with links to those statements that the page has."""
    intro = (
        "Each square is a plane of queries. A line is the boundary of one slot, found by root finding; the blue is darker "
        "where more slots are active. Point at a line for its slot."
    )
    figures = []
    for item in shown:
        links = joined((link_to(number, number) if number in known else number for number in item.statements), ", ")
        sets = Markup('<p class="soft">{} activated sets; see {}</p>').format(item.partition.regions, links)
        caption = Markup("{}<p>{}</p>{}").format(item.partition.title, item.caption, sets)
        drawn = Markup(item.partition.svg())
        figures.append(Markup("<figure>{}<figcaption>{}</figcaption></figure>").format(drawn, caption))
    return Markup('<p>{}</p><div class="charts">{}</div>').format(intro, joined(figures))


def html_table(results: Sequence[Result]) -> Markup:
    head = joined(map(Markup('<th scope="col">{}</th>').format, COLUMNS))
    rows = []
    for result in results:
        name, *rest = cells(result)
        link = Markup('<th scope="row">{}</th>').format(link_to(result.statement.number, name))
        rows.append(Markup("<tr>{}{}</tr>").format(link, joined(map(Markup("<td>{}</td>").format, rest))))
    table = Markup("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(head, joined(rows))
    return Markup('<div class="scroll" tabindex="0" role="region" aria-label="results">{}</div>').format(table)


def html_card(result: Result, known: Collection[str]) -> Markup:
    entry = result.statement
    kind = result.verdict.replace(" ", "-")
    parts = [
        Markup('<div class="statement {}" id="{}">').format(kind, anchor(entry.number)),
        Markup('<span class="verdict">{} {}</span>').format(SIGNS[result.verdict], result.verdict),
        Markup("<h4>{}. {}</h4><p>{}</p>").format(entry.name, entry.title, entry.says),
    ]
    if entry.check is not None:
        measured = {"assumes": entry.assumes, "control": entry.control}
        if result.instances:
            measured["errors"] = (
                f"at most {result.error:.2g} over {result.instances} instances, at least {result.control:.2g} under the "
                f"control; tolerance {entry.tolerance:g}"
            )
            if not isinf(result.slack):
                measured["slack"] = f"{result.slack:.4g}: the smallest bound ÷ value that was found"
        measured |= {name.lower(): text for name, text in remarks(entry).items()}
        if result.reason:
            measured["not run"] = result.reason
        rows = joined(Markup("<dt>{}</dt><dd>{}</dd>").format(*item) for item in measured.items())
        parts.append(Markup("<dl>{}</dl>").format(rows))
    parts.append(links_of(entry.number, known))
    for item, error in zip(entry.printed, result.printed or [None] * len(entry.printed), strict=True):
        shown = "" if error is None else f" Error of the printed statement: {error:.1e}."
        parts.append(Markup('<p class="correction"><b>As printed.</b> {}{}</p>').format(item.says, shown))
    return joined([*parts, Markup("</div>")])


def origin() -> str:
    return "Made by hypermlp theory --out: " + ", ".join(f"{k} {v}" for k, v in machine().items() if v is not None) + "."
