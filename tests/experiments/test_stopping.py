import os
import signal
import threading

import pytest

from ccfa.experiments.running import Stop, stoppable

CODES = {
    signal.SIGINT: 130,
    signal.SIGTERM: 143,
    signal.SIGHUP: 129,
    signal.SIGUSR1: 138,
    signal.SIGUSR2: 140,
}


@pytest.mark.parametrize(("number", "code"), CODES.items())
def test_a_signal_sets_a_flag_and_nothing_else(number, code):
    before = [signal.getsignal(one) for one in CODES]
    with stoppable() as stop:
        assert stop.asked() is None
        os.kill(os.getpid(), number)
        assert stop.asked() == code
    assert [signal.getsignal(one) for one in CODES] == before


def test_a_second_ctrl_c_aborts():
    with stoppable() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked() == 143


def test_handlers_are_as_before_after_an_error():
    before = [signal.getsignal(one) for one in CODES]
    with pytest.raises(ValueError, match="a bug"), stoppable():
        raise ValueError("a bug")
    assert [signal.getsignal(one) for one in CODES] == before


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with stoppable() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.asked() is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_another_thread_only_the_time_limit_counts():
    found = []

    def work():
        with stoppable(max_minutes=0) as stop:
            found.append(stop.asked())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [75]


def test_the_time_limit():
    assert Stop(max_minutes=0).asked() == 75
    assert Stop(max_minutes=1000).asked() is None
    assert Stop().asked() is None
