"""A run directory opened again: the networks predict what the run wrote down, and what does not fit is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ccfa.data import Stage
from ccfa.errors import ModelError
from ccfa.experiments import Experiment, Run
from ccfa.experiments.analyses import exemplars_after, learner_after, reopen, with_ccfa
from digit_runs import CPU, SHORT, digit_run

METHODS = {"aanet": SHORT} | {name: {"epochs": "1"} for name in ("bic", "gdumb", "il2a")}


@pytest.fixture(scope="module", params=METHODS)
def of_method(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / request.param
    return digit_run(path, request.param, scenario="6,2,2", options=METHODS[request.param])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return digit_run(tmp_path_factory.mktemp("runs") / "podnet", ccfa=True).path


@pytest.fixture
def copied(finished, tmp_path):
    return Run(shutil.copytree(finished, tmp_path / "copy"))


def check_predictions(directory):
    resolved = reopen(directory)
    for stage in resolved.stages:
        learner = learner_after(stage, directory, resolved, CPU)
        seen = resolved.test.subset(resolved.test.rows(0, stage.num_seen))
        stored = directory.read_predictions(stage.index)
        np.testing.assert_array_equal(learner.predict_by_logits(seen.images).numpy(), stored["by_logits"])


def test_every_stages_network_predicts_as_it_did(finished):
    check_predictions(Run(finished))


def test_so_do_networks_that_change_their_structure(of_method):
    """Two branches from stage 1 on, corrections, a batch norm that grows, outputs for one stage alone."""
    check_predictions(of_method)


def test_exemplars_are_those_written_down_and_can_be_chosen_again(copied):
    resolved = reopen(copied)
    learner = learner_after(resolved.stages[0], copied, resolved, CPU)
    stored = exemplars_after(copied, learner)
    assert [rows.tolist() for rows in stored] == copied.read_exemplars(0)
    shutil.rmtree(copied.path / "exemplars")
    again = exemplars_after(copied, learner)
    assert [rows.tolist() for rows in again] == [rows.tolist() for rows in stored]


def test_ccfa_is_plugged_in_with_the_runs_own_options(finished):
    resolved = reopen(Run(finished))
    assert with_ccfa(resolved).method.feature_augmentations == resolved.method.feature_augmentations
    without = resolved._replace(experiment=Experiment("podnet"))
    assert [type(part).__name__ for part in with_ccfa(without).method.feature_augmentations] == ["CCFA"]


def weights(directory, index=0):
    return directory.path / "networks" / f"stage-{index:03d}.safetensors"


def damage_end(path):
    path.write_bytes(path.read_bytes()[:-100])


def damage_pickle(path):
    torch.save({"backbone": torch.zeros(3)}, path)


def damage_missing(path):
    path.unlink()


def damage_names(path):
    save_file({f"other.{name}": tensor for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize("damage", [damage_end, damage_pickle, damage_missing, damage_names])
def test_weights_that_cannot_be_used_are_named(copied, damage):
    damage(weights(copied))
    resolved = reopen(copied)
    with pytest.raises(ModelError, match="weights"):
        learner_after(resolved.stages[0], copied, resolved, CPU)


def test_weights_of_another_stage_are_refused(copied):
    shutil.copy(weights(copied, 2), weights(copied, 1))
    resolved = reopen(copied)
    with pytest.raises(ModelError, match="10 classes, expected the 7"):
        learner_after(resolved.stages[1], copied, resolved, CPU)


def test_other_data_than_the_runs_are_refused(copied):
    config = copied.read_json("config.json")
    config["resolved"]["num_training_images"] += 1
    copied.write_json("config.json", config)
    with pytest.raises(ModelError, match=r"other data(.|\n)*num_training_images"):
        reopen(copied)


def test_other_images_of_the_same_names_and_numbers_are_refused(copied):
    config = copied.read_json("config.json")
    config["resolved"]["fingerprints"]["test"] = "0" * 64
    copied.write_json("config.json", config)
    with pytest.raises(ModelError, match=r"other data(.|\n)*fingerprints\.test"):
        reopen(copied)
    del config["resolved"]["fingerprints"]  # a run of an older version
    copied.write_json("config.json", config)
    assert reopen(copied).train.num_classes == 10


@pytest.mark.parametrize("resolved", [None, [1], "abc"])
def test_a_configuration_that_does_not_say_what_was_run_is_refused(copied, resolved):
    copied.write_json("config.json", {**copied.read_json("config.json"), "resolved": resolved})
    with pytest.raises(ModelError, match="what the experiment came to"):
        reopen(copied)


@pytest.mark.parametrize("rows", [[], [[0]], [[10**6]] * 4, [[-1]] * 4])
def test_exemplars_that_do_not_fit_are_refused(copied, rows):
    (copied.path / "exemplars" / "stage-000.json").write_text(json.dumps({"rows": rows}))
    resolved = reopen(copied)
    learner = learner_after(resolved.stages[0], copied, resolved, CPU)
    with pytest.raises(ModelError, match="do not fit"):
        exemplars_after(copied, learner)


def test_a_later_stage_without_exemplars_file_is_not_guessed(copied):
    shutil.rmtree(copied.path / "exemplars")
    resolved = reopen(copied)
    learner = learner_after(resolved.stages[1], copied, resolved, CPU)
    assert learner.stage == Stage(1, 4, 7)
    with pytest.raises(ModelError, match="exemplars"):
        exemplars_after(copied, learner)
