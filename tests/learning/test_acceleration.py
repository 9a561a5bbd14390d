"""Devices are chosen as they are named, and an accelerated step is the plain step."""

import copy
import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from ccfa.augmentation import CCFA
from ccfa.data import ImageSet, split
from ccfa.errors import ResourceError, UsageError
from ccfa.kernels.graphs import Aside, Lane, own_stream
from ccfa.learning import Learner
from ccfa.learning import acceleration as speed
from ccfa.learning.acceleration import (
    TINY,
    Acceleration,
    LossReader,
    memory_errors_explained,
    pick_device,
    suit_threads,
    threads_for,
)
from ccfa.learning.late import late_part
from ccfa.learning.loop import descend, prepare_phase
from ccfa.learning.step import Parts
from ccfa.methods import METHODS, with_augmentation
from ccfa.models import ChainBackbone
from toys import STAGES, Recorder, begun, plugged, tiny, toy_images, with_any

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NUM_STEPS = 20


@pytest.mark.parametrize("available", [True, False])
def test_auto_is_a_gpu_if_there_is_one(monkeypatch, available):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert pick_device("auto").type == ("cuda" if available else "cpu")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:", "cuda:-1", "cuda:x", "mps", "meta"])
def test_unknown_devices_are_refused(name):
    with pytest.raises(UsageError, match="Known: auto, cpu, cuda"):
        pick_device(name)


@pytest.mark.parametrize(("name", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:9", 2)])
def test_missing_gpus_are_resource_errors(monkeypatch, name, count):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ResourceError, match=f"{name}.* {count} CUDA devices.*--device cpu"):
        pick_device(name)


@pytest.mark.parametrize(("name", "count"), [("cuda", 1), ("cuda:1", 2)])
def test_numbered_gpus_become_current(monkeypatch, name, count):
    current = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert pick_device(name) == torch.device(name)
    assert current == ([torch.device(name)] if ":" in name else [])


def test_a_learner_on_a_cpu_leaves_the_rounding_of_gpus_alone(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    Learner(tiny("finetune"), toy_images(), device=CPU)
    assert torch.backends.cudnn.allow_tf32


def test_the_backbones_of_a_whole_sweep_are_compiled(monkeypatch):
    """torch compiles eight variants of a function by default, and runs further ones as they are."""
    speed._compiled.cache_clear()
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: compiled(function, dynamic=False, backend="eager"))
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    with torch._dynamo.config.patch(recompile_limit=8):
        for width in range(1, 11):
            backbone = ChainBackbone([nn.Conv2d(3, width, 1)], width)
            Acceleration(compile=True).features(backbone, torch.zeros(2, 3, 4, 4))
    speed._compiled.cache_clear()
    assert graphs["unique_graphs"] - before == 10


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError("full")])
@pytest.mark.parametrize(("batch_size", "smaller"), [(128, 64), (1, 1)])
def test_out_of_memory_suggests_a_smaller_batch(error, batch_size, smaller):
    with pytest.raises(ResourceError, match=rf"batch_size={smaller} ") as caught, memory_errors_explained(batch_size):
        raise error
    assert caught.value.__cause__ is error


def test_other_errors_pass_unchanged():
    with pytest.raises(ZeroDivisionError), memory_errors_explained(4):
        raise ZeroDivisionError


@pytest.mark.parametrize(("num_pixels", "num_threads"), [(16 * 16, 1), (16 * 16 + 1, 2)])
def test_tiny_images_use_one_thread(monkeypatch, num_pixels, num_threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        suit_threads(num_pixels)
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)


def test_larger_images_get_their_threads_back(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for num_values, num_threads in ((TINY, 1), (TINY + 1, 2), (TINY, 1)):
            assert threads_for(num_values) == num_threads
            suit_threads(num_values)
            assert torch.get_num_threads() == num_threads
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert threads_for(TINY) == threads_for(TINY + 1)
    finally:
        suit_threads(TINY + 1)
        torch.set_num_threads(before)


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=pytest.mark.gpu)])
def test_a_loss_arrives_as_it_was_when_asked_for(device):
    reader, loss = LossReader(), torch.tensor(1.5, device=device)
    assert reader.answer() is None
    for value in (1.5, 2.5):
        loss.fill_(value)
        reader.ask(loss)
        while (found := reader.answer()) is None:
            pass
        assert found == value


def test_defaults_suit_the_device():
    assert Acceleration.for_device(CUDA) == Acceleration("bf16", compile=True, graph=True)
    assert Acceleration.for_device(CUDA, "tf32", False, False) == Acceleration("tf32", compile=False, graph=False)
    assert Acceleration.for_device(CPU, "float32") == Acceleration.for_device(CPU) == Acceleration("float32")
    for precision in ("bf16", "tf32"):
        with pytest.raises(UsageError, match=precision):
            Acceleration.for_device(CPU, precision)


@pytest.mark.parametrize(("graph", "rate"), [(False, torch.tensor(0.1)), (True, 0.1)])
def test_uncaptured_steps_stay_as_they_are(graph, rate):
    """A graph would freeze a rate that is not a tensor; on a CPU there is no graph at all."""

    def step(batch):
        return {"loss": batch.sum()}

    network = torch.nn.Linear(2, 2)
    optimiser = torch.optim.SGD(network.parameters(), rate)
    assert Acceleration(graph=graph).prepare(step, (torch.arange(3),), network, optimiser, torch.Generator()) is step


class NoAcceleration:
    """The step written out: nothing fused, nothing aside, nothing captured."""

    compile = graph = False

    def __init__(self):
        self.fused = lambda function: function
        self.has_branches = lambda device: False
        self.aside = lambda name, device, compute: Aside(compute())
        self.prepare = lambda step, *others: step
        self.features = lambda backbone, images, mixing=None: backbone(images, mixing)
        self.place = lambda network, device: network


def second_stages(method, accelerations, device=CPU):
    """The losses of each main step with each acceleration, after one first stage without any.

    They start from the very same weights: a first stage at a high rate, such as iCaRL's, magnifies what two runs on a
    GPU round differently.
    """
    first = Learner(method, toy_images(), device=device, acceleration=Acceleration())
    first.learn(STAGES[0])
    for acceleration in accelerations:
        learner = copy.deepcopy(first)
        recorder = learner.observer = Recorder()
        learner.acceleration = acceleration
        learner.learn(STAGES[1])
        yield [losses for progress, losses in recorder.batches if progress.phase == "main"]


@pytest.mark.parametrize(("name", "augmentation"), [("podnet", "ccfa"), ("icarl", "ccfa"), ("afc", "nothing")])
def test_cpu_steps_are_the_plain_steps(name, augmentation):
    accelerations = NoAcceleration(), Acceleration(graph=True), Acceleration.for_device(CPU)
    plain, switched_on, usual = second_stages(plugged(tiny(name), augmentation), accelerations)
    assert plain == switched_on == usual


def with_and_without_branches(method, monkeypatch):
    """The losses of both, and the late parts of the steps with branches, which a CPU computes at once."""
    monkeypatch.setattr(speed, "aside", lambda name, device, compute: Aside(compute()))
    (plain,) = second_stages(method, [Acceleration()])
    monkeypatch.setattr(Acceleration, "has_branches", lambda self, device: True)
    made = []
    monkeypatch.setattr("ccfa.learning.step.late_part", lambda *given: made.append(late_part(*given)) or made[-1])
    (branched,) = second_stages(method, [Acceleration()])
    return plain, branched, made


LATE = [
    {},
    {"weight": 0.5},
    {"start": "noise"},
    *({"target": one} for one in ("balanced-3", "random", "least-confident")),
]


@pytest.mark.parametrize(
    ("name", "mixing", "rest"),
    [
        *itertools.product(["podnet", "icarl", "finetune", "pass", "bic", "afc", "ucir"], ["nothing"], LATE),
        *itertools.product(["podnet"], ["mixup", "cutmix"], [{}, {"target": "balanced-3"}]),
    ],
)
def test_late_samples_change_nothing(monkeypatch, name, mixing, rest):
    """With branches, CCFA's samples are made beside backward; the gradients of the two parts of L_cls add up."""
    method = plugged(with_augmentation(tiny(name), CCFA(count=2, steps=3, **rest)), mixing)
    plain, branched, made = with_and_without_branches(method, monkeypatch)
    assert sum(part is not None for part in made) >= len(branched)
    for one, other in zip(plain, branched, strict=True):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-6)


class Other(CCFA):
    """May do anything."""


@pytest.mark.parametrize(
    ("name", "augmentation"),
    [
        ("podnet", CCFA(gradient_to_backbone=True)),
        ("podnet", CCFA(backbone_weight=0.5)),
        ("podnet", CCFA(target="own-label")),
        ("podnet", CCFA(count=0)),
        ("podnet", Other()),
        ("foster", CCFA()),  # features are wider than the old head, so that new classes' samples have no weight
        ("der", CCFA()),
    ],
)
def test_samples_that_backward_waits_for_are_never_late(monkeypatch, name, augmentation):
    method = with_augmentation(tiny(name, epochs=1), augmentation)
    plain, branched, made = with_and_without_branches(method, monkeypatch)
    assert set(made) == {None}
    assert branched == plain


def test_a_step_that_trains_nothing_is_an_error():
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    parts = Parts({"classification": Aside(frozen.sum())})
    with pytest.raises(RuntimeError, match="grad"):
        descend(parts.roots(), torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1), [frozen])


@pytest.mark.gpu
@pytest.mark.parametrize("augmentation", ["nothing", "ccfa"])
@pytest.mark.parametrize("name", ["podnet", "icarl", "finetune", "geodl", "fetril", "afc", "ucir", "bic", "foster"])
def test_a_graph_makes_the_same_steps(name, augmentation):
    """PODNet's attack is a kernel; iCaRL's and fine-tuning's use autograd inside the capture, iCaRL reads its share.

    GeoDL's second stage has the branches of a graph, and cannot be captured. FeTrIL's sees no images. UCIR
    amplifies rounding: its later steps may differ by more than this between any two runs on a GPU (see RESULTS.md).
    """
    num_compared = 6 if name == "ucir" else NUM_STEPS
    method = plugged(tiny(name, epochs=NUM_STEPS), augmentation)
    both = second_stages(method, (Acceleration(), Acceleration(graph=True)), CUDA)
    eager, graph = (losses[:NUM_STEPS] for losses in both)
    assert len(eager) == len(graph) == NUM_STEPS
    assert len({losses["loss"] for losses in graph}) == NUM_STEPS  # replays read new batches and new random numbers
    for number, (one, other) in enumerate(zip(eager[:num_compared], graph[:num_compared], strict=True)):
        assert other == pytest.approx(one, abs=1e-3, rel=1e-3), f"step {number}"


def random_images(num_classes, per_class):
    """Of CIFAR-100's size."""
    pixels = np.random.default_rng(0).integers(0, 256, (num_classes * per_class, 3, 32, 32), dtype=np.uint8)
    labels = np.repeat(np.arange(num_classes), per_class)
    return ImageSet(pixels, labels, tuple(map(str, range(num_classes))))


ROUNDS, STEPS_OF_A_ROUND = 8, 25


def trained_at_once(method, num_runs):
    """Each of several runs, all alike, in a thread of its own: weights and statistics after each round of steps."""
    images, stages = random_images(70, 20), split(70, 50, 10)

    def run(_):
        with own_stream(CUDA):
            learner = Learner(method, images, device=CUDA, acceleration=Acceleration.for_device(CUDA))
            learner.begin(stages[0])
            for stage in stages[1:]:  # in the last one, AANet's previous network has two branches, too
                learner.conclude()
                learner.begin(stage)
            phase = prepare_phase(learner, method.phases(stage)[0], 0)
            for group in phase.optimiser.param_groups:
                group["lr"].fill_(0.01)
            found, shuffled = [], torch.Generator().manual_seed(0)
            for number in range(ROUNDS * STEPS_OF_A_ROUND):
                order = torch.randperm(len(phase.rows), generator=shuffled)[: phase.batch_size]
                phase.step(phase.rows[order.to(CUDA)])
                if (number + 1) % STEPS_OF_A_ROUND == 0:
                    state = learner.network.state_dict()
                    found.append({name: tensor.cpu().clone() for name, tensor in state.items()})
            return found

    with ThreadPoolExecutor(num_runs) as pool:
        return list(pool.map(run, range(num_runs)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "augmentation"),
    [
        ("podnet", CCFA()),
        ("podnet", CCFA(target="balanced-10")),
        ("podnet", None),
        ("afc", CCFA()),
        ("ucir", CCFA()),
        ("aanet", CCFA()),
    ],
)
def test_branches_never_race(name, augmentation, monkeypatch):
    """Steps of the real size end with the same bits: branches one after the other, side by side, or under load."""
    method = with_any(METHODS[name](), augmentation)
    with monkeypatch.context() as patch:
        patch.setattr(Lane, "branch", lambda self, name: self.main)
        (serial,) = trained_at_once(method, 1)
    (alone,), together = trained_at_once(method, 1), trained_at_once(method, 4)
    assert all(tensor.isfinite().all() for tensor in serial[-1].values())
    for label, states in {"alone": alone, **{f"one of four, {n}": states for n, states in enumerate(together)}}.items():
        for number, (one, other) in enumerate(zip(serial, states, strict=True)):
            differing = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
            assert not differing, f"{label}, round {number}: {len(differing)} of {len(one)} tensors, {differing[:3]}"


@pytest.mark.gpu
def test_balanced_targets_are_captured():
    method = with_augmentation(tiny("podnet"), CCFA(count=2, steps=3, target="balanced-3"))
    (losses,) = second_stages(method, [Acceleration(graph=True)], CUDA)
    assert all(math.isfinite(step["loss"]) for step in losses)


@pytest.mark.gpu
def test_capturing_leaves_the_network_as_it_was():
    learner = begun(tiny("podnet"), STAGES[1], device=CUDA, acceleration=Acceleration(graph=True))
    before = {name: tensor.clone() for name, tensor in learner.network.state_dict().items()}
    prepare_phase(learner, learner.method.phases(STAGES[1])[0], 0)
    after = learner.network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
