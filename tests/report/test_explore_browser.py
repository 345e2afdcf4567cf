"""The explorer in a real browser: choose tokens, layers and heads, and compare the numbers on the page with the layer's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browsed import BROWSED
from explored import MIXERS, TEXT, save_small

from hypermlp.analysis.capture import capture
from hypermlp.analysis.trace import Memory, Trace
from hypermlp.report.explore import build_page, open_subject

pytestmark = BROWSED
TOKENS = [256, *TEXT.encode()]
LAST = len(TOKENS) - 1
STATE = MIXERS.index("gla")


class Page:
    """What a reader does with the page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def script(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def click(self, selector: str) -> None:
        """Once more where the page draws itself anew between finding an element and clicking on it."""
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.common.by import By

        self.script("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        for left in reversed(range(5)):
            try:
                return self.driver.find_element(By.CSS_SELECTOR, selector).click()
            except StaleElementReferenceException:
                if not left:
                    raise

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def text(self, selector: str) -> str:
        return self.script("return document.querySelector(arguments[0]).textContent", selector)

    def choose(self, token: int, layer: int, head: int, model: int = 0) -> None:
        self.click(f"#token-{token}")
        self.click(f'.heads button[data-m="{model}"][data-l="{layer}"][data-h="{head}"]')

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """A column of the table of all numbers, unrounded."""
        self.script("document.getElementById('numbers').open = true; drawAll()")
        values = self.script(
            """const table = document.getElementById("all"), heads = [...table.tHead.rows[0].cells].map((c) => c.textContent);
            return [...table.tBodies[0].rows].map((r) => Number(r.cells[heads.indexOf(arguments[0])].dataset.v));""",
            name,
        )
        return np.array(values)

    def count(self, name: str) -> int:
        return int(self.text(f'[data-n="{name}"]'))

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("explorer")


@pytest.fixture(scope="module")
def traces(folder: Path) -> list[Trace | None]:
    return capture(save_small(folder / "all-kinds"), torch.tensor([TOKENS])).traces()


@pytest.fixture
def page(driver: Any, folder: Path, traces: list[Trace | None]) -> Iterator[Page]:
    path = folder / "page.html"
    if not path.exists():
        path.write_text(build_page([open_subject(folder / "all-kinds", TEXT)]), encoding="utf-8")
    yield from opened(driver, path)


def opened(driver: Any, path: Path) -> Iterator[Page]:
    driver.get("about:blank")
    driver.get(path.as_uri())
    page = Page(driver)
    yield page
    assert page.errors() == []


def assert_shows(page: Page, memory: Memory, *, shares: bool = True) -> None:
    expected = {"z": memory.z, "h": memory.h, "a": memory.a, "w": memory.w}
    if shares:
        expected |= {"slot share": memory.shares, "token share": memory.token_shares}
    for name, values in expected.items():
        np.testing.assert_allclose(page.column(name), values, rtol=2e-4, atol=2e-5, err_msg=name)
    assert page.count("pool-0") == len(memory.z)
    assert page.count("active-0") == int(memory.active.sum())


@pytest.mark.parametrize("layer", [i for i in range(len(MIXERS)) if i != STATE], ids=lambda i: MIXERS[i])
def test_numbers_on_the_page_are_the_layers(page: Page, traces: list[Trace | None], layer: int) -> None:
    trace = traces[layer]
    assert trace is not None
    for token, head in ((LAST, 0), (17, 1), (0, 0)):
        page.choose(token, layer, head)
        assert_shows(page, trace.memory(token, head))


def test_five_slots_that_matter_with_their_tokens(page: Page, traces: list[Trace | None]) -> None:
    trace = traces[0]
    assert trace is not None
    page.choose(20, 0, 1)
    memory = trace.memory(20, 1)
    order = memory.shares.abs().argsort(descending=True)[:5]
    rows = page.script("return [...document.querySelectorAll('#five tbody tr')].map((r) => ({...r.dataset}))")
    assert [int(row["c"]) for row in rows] == memory.place[order].tolist()
    for name, values in (("h", memory.h), ("a", memory.a), ("share", memory.shares)):
        np.testing.assert_allclose([float(row[name]) for row in rows], values[order], rtol=2e-4)
    assert page.count("five-0") == 5


def test_text_is_coloured_by_sign_and_strength(page: Page, traces: list[Trace | None]) -> None:
    trace = traces[0]
    assert trace is not None
    page.choose(LAST, 0, 0)
    memory = trace.memory(LAST, 0)
    spans = page.script(
        "return [...document.getElementById('text').children].map((s) => [s.dataset.value, s.style.backgroundColor])"
    )
    np.testing.assert_allclose([float(value) for value, _ in spans], memory.w, rtol=2e-4, atol=1e-6)
    strongest = [int(memory.w.argmax()), int(memory.w.argmin())]
    adds, takes = (spans[i][1] for i in strongest)
    assert adds.startswith("rgba(37, 99, 235") or adds.startswith("rgb(37")
    assert takes.startswith("rgba(217, 119, 6") or takes.startswith("rgb(217")


def test_keys_choose_token_layer_head_order_and_mixing(page: Page, traces: list[Trace | None]) -> None:
    from selenium.webdriver.common.keys import Keys

    trace = traces[0]
    assert trace is not None
    page.choose(20, 0, 0)
    page.press(Keys.ARROW_LEFT, Keys.ARROW_LEFT, "h", "m", "o")
    assert "(token 18), layer 1, head 2, without mixing" in page.text("#sentence")
    assert_shows(page, trace.memory(18, 1, mixing=False), shares=False)  # on the page they are shares of the true output
    assert page.script("return document.querySelector('[name=order][value=lag]').checked")
    page.press("m", Keys.ARROW_DOWN)
    assert "layer 2, head 2:" in page.text("#sentence")
    page.press(Keys.END)
    assert f"(token {LAST})" in page.text("#sentence")


def test_switched_on_and_off_by_mixing(page: Page, traces: list[Trace | None]) -> None:
    trace = traces[1]
    assert trace is not None
    page.choose(25, 1, 0)
    mixed, plain = trace.memory(25, 0).active, trace.memory(25, 0, mixing=False).active
    on, off = int((mixed & ~plain).sum()), int((plain & ~mixed).sum())
    assert on + off > 0
    assert f"switched {on} slots on and {off} off" in page.text("#switched")


def test_operators_and_kernels_at_the_token(page: Page, traces: list[Trace | None]) -> None:
    """R1 as a whole: its columns, one for each slot, are what the page draws."""
    trace = traces[0]
    assert trace is not None
    page.choose(12, 0, 1)
    memory = trace.memory(12, 1)
    assert memory.scale is not None
    for index, R in enumerate((memory.R1, memory.scale.R1)):
        columns = page.script(f"return [...Array(13).keys()].map((i) => [...columnOf(rowOf(0).R1[{index}], i)])")
        np.testing.assert_allclose(np.array(columns).T, R.dense(), rtol=2e-4, atol=1e-6)
    columns = page.script("return [...Array(13).keys()].map((i) => [...columnOf(rowOf(0).R2, i)])")
    np.testing.assert_allclose(np.array(columns).T, memory.R2.dense(), rtol=2e-4, atol=1e-6)
    assert page.script("return document.querySelectorAll('#maps canvas').length") == 3
    labels = page.script("return [...document.querySelectorAll('canvas')].map((c) => c.getAttribute('aria-label'))")
    assert all(labels), "every picture has a text alternative"


def test_layer_with_a_state_says_so(page: Page) -> None:
    page.script(f"pick(0, {STATE}, 0)")
    assert "condenses its past into a state" in page.text("#sentence")
    page.script("pick(0, 0, 0)")


def test_difference_of_two_models(driver: Any, folder: Path, traces: list[Trace | None]) -> None:
    other = capture(save_small(folder / "other", ("softmax",), seed=3), torch.tensor([TOKENS])).traces()[0]
    path, first = folder / "both.html", traces[0]
    path.write_text(build_page([open_subject(folder / name, TEXT) for name in ("all-kinds", "other")]), encoding="utf-8")
    assert first is not None
    assert other is not None
    for page in opened(driver, path):
        page.choose(LAST, 0, 0)
        page.click("[name=model][value=difference]")
        expected = first.memory(LAST, 0).token_shares - other.memory(LAST, 0).token_shares
        found = page.script("return [...document.getElementById('text').children].map((s) => Number(s.dataset.value))")
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
        assert "all-kinds (layer 1, head 1) against other (layer 1, head 1)" in page.text("#sentence")


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fits_a_phone_and_follows_the_systems_colours(driver: Any, folder: Path, page: Page, width: int, scheme: str) -> None:
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    )
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        assert page.script("return document.documentElement.scrollWidth") <= width
        paper = page.script("return getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(253, 252, 250)") is (scheme == "light")
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_1024_tokens_make_no_large_table(driver: Any, folder: Path) -> None:
    """A step through a long text computes rows alone, whatever the text's length: no array of the page is T × T."""
    save_small(folder / "long", ("hyperglu", "hyperglu"), length=1024)
    path = folder / "long.html"
    path.write_text(build_page([open_subject(folder / "long", ("def f(x):\n    return x\n" * 45)[:1023])]), encoding="utf-8")
    for page in opened(driver, path):
        page.press("h")
        arrays = "data.models[0].layers.flatMap((layer) => Object.values(arraysOf(layer)))"
        largest = page.script(f"return Math.max(...{arrays}.map((a) => a.values.length))")
        T = page.script("return T")
        assert T == 1024
        assert largest < 100 * T
        assert page.count("pool-0") == T
