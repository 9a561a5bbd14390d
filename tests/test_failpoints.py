import errno

import pytest

from ccfa import failpoints
from ccfa.failpoints import failpoint


@pytest.fixture(autouse=True)
def _fresh():
    failpoints.reset()
    yield
    failpoints.reset()


def test_unset_nothing_happens(monkeypatch):
    monkeypatch.delenv("CCFA_FAIL", raising=False)
    assert [failpoint("step") for _ in range(3)] == ["", "", ""]


def test_the_passing_that_was_named_fails_and_no_other(monkeypatch):
    monkeypatch.setenv("CCFA_FAIL", "step:2:raise,write:1:enospc,loss:1:nan,step:3:oom")
    assert failpoint("step") == ""
    with pytest.raises(RuntimeError, match="asked for at step"):
        failpoint("step")
    with pytest.raises(MemoryError):
        failpoint("step")
    with pytest.raises(OSError, match="No space") as error:
        failpoint("write")
    assert error.value.errno == errno.ENOSPC
    assert failpoint("loss") == "nan"
    assert [failpoint(name) for name in ("step", "write", "loss", "other")] == [""] * 4
