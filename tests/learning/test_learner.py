"""Learning stage by stage, predicting, and the memory of exemplars."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import ccfa.learning.learner as module
from ccfa.augmentation import CCFA
from ccfa.data import Stage, Transforms, parse_scenario
from ccfa.errors import DataError, DivergedError, ModelError, Notice, UsageError
from ccfa.files import write_tensors
from ccfa.kernels.graphs import own_stream
from ccfa.learning import Learner, Observer
from ccfa.learning.loop import optimise
from ccfa.learning.step import step_losses
from ccfa.methods import METHODS, Budget, with_augmentation
from ccfa.methods.method import EVERYTHING, NOTHING
from ccfa.methods.parts import herd
from toys import STAGES, TOY, Recorder, begun, learned, rows_of, tiny, toy_images

TEST = toy_images(seed=1, per_class=5)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def same_weights(one: Learner, other: Learner) -> bool:
    left, right = one.network.state_dict(), other.network.state_dict()
    return all(torch.equal(left[name], right[name]) for name in left)


def test_stages_come_in_order_and_once():
    learner = Learner(tiny("finetune", epochs=1), toy_images())
    for wrong in (STAGES[1], STAGES[2], Stage(0, 2, 4), Stage(1, 0, 2)):
        with pytest.raises(UsageError, match="does not follow"):
            learner.learn(wrong)
    learner.learn(STAGES[0])
    for wrong in (STAGES[0], STAGES[2], Stage(1, 1, 3)):
        with pytest.raises(UsageError, match="does not follow"):
            learner.learn(wrong)
    with pytest.raises(UsageError, match="6 classes"):
        learner.learn(Stage(1, 2, 8))
    learner.learn(STAGES[1])
    assert learner.stage == STAGES[1]


@pytest.fixture(scope="module")
def observed():
    recorder = Recorder()
    return learned(tiny("podnet"), 2, observer=recorder), recorder


def test_observers_see_every_step_and_epoch(observed):
    _, recorder = observed
    epochs = [(p.stage.index, p.phase, p.epoch, p.num_epochs, p.num_batches) for p, _, _ in recorder.epochs]
    assert epochs == [
        *((0, "main", epoch, 2, 2) for epoch in range(2)),  # 24 rows
        *((1, "main", epoch, 2, 2) for epoch in range(2)),  # 24 new and 6 exemplars
        *((1, "balanced", epoch, 2, 1) for epoch in range(2)),  # 12 exemplars
    ]
    assert [(p.batch, p.batch_size) for p, _ in recorder.batches] == [(0, 16), (1, 16)] * 4 + [(0, 12)] * 2
    for progress, means, _ in recorder.epochs:
        steps = [losses for p, losses in recorder.batches if p[:3] == progress[:3]]
        for name, mean in means.items():
            assert mean == pytest.approx(np.mean([losses[name] for losses in steps]), rel=1e-5)


def test_terms_act_from_the_second_stage_on(observed):
    names = {progress.stage.index: set(losses) for progress, losses in observed[1].batches}
    assert names[0] == {"classification", "loss"}
    assert names[1] == {"classification", "loss", "pod-flat", "pod-spatial"}


def test_augmented_features_never_touch_the_terms():
    def losses(method):
        learner = begun(method, STAGES[1])
        learner.network.train()
        main = method.phases(STAGES[1])[0]
        return step_losses(learner, learner.training_rows()[:16], main, learner.generator("one step")).read()

    without, with_ccfa = losses(tiny("podnet")), losses(with_augmentation(tiny("podnet"), CCFA(count=2)))
    changed = [name for name in without if not torch.equal(without[name], with_ccfa[name])]
    assert changed == ["classification", "loss"]


@pytest.mark.parametrize(
    ("augmentation", "changes"), [(CCFA(count=0), False), (CCFA(phases=()), False), (CCFA(), True)]
)
def test_ccfa_without_copies_or_phases_changes_nothing(observed, augmentation, changes):
    augmented = learned(with_augmentation(tiny("podnet"), augmentation), 2)
    assert same_weights(observed[0], augmented) != changes


def test_initialisation_and_batches_have_seeds_of_their_own():
    def start(**seeds):
        recorder = Recorder()
        learner = Learner(tiny("finetune", epochs=1), toy_images(), observer=recorder, **seeds)
        weight = learner.network.backbone.levels[0][0].weight.flatten()[0].item()
        learner.learn(STAGES[0])
        return weight, learner.generator("batches", 0, 0).initial_seed(), recorder.batches[0][1]["loss"]

    usual, same = start(seed=0), start(seed=0, batch_seed=0)
    other_batches, other_weights = start(seed=0, batch_seed=5), start(seed=5, batch_seed=0)
    assert usual == same
    assert [one == other for one, other in zip(usual, other_batches, strict=True)] == [True, False, False]
    assert [one == other for one, other in zip(usual, other_weights, strict=True)] == [False, True, False]


def test_torchs_generator_is_neither_read_nor_moved(observed):
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    assert same_weights(observed[0], learned(tiny("podnet"), 2))
    assert torch.equal(before, torch.random.get_rng_state())


def test_prediction_is_the_largest_logit_in_batches_of_any_size(observed, monkeypatch):
    learner, _ = observed
    pixels = TEST.images.numpy().astype(np.float32) / 255
    with torch.no_grad():
        logits = learner.network.eval()(torch.from_numpy((pixels - 0.5) / 0.25)).numpy()
    state = {key: value.clone() for key, value in learner.network.state_dict().items()}
    for size in (500, 7):
        monkeypatch.setattr(module, "EVALUATION_BATCH", size)
        assert learner.predict(TEST.images).tolist() == logits.argmax(axis=1).tolist()
    assert all(torch.equal(state[key], value) for key, value in learner.network.state_dict().items())
    assert learner.predict(TEST.images[:0]).shape == (0,)


def test_predictions_are_of_uint8_images(observed):
    learner, images = observed[0], TEST.images
    assert torch.equal(learner.predict(images.numpy()), learner.predict(images))
    for wrong in (images.float() / 255, images.to(torch.int8), images[:, :1], images[0], images.numpy() / 255):
        with pytest.raises(UsageError, match="uint8"):
            learner.predict(wrong)
    with pytest.raises(UsageError, match="learn a stage"):
        Learner(tiny("podnet"), toy_images()).predict(images)


@pytest.mark.parametrize("flip", [True, False])
def test_nearest_mean_is_numpys(flip):
    learner = learned(replace(tiny("replay", epochs=1), transforms=replace(TOY, flip=flip)), 2)

    def embed(images):
        pixels = torch.from_numpy((images.astype(np.float32) / 255 - 0.5) / 0.25)
        with torch.no_grad():
            return unit(learner.network.eval().backbone(pixels).embedding.numpy())

    train = learner.train.images.numpy()
    means = []
    for rows in rows_of(learner.memory.classes):
        views = [embed(train[rows])] + ([embed(train[rows][..., ::-1].copy())] if flip else [])
        means.append(unit(np.concatenate(views).mean(axis=0)))
    distances = np.linalg.norm(embed(TEST.images.numpy())[:, None] - np.stack(means), axis=2)
    assert learner.predict_by_nearest_mean(TEST.images).tolist() == distances.argmin(axis=1).tolist()


def test_nearest_mean_needs_exemplars():
    with pytest.raises(UsageError, match="finetune"):
        learned(tiny("finetune", epochs=1), 1).predict_by_nearest_mean(TEST.images)


def test_evaluation_counts_seen_classes(observed):
    learner, _ = observed
    seen = TEST.subset(TEST.rows(0, 4))
    right, old = (learner.predict(seen.images) == seen.labels).float(), seen.labels < 2
    expected = {"accuracy": right.mean(), "old_accuracy": right[old].mean(), "new_accuracy": right[~old].mean()}
    assert learner.evaluate(TEST) == pytest.approx({name: float(value) for name, value in expected.items()})
    first = learned(tiny("finetune", epochs=1), 1)
    assert first.evaluate(TEST).keys() == {"accuracy", "new_accuracy"}


@pytest.mark.parametrize(("budget", "old"), [(Budget(per_class=3), 3), (Budget(total=14), 7)])
def test_rows_of_a_stage(budget, old):
    learner = begun(tiny("podnet", budget, epochs=1), STAGES[1])
    labels = learner.train.labels
    assert [labels[rows].unique().tolist() for rows in learner.new_classes()] == [[2], [3]]
    assert torch.bincount(labels[learner.training_rows()], minlength=6).tolist() == [old, old, 12, 12, 0, 0]
    assert torch.bincount(labels[learner.balanced_rows()], minlength=6).tolist() == [3, 3, 3, 3, 0, 0]


@pytest.mark.parametrize("name", ["podnet", "icarl"])
def test_equal_stages_share_one_memory(name):
    learner = Learner(tiny(name, Budget(total=60), epochs=1), toy_images(20, 8))
    first, second = parse_scenario("B0-inc10", 20)
    learner.learn(first)
    best = [rows[:3] for rows in rows_of(learner.memory.classes)]
    assert [len(rows) for rows in learner.memory.classes] == [6] * 10
    learner.learn(second)
    assert [len(rows) for rows in learner.memory.classes] == [3] * 20
    assert rows_of(learner.memory.classes)[:10] == best
    assert learner.evaluate(toy_images(20, 2, seed=1)).keys() == {"accuracy", "new_accuracy", "old_accuracy"}


def test_exemplars_are_chosen_with_the_final_network(observed):
    learner, _ = observed
    for label in (2, 3):
        rows = learner.train.rows(label, label + 1)
        (picked,) = herd([learner.embeddings(rows)], 3, torch.Generator())
        assert learner.memory.classes[label].tolist() == rows[picked].tolist()


def test_previous_is_the_network_of_the_stage_before():
    learner, seen = learned(tiny("podnet", epochs=1), 1), []
    state = {key: value.clone() for key, value in learner.network.state_dict().items()}
    learner.method = replace(learner.method, prepare=lambda view: seen.append(view.previous))
    learner.learn(STAGES[1])
    (previous,) = seen
    assert not previous.training
    assert not any(parameter.requires_grad for parameter in previous.parameters())
    assert all(torch.equal(state[key], value) for key, value in previous.state_dict().items())
    assert learner.previous is not previous


def test_divergence_says_where():
    with pytest.raises(DivergedError, match=r"stage 1, phase main, epoch 1 .*1e\+30"):
        Learner(tiny("finetune", lr=1e30), toy_images()).learn(STAGES[0])


@pytest.mark.parametrize(("train", "num_changed"), [(False, 0), (True, 3 * 7)])
def test_phases_decide_about_batch_norm(train, num_changed):
    learner = begun(tiny("podnet", epochs=1), STAGES[1])
    before = {key: value.clone() for key, value in learner.network.named_buffers()}
    optimise(learner, replace(learner.method.phases(STAGES[1])[1], train_batch_norm=train), 1)
    changed = [key for key, value in learner.network.named_buffers() if not torch.equal(value, before[key])]
    assert len(changed) == num_changed  # mean, variance and count of each of small's batch norms


def test_transforms_for_other_channels_are_refused():
    method = replace(tiny("finetune"), transforms=Transforms((0.5,), (0.5,)))
    with pytest.raises(UsageError, match="3 channels"):
        Learner(method, toy_images()).learn(STAGES[0])


@pytest.mark.gpu
def test_learners_in_threads_share_one_copy_on_the_device():
    device, images = torch.device("cuda"), toy_images()

    def learner(order):
        with own_stream(device):
            return Learner(tiny("finetune"), images.reorder(order), device=device)

    with ThreadPoolExecutor(4) as pool:
        learners = list(pool.map(learner, [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0)] * 2))
    assert len({one.train.images.data_ptr() for one in learners}) == 1
    assert torch.equal(learners[0].train.images.cpu(), images.images)
    assert len({one.train.fingerprint for one in learners}) == 1


def test_saved_learners_continue_exactly(tmp_path):
    one, other = (Learner(tiny("podnet", epochs=1), toy_images(), seed=3) for _ in range(2))
    one.learn(STAGES[0])
    one.save(tmp_path / "learner.safetensors")
    other.load(tmp_path / "learner.safetensors")
    for learner in (one, other):
        learner.learn(STAGES[1])
    assert same_weights(one, other)
    with pytest.raises(ModelError, match="seed 3, not 4"):
        Learner(tiny("podnet", epochs=1), toy_images(), seed=4).load(tmp_path / "learner.safetensors")
    for images in (toy_images(seed=1), toy_images().reorder([1, 0, 2, 3, 4, 5])):
        with pytest.raises(ModelError, match=r"other (images|classes)"):
            Learner(tiny("podnet", epochs=1), images, seed=3).load(tmp_path / "learner.safetensors")


def test_a_file_of_something_else_is_refused(tmp_path):
    write_tensors(tmp_path / "other", {"weight": torch.zeros(1)}, {"first_stage": "a"})
    with pytest.raises(ModelError, match="method None, not 'podnet'"):
        Learner(tiny("podnet"), toy_images()).load(tmp_path / "other")


class Breaking(Observer):
    """An observer that saves the learner in the second batch of a stage, and then breaks off."""

    def __init__(self, path):
        self.path, self.learner, self.stage, self.batch = path, None, None, 1

    def on_batch(self, progress, losses):
        if progress.stage == self.stage and progress.batch == self.batch:
            if self.batch == 1:
                self.learner.save(self.path)
            raise KeyboardInterrupt


def test_a_stage_that_broke_off_is_continued_from_a_file_or_not_at_all(tmp_path):
    breaking = Breaking(tmp_path / "midway")
    learner = breaking.learner = Learner(tiny("podnet", epochs=1), toy_images(), observer=breaking)
    learner.learn(STAGES[0])
    breaking.stage = STAGES[1]
    with pytest.raises(KeyboardInterrupt):
        learner.learn(STAGES[1])
    for stage in STAGES[1:]:
        with pytest.raises(UsageError, match="not learned to its end"):
            learner.learn(stage)
    with pytest.raises(UsageError, match="save between"):
        learner.save(tmp_path / "broken")
    learner.load(tmp_path / "midway")
    with pytest.raises(UsageError, match="was interrupted"):
        learner.learn(STAGES[2])
    with pytest.raises(UsageError, match="save between"):
        learner.save(tmp_path / "broken")  # it would hold no phase
    breaking.batch = 0
    with pytest.raises(KeyboardInterrupt):
        learner.learn(STAGES[1])
    with pytest.raises(UsageError, match="not learned to its end"):
        learner.learn(STAGES[1])
    breaking.stage = None
    learner.load(tmp_path / "midway")
    learner.learn(STAGES[1])
    learner.save(tmp_path / "whole")
    again = Learner(tiny("podnet", epochs=1), toy_images())
    again.load(tmp_path / "whole")
    again.learn(STAGES[2])
    assert same_weights(again, learned(tiny("podnet", epochs=1), 3))


@pytest.mark.parametrize("name", METHODS)
def test_a_stage_that_failed_leaves_nothing_behind_when_a_file_is_loaded(name, tmp_path, monkeypatch):
    learner = learned(tiny(name, epochs=1), 1)
    learner.save(tmp_path / "learner")
    with monkeypatch.context() as patch:
        patch.setattr(learner, "select_new_exemplars", Mock(side_effect=MemoryError))  # the terms are concluded then
        with pytest.raises(MemoryError):
            learner.learn(STAGES[1])
    learner.load(tmp_path / "learner")
    for stage in STAGES[1:]:
        learner.learn(stage)
    assert same_weights(learner, learned(tiny(name, epochs=1), 3))


def test_a_learner_that_was_restored_in_part_is_refused(tmp_path):
    learner = learned(tiny("ranpac"), 1)
    learner.save(tmp_path / "learner")
    other = Learner(tiny("ranpac", projection=30), toy_images())
    with pytest.raises(ModelError):
        other.load(tmp_path / "learner")
    with pytest.raises(UsageError, match="not learned to its end"):
        other.learn(STAGES[1])


def test_evaluation_is_of_the_same_classes(observed):
    learner, _ = observed
    with pytest.raises(UsageError, match="'class 1' in training and 'class 2'"):
        learner.evaluate(TEST.reorder([0, 2, 1, 3, 4, 5]))
    with pytest.raises(UsageError, match="no test images"):
        learner.evaluate(TEST.subset(TEST.rows(4, 6)))


@pytest.mark.parametrize(("name", "left"), [("slda", 0), ("bic", 1)])
def test_each_class_has_enough_images(name, left):
    images = toy_images()
    few = images.subset([*images.rows(0, 3).tolist(), *images.rows(3, 4)[:left].tolist(), *images.rows(4, 6).tolist()])
    learner = Learner(tiny(name, epochs=1), few)
    learner.learn(STAGES[0])
    with pytest.raises(DataError, match=f"'class 3' has {left}"):
        learner.learn(STAGES[1])


def test_plug_ins_for_phases_that_never_come_are_noticed():
    learner = learned(with_augmentation(tiny("podnet", epochs=1), CCFA(phases=("mian",))), 1)
    with pytest.warns(Notice, match="mian"):
        learner.learn(STAGES[1])


def test_a_stage_has_new_classes():
    with pytest.raises(UsageError, match="no new classes"):
        learned(tiny("podnet", epochs=1), 1).learn(Stage(1, 2, 2))


@pytest.mark.parametrize(
    ("budget", "num_seen", "expected"),
    [
        (Budget(per_class=20), 100, 20),
        (Budget(per_class=0), 10, 0),
        (Budget(total=2000), 60, 33),
        (Budget(total=5), 6, 0),
        (NOTHING, 10, 0),
    ],
)
def test_quota(budget, num_seen, expected):
    assert budget.quota(num_seen) == expected
    assert EVERYTHING.quota(1000) > 1_281_167
    for options in ({"per_class": -1}, {"total": -1}):
        with pytest.raises(UsageError, match="-1"):
            Budget(**options)


@pytest.mark.parametrize(("version", "noticed"), [("2.15.1+cu132", 0), ("2.16.0", 1), ("3.0.0.dev20270101", 1)])
def test_newer_torch_is_noticed_once(version, noticed, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", Notice)
        for _ in range(3):
            Learner(tiny("finetune"), toy_images())
    assert len(caught) == noticed
    assert all(version in str(warning.message) for warning in caught)
