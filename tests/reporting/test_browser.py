import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By

from browser import look, requests, screenshot, tip
from ccfa.cli import main
from ccfa.reporting.page import write_report
from synthetic_runs import synthetic_resolved, synthetic_run

HOSTILE = ["<script>document.title='taken over'</script>", "{{ 7 * 7 }}", "x" * 255, "🐟 \"'&", "</title><img src=x>"]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """50 stages, 100 classes, pictures of 32 x 32 noise, which compress worst."""
    path = tmp_path_factory.mktemp("runs") / "large"
    resolved = synthetic_resolved([*HOSTILE, *(f"class {number}" for number in range(95))])
    synthetic_run(path, resolved, epochs=40)
    page = write_report(path, resolved)
    assert page.stat().st_size < 5_000_000
    return page


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A real run on digits, by the command line."""
    path = tmp_path_factory.mktemp("runs") / "small"
    with pytest.MonkeyPatch.context() as patch:
        options = ["--scenario", "4,3,3", "--set", "epochs=1", "balanced_epochs=1", "--device", "cpu"]
        patch.setattr("sys.argv", ["ccfa", "run", "podnet", "--out", str(path), *options])
        main()
    return path / "report.html"


@pytest.fixture(params=["small", "large"])
def page(request) -> Path:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_page_renders_alone_and_fits(browser, page, width, theme):
    look(browser, page, width, theme)
    assert browser.get_log("browser") == []
    assert [url for url in requests(browser) if not url.startswith("data:")] == [page.resolve().as_uri()]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.title.startswith("podnet")
    widths = [chart.size["width"] for chart in browser.find_elements(By.CSS_SELECTOR, "svg.chart")]
    assert min(widths) > 300
    image = np.asarray(Image.open(io.BytesIO(screenshot(browser))).convert("L"))
    assert image.shape[1] == width
    paper = np.bincount(image.ravel()).argmax()
    assert paper > 240 if theme == "light" else paper < 40
    assert image.std() > 10


def test_mouse_shows_values(browser, small):
    look(browser, small)
    line, cells = browser.find_elements(By.CSS_SELECTOR, "svg.chart")[:2]
    table = browser.find_elements(By.CSS_SELECTOR, "details.data")[0]
    last = [
        cell.get_attribute("textContent") for cell in table.find_elements(By.CSS_SELECTOR, "tbody tr:last-child > *")
    ]
    point = line.find_elements(By.CSS_SELECTOR, ".hit")[-1]
    ActionChains(browser).move_to_element(point).perform()
    assert tip(browser).splitlines()[:2] == ["classes seen 10", f"by logits, the method's rule: {last[1]} %"]
    side = float(cells.get_attribute("data-side")) * cells.size["width"] / 480
    ActionChains(browser).move_to_element_with_offset(
        cells, round(44 / 480 * cells.size["width"] + side / 2 - cells.size["width"] / 2), 0
    ).perform()
    assert tip(browser).splitlines()[:2] == ["after stage 1", "classes of stage 0"]
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    assert tip(browser) == ""


def test_keyboard_walks_through_points(browser, small):
    look(browser, small)
    line, cells = browser.find_elements(By.CSS_SELECTOR, "svg.chart")[:2]
    line.send_keys(Keys.ARROW_RIGHT)
    assert tip(browser).startswith("classes seen 4\n")
    line.send_keys(Keys.ARROW_RIGHT)
    assert tip(browser).startswith("classes seen 7\n")
    line.send_keys(Keys.ESCAPE)
    assert tip(browser) == ""
    cells.send_keys(Keys.ARROW_DOWN)
    assert tip(browser).splitlines()[:2] == ["after stage 1", "classes of stage 0"]
    cells.send_keys(Keys.HOME, Keys.ARROW_RIGHT)
    assert tip(browser).splitlines()[2] == "no value"


def test_page_needs_no_script(browser, small):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        look(browser, small)
        assert browser.find_element(By.CSS_SELECTOR, ".verdict dd").text.endswith("%")
        assert browser.find_elements(By.CSS_SELECTOR, "svg.chart .hit title")
        printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert printed.startswith(b"%PDF")
    assert 2 <= printed.count(b"/Type /Page\n") <= 12
