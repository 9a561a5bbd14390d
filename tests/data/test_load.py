"""`load`: names, paths, and imports that wait until they are needed."""

import subprocess
import sys

import pytest
from PIL import Image

from ccfa.data import DATASETS, load
from ccfa.errors import DataError, UsageError


def test_names_and_paths(tmp_path, monkeypatch):
    assert set(DATASETS) == {"digits", "glyphs", "cifar100"}
    assert load("digits")[0].num_classes == 10
    for name in ("ant", "bee"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(4):
            Image.new("RGB", (4, 4)).save(tmp_path / "photos" / name / f"{index}.png")
    assert load(str(tmp_path / "photos"), image_size=8, held_out=0.5)[1].images.shape == (4, 3, 8, 8)
    monkeypatch.chdir(tmp_path)
    assert load("photos", image_size=8)[0].class_names == ("ant", "bee")
    assert load("./photos", image_size=8)[0].class_names == ("ant", "bee")


def test_unknown_names_and_missing_paths(tmp_path):
    with pytest.raises(UsageError, match="Did you mean 'cifar100'"):
        load("cifar10")
    with pytest.raises(DataError, match="does not exist"):
        load(str(tmp_path / "photos"))
    with pytest.raises(DataError, match="CIFAR-100 was not found"):
        load("cifar100", tmp_path, download=False)


def test_import_is_light():
    code = "import sys, ccfa.data; print([name for name in ('PIL', 'sklearn') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
