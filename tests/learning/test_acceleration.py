import pytest
import torch

from ccfa.errors import ResourceError, UsageError
from ccfa.learning.acceleration import describe_device, memory_errors_explained, pick_device


def test_the_cpu_is_always_there():
    assert pick_device("cpu") == torch.device("cpu")
    assert describe_device(pick_device("cpu")) == f"cpu ({torch.get_num_threads()} threads)"


@pytest.mark.parametrize("available", [True, False])
def test_auto_takes_a_gpu_where_there_is_one(monkeypatch, available):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert pick_device("auto").type == ("cuda" if available else "cpu")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:", "cuda:-1", "cuda:x"])
def test_unknown_devices_are_refused(name):
    with pytest.raises(UsageError, match="Known: auto, cpu, cuda"):
        pick_device(name)


@pytest.mark.parametrize("name", ["mps", "meta"])
def test_devices_of_other_kinds_are_not_supported(name):
    with pytest.raises(UsageError, match="not supported"):
        pick_device(name)


@pytest.mark.parametrize(("name", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:9", 2)])
def test_a_gpu_that_is_not_there_is_a_resource_error(monkeypatch, name, count):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ResourceError, match=f"{name} was asked for.*finds {count} CUDA devices.*--device cpu"):
        pick_device(name)


@pytest.mark.parametrize(("name", "count"), [("cuda", 1), ("cuda:1", 2)])
def test_a_gpu_that_is_there_is_taken(monkeypatch, name, count):
    current = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert pick_device(name) == torch.device(name)
    assert current == ([torch.device(name)] if ":" in name else [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_is_described_by_its_name():
    assert describe_device(pick_device("cuda")) == torch.cuda.get_device_name()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError("full")])
@pytest.mark.parametrize(("batch_size", "smaller"), [(128, 64), (1, 1)])
def test_running_out_of_memory_suggests_a_smaller_batch(error, batch_size, smaller):
    with (
        pytest.raises(ResourceError, match=rf"batch size {batch_size}: .*batch_size={smaller} ") as caught,
        memory_errors_explained(batch_size),
    ):
        raise error
    assert caught.value.__cause__ is error


def test_other_errors_pass_unchanged():
    with pytest.raises(ZeroDivisionError), memory_errors_explained(4):
        raise ZeroDivisionError
