"""The site opened from a disk: its search needs a worker, which a browser does not start there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from browsed import BROWSED

pytestmark = BROWSED
SHIM = Path(__file__).parents[2] / "docs" / "iframe-worker.js"


def test_a_worker_runs_answers_and_loads_other_scripts(driver: Any, tmp_path: Path) -> None:
    shutil.copy(SHIM, tmp_path / "shim.js")
    (tmp_path / "worker.js").write_text(
        "addEventListener('message', async (event) => {"
        "  if (event.data.load) await importScripts(event.data.load);"
        "  postMessage(typeof triple === 'undefined' ? 'not loaded' : triple(event.data.number));"
        "})"
    )
    (tmp_path / "triple.js").write_text("function triple(number) { return 3 * number }")
    (tmp_path / "index.html").write_text(
        "<script src=shim.js></script><script>"
        "const answers = [], worker = new Worker('worker.js');"
        "worker.addEventListener('message', (event) => answers.push(event.data));"
        "worker.postMessage({ number: 1 });"
        f"worker.postMessage({{ number: 14, load: '{(tmp_path / 'triple.js').as_uri()}' }})"
        "</script>"
    )
    driver.get((tmp_path / "index.html").as_uri())
    found = driver.execute_async_script(
        "const done = arguments[0], begun = Date.now();"
        "(function look() { answers.length > 1 || Date.now() - begun > 5000 ? done(answers) : setTimeout(look, 20) })()"
    )
    assert found == ["not loaded", 42]
    assert driver.execute_script("return typeof triple") == "undefined", "what a worker loads stays in its frame"
