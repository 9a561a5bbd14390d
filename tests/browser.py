"""A headless Chromium for the tests of pages; they are skipped, with the reason, where there is none."""

import base64
import json
import shutil

import pytest
from selenium import webdriver
from selenium.common.exceptions import WebDriverException

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def start_browser(profile):
    """A new browser with an empty profile that notes every request and every console message."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    try:
        return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    except WebDriverException as error:
        pytest.skip(f"Chromium does not start here: {error.msg}")


def look(browser, page, width=1600, theme="light"):
    """Open a page from the disk in a window of that width."""
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    )
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get_log("performance"), browser.get_log("browser")
    browser.get(page.resolve().as_uri())


def requests(browser):
    """The addresses fetched since the page was opened, itself included; the browser's own start page is not ours."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [url for url in sent if not url.startswith("chrome://")]


def screenshot(browser):
    """What the window shows, as PNG bytes."""
    return base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {})["data"])


def tip(browser):
    """What the hint says; empty while it is hidden."""
    return browser.execute_script(
        "const tip = document.getElementById('tip'); return tip.hidden ? '' : tip.textContent"
    )
