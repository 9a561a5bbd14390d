"""Methods that freeze the backbone after the first stage.

What they share: how the first stage is trained, the head whose classes are computed afterwards, and the term that
computes them from each image's embedding, seen once.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ccfa.data import Stage
from ccfa.errors import DivergedError, UsageError, choose
from ccfa.losses import cross_entropy
from ccfa.methods.method import NOTHING, LearnerView, Method, Phase, Recipe, Step, Term, nothing_to_prepare
from ccfa.methods.parts import Phases, Steps
from ccfa.methods.podnet import without_distillation
from ccfa.models import Head, LinearHead, Network

First = Literal["linear", "podnet"]
"""How the first stage is trained: with cross-entropy through a linear head, or as PODNet's."""


def first_stage(recipe: Recipe, first: First, milestones: tuple[float, ...]) -> Method:
    """The method whose first stage trains the backbone. PODNet's has a schedule of its own and no milestones."""
    known: dict[str, Callable[[Recipe], Method]] = {
        "linear": partial(_linear, milestones=milestones),
        "podnet": _podnet,
    }
    return choose("first stage", first, known)(recipe)


def _linear(recipe: Recipe, milestones: tuple[float, ...]) -> Method:
    return Method(
        name="linear",
        transforms=recipe.transforms,
        backbone=recipe.builder,
        head=LinearHead,
        criterion=cross_entropy,
        phases=Phases(first=(recipe.phase(Steps(milestones)),), later=()),
    )


def _podnet(recipe: Recipe) -> Method:
    return without_distillation(**{one.name: getattr(recipe, one.name) for one in fields(recipe)})


def frozen_after(first: Method, head: Callable[..., "LateHead"], *terms: Callable[[], Term]) -> Method:
    """A method that has the first stage of another, and trains nothing afterwards.

    Args:
        first: The method whose first stage trains the backbone, see `first_stage`.
        head: (dim of the embedding, stand_in=the head of `first`) -> the head that predicts.
        terms: Functions that make the terms. They compute the head's classes when a stage is over.

    Returns:
        The method. It keeps no exemplars.
    """
    return replace(
        first,
        head=partial(head, stand_in=first.head),
        phases=FirstOnly(first.phases),
        prepare=nothing_to_prepare,
        terms=terms,
        memory=NOTHING,
        needs_memory=0,
        select_exemplars=None,
        no_old_head="it trains nothing after the first stage",
        first=first,
    )


@dataclass(frozen=True)
class FirstOnly:
    """The phases of the first stage, and none later. A phase without epochs is left out."""

    phases: Callable[[Stage], tuple[Phase, ...]]

    def __call__(self, stage: Stage) -> tuple[Phase, ...]:
        return tuple(phase for phase in self.phases(stage) if phase.epochs) if stage.index == 0 else ()


class LateHead(Head):
    """A head whose classes are computed and not trained: in the first stage another head stands in for it.

    The stand-in, `trained`, is drawn and trained as if it were the network's head. `finish` removes it.
    """

    def __init__(
        self, dim: int, block: tuple[int, ...], stand_in: Callable[[int], Head] = LinearHead, uniform: bool = False
    ) -> None:
        super().__init__(dim, block, nn.Buffer(torch.ones(())), uniform)
        self.stand_in = stand_in
        self.trained = stand_in(dim)

    @property
    def is_trained(self) -> bool:
        """Whether the stand-in is in use."""
        return self.trained.num_classes > 0

    @property
    def num_classes(self) -> int:
        return self.trained.num_classes or super().num_classes

    def grow(self, num_new: int, generator: Generator | None = None) -> None:
        """Add classes: the first ones to the stand-in, later ones with zeros until they are computed."""
        if self.num_classes:
            super().grow(num_new, generator)
        else:
            self.trained.grow(num_new, generator)

    def initial(self, num_new: int, generator: Generator | None) -> Tensor:
        """Zeros, until the classes are computed."""
        return torch.zeros(num_new, *self.new.shape[1:])

    def finish(self) -> None:
        """Replace the stand-in by classes of zeros, which are then computed. Without a stand-in nothing changes."""
        if self.is_trained:
            self.new = nn.Parameter(self.initial(self.trained.num_classes, None).to(self.new))
            self.trained = self.stand_in(self.dim).to(self.new)

    @torch.no_grad()
    def set_rows(self, rows: Tensor) -> None:
        """Replace what there is of all classes (classes, ...), and with it the stand-in."""
        self.finish()
        old, new = rows.to(self.new).split([len(self.old), len(self.new)])
        self.old.copy_(old)
        self.new.copy_(new)

    def embed(self, embedding: Tensor) -> Tensor:
        """The stand-in's space while there is one, then the embedding itself."""
        return self.trained.embed(embedding) if self.is_trained else embedding

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Tensor:
        """The logits; those of the stand-in while there is one."""
        logits: Tensor = self.trained(features, labels) if self.is_trained else super().forward(features)
        return logits


def trained_network(network: Network) -> Network:
    """The network as the first stage trains it: if another head stands in, that one is its head."""
    head = network.head
    return Network(network.backbone, head.trained) if isinstance(head, LateHead) else network


H = TypeVar("H", bound=LateHead)


def new_images(learner: LearnerView) -> tuple[Tensor, Tensor]:
    """The embeddings (N, dim) of the new classes' images, each once under the test transform, and their labels (N,)."""
    classes = learner.new_classes()
    labels = [torch.full_like(own, learner.stage.num_old + place) for place, own in enumerate(classes)]
    return learner.embeddings(torch.cat(classes)), torch.cat(labels)


class ReadOut(Term):
    """No penalty: after a stage it learns each image once, by its embedding, and computes the classes of a late head.

    What it remembers of images are sums, so that the result does not depend on when an image came.
    """

    kind: ClassVar[type[LateHead]]  # the head whose classes it computes
    counts: Tensor  # images of each class (classes,)
    directions: Tensor  # the sum of the directions of their embeddings (classes, dim): where a class lies

    def __init__(self) -> None:
        super().__init__("read-out")
        self.register_buffer("counts", torch.empty(0, dtype=torch.float64))
        self.register_buffer("directions", torch.empty(0))

    def forward(self, step: Step) -> Tensor:
        return step.features.embedding.new_zeros(())

    @torch.no_grad()
    def conclude(self, learner: LearnerView) -> None:
        """Learn the new classes."""
        self.learn(learner.network.head, *new_images(learner))

    @abstractmethod
    def learn(self, head: Head, embeddings: Tensor, labels: Tensor) -> None:
        """Add images to what is remembered, and compute the head's classes."""

    @torch.no_grad()
    def learn_more(self, head: Head, embeddings: Tensor, labels: Tensor) -> None:
        """Learn from more images of classes that the head knows, without a new stage.

        The result is the same as if the images had been there in the classes' own stage, but for two things. A ridge
        that was chosen stays. Where classes are balanced, the earlier images of a class keep their weight of 1 over
        their number, and the new ones get 1 over the number of all, so a class with n earlier and m new images counts
        1 + m / (n + m) times as much as others.

        Args:
            head: The head of the network, whose classes are computed anew.
            embeddings: The backbone's embeddings (N, dim) of the images, in evaluation mode under the test transform,
                as `Learner.embeddings` and `network.backbone(images).embedding` give them.
            labels: Their classes (N,), int64.

        Example:
            >>> import ccfa
            >>> train, test = ccfa.load("digits")
            >>> learner = ccfa.Learner(ccfa.build_method("ranpac", "digits", epochs=1, projection=100), train)
            >>> learner.learn(ccfa.split(10, 5, 5)[0])
            >>> more = train.rows(0, 2)
            >>> learner.terms[0].learn_more(learner.network.head, learner.embeddings(more), train.labels[more])
        """
        require_head(head, self.kind)
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < head.num_classes:
            raise UsageError(f"More images must be of the {head.num_classes} classes that were learned, got {labels}.")
        self.learn(head, embeddings, labels)

    def count(self, num_classes: int, embeddings: Tensor, labels: Tensor) -> None:
        """Count the images of each class, and add up their directions."""
        if not embeddings.isfinite().all():
            raise DivergedError("The backbone's embeddings are not finite. Try a smaller learning rate.")
        self.counts = F.pad(self.counts, (0, num_classes - len(self.counts)))
        self.counts += labels.bincount(minlength=num_classes)
        known = self.directions.view(-1, embeddings.shape[1])
        self.directions = F.pad(known, (0, 0, 0, num_classes - len(known)))
        self.directions.index_add_(0, labels, F.normalize(embeddings).to(self.directions))


def require_head(head: Head, kind: type[H]) -> H:
    """The head, if it is of the kind whose classes a read-out computes."""
    if isinstance(head, kind):
        return head
    raise UsageError(f"A read-out sets the rows of a {kind.__name__}; this method has a {type(head).__name__}.")
