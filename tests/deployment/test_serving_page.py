"""The server's page in a headless Chromium: a photo is chosen or dropped, its classes are seen, and it is corrected."""

import json
import time

import pytest
from selenium.webdriver import Keys
from selenium.webdriver.common.by import By

from browsers import headless
from ccfa.deployment.serving import Limits
from served import ColourModel, ask, picture, serving

HOSTILE = ["<script>document.title='taken over'</script>", "🐟 \"'&", "x" * 150]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with headless(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def port(tmp_path):
    with serving(ColourModel(*HOSTILE), corrections=tmp_path / "fixed", limits=Limits(body_bytes=100_000)) as port:
        yield port


def look(browser, port, width=1400, theme="light"):
    """Open the page in a window of that width."""
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    )
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get_log("browser")
    browser.get(f"http://127.0.0.1:{port}/")


def part(browser, name):
    return browser.find_element(By.ID, name)


def shown(browser, name):
    """The text of a part, as soon as it has one other than that of waiting."""
    for _ in range(600):
        text = part(browser, name).text
        if text and "moment" not in text:
            return text
        time.sleep(0.1)
    raise AssertionError(f"{name} stays empty")


def choose(browser, place, content, name="photo.png"):
    (place / name).write_bytes(content)
    part(browser, "photo").send_keys(str(place / name))


def drop(browser, path):
    """Drag a file over the page and drop it, as the window system would tell the browser."""
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        browser.execute_cdp_cmd("Input.dispatchDragEvent", {"type": kind, "x": 300, "y": 300, "data": data})


@pytest.mark.parametrize(("width", "theme"), [(400, "dark"), (1400, "light")])
def test_chosen_photo_gets_five_classes(browser, port, tmp_path, width, theme):
    look(browser, port, width, theme)
    assert not part(browser, "answer").is_displayed()
    choose(browser, tmp_path, picture("blue", "JPEG"))
    assert shown(browser, "best") == "blue"
    rows = [row.text.splitlines() for row in part(browser, "classes").find_elements(By.TAG_NAME, "li")]
    assert [name for name, _ in rows] == ["blue", "red", "green", *HOSTILE[:2]]
    assert [share for _, share in rows] == ["60.0 %", "20.0 %", "10.0 %", "6.0 %", "4.0 %"]
    bars = [bar.size["width"] for bar in browser.find_elements(By.CSS_SELECTOR, ".bar i")]
    assert bars == sorted(bars, reverse=True)
    assert browser.execute_script("return document.getElementById('preview').naturalWidth") == 40
    assert not part(browser, "unfamiliar").is_displayed()
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.title == "Classify a photo"
    assert browser.get_log("browser") == []


def test_dropped_photo_is_corrected(browser, port, tmp_path):
    look(browser, port)
    (tmp_path / "dark.png").write_bytes(picture((10, 20, 10)))
    drop(browser, tmp_path / "dark.png")
    assert shown(browser, "best") == "green"
    assert part(browser, "unfamiliar").is_displayed()
    part(browser, "name").send_keys("../x", Keys.ENTER)
    assert "letters" in shown(browser, "told")
    part(browser, "name").clear()
    part(browser, "name").send_keys("Moss green", Keys.ENTER)
    for _ in range(600):
        if "Moss green" in part(browser, "told").text:
            break
        time.sleep(0.1)
    assert json.loads(ask(port, path="/corrections").content) == {"corrections": {"Moss green": 1}}
    (stored,) = tmp_path.glob("fixed/Moss green/*.png")
    assert stored.read_bytes() == picture((10, 20, 10))


def test_known_classes_can_be_chosen(browser, port):
    look(browser, port)
    options = browser.find_elements(By.CSS_SELECTOR, "#known option")
    assert [option.get_attribute("value") for option in options] == ["red", "green", "blue", *HOSTILE]


def test_unusable_files_are_told(browser, port, tmp_path):
    look(browser, port)
    choose(browser, tmp_path, b"no image", "photo.jpg")
    assert "not an image" in shown(browser, "status")
    assert part(browser, "invitation").is_displayed()
    choose(browser, tmp_path, picture(form="BMP", size=(300, 300)), "large.bmp")
    assert "too large" in shown(browser, "status")
    assert not part(browser, "correction").is_displayed()
    choose(browser, tmp_path, picture("red"))
    assert shown(browser, "best") == "red"


def test_parts_have_names_for_screen_readers(browser, port, tmp_path):
    look(browser, port)
    choose(browser, tmp_path, picture("red"))
    shown(browser, "best")
    assert "Choose another photo" in part(browser, "photo").accessible_name
    assert "right class" in part(browser, "name").accessible_name
    assert part(browser, "result").get_attribute("aria-live") == "polite"
    browser.execute_script("document.getElementById('photo').focus()")
    assert browser.switch_to.active_element == part(browser, "photo")


def test_server_that_ended_is_told(browser, tmp_path):
    with serving() as port:
        look(browser, port)
        assert browser.find_elements(By.ID, "correction") == []
    choose(browser, tmp_path, picture("red"))
    assert "does not answer" in shown(browser, "status")
