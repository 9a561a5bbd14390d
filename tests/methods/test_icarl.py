import pytest
import torch
from torch import nn

import reference
from ccfa.augmentation import CCFA, Mixup, Samples
from ccfa.data import Stage
from ccfa.learning.step import step_losses
from ccfa.losses import binary_cross_entropy
from ccfa.methods import Step, with_augmentation, with_image_augmentation
from ccfa.methods.icarl import SigmoidDistillation
from ccfa.models import Features, LinearHead, Network
from toys import STAGES, begun, learned, tiny, toy_images

NUM_OLD, NUM_SEEN, NUM_ROWS, DIM = 3, 5, 7, 5
LABELS = torch.arange(NUM_ROWS) % NUM_SEEN


class Batch:
    """Heads with and without the new classes, and a batch as both backbones see it."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.previous_head, self.head = LinearHead(DIM, relu=True).double(), LinearHead(DIM, relu=True).double()
        self.previous_head.grow(NUM_OLD, random)
        self.head.grow(NUM_OLD, random)
        self.head.grow(NUM_SEEN - NUM_OLD, random)
        self.embedding, self.previous = torch.randn(2, NUM_ROWS, DIM, generator=random, dtype=torch.float64) * 3
        self.samples = Samples.of(self.head.embed(self.embedding), LABELS)
        self.teacher = self.previous_head(self.previous_head.embed(self.previous)).detach().numpy()

    def term(self, samples: Samples, share: float = 1.0) -> torch.Tensor:
        features, previous = Features((), self.embedding), Features((), self.previous)
        step = Step(
            stage=Stage(1, NUM_OLD, NUM_SEEN),
            labels=samples.labels[:, 0],
            features=features,
            previous_features=previous,
            generator=torch.Generator(),
            samples=samples,
            _total_weight=lambda: samples.weights.sum() / share,
            network=Network(nn.Identity(), self.head),
            previous=Network(nn.Identity(), self.previous_head),
        )
        return SigmoidDistillation()(step)


def test_criterion_and_term_are_the_published_loss():
    batch = Batch()
    logits = batch.head(batch.samples.features)
    total = binary_cross_entropy(logits, LABELS).mean() + batch.term(batch.samples)
    expected = reference.icarl_loss(logits.detach().numpy(), LABELS.numpy(), batch.teacher)
    assert total.item() == pytest.approx(expected, rel=1e-12)


def test_augmented_samples_leave_distillation_whole():
    batch = Batch()
    every = batch.samples.and_also(2 * batch.samples.features, LABELS.flip(0), torch.ones(7, dtype=torch.float64))
    logits = batch.head(every.features)
    l_cls = binary_cross_entropy(logits, every.labels[:, 0]).mean()
    total = l_cls + batch.term(batch.samples, share=0.5)
    numbers, labels, new_share = logits.detach().numpy(), LABELS.numpy(), 1 - NUM_OLD / NUM_SEEN
    distilled = (1 - new_share) * reference.icarl_loss(numbers[:NUM_ROWS, :NUM_OLD], labels, batch.teacher)
    new = new_share * reference.icarl_loss(numbers[:NUM_ROWS, NUM_OLD:], labels - NUM_OLD, None)
    augmented = reference.icarl_loss(numbers[NUM_ROWS:], LABELS.flip(0).numpy(), None)
    assert total.item() == pytest.approx(distilled + new / 2 + augmented / 2, rel=1e-12)


def test_mixed_labels_leave_l_cls_in_proportion():
    batch = Batch()
    both = torch.stack([LABELS, LABELS.flip(0)], dim=1)
    weights = torch.tensor([0.7, 0.3], dtype=torch.float64).expand(NUM_ROWS, 2)
    mixed = batch.term(Samples(batch.samples.features, both, weights))
    parts = [batch.term(Samples.of(batch.samples.features, label)).item() for label in both.unbind(dim=1)]
    assert mixed.item() == pytest.approx(0.7 * parts[0] + 0.3 * parts[1], rel=1e-12)


@pytest.mark.parametrize("plug_in", [None, "features", "images"])
def test_the_loss_of_a_step_is_never_negative(plug_in):
    method = tiny("icarl", epochs=1)
    if plug_in == "features":
        method = with_augmentation(method, CCFA(count=3, steps=2))
    if plug_in == "images":
        method = with_image_augmentation(method, Mixup())
    learner = begun(method, STAGES[1])
    with torch.no_grad():  # a previous network that is sure of itself pulls hardest
        learner.previous.head.new.mul_(100)
    losses = step_losses(
        learner, learner.training_rows(), method.phases(STAGES[1])[0], learner.generator("step")
    ).read()
    assert losses["loss"].item() >= 0
    assert set(losses) == {"classification", "distillation", "loss"}


def test_it_predicts_by_the_nearest_mean():
    learner, test = learned(tiny("icarl", epochs=1), 2), toy_images(seed=1)
    assert torch.equal(learner.predict(test.images), learner.predict_by_nearest_mean(test.images))
    embeddings = learner.embeddings(learner.memory.classes[0])
    assert embeddings.min() < 0  # herding and means use the embedding before the ReLU
