"""A headless Chromium, and how to open a page in it."""

import shutil
from contextlib import contextmanager

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


@contextmanager
def headless(profile):
    """A browser that notes every request and every console message; tests are skipped where there is none."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    try:
        started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    except WebDriverException as error:
        pytest.skip(f"Chromium does not start here: {error.msg}")
    try:
        yield started
    finally:
        started.quit()


def look(browser, page, width=1600, theme="light"):
    """Open a page from the disk in a window of that width."""
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    )
    resize(browser, width)
    browser.get_log("performance"), browser.get_log("browser")
    browser.get(page.resolve().as_uri())


def resize(browser, width):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
