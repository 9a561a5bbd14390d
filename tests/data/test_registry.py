"""Data sets by name: built in, registered, from a plug-in, or the path of a folder."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from ccfa import ImageSet, build_method, load, register_data
from ccfa.data import DATASETS, FOLDER, Transforms, data_set, describe_data_sets
from ccfa.errors import DataError, UsageError
from ccfa.experiments import Experiment, resolve
from zoo import write_noise

GREY = Transforms((0.5,), (0.5,))


def grey_noise(seed, num=40):
    """Grey noise."""
    images = np.random.default_rng(seed).integers(0, 256, (num, 1, 8, 8), dtype=np.uint8)
    return ImageSet(images, np.arange(num) % 4, ["a", "b", "c", "d"]).hold_out(0.25, seed=0)


def register_grey(**changes):
    options = {"backbone": "small", "transforms": GREY, "epochs": 1, "batch_size": 8, "memory": 3}
    defaults = {"scenario": "2,1,1", "order": "3,2,1,0", "options": options}
    return register_data("noise", **{**defaults, **changes})(grey_noise)


def test_a_registered_data_set_has_its_defaults(call):
    register_grey(method_options={"ccfa": {"count": 2}})
    resolved = resolve(Experiment("podnet", data="noise", ccfa=True))
    assert [stage.num_new for stage in resolved.stages] == [2, 1, 1]
    assert resolved.order == (3, 2, 1, 0)
    assert resolved.method.transforms == GREY
    assert resolved.method.memory.per_class == 3
    assert resolved.method.feature_augmentations[0].count == 2
    assert "noise" in call("list", "datasets")[1]
    assert "noise: Grey noise." in call("doctor")[1]


def test_a_plug_in_is_loaded_when_needed(monkeypatch, tmp_path):
    (tmp_path / "noisy_plug_in.py").write_text(
        "import ccfa\ndef plain():\n    return ccfa.load('digits')\nnoisy = ccfa.register_data('noisy')(plain)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = {"noisy": "noisy_plug_in:noisy", "plain": "noisy_plug_in:plain"}
    offered = {name: EntryPoint(name, module, "ccfa.data") for name, module in found.items()}
    monkeypatch.setitem(vars(DATASETS), "offered", offered)
    assert set(describe_data_sets()) == {*found, *DATASETS, "imagenet:FILE", "PATH"}
    assert "noisy_plug_in" not in sys.modules
    for name in found:
        assert resolve(Experiment("finetune", data=name)).train.num_classes == 10


def test_the_loader_gets_what_it_names():
    @register_data("asked")
    def asked(data_dir, image_size, held_out, skip_bad, recursive, download, own=1):
        given.append((data_dir, image_size, held_out, skip_bad, recursive, download, own))
        return grey_noise(0)

    given = []
    load("asked", "there", image_size=9, skip_bad=True, recursive=True)
    assert given == [(Path("there"), 9, 0.2, True, True, True, 1)]
    assert data_set("asked").default_scenario(11) == "B6-inc1"


def test_names_are_taken_once():
    register_grey()
    register_grey()  # as a notebook's cell that is run again
    for name in ("noise", "digits", "", "a/b"):
        with pytest.raises(UsageError):
            register_data(name)(lambda: None)


def test_misspelt_names_get_a_suggestion():
    register_grey(options={"epoch": 1})
    for misspelt, meant in [("digts", "digits"), ("noize", "noise"), ("noise", "epochs")]:
        with pytest.raises(UsageError, match=f"Did you mean '{meant}'"):
            build_method("podnet", misspelt)


def test_folders_are_known_by_their_path(tmp_path, monkeypatch):
    for seed, name in enumerate(("ant", "bee")):
        write_noise(tmp_path / "photos" / name, 4, seed)
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "photos/", "./photos", Path("photos"), tmp_path / "photos"):
        assert load(name, image_size=8)[0].class_names == ("ant", "bee")
    assert build_method("podnet", "photos").transforms == FOLDER


@pytest.mark.parametrize("name", ["./nowhere", "~nobody-of-this-name/x", "a/" + "x" * 300])
def test_missing_folders_are_data_errors(name):
    with pytest.raises(DataError, match="does not exist"):
        load(name)
    with pytest.raises(DataError, match="does not exist"):
        build_method("podnet", name)
