"""The pages in a headless Chromium: they render alone, fit the window, and respond to mouse and keyboard."""

import base64
import io
import json
import time

import numpy as np
import pytest
from PIL import Image
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By

from browsers import headless, look
from ccfa.reporting.charts import text_width
from ccfa.reporting.comparison import compare_entries, write_comparison
from ccfa.reporting.page import write_report
from comparisons import entry
from synthetic_runs import synthetic_resolved, synthetic_run

HOSTILE = ["<script>document.title='taken over'</script>", "{{ 7 * 7 }}", "x" * 255, "🐟 \"'&", "</title><img src=x>"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with headless(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The page of a run of 50 stages and that of a comparison of 8 methods, both with hostile names."""
    folder = tmp_path_factory.mktemp("pages")
    resolved = synthetic_resolved([*HOSTILE, *(f"class {number}" for number in range(95))])
    page = write_report(synthetic_run(folder / "run", resolved, epochs=10), resolved)
    assert page.stat().st_size < 5_000_000
    methods = [*HOSTILE, *(f"method-{number}" for number in range(3))]
    runs = [
        entry(f"runs/{HOSTILE[0]}/{at}", 0.7 - at / 100, method=name, sizes_mb=(1.0 + at, 0.0, 0.0))
        for at, name in enumerate(methods)
    ]
    return {"run": page, "comparison": write_comparison(compare_entries(runs), folder / "comparison")}


def requests(browser):
    """The addresses fetched since the page was opened, itself included; the browser's own start page is not ours."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [url for url in sent if not url.startswith(("chrome://", "data:"))]


def charts(browser):
    return browser.find_elements(By.CSS_SELECTOR, "svg.chart")


def tip(browser):
    """What the hint says; empty while it is hidden."""
    return browser.execute_script(
        "const tip = document.getElementById('tip'); return tip.hidden ? '' : tip.textContent"
    )


def hover(browser, part):
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", part)  # the middle of all of it
    for attempt in range(50):  # moving there scrolls the page, which hides hints until it is over
        ActionChains(browser).move_to_element_with_offset(part, attempt % 2, 0).perform()
        if tip(browser):
            return tip(browser).splitlines()
        time.sleep(0.1)
    return []


@pytest.mark.parametrize(("width", "theme"), [(400, "dark"), (1600, "light")])
@pytest.mark.parametrize("name", ["run", "comparison"])
def test_page_renders_alone_and_fits(browser, pages, name, width, theme):
    look(browser, pages[name], width, theme)
    assert browser.get_log("browser") == []
    assert requests(browser) == [pages[name].resolve().as_uri()]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.title.startswith(("podnet + CCFA on digits", "Comparison: digits"))
    assert min(chart.size["width"] for chart in charts(browser)) > 300
    screenshot = base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {})["data"])
    image = np.asarray(Image.open(io.BytesIO(screenshot)).convert("L"))
    assert image.shape[1] == width
    paper = np.bincount(image.ravel()).argmax()
    assert paper > 240 if theme == "light" else paper < 40
    assert image.std() > 10


def test_mouse_shows_values(browser, pages):
    look(browser, pages["comparison"])
    last = charts(browser)[0].find_elements(By.CSS_SELECTOR, ".hit")[-1]
    assert hover(browser, last) == ["classes seen 10", f"{HOSTILE[0]}: 60.00"]
    look(browser, pages["run"])
    places = [line.rsplit(" ", 1)[0] for line in hover(browser, charts(browser)[1])[:2]]
    assert places == ["after stage", "classes of stage"]
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    assert tip(browser) == ""


def test_keyboard_walks_through_points(browser, pages):
    look(browser, pages["run"])
    line, cells = charts(browser)[:2]
    line.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert tip(browser).startswith("classes seen 4\n")
    line.send_keys(Keys.ESCAPE)
    assert tip(browser) == ""
    cells.send_keys(Keys.ARROW_DOWN)
    assert tip(browser).splitlines()[:2] == ["after stage 1", "classes of stage 0"]
    cells.send_keys(Keys.HOME, Keys.ARROW_RIGHT)
    assert tip(browser).splitlines()[2] == "no value"


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """A comparison of ten methods with long names, and the page of a run whose classes have names of all lengths."""
    folder = tmp_path_factory.mktemp("crowded")
    options = {"epochs": "6", "weight_of_the_distillation_loss": "0.125"}
    runs = [
        entry(
            f"runs/{at}",
            0.7 - at / 50,
            method=f"method-{at // 2}",
            ccfa=at % 2 == 1,
            options=options if at % 3 else {},
            sizes_mb=(1.9 + 40 * at, 0.0, 0.0),  # ticks from 1 to 1000
        )
        for at in range(20)
    ]
    wide_ticks = [
        entry(f"runs/{at}", 0.62 + at / 100, method=f"method-{at}", sizes_mb=(1.0 + at, 0.0, 0.0)) for at in range(2)
    ]
    names = ["a", "aquarium fish", "W" * 40, *(f"{'i' * number} class {number}" for number in range(13))]
    resolved = synthetic_resolved(names, increment=4)
    return [
        write_comparison(compare_entries(runs), folder / "comparison"),
        write_comparison(compare_entries(wide_ticks), folder / "wide ticks"),
        write_report(synthetic_run(folder / "run", resolved, epochs=10), resolved),
    ]


@pytest.mark.parametrize("width", [400, 1100])
def test_names_of_points_fit_their_places(browser, crowded, width):
    look(browser, crowded[1], width)
    names = browser.execute_script(
        "return [...document.querySelectorAll('text.name')].map((name) => [name.textContent, "
        "name.getComputedTextLength()])"
    )
    assert {name for name, _ in names} == {"method-0", "method-1"}
    assert all(length <= text_width(name) for name, length in names)


def overprinted(browser):
    """Pairs of texts of one chart whose letters meet; the box of a text is a few pixels higher than its letters."""
    return browser.execute_script(
        """return [...document.querySelectorAll('svg.chart')].flatMap((chart) => {
             const texts = [...chart.querySelectorAll('text')];
             return texts.flatMap((one, at) => texts.slice(at + 1).filter((other) => {
               const [a, b] = [one, other].map((text) => text.getBoundingClientRect());
               return Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
                 Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 5;
             }).map((other) => [one.textContent, other.textContent]));
           })"""
    )


@pytest.mark.parametrize("width", [400, 1400])
def test_no_text_leaves_its_picture(browser, crowded, width):
    for page in crowded:
        look(browser, page, width)
        outside = browser.execute_script(
            """return [...document.querySelectorAll('svg.chart')].flatMap((chart) => {
                 const room = chart.getBoundingClientRect();
                 return [...chart.querySelectorAll('text')].filter((text) => {
                   const box = text.getBoundingClientRect();
                   return box.left < room.left - 1 || box.right > room.right + 1 ||
                     box.top < room.top - 1 || box.bottom > room.bottom + 1;
                 }).map((text) => text.textContent);
               })"""
        )
        assert outside == []
        assert not overprinted(browser)
        names = browser.execute_script(
            "return [...document.querySelectorAll('.legend li')].map((li) => li.scrollWidth)"
        )
        assert max(names) <= width


def test_table_shows_that_it_scrolls(browser, crowded):
    look(browser, crowded[0], 400)
    table = browser.find_element(By.CSS_SELECTOR, ".whole > .scroll")
    assert table.get_property("scrollWidth") > table.get_property("clientWidth")

    def edge():
        """The grey values of the last columns of pixels beside the first rows of the table."""
        browser.execute_script("arguments[0].scrollIntoView()", table)
        screenshot = base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {})["data"])
        image = np.asarray(Image.open(io.BytesIO(screenshot)).convert("L"))
        right = round(browser.execute_script("return arguments[0].getBoundingClientRect().right", table))
        return np.median(image[100:400, right - 4 : right], axis=0)

    assert edge().max() < 250, "there is more to the right"
    browser.execute_script("arguments[0].scrollLeft = 10000", table)
    assert edge().min() > 250, "this is the end"


def test_whole_table_fits_the_window(browser, tmp_path):
    runs = [
        entry(f"runs/{seed}{ccfa}", 0.6 + seed / 100, method="podnet", ccfa=ccfa, seed=seed, sizes_mb=(1.9, 0.1, 0.3))
        for seed in range(3)
        for ccfa in (False, True)
    ]
    look(browser, write_comparison(compare_entries(runs), tmp_path / "comparison"), 1100)
    table = browser.find_element(By.CSS_SELECTOR, ".whole > .scroll")
    assert table.get_property("scrollWidth") <= table.get_property("clientWidth")


def test_headings_sort_the_table(browser, pages):
    look(browser, pages["comparison"])
    table = browser.find_element(By.CSS_SELECTOR, ".whole table")

    def averages():
        rows = table.find_elements(By.CSS_SELECTOR, "tbody tr")
        return [row.find_elements(By.CSS_SELECTOR, "td")[1].text for row in rows]

    before = averages()
    table.find_element(By.XPATH, ".//th[.='average']/button").click()
    assert averages() == sorted(before) != before
