import base64
import io
import zipfile

import numpy as np
import pytest
from PIL import Image

from ccfa.errors import ModelError
from ccfa.files import read_arrays
from ccfa.reporting.confusions import confused_pairs
from ccfa.reporting.pictures import read_pictures, strip, write_pictures
from ccfa.reporting.rundata import read_run
from synthetic_runs import synthetic_resolved, synthetic_run


def pictured(path, side=8, num_done=None, num_classes=6):
    resolved = synthetic_resolved([f"c{number}" for number in range(num_classes)], side=side)
    synthetic_run(path, resolved, num_done=num_done)
    run = read_run(path)
    pairs = confused_pairs(run)
    write_pictures(path, run, pairs, resolved)
    return resolved, run, pairs, read_pictures(path, len(run.predictions) - 1)


@pytest.mark.parametrize("num_done", [2, 3])
def test_pictures_are_the_images_they_claim_to_be(tmp_path, num_done):
    resolved, run, pairs, pictures = pictured(tmp_path / "run", num_done=num_done)
    for label, rows in enumerate(run.exemplars):
        expected = resolved.train.images[rows[:10]].permute(0, 2, 3, 1).numpy()
        np.testing.assert_array_equal(pictures.of_class(label), expected)
    seen = resolved.test.rows(0, run.num_seen[-1])
    for pair in pairs:
        images = resolved.test.images[seen[pair.rows[:5]]].permute(0, 2, 3, 1).numpy()
        np.testing.assert_array_equal(pictures.of_pair(pair), images)
        assert (resolved.test.labels[seen[pair.rows]] == pair.true).all()


def test_photos_are_scaled_down(tmp_path):
    resolved, *_, pictures = pictured(tmp_path / "run", side=96)
    assert pictures.exemplars.shape[1:] == (48, 48, 3)
    blocks = resolved.train.images[0].float().reshape(3, 48, 2, 48, 2).mean((2, 4)).permute(1, 2, 0).numpy()
    assert np.abs(pictures.of_class(0)[0].astype(float) - blocks).mean() < 12


def test_pictures_stay_small_with_many_classes(tmp_path):
    path = tmp_path / "run"
    pictured(path, side=32, num_classes=300)
    assert (path / "pictures.npz").stat().st_size < 3_000_000


def test_strip_holds_the_pixels():
    thumbnails = np.random.default_rng(0).integers(0, 256, (3, 5, 4, 1), dtype=np.uint8)
    kind, content = strip(thumbnails).split(",")
    assert kind == "data:image/png;base64"
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))
    np.testing.assert_array_equal(image, np.hstack(thumbnails[..., 0]))
    assert strip(thumbnails[:0]) == ""


def test_pictures_of_another_stage_are_not_shown(tmp_path):
    pictured(tmp_path / "run", num_done=2)
    assert read_pictures(tmp_path / "run", 2) is None
    assert read_pictures(tmp_path, 0) is None


def test_pictures_that_are_none_are_not_shown(tmp_path):
    arrays = {
        "stage": 0,
        "exemplars": np.zeros((1, 4, 4, 3)),
        "exemplar_classes": [0],
        "mistakes": np.zeros((0, 1, 1, 1)),
    }
    np.savez(tmp_path / "pictures.npz", mistake_pairs=np.zeros((0, 2)), **arrays)
    assert read_pictures(tmp_path, 0) is None


def test_pickles_and_bombs_are_refused(tmp_path):
    np.savez(tmp_path / "pickle.npz", labels=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ModelError, match="cannot be read"):
        read_arrays(tmp_path / "pickle.npz")
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("labels.npy", bytes(300 * 2**20))
    with pytest.raises(ModelError, match="would unpack to 300 MiB"):
        read_arrays(tmp_path / "bomb.npz")
