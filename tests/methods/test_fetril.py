"""FeTrIL: features of old classes made from those of new ones, and a head that learns on a frozen backbone."""

from dataclasses import replace

import pytest
import torch

import reference
from ccfa.data import Transforms
from ccfa.deployment.updating import is_frozen
from ccfa.errors import UsageError
from ccfa.experiments.first_stage import first_stage_key
from ccfa.learning import Learner
from ccfa.learning.acceleration import Acceleration
from ccfa.learning.step import augmented
from ccfa.methods import METHODS, Phase
from ccfa.methods.fetril import real_samples, translated, translated_samples
from toy_runs import CPU, toy_resolved
from toys import STAGES, Recorder, begun, learned, moved_by, plugged, seeded, tiny, toy_images

STILL = Transforms((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))  # training images are as test images


def new_classes(*sizes, dim=5):
    return [torch.randn(size, dim, dtype=torch.float64, generator=seeded(size)) for size in sizes]


def accuracy(learner, first=0, last=6):
    test = toy_images(seed=1)
    rows = test.rows(first, last)
    return float((learner.predict(test.images[rows]) == test.labels[rows]).float().mean())


def test_old_features_are_translations():
    features, means = new_classes(7, 1, 4), torch.randn(6, 5, dtype=torch.float64, generator=seeded())
    found, expected = (
        translated(features, means),
        reference.translated([rows.numpy() for rows in features], means.numpy()),
    )
    assert len({len(rows) for rows in expected}) > 1  # old classes choose different new ones
    for rows, own in zip(found, expected, strict=True):
        assert rows.numpy() == pytest.approx(own, rel=1e-12)


def test_equal_means_change_nothing():
    features = new_classes(7, 9)
    means = torch.stack([rows.mean(dim=0) for rows in features])
    assert all(map(torch.equal, translated(features, means), features))


def test_translated_features_have_the_old_mean():
    means = torch.randn(3, 5, dtype=torch.float64, generator=seeded())
    for rows, mean in zip(translated(new_classes(7, 9), means), means, strict=True):
        torch.testing.assert_close(rows.mean(dim=0), mean)


def test_the_head_trains_as_published():
    (phase,) = METHODS["fetril"]().phases(STAGES[1])
    assert (phase.epochs, phase.lr, phase.batch_size, phase.weight_decay) == (50, 0.05, 128, 5e-4)
    rates = [phase.schedule(epoch, 50) for epoch in (0, 25, 49)]
    assert rates[0] == 1
    assert 0.4 < rates[1] < 0.6
    assert rates[2] < 0.01


def test_every_seen_class_has_samples():
    learner = begun(tiny("fetril", epochs=1), STAGES[2])
    samples, rows = translated_samples(learner), learner.train.rows(4, 6)
    assert samples.labels.flatten().bincount().tolist() == [12] * 6
    assert samples.weights.unique().tolist() == [1]
    real = samples.picked(torch.nonzero(samples.labels[:, 0] >= 4).flatten())
    order = learner.train.labels[rows].argsort(stable=True)
    assert torch.equal(real.features, learner.embeddings(rows[order]))
    assert all(map(torch.equal, real_samples(learner), real))


def test_more_images_of_old_classes_are_learned_as_well():
    learner = begun(tiny("fetril", epochs=1), STAGES[1])
    learner.additional = learner.train.rows(0, 1)[:3]
    assert translated_samples(learner).labels.flatten().bincount().tolist() == [15, 12, 12, 12]


def test_means_of_all_classes_are_remembered():
    learner = learned(tiny("fetril", epochs=1))
    means = [learner.embeddings(learner.train.rows(label, label + 1)).mean(dim=0) for label in range(6)]
    torch.testing.assert_close(learner.terms[0].means, torch.stack(means))
    assert not len(learner.memory)


@pytest.mark.parametrize("first", ["linear", "podnet"])
def test_later_stages_train_the_head_alone(first):
    learner = begun(tiny("fetril", epochs=1, first=first), STAGES[1])
    assert moved_by(learner, 0) == {"head.old", "head.new"}
    learner.conclude()
    initial = learner.initial.backbone.state_dict()
    assert all(torch.equal(tensor, initial[name]) for name, tensor in learner.network.backbone.state_dict().items())


@pytest.mark.parametrize("augmentation", ["nothing", "ccfa"])
def test_features_computed_once_train_as_the_frozen_backbone(augmentation):
    method = plugged(replace(tiny("fetril", translate=False), transforms=STILL), augmentation)
    (on_features,) = method.phases(STAGES[1])
    through_backbone = replace(on_features, samples=None, train_batch_norm=False)
    found = []
    for phase in (on_features, through_backbone):
        learner = begun(replace(method, phases=lambda stage: method.phases(STAGES[0])), STAGES[1])
        learner.observer = Recorder()
        learner.method = replace(method, phases=lambda stage, phase=phase: (phase,))
        learner.optimise()
        found.append(([losses["loss"] for _, losses in learner.observer.batches], learner.network.head.weights))
    (losses, weights), (expected, expected_weights) = found
    assert len(losses) == 4
    assert losses == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "other", "others"),
    [
        ({}, "ranpac", {}),
        ({"translate": False}, "fetril", {"head_lr": 1.0}),
        ({}, "fecam", {}),
        ({"first": "podnet"}, "podnet", {}),
        ({"first": "podnet"}, "afc", {}),
    ],
)
def test_first_stages_are_shared(options, other, others):
    own, shared = toy_resolved("fetril", **options), toy_resolved(other, **others)
    assert first_stage_key(own, Acceleration(), CPU) == first_stage_key(shared, Acceleration(), CPU)


def test_a_given_backbone_stays_as_it_is():
    method = METHODS["fetril"](backbone="small", transforms=STILL, epochs=0, head_epochs=10, batch_size=8)
    learner = Learner(method, toy_images())
    before = {name: tensor.clone() for name, tensor in learner.network.backbone.state_dict().items()}
    for stage in STAGES:
        learner.learn(stage)
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.network.backbone.state_dict().items())
    assert accuracy(learner) > 0.7  # chance is 0.17


def test_translation_keeps_old_classes():
    kept = [accuracy(learned(tiny("fetril", epochs=8, translate=translate), 2), 0, 2) for translate in (False, True)]
    assert kept[0] < kept[1]


def test_ccfa_alone_makes_old_features():
    learner = begun(plugged(tiny("fetril", translate=False), "ccfa"), STAGES[1])
    real = real_samples(learner)
    samples = augmented(learner, real, len(real.labels), learner.method.phases(STAGES[1])[0], seeded())
    assert real.labels.min() == 2
    assert len(samples.labels) == 3 * len(real.labels)
    assert samples.labels[len(real.labels) :].max() < 2


def test_a_head_without_epochs_is_refused():
    with pytest.raises(UsageError, match="head_epochs"):
        METHODS["fetril"](head_epochs=0)


def test_terms_need_images():
    with pytest.raises(UsageError, match="use_terms"):
        Phase("main", 1, 0.1, samples=real_samples)


def test_a_model_may_keep_embeddings():
    assert is_frozen(tiny("fetril"), STAGES[0])
    assert not is_frozen(tiny("finetune"), STAGES[0])
