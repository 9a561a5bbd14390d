"""A captured step is the step itself: the same losses, from the same start, with the same random numbers."""

from contextlib import nullcontext

import pytest
import torch

from ccfa.errors import UsageError
from ccfa.learning import Learner
from ccfa.learning.acceleration import Acceleration, suit_threads
from ccfa.learning.loop import prepare_phase
from toys import STAGES, Recorder, begun, plugged, tiny, toy_images

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NUM_STEPS = 20


def losses_of_second_stage(method, acceleration):
    """Every step's losses, after a first stage without a graph: both start from the same weights."""
    recorder = Recorder()
    learner = Learner(method, toy_images(), device=CUDA, observer=recorder, acceleration=Acceleration())
    learner.learn(STAGES[0])
    recorder.batches.clear()
    learner.acceleration = acceleration
    learner.learn(STAGES[1])
    return [losses for progress, losses in recorder.batches if progress.phase == "main"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("augmentation", ["nothing", "ccfa"])
def test_a_graph_makes_the_same_steps(augmentation):
    method = plugged(tiny("podnet", epochs=NUM_STEPS), augmentation)
    eager = losses_of_second_stage(method, Acceleration())[:NUM_STEPS]
    graph = losses_of_second_stage(method, Acceleration(graph=True))[:NUM_STEPS]
    assert len(eager) == len(graph) == NUM_STEPS
    assert len({losses["loss"] for losses in graph}) == NUM_STEPS  # replays read new batches and new random numbers
    for one, other in zip(eager, graph, strict=True):
        assert other == pytest.approx(one, abs=1e-3, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_capturing_leaves_the_network_as_it_was():
    learner = begun(tiny("podnet"), STAGES[1], device=CUDA, acceleration=Acceleration(graph=True))
    before = {name: tensor.clone() for name, tensor in learner.network.state_dict().items()}
    prepare_phase(learner, learner.method.phases(STAGES[1])[0], 0)
    after = learner.network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


class NoAcceleration:
    """The step written out: nothing fused, nothing aside, nothing captured."""

    def __init__(self):
        self.fused = lambda function: function
        self.aside = lambda name, device: nullcontext(lambda: None)
        self.prepare = lambda step, *others: step
        self.features = lambda backbone, images, mixing=None: backbone(images, mixing)
        self.place = lambda network, device: network


@pytest.mark.parametrize("augmentation", ["nothing", "ccfa"])
@pytest.mark.parametrize("name", ["podnet", "icarl", "afc"])
def test_on_a_cpu_the_accelerated_step_is_the_written_out_one_bit_for_bit(name, augmentation):
    def trace(acceleration):
        recorder = Recorder()
        method = plugged(tiny(name), augmentation)
        learner = Learner(method, toy_images(), observer=recorder, acceleration=acceleration)
        for stage in STAGES[:2]:
            learner.learn(stage)
        return [losses for _, losses in recorder.batches]

    assert trace(Acceleration.for_device(CPU)) == trace(Acceleration(graph=True)) == trace(NoAcceleration())


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_other_precisions_need_a_gpu(precision):
    with pytest.raises(UsageError, match=f"--precision {precision} needs a GPU"):
        Acceleration.for_device(CPU, precision)


@pytest.mark.parametrize("precision", [None, "float32"])
def test_on_a_cpu_nothing_is_accelerated(precision):
    assert Acceleration.for_device(CPU, precision, compile=True, graph=True) == Acceleration("float32", False, False)


def test_on_a_gpu_everything_is_unless_it_is_asked_for_otherwise():
    assert Acceleration.for_device(CUDA) == Acceleration("bf16", compile=True, graph=True)
    assert Acceleration.for_device(CUDA, "tf32", False, False) == Acceleration("tf32", compile=False, graph=False)


def prepared(acceleration, rate):
    """A step that does nothing, and what becomes of it."""

    def step(batch):
        return {"loss": batch.sum()}

    network = torch.nn.Linear(2, 2)
    optimiser = torch.optim.SGD(network.parameters(), rate)
    return step, acceleration.prepare(step, torch.arange(3), network, optimiser, torch.Generator())


def test_without_a_graph_a_step_is_run_as_it_is():
    step, fast_step = prepared(Acceleration(), torch.tensor(0.1))
    assert fast_step is step


def test_a_rate_that_a_graph_would_freeze_is_not_captured():
    step, fast_step = prepared(Acceleration(graph=True), 0.1)
    assert fast_step is step


def test_functions_are_fused_only_where_compilation_is_on():
    assert Acceleration().fused(torch.sum) is torch.sum


@pytest.mark.parametrize(("num_pixels", "num_threads"), [(64, 1), (16 * 16, 1), (16 * 16 + 1, 2), (3 * 32 * 32, 2)])
def test_tiny_images_are_handled_by_one_thread(num_pixels, num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        suit_threads(num_pixels)
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
