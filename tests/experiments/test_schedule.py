"""Runs that share a GPU: each captures its steps while others evaluate, and none gets in another's way."""

import time

import pytest
import torch

from ccfa.data import split
from ccfa.experiments.environment import environment
from ccfa.experiments.run_directory import Run
from ccfa.experiments.schedule import Job, run_all
from ccfa.kernels.graphs import Lane, own_stream
from ccfa.learning.acceleration import Acceleration
from toy_runs import Silent, toy_resolved
from toys import toy_images

AT_ONCE = 8
SECONDS = 60
CUDA = torch.device("cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def jobs(folder, speed):
    """Eight runs of eleven stages, each with test sets, and so with last batches, of a size of its own."""
    for number in range(AT_ONCE):
        resolved = toy_resolved("podnet", seed=number)._replace(
            train=toy_images(12, 40 + number),
            test=toy_images(12, 43 + number, seed=1),
            stages=split(12, 2, 1),
            order=tuple(range(12)),
        )
        yield Job(resolved, Run(folder / str(number)), Silent(), environment(CUDA, speed))


@pytest.mark.gpu
@pytest.mark.slow
@needs_gpu
def test_eight_runs_capture_and_evaluate_against_each_other(tmp_path):
    speed = Acceleration("bf16", compile=False, graph=True)
    began, outcomes = time.monotonic(), []
    while time.monotonic() - began < SECONDS:
        outcomes += run_all(list(jobs(tmp_path / str(len(outcomes)), speed)), CUDA, speed, AT_ONCE)
    assert [str(outcome.error) for outcome in outcomes if outcome.error] == []
    assert all(outcome.report.finished for outcome in outcomes)


@pytest.mark.gpu
@needs_gpu
def test_packed_runs_learn_what_they_learn_alone(tmp_path):
    speed = Acceleration("float32", compile=False, graph=True)
    packed = run_all(list(jobs(tmp_path / "packed", speed)), CUDA, speed, AT_ONCE)
    alone = run_all(list(jobs(tmp_path / "alone", speed)), CUDA, speed, 1)
    for one, other in zip(packed, alone, strict=True):
        assert one.report.overall == pytest.approx(other.report.overall, abs=0.05)


@pytest.mark.gpu
@needs_gpu
def test_no_two_lanes_share_a_stream():
    lanes = [Lane(CUDA) for _ in range(40)]
    handles = [stream.cuda_stream for lane in lanes for stream in (lane.main, lane.branch("a"), lane.branch("b"))]
    assert len(set(handles)) == len(handles)


@pytest.mark.gpu
@needs_gpu
def test_a_lane_is_lent_to_the_next_run():
    with own_stream(CUDA):
        first = torch.cuda.current_stream().cuda_stream
    with own_stream(CUDA):
        assert torch.cuda.current_stream().cuda_stream == first
