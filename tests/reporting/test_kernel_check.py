"""Steps by the kernels are torch's steps, and kernels that are wrong are noticed."""

import pytest

from ccfa.augmentation import ccfa
from ccfa.kernels import LAUNCHED, kernels_left_out, resnet, sgd, sphere_attack
from ccfa.kernels.resnet import chain_features
from ccfa.learning import acceleration
from ccfa.reporting.kernel_check import compare_steps

CHAIN = {
    "reorder_weights",
    "forward_stem",
    "forward_16",
    "backward_64",
    "weights_32",
    "weights_stem",
    "evaluate",
    "sgd",
}
HEAD = {"most_confident", "attack", "head_loss_rows", "head_loss_proxies", "normalise"}
KERNELS = {
    "podnet": {*CHAIN, *HEAD, "compare", "gradients", "cosine_distance"},
    "aanet": {*CHAIN, *HEAD, "forward_end_16", "backward_start_32", "add_parts_of_factors"} - {"evaluate"},
    "ucir": {*CHAIN, *HEAD, "project_16_32", "normalise_64", "sum_gradients_32", "project_back_64_32"},
}


def batch_size(device):
    """Emulated kernels are slow."""
    return 128 if device.type == "cuda" else 6


@pytest.mark.parametrize("name", KERNELS)
def test_steps_by_kernels_are_torchs_steps(device, name):
    found = compare_steps(name, device, batch_size(device))
    assert found.agrees, str(found)
    assert KERNELS[name] <= {kernel for _, kernel in LAUNCHED}
    assert all(error < 0.02 for part, error in found.by_kernels.items() if part.startswith("loss: "))
    assert all(error < 0.1 or name == "ucir" for error in found.by_kernels.values())


def test_kernels_can_be_left_out(device):
    with kernels_left_out():
        found = compare_steps("podnet", device, batch_size(device))
    assert found.by_kernels == pytest.approx(found.by_torch, abs=0.01)
    assert not LAUNCHED
    assert "no kernel" in str(found)


def wrong_features(chain, images):
    """Some of each number comes from its neighbour."""
    maps, embedding = chain_features(chain, images)
    return maps, embedding + 0.2 * embedding.roll(1, dims=1)


def wrong_attack(*problem):
    """Nothing was attacked."""
    *given, _ = problem
    return sphere_attack(*given, 0)


def with_argument(kernel, wrong_name, place, value):
    """Kernels, one of which is launched with another argument."""

    def found(source, name, *shared, **constants):
        right = kernel(source, name, *shared, **constants)

        def launch(grid, threads, *arguments, **options):
            arguments = list(arguments)
            arguments[place] = value
            right(grid, threads, *arguments, **options)

        return launch if name == wrong_name else right

    return found


@pytest.mark.parametrize("what", ["features", "attack", "momentum", "limit", "statistics"])
def test_wrong_kernels_are_noticed(device, monkeypatch, what):
    if what == "features":
        monkeypatch.setattr(acceleration, "chain_features", wrong_features)
    elif what == "attack":
        monkeypatch.setattr(ccfa, "sphere_attack", wrong_attack)
    elif what == "statistics":
        monkeypatch.setattr(resnet, "kernel", with_argument(resnet.kernel, "forward_16", 4, 0.9))
    else:
        place, value = {"momentum": (-1, 0.0), "limit": (-3, 1e9)}[what]
        monkeypatch.setattr(sgd, "kernel", with_argument(sgd.kernel, "sgd", place, value))
    assert not compare_steps("podnet", device, batch_size(device)).agrees
