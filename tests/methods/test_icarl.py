import pytest
import torch

import reference_rivals as rivals
from ccfa.augmentation import CCFA, Mixup, Samples
from ccfa.data import Stage
from ccfa.learning.step import step_losses
from ccfa.losses.classification import binary_cross_entropy
from ccfa.losses.distillation import sigmoids_for_labels
from ccfa.methods import Step, with_augmentation, with_image_augmentation
from ccfa.methods.icarl import SigmoidDistillation
from ccfa.models import Features, LinearHead
from toys import STAGES, begun, learned, tiny, toy_images


def random_batch(num_old=3, num_new=2, num_rows=7, dim=5):
    """Heads with and without the new classes, and a batch as both backbones see it."""
    random = torch.Generator().manual_seed(0)
    previous_head, head = LinearHead(dim, relu=True).double(), LinearHead(dim, relu=True).double()
    previous_head.grow(num_old, random)
    head.grow(num_old, random)
    head.grow(num_new, random)
    embedding, previous = torch.randn(2, num_rows, dim, generator=random, dtype=torch.float64) * 3
    labels = torch.arange(num_rows) % (num_old + num_new)
    return head, previous_head, embedding, previous, labels


def term_of(head, previous_head, embedding, previous, samples, share=1.0):
    stage = Stage(1, previous_head.num_classes, head.num_classes)
    labels = samples.labels[:, 0]
    features = Features((), embedding), Features((), previous)
    step = Step(
        stage,
        labels,
        head,
        features[0],
        previous_head,
        features[1],
        torch.Generator(),
        samples,
        lambda: samples._replace(weights=samples.weights / share),
    )
    return SigmoidDistillation()(step)


def test_binary_cross_entropy_as_the_reference():
    head, _, embedding, _, labels = random_batch()
    logits = head(head.embed(embedding)).detach()
    expected = rivals.binary_cross_entropy(logits.numpy(), labels.numpy())
    assert binary_cross_entropy(logits, labels).numpy() == pytest.approx(expected, rel=1e-12)


def test_criterion_and_term_are_the_published_loss_together():
    head, previous_head, embedding, previous, labels = random_batch()
    samples = Samples.of(head.embed(embedding), labels)
    logits = head(samples.features)
    total = binary_cross_entropy(logits, labels).mean() + term_of(head, previous_head, embedding, previous, samples)
    teacher = previous_head(previous_head.embed(previous)).detach().numpy()
    assert total.item() == pytest.approx(rivals.icarl_loss(logits.detach().numpy(), labels.numpy(), teacher), rel=1e-12)


def test_augmented_samples_leave_distillation_whole():
    head, previous_head, embedding, previous, labels = random_batch()
    own = Samples.of(head.embed(embedding), labels)
    every = own.and_also(2 * own.features, labels.flip(0), torch.ones(7, dtype=torch.float64))
    logits = head(every.features)
    l_cls = binary_cross_entropy(logits, every.labels[:, 0]).mean()
    total = l_cls + term_of(head, previous_head, embedding, previous, own, share=0.5)
    teacher = previous_head(previous_head.embed(previous)).detach().numpy()
    rows, num_old, num_seen = 7, 3, 5
    numbers = logits.detach().numpy()
    distilled = num_old / num_seen * rivals.icarl_loss(numbers[:rows, :num_old], labels.numpy(), teacher)
    new = (num_seen - num_old) / num_seen * rivals.icarl_loss(numbers[:rows, num_old:], labels.numpy() - num_old, None)
    augmented = rivals.icarl_loss(numbers[rows:], labels.flip(0).numpy(), None)
    assert total.item() == pytest.approx(distilled + new / 2 + augmented / 2, rel=1e-12)


def test_mixed_labels_leave_l_cls_in_proportion():
    head, previous_head, embedding, previous, labels = random_batch()
    both = torch.stack([labels, labels.flip(0)], dim=1)
    weights = torch.tensor([0.7, 0.3], dtype=torch.float64).expand(7, 2)
    samples = Samples(head.embed(embedding), both, weights)
    mixed = term_of(head, previous_head, embedding, previous, samples)
    parts = [
        term_of(head, previous_head, embedding, previous, Samples.of(samples.features, label))
        for label in both.unbind(dim=1)
    ]
    assert mixed.item() == pytest.approx(0.7 * parts[0].item() + 0.3 * parts[1].item(), rel=1e-12)


def test_the_same_sigmoids_as_labels_cancel():
    logits, targets = torch.randn(4, 3), torch.randint(2, (4, 3)).float()
    far = (2 * targets - 1) * 1e3  # sigmoids of exactly 0 and 1
    assert torch.equal(sigmoids_for_labels(far, logits, targets, torch.tensor(1.0)), torch.zeros(4))


@pytest.mark.parametrize("plug_in", [None, "features", "images"])
def test_the_loss_of_a_step_is_never_negative(plug_in):
    method = tiny("icarl")
    if plug_in == "features":
        method = with_augmentation(method, CCFA(count=3, steps=2))
    if plug_in == "images":
        method = with_image_augmentation(method, Mixup())
    learner = begun(method, STAGES[1])
    with torch.no_grad():  # a previous network that is sure of itself pulls hardest
        learner.previous.head.new.mul_(100)
    losses = step_losses(learner, learner.training_rows(), method.phases(STAGES[1])[0], learner.generator("step"))
    assert losses["loss"].item() >= 0
    assert set(losses) == {"classification", "distillation", "loss"}


def test_it_predicts_by_the_nearest_mean():
    learner, test = learned(tiny("icarl")), toy_images(seed=1)
    assert torch.equal(learner.predict(test.images), learner.predict_by_nearest_mean(test.images))
    embeddings = learner.embeddings(learner.memory.classes[0])
    assert embeddings.min() < 0  # herding and means use the embedding before the ReLU
