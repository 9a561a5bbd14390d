import io
import time

import numpy as np
import pytest
from PIL import Image
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By

from browser import look, requests, screenshot, tip
from ccfa.reporting.comparison import compare
from ccfa.reporting.comparison_page import write_comparison
from comparisons import entry, podnets

HOSTILE = "<script>document.title='taken over'</script>"
METHODS = [HOSTILE, "x" * 200, *(f"method-{number}" for number in range(5))]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A comparison of few methods, and one of many with awkward names."""
    folder = tmp_path_factory.mktemp("pages")
    many = [entry(f"runs/{HOSTILE}/{at}", 0.5 + at / 100, method=name) for at, name in enumerate(METHODS)]
    runs = {"few": [*podnets(), entry("runs/u", method="ucir")], "many": many}
    return {name: write_comparison(compare(found), folder / name) for name, found in runs.items()}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize(("name", "num_charts"), [("few", 7), ("many", 12)])
def test_page_renders_without_errors_requests_or_sideways_scrolling(browser, pages, name, num_charts, width, theme):
    look(browser, pages[name], width, theme)
    assert browser.get_log("browser") == []
    assert [url for url in requests(browser) if not url.startswith("data:")] == [pages[name].resolve().as_uri()]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.title == "Comparison: digits · B4-inc3"
    charts = browser.find_elements(By.CSS_SELECTOR, "svg.chart")
    assert len(charts) == num_charts
    assert min(chart.size["width"] for chart in charts) > 300
    image = np.asarray(Image.open(io.BytesIO(screenshot(browser))).convert("L"))
    assert image.shape[1] == width
    paper = np.bincount(image.ravel()).argmax()
    assert paper > 240 if theme == "light" else paper < 40


def test_mouse_shows_every_method_s_value_at_a_stage(browser, pages):
    look(browser, pages["few"])
    chart = browser.find_elements(By.CSS_SELECTOR, "svg.chart")[0]
    point = chart.find_elements(By.CSS_SELECTOR, ".hit")[-1]
    for attempt in range(50):  # coming here scrolls, which hides hints until it is over
        ActionChains(browser).move_to_element_with_offset(point, attempt % 2, 0).perform()
        if tip(browser):
            break
        time.sleep(0.1)
    lines = compare([*podnets(), entry("runs/u", method="ucir")]).lines
    shown = [f"{line.name}: {line.curve[-1].mean:.2f}" for line in lines]
    assert tip(browser).splitlines() == ["classes seen 10", *shown]


def test_headings_sort_the_table(browser, pages):
    look(browser, pages["few"])
    table = browser.find_element(By.CSS_SELECTOR, ".whole table")

    def averages():
        rows = table.find_elements(By.CSS_SELECTOR, "tbody tr")
        return [row.find_elements(By.CSS_SELECTOR, "td")[1].text for row in rows]

    before = averages()
    table.find_element(By.XPATH, ".//th[.='average']/button").click()
    assert averages() == sorted(before) != before
