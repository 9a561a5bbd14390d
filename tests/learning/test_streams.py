"""Who has which lane; that no two share a stream is tested on a GPU, in tests/experiments/test_sweep.py."""

import threading

import pytest
import torch

from ccfa.learning import streams
from ccfa.learning.streams import lane_here

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def no_gpu_needed(monkeypatch):
    monkeypatch.setattr(streams, "_unshared_stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(streams, "_HERE", threading.local())


def test_a_thread_has_one_lane_for_each_device():
    assert lane_here(CUDA) is lane_here(torch.device("cuda:0"))
    assert lane_here(CUDA) is not lane_here(torch.device("cuda:1"))


def test_threads_have_lanes_of_their_own():
    lanes = [lane_here(CUDA)]
    thread = threading.Thread(target=lambda: lanes.append(lane_here(CUDA)))
    thread.start()
    thread.join()
    assert lanes[0] is not lanes[1]


def test_a_branch_keeps_its_stream():
    lane = lane_here(CUDA)
    assert lane.branch("previous") is lane.branch("previous")
    assert len({lane.main, lane.branch("previous"), lane.branch("samples")}) == 3
