"""Learning from folders: new models, more classes without the old photos, and what is refused."""

import os
import random
import shutil
import signal
import time
import unicodedata
from dataclasses import replace

import pytest
import torch
import yaml
from safetensors.torch import save_file

import ccfa
from ccfa import Learning
from ccfa.deployment import ModelFolder, updating
from ccfa.deployment.updating import estimated_seconds, plan_update
from ccfa.errors import DataError, LockedError, UsageError
from ccfa.learning.acceleration import Acceleration
from ccfa.models import BACKBONES
from ccfa.settings import Running
from children import started, wait
from commands import contents
from pictures import QUICK, SIZE, draw

SHORT = {"backbone": "small", "epochs": 3}
READ_OUT = Learning(method="ranpac", options={**SHORT, "projection": 50}, image_size=SIZE)


@pytest.fixture
def place(tmp_path):
    draw(tmp_path / "first", "abc")
    draw(tmp_path / "second", "de")
    return tmp_path


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A model of three classes; tests copy it."""
    place = tmp_path_factory.mktemp("learned")
    ccfa.learn(place / "model", draw(place / "first", "abc"), QUICK)
    return place / "model"


def copied(learned, place):
    return shutil.copytree(learned, place / "model")


def test_new_classes_are_learned_without_the_old_photos(learned, place):
    path = copied(learned, place)
    model = ccfa.learn(path, place / "second")
    assert model.class_names == ("a", "b", "c", "d", "e")
    assert [one["stage"] for one in model.config["classes"]] == [0, 0, 0, 1, 1]
    assert [one["images"] for one in model.config["classes"]] == [8] * 5
    assert [one["memory"] for one in model.config["classes"]] == [4] * 5
    assert len(model.state.memory.labels) == 20
    again = ccfa.load_model(path)
    pixels = model.state.memory.images
    assert [one.top for one in again.predict(pixels)] == [one.top for one in model.predict(pixels)]


def test_old_exemplars_stay_as_they_were(learned, place):
    before = ccfa.load_model(learned).state.memory
    after = ccfa.learn(copied(learned, place), place / "second").state.memory
    old = after.labels < 3
    assert torch.equal(after.images[old], before.images)


def test_learning_equals_a_learner_that_was_never_stored(place):
    """A model that is stored between stages learns as one learner over both stages does."""
    first, second = draw(place / "a-first", "abc"), draw(place / "a-second", "de")
    asked = replace(QUICK, held_out=0.0)
    ccfa.learn(place / "model", first, asked)
    model = ccfa.learn(place / "model", second, Learning(held_out=0.0))
    both = place / "both"
    for folder in (*first.iterdir(), *second.iterdir()):
        shutil.copytree(folder, both / folder.name)
    photos = ccfa.data.read_photos(both, model.framing)
    learner = ccfa.Learner(model.method, photos.images)
    for stage in ccfa.split(5, 3, 2):
        learner.learn(stage)
    for name, tensor in learner.network.state_dict().items():
        assert torch.equal(tensor, model.state.network[name]), name


def test_known_classes_are_left_out_unless_asked(learned, place):
    path = copied(learned, place)
    draw(place / "second", "a", count=6, seed=5)
    plan = plan_update(path, place / "second", Learning())
    assert (plan.new, plan.left_out, plan.more) == (("d", "e"), ("a",), ())
    plan = plan_update(path, place / "second", Learning(more=True))
    assert (plan.left_out, plan.more) == ((), ("a",))
    model = ccfa.learn(path, place / "second", Learning(more=True))
    one = model.config["classes"][0]
    assert (one["images"], one["memory"]) == (8 + 5, 4)


def test_more_photos_are_trained_on_and_may_be_kept(learned, place):
    path = copied(learned, place)
    stored = ccfa.load_model(path).state.memory
    draw(place / "second", "a", count=30, seed=5)
    plan = plan_update(path, place / "second", Learning(more=True))
    learner = updating._learner(plan, Running(device="cpu"), None)
    learner.begin(plan.stage)
    trained = plan.train.labels[learner.training_rows()]
    assert int((trained == 0).sum()) == 4 + 24
    kept = updating.carry_out(plan).state.memory
    known = {image.numpy().tobytes() for image in stored.images[stored.labels == 0]}
    assert {image.numpy().tobytes() for image in kept.images[kept.labels == 0]} - known


def test_a_photo_is_used_once_in_the_life_of_a_model(place):
    """A folder that grows: known photos are left out, and held-out ones stay held out."""
    ccfa.learn(place / "model", place / "first", READ_OUT)
    draw(place / "first", "a", count=16)  # the first ten are the same again
    plan = plan_update(place / "model", place / "first", Learning(more=True))
    assert plan.more == ("a",)
    assert (len(plan.train), len(plan.held_out)) == (5, 1)
    model = updating.carry_out(plan)
    assert model.config["classes"][0]["images"] == 8 + 5
    with pytest.raises(UsageError, match="learned before"):
        plan_update(place / "model", place / "first", Learning(more=True))


def test_known_classes_are_named_where_there_is_nothing_else(learned, place):
    path = copied(learned, place)
    ccfa.learn(path, place / "second", Learning())
    draw(place / "third", "a", seed=9)
    shutil.copytree(place / "second" / "d", place / "third" / "z")
    with pytest.raises(UsageError, match=r"known classes \(a, see --more\) .*as 'd'"):
        plan_update(path, place / "third", Learning())


def test_phases_that_epochs_do_not_set_are_told(place):
    asked = Learning(method="podnet", options={"backbone": "small", "epochs": "1"}, image_size=SIZE)
    assert "balanced has 20 epochs" in " ".join(plan_update(place / "model", place / "first", asked).notes)


def test_a_class_of_known_photos_alone_is_refused(learned, place):
    draw(place / "renamed", "a")
    (place / "renamed" / "a").rename(place / "renamed" / "x")
    with pytest.raises(UsageError, match=r"00\.png as 'a'"):
        plan_update(copied(learned, place), place / "renamed", Learning())


def test_a_photo_of_two_classes_is_not_measured_with(place):
    for number in range(10):
        shutil.copy(place / f"first/a/{number:02d}.png", place / f"first/b/copy{number}.png")
    plan = plan_update(place / "model", place / "first", QUICK)
    pixels = {image.numpy().tobytes() for image in plan.train.images}
    assert not [image for image in plan.held_out.images if image.numpy().tobytes() in pixels]


def test_accuracy_of_classes_that_cannot_be_measured_is_unknown(place):
    asked = Learning(method="finetune", options=dict(QUICK.options), image_size=SIZE)
    ccfa.learn(place / "model", place / "first", asked)
    model = ccfa.learn(place / "model", place / "second")
    assert [one["accuracy"] is None for one in model.config["classes"]] == [True] * 3 + [False] * 2
    assert model.config["updates"][-1]["measured_classes"] == 2
    assert "2 classes only" in (place / "model" / "README.md").read_text()


def test_the_owner_s_card_stays(learned, place):
    path = copied(learned, place)
    own = {
        "license: other  # choose one: the model is yours": "license: mit",
        "pipeline_tag: image-classification": "pipeline_tag: image-feature-extraction",
        "tags:\n- class-incremental-learning": "tags: [birds, vision]",
        "To be written by the model's owner.": "Birds only.",
    }
    card = (path / "README.md").read_text()
    for ours, theirs in own.items():
        assert ours in card
        card = card.replace(ours, theirs)
    (path / "README.md").write_bytes(card.replace("\n", "\r\n").encode())
    ccfa.learn(path, place / "second")
    folder = ModelFolder(path)
    for number in (5, 3):
        text = (path / "README.md").read_text()
        assert all(part in text for part in own.values())
        assert text.count("license:") == text.count("Intended use") == 1
        head = yaml.safe_load(text.split("---\n")[1])
        assert head["model-index"][0]["name"] == f"image classifier of {number} classes"
        if folder.earlier():
            with folder.held():
                folder.undo()


def test_the_hub_reads_the_card(learned):
    config = ccfa.load_model(learned).config
    head = yaml.safe_load((learned / "README.md").read_text().split("---\n")[1])
    assert (head["library_name"], head["pipeline_tag"]) == ("ccfa", "image-classification")
    [found] = head["model-index"][0]["results"]
    assert found["metrics"][0]["value"] == pytest.approx(config["updates"][-1]["accuracy"], abs=1e-4)


@pytest.mark.parametrize("body", ["\n# My birds\n", ""])
def test_a_head_of_the_owner_s_is_left_alone(learned, place, body):
    path = copied(learned, place)
    (path / "README.md").write_text(f"---\nlicense: mit\n---{body}")
    ccfa.learn(path, place / "second")
    text = (path / "README.md").read_text()
    assert text.startswith("---\nlicense: mit\n---\n")
    assert body in text
    assert "classifier of 5 classes" in text


def test_a_head_that_was_written_anew_gets_new_results(learned, place):
    """By the Hub's client, for example, which drops remarks and changes the layout."""
    path = copied(learned, place)
    _, head, body = (path / "README.md").read_text().split("---\n", 2)
    mine = yaml.safe_load(head) | {"metrics": ["accuracy", "f1"], "license": "mit"}
    (path / "README.md").write_text(f"---\n{yaml.safe_dump(mine)}---\n{body}")
    ccfa.learn(path, place / "second")
    found = yaml.safe_load((path / "README.md").read_text().split("---\n")[1])
    assert found["model-index"][0]["name"] == "image classifier of 5 classes"
    assert {**found, "model-index": 0} == {**mine, "model-index": 0}


def test_a_plan_that_is_out_of_date_is_refused(learned, place):
    path = copied(learned, place)
    plan = plan_update(path, place / "second", Learning())
    ccfa.learn(path, draw(place / "third", "f"))
    with pytest.raises(LockedError, match="Try again"):
        updating.carry_out(plan)
    assert ccfa.load_model(path).class_names == ("a", "b", "c", "f")


def test_old_and_new_classes_count_the_same(place):
    """Old classes keep one held-out image each, and new ones have several."""
    ccfa.learn(place / "replay", place / "first", replace(QUICK, memory=1))
    model = ccfa.learn(place / "replay", draw(place / "many", "de", count=40))
    classes = model.config["classes"]
    assert [one["held_out"] for one in classes] == [1, 1, 1, 8, 8]
    accuracy = model.config["updates"][-1]["accuracy"]
    assert accuracy == pytest.approx(sum(one["accuracy"] for one in classes) / 5)


def test_card_and_config_say_what_the_backbone_began_with(place):
    save_file(BACKBONES["small"](3).state_dict(), place / "some.safetensors")
    asked = replace(READ_OUT, weights=str(place / "some.safetensors"), options={"backbone": "small", "projection": 50})
    model = ccfa.learn(place / "model", place / "first", asked)
    for one in (model, ccfa.learn(place / "model", place / "second")):
        assert one.config["weights"].startswith("some.safetensors, SHA-256 ")
        assert one.config["weights"] in one.state.card
        assert str(place) not in one.state.card
    random = ccfa.learn(place / "other", place / "first", QUICK)
    assert random.config["weights"] == "none"
    assert "main: 3" in random.state.card


def test_starting_afresh_begins_with_the_same_weights(place):
    weights = BACKBONES["small"](3).state_dict()
    save_file(weights, place / "some.safetensors")
    asked = Learning(method="joint", weights=str(place / "some.safetensors"), image_size=SIZE)
    asked = replace(asked, options={"backbone": "small", "epochs": 0})
    ccfa.learn(place / "model", place / "first", asked)
    (place / "some.safetensors").unlink()
    for folder in (place / "second", draw(place / "third", "f")):
        model = ccfa.learn(place / "model", folder)
        found = model.classifier.network.backbone.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def test_a_model_inside_its_photos_is_refused(place):
    with pytest.raises(UsageError, match="elsewhere"):
        ccfa.learn(place / "first" / "model", place / "first", QUICK)
    assert not (place / "first" / "model").exists()


def test_photos_of_another_class_are_named(place):
    ccfa.learn(place / "model", place / "first", READ_OUT)
    (place / "moved").mkdir()
    shutil.copytree(place / "first" / "a", place / "moved" / "b")
    shutil.copytree(place / "first" / "c", place / "moved" / "f")
    shutil.copytree(place / "second" / "d", place / "moved" / "d")
    plan = plan_update(place / "model", place / "moved", Learning(more=True))
    assert plan.new == ("d",)
    notes = "\n".join(plan.notes)
    assert f"{place / 'moved' / 'b'}" in notes
    assert "as 'a'" in notes
    assert "f: left out" in notes


@pytest.mark.parametrize(
    "asked",
    [
        {"held_out": 1.0},
        {"held_out": float("nan")},
        {"keep": -1},
        {"seed": 2**32},
        {"memory": -1},
        {"memory_mb": float("nan")},
        {"image_size": 0},
    ],
)
def test_values_without_a_meaning_are_refused(place, asked):
    with pytest.raises(UsageError, match="must be"):
        plan_update(place / "model", place / "first", Learning(**asked))


def test_memory_cannot_begin_or_end(learned, place):
    with pytest.raises(UsageError, match="cannot stop"):
        plan_update(copied(learned, place), place / "second", Learning(memory=0))
    ccfa.learn(place / "other", place / "first", READ_OUT)
    with pytest.raises(UsageError, match="cannot begin"):
        plan_update(place / "other", place / "second", Learning(memory=3))


def test_nothing_to_learn_is_an_error(learned, place):
    with pytest.raises(UsageError, match="--more"):
        plan_update(copied(learned, place), place / "first", Learning())


def test_more_photos_alone_are_refused_where_nothing_can_learn_them(learned, place):
    with pytest.raises(UsageError, match="new class"):
        plan_update(copied(learned, place), draw(place / "others", "ab", seed=9), Learning(more=True))


def test_more_photos_are_refused_where_exemplars_are_learned_alone(place):
    ccfa.learn(place / "model", place / "first", Learning(method="gdumb", options=SHORT, image_size=SIZE, memory=2))
    draw(place / "second", "a", seed=9)
    with pytest.raises(UsageError, match="exemplars alone"):
        plan_update(place / "model", place / "second", Learning(more=True))


@pytest.mark.parametrize(
    "asked", [{"method": "Replay"}, {"seed": 0}, {"options": {"epochs": 3, "lr": 0.1, "backbone": "Small"}}]
)
def test_what_a_model_has_already_may_be_repeated(learned, place, asked):
    assert plan_update(copied(learned, place), place / "second", Learning(**asked)).new == ("d", "e")


@pytest.mark.parametrize(
    "asked", [{"method": "podnet"}, {"image_size": 9}, {"seed": 4}, {"options": {"epochs": 9}}, {"ccfa": True}]
)
def test_another_model_is_not_made_of_an_existing_one(learned, place, asked):
    with pytest.raises(UsageError, match="would make another"):
        plan_update(copied(learned, place), place / "second", Learning(**asked))


def test_failed_learning_changes_nothing(learned, place, monkeypatch):
    path = copied(learned, place)
    before = contents(path)

    def fail(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(updating, "new_state", fail)
    with pytest.raises(KeyboardInterrupt):
        ccfa.learn(path, place / "second")
    assert contents(path) == before


def test_plan_writes_nothing(place):
    plan = plan_update(place / "model", place / "first", QUICK)
    assert estimated_seconds(plan) > 0
    assert not (place / "model").exists()


@pytest.mark.parametrize(("epochs", "compiles"), [(3, False), (10_000, True)])
def test_only_long_training_is_compiled(place, monkeypatch, epochs, compiles):
    plan = plan_update(
        place / "model", place / "first", replace(QUICK, options={**QUICK.options, "epochs": str(epochs)})
    )
    as_on_a_gpu = torch.device("cpu"), Acceleration("float32", compile=True)
    monkeypatch.setattr(updating, "acceleration_of", lambda running: as_on_a_gpu)
    assert updating._learner(plan, Running(), None).acceleration.compile == compiles


def test_memory_in_megabytes(place):
    asked = replace(QUICK, memory=None, memory_mb=20 * 3 * SIZE * SIZE / 1e6)
    model = ccfa.learn(place / "model", place / "first", asked)
    assert len(model.state.memory.labels) == 15  # five each; four fifths of 20 images
    assert len(model.state.held_out.labels) <= 4
    model = ccfa.learn(place / "model", place / "second")
    assert len(model.state.memory.labels) == 15
    with pytest.raises(UsageError, match="fewer than one"):
        plan_update(place / "other", place / "first", replace(asked, memory_mb=1e-6))


def test_method_without_memory_stores_no_image(place):
    asked = Learning(method="finetune", options=dict(QUICK.options), image_size=SIZE)
    model = ccfa.learn(place / "model", place / "first", asked)
    assert not list((place / "model" / "exemplars").rglob("*.png"))
    model = model.learn(place / "second")
    assert len(model.class_names) == 5


def test_left_out_exemplars_are_missed(learned, place):
    path = copied(learned, place)
    shutil.rmtree(path / "exemplars")
    assert ccfa.load_model(path).predict(place / "first" / "a")
    with pytest.raises(UsageError, match="left out"):
        ccfa.learn(path, place / "second")


def test_class_of_one_photo_is_learned(place):
    draw(place / "first", "x", count=1)
    model = ccfa.learn(place / "model", place / "first", QUICK)
    one = model.config["classes"][-1]
    assert (one["images"], one["held_out"], one["accuracy"]) == (1, 0, None)
    assert any("one image only" in note for note in plan_update(place / "m2", place / "first", QUICK).notes)


def test_duplicates_are_learned_once(place):
    shutil.copy(place / "first/a/00.png", place / "first/a/copy.png")
    assert ccfa.learn(place / "model", place / "first", QUICK).config["classes"][0]["images"] == 8


def test_nearest_mean_is_stored(place):
    asked = Learning(
        method="icarl", options={"backbone": "small", "epochs": 2, "batch_size": 8}, image_size=SIZE, memory=4
    )
    model = ccfa.learn(place / "model", place / "first", asked)
    assert model.rule == "nearest_mean"
    shutil.rmtree(place / "model" / "exemplars")
    photos = sorted((place / "first/b").iterdir())
    assert [one.name for one in ccfa.load_model(place / "model").predict(photos)] == [
        one.name for one in model.predict(photos)
    ]


def test_empty_folder_is_an_error(place):
    (place / "empty").mkdir()
    with pytest.raises(DataError):
        plan_update(place / "model", place / "empty", QUICK)


@pytest.mark.soak
def test_learn_killed_a_hundred_times(learned, place):
    """At random moments: the model always loads, and is the old or the new one."""
    chance = random.Random(0)
    old = contents(learned)
    began = time.monotonic()
    assert wait(started(lambda: ccfa.learn(copied(learned, place), place / "second"))) == 0
    length = time.monotonic() - began
    new = ccfa.load_model(place / "model").state
    ends = []
    for number in range(100):
        path = place / f"killed-{number}" / "model"
        copied(learned, path.parent)
        process = started(lambda path=path: ccfa.learn(path, place / "second"))
        # Half of the kills are near the end, where the new model is written.
        time.sleep(length * (chance.uniform(0, 1.1) if number % 2 else chance.uniform(0.85, 1.05)))
        os.kill(process, signal.SIGKILL)
        wait(process)
        state = ccfa.load_model(path).state
        ends.append(len(state.config["classes"]))
        if ends[-1] == 3:
            assert {name: old[name] for name in old if name != ".lock"}.items() <= contents(path).items()
        else:
            assert all(torch.equal(tensor, new.network[name]) for name, tensor in state.network.items())
            assert torch.equal(state.memory.images, new.memory.images)
        assert len(ccfa.learn(path, draw(place / "third", "f")).class_names) == ends[-1] + 1
        shutil.rmtree(path.parent)
    print(f"{ends.count(3)} old, {ends.count(5)} new")
    assert {3, 5} == set(ends)


def test_read_out_measures_old_classes_without_their_photos(place):
    ccfa.learn(place / "model", place / "first", READ_OUT)
    assert not list((place / "model" / "exemplars").rglob("*.png"))
    model = ccfa.learn(place / "model", place / "second")
    assert model.config["updates"][-1]["held_out"] == 10
    assert [one["held_out"] for one in model.config["classes"]] == [2] * 5
    assert model.evaluate(place / "first").accuracy > 0.8


@pytest.mark.parametrize("asked", [READ_OUT, replace(READ_OUT, method="fecam", options=SHORT)], ids=["ranpac", "fecam"])
def test_read_out_learns_more_photos_alone(place, asked):
    before = ccfa.learn(place / "model", place / "first", asked)
    more = draw(place / "more", "ab", count=10, seed=3)
    after = ccfa.learn(place / "model", more, Learning(more=True))
    assert after.class_names == before.class_names
    assert [one["images"] for one in after.config["classes"]] == [16, 16, 8]
    assert after.config["updates"][-1]["more_of"] == ["a", "b"]
    assert not torch.equal(after.state.network["head.new"], before.state.network["head.new"])
    assert len(ccfa.learn(place / "model", place / "second").class_names) == 5


def test_a_class_that_cannot_be_learned_alone_is_refused(place):
    asked = Learning(method="lwf", options=dict(QUICK.options), image_size=SIZE)
    ccfa.learn(place / "model", place / "first", asked)
    alone = draw(place / "alone", "d")
    with pytest.raises(UsageError, match="'d'"):
        plan_update(place / "model", alone, Learning())
    assert plan_update(place / "model", place / "second", Learning()).new == ("d", "e")
    assert plan_update(place / "other", alone, asked).new == ("d",)


@pytest.mark.parametrize(("method", "options"), [("ranpac", {"projection": 50}), ("fetril", {"head_epochs": 2})])
def test_given_weights_stay_where_the_backbone_is_frozen(place, method, options):
    given = BACKBONES["small"](3).state_dict()
    save_file(given, place / "backbone.safetensors")
    asked = Learning(method=method, options=options, backbone="small", image_size=SIZE)
    asked = replace(asked, weights=str(place / "backbone.safetensors"))
    network = ccfa.learn(place / "model", place / "first", asked).state.network
    assert all(torch.equal(tensor, network[f"backbone.{name}"]) for name, tensor in given.items())
    for other, epochs in ((replace(asked, options={"epochs": 3}), "3"), (replace(asked, weights=None), None)):
        assert plan_update(place / "other", place / "first", other).experiment.options.get("epochs") == epochs


def test_given_weights_are_trained_where_they_are_not_frozen(place):
    save_file(BACKBONES["small"](3).state_dict(), place / "backbone.safetensors")
    asked = Learning(method="finetune", backbone="small", weights=str(place / "backbone.safetensors"), image_size=SIZE)
    assert "epochs" not in plan_update(place / "model", place / "first", asked).experiment.options


def test_names_in_other_letters_are_the_same_class(place):
    """A Mac writes umlauts as two letters."""
    for form, count in (("NFC", 6), ("NFD", 12)):
        folder = draw(place / form, "ab", count=count)
        (folder / "a").rename(folder / unicodedata.normalize(form, "\u00c4pfel"))
    ccfa.learn(place / "model", place / "NFC", READ_OUT)
    plan = plan_update(place / "model", place / "NFD", Learning(more=True))
    assert (plan.new, plan.more) == ((), ("b", "\u00c4pfel"))
    draw(place / "case", "B")
    assert any(
        "'b', which the model knows" in note for note in plan_update(place / "model", place / "case", Learning()).notes
    )
