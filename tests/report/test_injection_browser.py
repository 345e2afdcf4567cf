"""No name that a user can choose becomes part of a page: neither as a tag nor as a script, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browsed import BROWSED
from explored import save_small

from hypermlp.report.explore import build_page, open_subject
from hypermlp.report.markup import cell, document, facts, paragraph, table
from hypermlp.report.page import write_report
from hypermlp.studies.protocol import digest
from hypermlp.verdicts.registration import MARK, VERSIONS
from made_up import START, language, mad, write

pytestmark = BROWSED
EVIL = '<img src=x onerror="window.injected = 1"><script>window.injected = 2</script>\'"&'
NAME = "<img src=x onerror=window.injected=3>'"  # as a folder may be called
PROTOCOL = f"""
title = {json.dumps(EVIL)}
mixers = ["S-pc", {json.dumps(EVIL)}]
seeds = 1

[why]
{json.dumps(EVIL)} = {json.dumps(EVIL)}

[mad]
protocol = "clean"
scale = "baseline"
tasks = ["compression"]

[[comparisons]]
title = {json.dumps(EVIL)}
text = {json.dumps(EVIL)}
better = {json.dumps(EVIL)}
worse = "S-pc"
expect = "more"
on = ["compression"]
"""


def assert_harmless(driver: Any, path: Path) -> str:
    """The text of the page, which must hold no tag from outside."""
    driver.get("about:blank")
    driver.get(path.as_uri())
    driver.execute_script("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    assert driver.execute_script("return [window.injected ?? 0, document.querySelectorAll('img[src=x]').length]") == [0, 0]
    return str(driver.execute_script("return document.body.textContent"))


def evil_runs() -> list[dict[str, Any]]:
    extra = {"error": EVIL, "traceback": EVIL, "metrics": None, "budget": EVIL}
    search = {"phase": "search", "rung": 1.0, "score": 1.0}
    marks = {MARK: digest(PROTOCOL)}
    return [
        *(mad(mixer, "compression", 50, **marks) for mixer in (EVIL, "S-pc")),
        mad(EVIL, "compression", 1, lr=2.0, **marks, **extra),
        mad(EVIL, "compression", 1, lr=1e-3, seed=10_000, **marks, **search),
    ]


def test_a_registered_study_whose_every_name_is_a_script(driver: Any, tmp_path: Path) -> None:
    folder = tmp_path / NAME
    plan = {"study": "mad", "width": 64, EVIL: EVIL, "search": {"rates": [1e-3], "rungs": [1.0], "widen": 0}}
    write(folder / "mad", evil_runs(), plan)
    start = {**START, "command": EVIL, "commit": EVIL, "cpu": EVIL, "gpu": EVIL, "torch": EVIL, "date": EVIL}
    (folder / "mad" / "plan.json").write_text(json.dumps({"plan": plan, "starts": [start]}))
    version = {"digest": digest(PROTOCOL), "text": PROTOCOL, "date": "2026-01-01T00:00:00+00:00", "commit": EVIL}
    versions = [version | {"committed": "2025-01-01T00:00:00+00:00", "records": records} for records in (0, 1)]
    versions[1]["text"] = PROTOCOL.replace("seeds = 1", f"seeds = {json.dumps(EVIL)}")
    (folder / VERSIONS).write_text("".join(json.dumps(one) + "\n" for one in versions))
    text = assert_harmless(driver, write_report(folder))
    assert text.count(EVIL) > 20, "every name is there, as text"


def test_several_studies_and_unknown_tasks(driver: Any, tmp_path: Path) -> None:
    folder = tmp_path / NAME
    for width in (64, 32):  # two of one title, which are told apart by their folders
        runs = [mad(EVIL, "compression", 50), mad("S-pc", "compression", 20)]
        write(folder / f"{NAME}{width}", runs, {"study": "mad", "width": width})
    write(folder / f"{NAME}2", [language(EVIL, 2.0), language("S-pc", 2.5)], {"study": "language"})
    scored = {"accuracy": 0.5, "loss": 1.0, "step": 4, "validation_loss": 1.0}
    sets = {"sets": {EVIL: {**scored, "slices": {EVIL: {EVIL: 0.5, "b": 0.7}}}}}
    fields = {"kind": "tasks", "measure": "accuracy", "baselines": {EVIL: {"accuracy": 0.1, "sets": {EVIL: 0.1}}}}
    own = mad(EVIL, EVIL, 50, setting=EVIL, **fields, metrics={**scored, **sets}, ways={EVIL: {"sets": {EVIL: 0.2}}})
    write(folder / "own", [own], {"study": "tasks", "task": EVIL, "width": 16})
    text = assert_harmless(driver, write_report(folder))
    assert NAME in text
    assert EVIL in text


def test_pieces_escape_what_they_are_given(driver: Any, tmp_path: Path) -> None:
    body = table([EVIL] * 6, [[cell(EVIL, EVIL, small=EVIL, kind=EVIL, head=True)] * 6], left=(EVIL,))
    path = tmp_path / "page.html"
    path.write_text(document(EVIL, EVIL, [(EVIL, body + paragraph(EVIL) + facts({EVIL: EVIL}))] * 2, EVIL), encoding="utf-8")
    assert assert_harmless(driver, path).count(EVIL) > 30


@pytest.mark.parametrize("models", [1, 2])
def test_the_explorer_with_folders_that_are_called_like_scripts(driver: Any, tmp_path: Path, models: int) -> None:
    folders = [tmp_path / f"{NAME}{i}" for i in range(models)]
    for folder in folders:
        save_small(folder, ("hyperglu", "softmax"))
    path = tmp_path / "page.html"
    path.write_text(build_page([open_subject(folder, EVIL) for folder in folders]), encoding="utf-8")
    text = assert_harmless(driver, path)
    assert NAME in text
    for model in (0, 1, "difference")[: 3 if models == 2 else 1]:
        for layer in range(2):
            code = "document.getElementById('numbers').open = true; state.colour = arguments[2];"
            code += "change({model: arguments[0]}); pick(shownModels()[0], arguments[1], 0); drawAll()"
            for colour in ("weight", "surprise"):
                driver.execute_script(code, model, layer, colour)
                found = "return [window.injected ?? 0, document.querySelectorAll('img').length]"
                assert driver.execute_script(found) == [0, 0]
