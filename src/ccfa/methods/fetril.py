"""FeTrIL: Petit, Popescu, Schindler, Picard and Delezoide, "FeTrIL: Feature Translation for Exemplar-Free
Class-Incremental Learning", WACV 2023.

The backbone is frozen after the first stage. The head learns from features that are computed once per stage: those of
the new classes' images, and features of old classes made from them. Of an old class only its mean feature is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ccfa.augmentation import Samples
from ccfa.data import Stage
from ccfa.errors import UsageError
from ccfa.methods.frozen import First, FirstOnly, first_stage
from ccfa.methods.method import NOTHING, LearnerView, Method, Phase, Recipe, Step, Term, register_method
from ccfa.methods.parts import class_blocks, cosine


@register_method("fetril", Recipe())
def fetril(
    recipe: Recipe,
    *,
    first: First = "linear",
    milestones: tuple[float, ...] = (120 / 160, 140 / 160),
    head_epochs: int = 50,
    head_lr: float = 0.05,
    translate: bool = True,
) -> Method:
    """FeTrIL: features moved to old means.

    After the first stage only the head learns, on features of new classes, some moved to old classes' means. It keeps
    the head of the first stage. With `epochs=0` the backbone stays as it is given.

    Args:
        epochs: Epochs of the first stage; 0 leaves the backbone as it is given.
        first: How the first stage trains the backbone: with a linear head and cross-entropy, or as PODNet's.
        milestones: Fractions of the first stage's epochs at which the rate is divided by 10, if `first` is linear.
        head_epochs: Epochs of the head in stages after the first.
        head_lr: The learning rate of the head in these stages.
        translate: Move features to old classes' means; otherwise the head sees the new classes alone, or CCFA's
            features.
    """
    if head_epochs < 1:
        raise UsageError(f"FeTrIL's head needs at least 1 epoch (head_epochs) to learn new classes, got {head_epochs}.")
    method = first_stage(recipe, first, milestones)
    samples = translated_samples if translate else real_samples
    on_features = recipe.phase(cosine, parameters=class_blocks, use_terms=False, samples=samples)
    return replace(
        method,
        phases=ThenHead(FirstOnly(method.phases), replace(on_features, epochs=head_epochs, lr=head_lr)),
        terms=(ClassMeans,),
        memory=NOTHING,
        needs_memory=0,
        select_exemplars=None,
    )


@dataclass(frozen=True)
class ThenHead:
    """The phases of the first stage; in later ones, or if it has none, a phase that trains the head alone."""

    first: FirstOnly
    later: Phase

    def __call__(self, stage: Stage) -> tuple[Phase, ...]:
        return self.first(stage) or (self.later,)


class ClassMeans(Term):
    """No penalty: it remembers the mean embedding of every class."""

    means: Tensor  # (classes, dim)

    def __init__(self) -> None:
        super().__init__("means")
        self.register_buffer("means", torch.empty(0))

    def forward(self, step: Step) -> Tensor:
        return step.features.embedding.new_zeros(())

    def conclude(self, learner: LearnerView) -> None:
        """Add the new classes, with all of their images under the test transform."""
        means = [learner.embeddings(rows).mean(dim=0) for rows in learner.new_classes()]
        self.means = torch.cat([self.means, torch.stack(means)])


def real_samples(learner: LearnerView) -> Samples:
    """The features of D'_k, all images of the new classes under the test transform."""
    features, labels = _features(learner)
    return Samples.of(learner.network.head.embed(features), labels)


def translated_samples(learner: LearnerView) -> Samples:
    """The same, followed by features of each old class."""
    (means,) = [term.means for term in learner.terms if isinstance(term, ClassMeans)]
    features, labels = _features(learner)
    new = [features[labels == label] for label in range(learner.stage.num_old, learner.stage.num_seen)]
    old = translated(new, means.view(-1, features.shape[1]))  # there are none yet in the first stage
    owners = [labels.new_full((len(rows),), label) for label, rows in enumerate(old)]
    embed = learner.network.head.embed
    return Samples.of(torch.cat([embed(features), *map(embed, old)]), torch.cat([labels, *owners]))


def _features(learner: LearnerView) -> tuple[Tensor, Tensor]:
    rows = learner.training_rows()
    return learner.embeddings(rows), learner.labels(rows)


def translated(features: Sequence[Tensor], means: Tensor) -> list[Tensor]:
    """F_n - mu_n + mu_p for each old class p, where n is the new class whose mean has the largest cosine with mu_p.

    Args:
        features: F_n, the features (images, dim) of each new class.
        means: mu_p (old classes, dim).

    Returns:
        As many features of each old class as its new class has.
    """
    new_means = torch.stack([rows.mean(dim=0) for rows in features])
    nearest = (F.normalize(means) @ F.normalize(new_means).T).argmax(dim=1).tolist()
    return [features[new] + (mean - new_means[new]) for mean, new in zip(means, nearest, strict=True)]
