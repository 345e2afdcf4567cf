"""Photographs docs/explorer.png and docs/answers.png: the demo's copying models.

hypermlp demo && python docs/make_screens.py     (needs Chromium, its driver and selenium)
"""

import base64
import shutil
from pathlib import Path
from typing import Any

from markupsafe import Markup
from selenium import webdriver

from hypermlp.report.explore import show_explore
from hypermlp.report.markup import charts, document
from hypermlp.report.readings import figure
from hypermlp.report.terminal import new_console
from hypermlp.studies.demo import READERS, reading
from hypermlp.studies.task_models import find_task_models, open_task_model

HERE, RUNS, TASK = Path(__file__).parent, Path("runs/demo"), "selective-copying"
ANSWER = 45  # the sixth


def main() -> None:
    folders = find_task_models(RUNS, TASK, READERS)
    page = show_explore(new_console(), None, folders[:1], RUNS / "copying.html")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        photograph(driver, page, HERE / "explorer.png", 1280, 960, f"pick(0, 1, 0); change({{token: {ANSWER}}})")
        answers = RUNS / "answers.html"
        answers.write_text(document("", "", [("", pictures(folders))]), encoding="utf-8")
        photograph(driver, answers, HERE / "answers.png", 850, 440, "document.querySelector('figure').scrollIntoView()")
    finally:
        driver.quit()


def pictures(folders: list[Path]) -> Markup:
    found = [open_task_model(folder) for folder in folders]
    figures = [figure(own.mixer, reading(own.model, own.setting, own.inputs[0], own.targets[0])) for own in found]
    style = "<style>main > :not(section), h2 { display: none } main { padding: 8px }</style>"
    return Markup(style) + charts(figures, wide=True)


def photograph(driver: Any, page: Path, out: Path, width: int, height: int, script: str) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(page.resolve().as_uri())
    driver.execute_script(script)
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "optimizeForSpeed": False})
    out.write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    main()
