"""Several processes with one learner: the same training as by one, and one memory."""

import time
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import TCPStore
from torch.nn import functional as F

from ccfa.augmentation.mixing import ManifoldMixup
from ccfa.errors import ResourceError, UsageError
from ccfa.learning import Learner
from ccfa.learning import processes as module
from ccfa.learning.acceleration import Acceleration
from ccfa.learning.processes import ALONE, Processes, joined, own_device, several
from ccfa.learning.shared_batch_norm import shared_batch_norm
from ccfa.methods import METHODS, Step, Term, with_image_augmentation
from ccfa.models import Features
from teams import in_processes, together, torchrun_variables
from toys import STAGES, TOY, Double, Recorder, Shortened, plugged, rows_of, tiny, toy_images


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def trained(method, processes, per_class=12):
    """The losses, the exemplars, the weights and the predictions of a toy run."""
    recorder = Recorder()
    method = replace(method, transforms=Double(**asdict(method.transforms)))
    learner = Learner(method, toy_images(per_class=per_class), observer=recorder, device="cpu", processes=processes)
    predictions = []
    for stage in STAGES:
        learner.learn(stage)
        images = toy_images(seed=1).images
        predictions += [learner.predict(some).tolist() for some in (images, images[:1])]  # the others have no part of 1
    losses = [loss for _, losses in recorder.batches for loss in losses.values()]
    weights = {name: tensor.numpy() for name, tensor in learner.network.state_dict().items()}
    return losses, rows_of(learner.memory.classes), weights, predictions


def agrees_with_one_process(method, number=2, batch_size=13, per_class=12):  # in uneven parts
    method = replace(method, phases=Shortened(method.phases, batch_size=batch_size))
    losses, exemplars, weights, predictions = trained(method, ALONE, per_class)
    found = together(partial(trained, method, per_class=per_class), number)
    np.testing.assert_allclose(found[0][0], losses, rtol=1e-9, atol=1e-14)  # of nothing to distil, rounding is left
    assert found[0][1] == exemplars
    assert found[0][3] == predictions
    for name, expected in weights.items():
        np.testing.assert_allclose(found[0][2][name], expected, rtol=1e-7, atol=1e-8)
    for other in found[1:]:  # to the last bit, or the processes would drift apart
        assert other[:2] == found[0][:2]
        assert all(np.array_equal(other[2][name], found[0][2][name]) for name in weights)


@pytest.mark.parametrize(
    ("name", "augmentation"),
    [("replay", "mixup"), ("podnet", "nothing"), ("podnet", "ccfa"), ("icarl", "nothing"), ("fetril", "ccfa")],
)
def test_two_processes_train_as_one(name, augmentation):
    agrees_with_one_process(plugged(tiny(name), augmentation))


@pytest.mark.soak
@pytest.mark.parametrize("batch_size", [13, 2])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_with_uneven_parts(name, batch_size):
    """Of two rows, a third process has none."""
    agrees_with_one_process(tiny(name, epochs=1), number=3, batch_size=batch_size)


class MapsAtOnce(Term):
    """A penalty of all maps together, which is no mean over rows."""

    def __init__(self) -> None:
        super().__init__("maps")

    def forward(self, step: Step) -> torch.Tensor:
        pairs = zip(step.previous_features.maps, step.features.maps, strict=True)
        return torch.stack([(old - new).square().sum() for old, new in pairs]).sum().sqrt()


def test_a_term_may_read_all_maps():
    agrees_with_one_process(replace(tiny("replay"), terms=(MapsAtOnce,)))


class NeedsRows(nn.Module):
    """A backbone that takes no empty batch, as vision transformers do not."""

    dim = 5

    def __init__(self, norms: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, self.dim, 3), nn.BatchNorm2d(self.dim)] if norms else [nn.Conv2d(3, self.dim, 3)]
        self.layers = nn.Sequential(*layers, nn.ReLU(), *layers[1:])

    def forward(self, images: torch.Tensor) -> Features:
        assert len(images), "an empty batch"
        level = self.layers(images)
        return Features((level,), level.mean(dim=(2, 3)))


# Batches smaller than the number of processes, and then stages with fewer images.
@pytest.mark.parametrize(("batch_size", "per_class"), [(2, 3), (16, 1)])
@pytest.mark.parametrize("norms", [True, False])
def test_a_process_may_have_no_rows(norms, batch_size, per_class):
    method = METHODS["podnet"](backbone=lambda channels: NeedsRows(norms), transforms=TOY, memory=1, lr=0.01)
    method = replace(method, phases=Shortened(method.phases, epochs=1))
    agrees_with_one_process(method, 3, batch_size, per_class)


def test_batch_norm_of_one_value_is_refused():
    with shared_batch_norm(Processes(0, 2), 1), pytest.raises(UsageError, match="batch size"):
        nn.BatchNorm2d(3)(torch.zeros(1, 3, 1, 1))


def normalised(images, slope, processes):
    """The rows of this process after batch norm, their gradient, and what the layer has learned and remembered."""
    rows = processes.own(len(images))
    norm, x = nn.BatchNorm2d(3), images[rows].clone().requires_grad_()
    with shared_batch_norm(processes, len(images)):
        y = norm(x)
    # Gradients are multiplied by the number of processes, of which the mean is taken.
    (processes.number * (slope[rows] * y).sum()).backward()
    processes.average_gradients(norm.parameters())
    learned = [norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var]
    return [tensor.detach().numpy() for tensor in (y, x.grad / processes.number, *learned)]


@pytest.mark.parametrize("num_images", [7, 1])
def test_batch_norm_of_all_rows(num_images):
    """Also where a process has no rows."""
    draws = torch.Generator().manual_seed(0)
    images, slope = torch.randn(2, num_images, 3, 4, 2, generator=draws)
    expected = normalised(images, slope, ALONE)
    found = together(partial(normalised, images, slope))
    for part in (0, 1):
        np.testing.assert_allclose(np.concatenate([own[part] for own in found]), expected[part], rtol=1e-10)
    for own in found:
        for value, wanted in zip(own[2:], expected[2:], strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-10)


def test_evaluation_uses_running_statistics():
    images = torch.randn(4, 3, 2, 2)
    layer = nn.BatchNorm2d(3).eval()
    with shared_batch_norm(Processes(0, 2), len(images)):  # nobody else is there to ask
        assert torch.equal(layer(images), F.batch_norm(images, layer.running_mean, layer.running_var))


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("num_rows", [0, 3, 16])
def test_every_row_has_one_process(number, num_rows):
    rows = list(range(num_rows))
    assert [row for rank in range(number) for row in rows[Processes(rank, number).own(num_rows)]] == rows


def told(processes):
    if processes.rank == 0:
        processes.tell({"stage": 1}, {"rows": torch.tensor([3, 5])})
        return None
    facts, tensors = processes.told()
    return facts, tensors["rows"].tolist()


def test_process_0_tells_the_others():
    assert together(told, 3)[1:] == [({"stage": 1}, [3, 5])] * 2


def test_manifold_mixup_is_refused():
    method = with_image_augmentation(tiny("replay"), ManifoldMixup())
    with pytest.raises(UsageError, match="Manifold Mixup"):
        Learner(method, toy_images(), device="cpu", processes=Processes(0, 2))


def test_several_processes_neither_compile_nor_capture():
    fast = Acceleration("float32", compile=True, graph=True)
    shared = Learner(tiny("replay"), toy_images(), device="cpu", acceleration=fast, processes=Processes(0, 2))
    assert shared.acceleration == Acceleration("float32", compile=False, graph=False)
    assert Learner(tiny("replay"), toy_images(), device="cpu", acceleration=fast).acceleration == fast


def test_without_torchrun_there_is_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # some clusters set it for other reasons
    assert not several()
    with joined("cpu") as processes:
        assert processes is ALONE


def test_a_script_joins_twice():
    """The second time, process 1 finds the store of the first time, which process 0 is about to close."""

    def script():
        for _ in range(2):
            with joined("cpu") as processes:
                pass
            time.sleep(0 if processes.rank else 0.3)
            del processes  # the store closes

    assert in_processes(script) == [(0, None)] * 2


def test_a_missing_process_is_named(monkeypatch):
    """Where torchrun keeps the store, the store does not wait for the others."""
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    for name, value in torchrun_variables(1, 3, store.port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(module, "MEETING", timedelta(seconds=0.1))
    with pytest.raises(ResourceError, match=r"of 3, number 0, 2 did not start"), joined("cpu"):
        pass


def test_more_processes_than_gpus(monkeypatch):
    for name, value in torchrun_variables(2, 4, 0).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ResourceError, match="--nproc-per-node 2"):
        own_device("cuda")


def test_a_numbered_gpu_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UsageError, match="cuda:1"):
        own_device("cuda:1")
    assert own_device("cpu") == torch.device("cpu")
