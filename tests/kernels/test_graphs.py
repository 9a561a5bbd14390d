"""Lanes and branches with streams that only write down what happens; tests/experiments/test_schedule.py uses a GPU."""

import threading
from contextlib import nullcontext

import pytest
import torch

from ccfa.kernels import graphs
from ccfa.kernels.graphs import aside, lane_here, own_stream

CUDA = torch.device("cuda")


@pytest.fixture
def log(monkeypatch):
    """No GPU: what streams are told to do, in order."""
    happened = []

    class Stream:
        def __init__(self, name):
            self.wait_stream = lambda other: happened.append((name, "waits for stream", other.name))
            self.synchronize = lambda: happened.append((name, "is waited for"))
            self.name = name

    class Event:
        def record(self, stream):
            happened.append((stream.name, "records"))

        def wait(self):
            happened.append("the current stream waits")

    monkeypatch.setattr(graphs, "_unshared_stream", lambda device, priority: Stream("own"))
    monkeypatch.setattr(graphs, "_HERE", graphs._Here())
    monkeypatch.setattr(graphs, "_IDLE", {0: [], 1: []})
    monkeypatch.setattr(graphs, "_LOADED", [])
    monkeypatch.setattr(torch, "ones", lambda *shape, device: None)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda matrix: happened.append("linear algebra is loaded"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return happened


def test_a_lane_belongs_to_one_thread_and_device(log):
    lanes = [lane_here(CUDA), lane_here(torch.device("cuda:1"))]
    thread = threading.Thread(target=lambda: lanes.append(lane_here(CUDA)))
    thread.start()
    thread.join()
    assert len(set(lanes)) == 3
    assert lane_here(torch.device("cuda:0")) is lanes[0]
    assert len({lanes[0].main, lanes[0].branch("a"), lanes[0].branch("a"), lanes[0].branch("b")}) == 3


def test_lanes_are_lent_to_later_runs_unless_one_failed(log):
    with own_stream(CUDA):
        first = lane_here(CUDA)
    assert log[1:] == [("own", "is waited for")]
    with pytest.raises(ZeroDivisionError), own_stream(CUDA):
        raise ZeroDivisionError
    with own_stream(CUDA):
        assert lane_here(CUDA) is not first  # it may still be at work


def test_linear_algebra_is_loaded_once_before_any_run_begins(log):
    for _ in range(2):
        with own_stream(CUDA):
            log.append("a run")
    assert log == ["linear algebra is loaded", *["a run", ("own", "is waited for")] * 2]


def test_a_branch_forks_at_once_and_joins_when_it_is_read(log):
    value = aside("branch", CUDA, lambda: log.append("computes") or 7)
    assert log == [("own", "waits for stream", "main"), "computes", ("own", "records")]
    assert value() == 7
    assert log[3:] == ["the current stream waits"]
