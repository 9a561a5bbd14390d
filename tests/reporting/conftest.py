import pytest

from browser import start_browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser with an empty profile; the test is skipped where there is none."""
    started = start_browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.quit()
