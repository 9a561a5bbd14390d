"""CKA along a run: the levels' maps, flattened, of the first stage's test images."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ccfa.errors import UsageError
from ccfa.evaluation.similarity import linear_cka
from ccfa.experiments import Experiment, Run
from ccfa.experiments import map_similarity as module
from ccfa.experiments.analyses import learner_after, reopen
from ccfa.experiments.map_similarity import map_similarities
from digit_runs import CPU, created, digit_run


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return digit_run(tmp_path_factory.mktemp("runs") / "podnet")


@pytest.mark.parametrize("estimator", ["biased", "unbiased"])
def test_is_linear_cka_of_flattened_maps_of_the_first_stages_test_images(directory, estimator):
    resolved = reopen(directory)
    images = resolved.test.images[resolved.test.labels < 4]
    with torch.no_grad():
        maps = [
            learner_after(stage, directory, resolved, CPU)
            .network.eval()
            .backbone(resolved.method.transforms.test(images))
            for stage in resolved.stages
        ]
    expected = [
        [linear_cka(first.flatten(1), later.flatten(1), estimator) for first, later in pairs]
        for pairs in (zip(maps[0].maps, features.maps, strict=True) for features in maps[1:])
    ]
    found = map_similarities(directory, estimator=estimator)
    assert found.num_images == len(images)
    np.testing.assert_allclose(found.values, expected, rtol=1e-5)
    assert np.shape(found.values) == (2, 3)
    assert (np.array(found.values) < 1).all()


def test_an_unchanged_backbone_is_aligned_entirely(directory, tmp_path):
    copy = Run(shutil.copytree(directory.path, tmp_path / "copy"))
    first, second = (copy.path / "networks" / f"stage-00{index}.safetensors" for index in (0, 1))
    kept = {name: tensor for name, tensor in load_file(first).items() if name.startswith("backbone.")}
    save_file({**load_file(second), **kept}, second)
    found = map_similarities(copy)
    np.testing.assert_allclose(found.values[0], 1.0, atol=1e-9)
    np.testing.assert_array_equal(found.values[1], map_similarities(directory).values[1])


def test_maps_in_parts_give_the_same(directory, monkeypatch):
    whole = map_similarities(directory)
    monkeypatch.setattr(module, "BYTES_OF_MAPS", 100_000)  # fewer channels than the first level has
    np.testing.assert_allclose(map_similarities(directory).values, whole.values, rtol=1e-6)


@pytest.mark.parametrize("limit", [1, 3000, 10**4, 10**9])
def test_passes_hold_every_channel_once_and_stay_within_their_room(monkeypatch, limit):
    shapes, num_images = [(16, 8, 8), (32, 4, 4), (5, 2, 2)], 3
    monkeypatch.setattr(module, "BYTES_OF_MAPS", limit)
    passes = list(module._passes(shapes, num_images))
    channels = [(part.level, channel) for parts in passes for part in parts for channel in range(part.first, part.last)]
    assert channels == [(level, channel) for level, shape in enumerate(shapes) for channel in range(shape[0])]
    assert [part.level for parts in passes for part in parts if part.completes] == [0, 1, 2]
    for parts in passes:
        held = sum(4 * num_images * (part.last - part.first) * int(np.prod(shapes[part.level][1:])) for part in parts)
        assert held <= limit or (len(parts), parts[0].last - parts[0].first) == (1, 1)


def test_fewer_images_are_drawn_by_the_seed(directory):
    first, again, other = (map_similarities(directory, num_images=40, seed=seed) for seed in (0, 0, 1))
    assert first.num_images == 40
    assert first == again
    assert first.values != other.values


def test_a_single_stage_has_nothing_to_compare(tmp_path):
    with pytest.raises(UsageError, match="single stage"):
        map_similarities(created(tmp_path / "run", Experiment("podnet", scenario="10")))
