from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

import ccfa.learning.learner as loop
from ccfa.augmentation import CCFA
from ccfa.data import Stage, Transforms
from ccfa.errors import CcfaError, DivergedError, ModelError, UsageError
from ccfa.learning import Learner
from ccfa.learning.loop import optimise
from ccfa.learning.step import step_losses
from ccfa.learning.streams import own_stream
from ccfa.methods import Budget, with_augmentation
from ccfa.methods.selection import herd
from toys import STAGES, TOY, Recorder, begun, learned, rows_of, tiny, toy_images

TEST = toy_images(seed=1, per_class=5)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


@pytest.mark.parametrize("stage", [STAGES[1], STAGES[2], Stage(0, 2, 4), Stage(1, 0, 2)])
def test_the_first_stage_comes_first(stage):
    with pytest.raises(UsageError, match="learn the stages in order"):
        Learner(tiny("finetune"), toy_images()).learn(stage)


def test_no_stage_twice_and_none_left_out():
    learner = learned(tiny("finetune"), 1)
    for stage in (STAGES[0], STAGES[2], Stage(1, 1, 3)):
        with pytest.raises(UsageError, match="does not follow"):
            learner.learn(stage)
    learner.learn(STAGES[1])
    assert learner.stage == STAGES[1]


def test_observer_is_told_every_step_and_epoch():
    recorder = Recorder()
    learned(tiny("podnet"), 2, observer=recorder)
    told = [(p.stage.index, p.phase, p.epoch, p.num_epochs, p.num_batches) for p, _, _ in recorder.epochs]
    assert told == [
        *((0, "main", epoch, 2, 2) for epoch in range(2)),  # 24 rows
        *((1, "main", epoch, 2, 2) for epoch in range(2)),  # 24 new and 6 exemplars
        *((1, "balanced", epoch, 2, 1) for epoch in range(2)),  # 12 exemplars
    ]
    assert len(recorder.batches) == 10
    assert [p.batch for p, _ in recorder.batches[:4]] == [0, 1, 0, 1]
    assert {p.batch_size for p, _ in recorder.batches if p.phase == "main"} == {16}
    assert {p.batch_size for p, _ in recorder.batches if p.phase == "balanced"} == {12}
    for progress, means, _ in recorder.epochs:
        steps = [losses for p, losses in recorder.batches if p[:3] == progress[:3]]
        for name, mean in means.items():
            assert mean == pytest.approx(np.mean([losses[name] for losses in steps]), rel=1e-5)


def test_terms_act_from_the_second_stage_on():
    recorder = Recorder()
    learned(tiny("podnet"), 2, observer=recorder)
    names = {progress.stage.index: set(losses) for progress, losses in recorder.batches}
    assert names[0] == {"classification", "loss"}
    assert names[1] == {"classification", "loss", "pod-flat", "pod-spatial"}


def test_augmented_features_never_touch_the_terms():
    def losses(method):
        learner = begun(method, STAGES[1])
        learner.network.train()
        main = method.phases(STAGES[1])[0]
        return step_losses(learner, learner.training_rows()[:16], main, learner.generator("one step"))

    without, with_ccfa = losses(tiny("podnet")), losses(with_augmentation(tiny("podnet"), CCFA(count=2)))
    assert torch.equal(without["pod-flat"], with_ccfa["pod-flat"])
    assert torch.equal(without["pod-spatial"], with_ccfa["pod-spatial"])
    assert not torch.equal(without["classification"], with_ccfa["classification"])


@pytest.mark.parametrize(
    ("augmentation", "changes"), [(CCFA(count=0), False), (CCFA(phases=()), False), (CCFA(), True)]
)
def test_an_augmentation_without_copies_or_phases_changes_nothing(augmentation, changes):
    plain = learned(tiny("podnet"), 2).network.state_dict()
    augmented = learned(with_augmentation(tiny("podnet"), augmentation), 2).network.state_dict()
    assert all(torch.equal(plain[key], augmented[key]) for key in plain) != changes


def test_the_first_stage_is_the_same_with_ccfa():
    plain, augmented = learned(tiny("ucir"), 1), learned(with_augmentation(tiny("ucir"), CCFA()), 1)
    for old, new in zip(plain.network.parameters(), augmented.network.parameters(), strict=True):
        assert torch.equal(old, new)


def test_two_seeds_are_kept_apart():
    def start(**seeds):
        recorder = Recorder()
        learner = Learner(tiny("replay"), toy_images(), observer=recorder, **seeds)
        conv = learner.network.backbone.levels[0][0].weight.detach().clone()
        learner.learn(STAGES[0])
        return conv, learner.generator("batches", 0, 0).initial_seed(), recorder.batches[0][1]["loss"]

    usual, same, other_batches, other_start = (
        start(seed=0),
        start(seed=0, batch_seed=0),
        start(seed=0, batch_seed=5),
        start(seed=5, batch_seed=0),
    )
    assert torch.equal(usual[0], same[0])
    assert usual[1:] == same[1:]
    assert torch.equal(usual[0], other_batches[0])
    assert usual[1] != other_batches[1]
    assert usual[2] != other_batches[2]
    assert not torch.equal(usual[0], other_start[0])
    assert usual[1] == other_start[1]


def test_the_global_random_state_is_neither_read_nor_moved():
    torch.manual_seed(1)
    first = learned(tiny("podnet"), 2).network.state_dict()
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    second = learned(tiny("podnet"), 2).network.state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_prediction_does_not_depend_on_its_batches(monkeypatch):
    learner = learned(tiny("podnet"), 2)
    whole = learner.predict(TEST.images)
    state = {key: value.clone() for key, value in learner.network.state_dict().items()}
    monkeypatch.setattr(loop, "EVALUATION_BATCH", 7)
    assert torch.equal(learner.predict(TEST.images), whole)
    assert torch.equal(torch.cat([learner.predict(TEST.images[:1]), learner.predict(TEST.images[1:])]), whole)
    assert all(torch.equal(state[key], value) for key, value in learner.network.state_dict().items())


def test_prediction_is_the_largest_logit():
    learner = learned(tiny("podnet"), 2)
    pixels = TEST.images.numpy().astype(np.float32) / 255
    with torch.no_grad():
        logits = learner.network.eval()(torch.from_numpy((pixels - 0.5) / 0.25)).numpy()
    assert learner.predict(TEST.images).tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("flip", [True, False])
def test_nearest_mean_against_numpy(flip):
    method = replace(tiny("replay"), transforms=replace(TOY, flip=flip))
    learner = learned(method, 2)

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
    with pytest.raises(UsageError, match="finetune keeps no exemplars"):
        learned(tiny("finetune"), 1).predict_by_nearest_mean(TEST.images)


def test_rows_of_a_stage():
    learner = begun(tiny("podnet"), STAGES[1])
    labels = learner.train.labels
    assert [labels[rows].unique().tolist() for rows in learner.new_classes()] == [[2], [3]]
    assert torch.bincount(labels[learner.training_rows()], minlength=6).tolist() == [3, 3, 12, 12, 0, 0]
    assert torch.bincount(labels[learner.balanced_rows()], minlength=6).tolist() == [3, 3, 3, 3, 0, 0]


def test_a_shared_memory_keeps_the_balanced_rows_balanced():
    learner = begun(tiny("podnet", Budget(total=14)), STAGES[1])
    counts = torch.bincount(learner.train.labels[learner.training_rows()], minlength=6)
    assert counts.tolist() == [7, 7, 12, 12, 0, 0]
    balanced = torch.bincount(learner.train.labels[learner.balanced_rows()], minlength=6)
    assert balanced.tolist() == [3, 3, 3, 3, 0, 0]


def test_stored_exemplars_are_chosen_with_the_final_network():
    learner = learned(tiny("podnet"), 2)
    for label in (2, 3):
        rows = learner.train.rows(label, label + 1)
        (picked,) = herd([learner.embeddings(rows)], 3, torch.Generator())
        assert learner.memory.classes[label].tolist() == rows[picked].tolist()


def test_previous_is_the_network_of_the_stage_before():
    learner = learned(tiny("podnet"), 1)
    state = {key: value.clone() for key, value in learner.network.state_dict().items()}
    phases_seen = []
    method = replace(learner.method, prepare=lambda view: phases_seen.append(view.previous))
    learner.method = method
    learner.learn(STAGES[1])
    (previous,) = phases_seen
    assert not previous.training
    assert not any(parameter.requires_grad for parameter in previous.parameters())
    assert all(torch.equal(state[key], value) for key, value in previous.state_dict().items())
    assert learner.previous is not previous


def test_divergence_is_an_error_that_says_where():
    method = tiny("finetune", lr=1e30)
    with pytest.raises(DivergedError, match=r"stage 1, phase main, epoch 1 of \d+, at a learning rate of 1e\+30"):
        Learner(method, toy_images()).learn(STAGES[0])


def test_batch_norm_is_left_alone_where_the_phase_says_so():
    def moved(train_batch_norm):
        method = tiny("podnet")
        balanced = replace(method.phases(STAGES[1])[1], train_batch_norm=train_batch_norm)
        learner = begun(method, STAGES[1])
        before = {key: value.clone() for key, value in learner.network.named_buffers()}
        optimise(learner, balanced, 1)
        return [key for key, value in learner.network.named_buffers() if not torch.equal(value, before[key])]

    assert moved(train_batch_norm=False) == []
    assert len(moved(train_batch_norm=True)) == 3 * 7  # mean, variance, count of each of small's batch norms


def test_transforms_for_other_channels_are_refused():
    method = replace(tiny("finetune"), transforms=Transforms((0.5,), (0.5,)))
    with pytest.raises(UsageError, match="3 channels"):
        Learner(method, toy_images()).learn(STAGES[0])


def test_no_images_have_no_predictions():
    predicted = learned(tiny("podnet"), 1).predict(TEST.images[:0])
    assert predicted.shape == (0,)
    assert predicted.dtype == torch.int64


def test_there_is_nothing_to_predict_before_the_first_stage():
    with pytest.raises(UsageError, match="learn"):
        Learner(tiny("podnet"), toy_images()).predict(TEST.images)


def test_a_stage_must_have_training_images():
    learner = learned(tiny("replay"))
    with pytest.raises(CcfaError, match="6"):
        learner.learn(Stage(3, 6, 8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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


def test_predictions_are_of_uint8_images():
    learner = Learner(tiny("podnet", epochs=1), toy_images(), device="cpu")
    images = toy_images(seed=1).images
    with pytest.raises(UsageError, match="learn a stage first"):
        learner.predict(images)
    learner.learn(STAGES[0])
    expected = learner.predict(images)
    assert torch.equal(learner.predict(images.numpy()), expected)
    for wrong in (
        images.float() / 255,
        images.to(torch.int8),
        images.bool(),
        images[:, :1],
        images[0],
        images.numpy() / 255,
    ):
        with pytest.raises(UsageError, match="uint8"):
            learner.predict(wrong)


def test_evaluation_counts_seen_classes():
    learner = Learner(tiny("podnet", epochs=1), toy_images(), device="cpu")
    test = toy_images(seed=1)
    learner.learn(STAGES[0])
    assert learner.evaluate(test).keys() == {"accuracy", "new_accuracy"}
    learner.learn(STAGES[1])
    found = learner.evaluate(test)
    seen = test.subset(test.rows(0, STAGES[1].num_seen))
    right = (learner.predict(seen.images) == seen.labels).float()
    old = seen.labels < STAGES[1].num_old
    assert found["accuracy"] == pytest.approx(float(right.mean()))
    assert found["old_accuracy"] == pytest.approx(float(right[old].mean()))
    assert found["new_accuracy"] == pytest.approx(float(right[~old].mean()))


def test_a_saved_learner_goes_on_as_if_nothing_had_happened(tmp_path):
    one, other = (Learner(tiny("podnet", epochs=1), toy_images(), seed=3, device="cpu") for _ in range(2))
    one.learn(STAGES[0])
    one.save(tmp_path / "learner.safetensors")
    other.load(tmp_path / "learner.safetensors")
    for learner in (one, other):
        learner.learn(STAGES[1])
    for name, tensor in one.network.state_dict().items():
        assert torch.equal(tensor, other.network.state_dict()[name])
    with pytest.raises(ModelError, match="seed 3, not 4"):
        Learner(tiny("podnet", epochs=1), toy_images(), seed=4, device="cpu").load(tmp_path / "learner.safetensors")


def test_tiny_images_use_one_thread(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    Learner(tiny("podnet", epochs=1), toy_images(), device="cpu")
    assert torch.get_num_threads() == 1
