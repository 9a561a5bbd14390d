"""Methods that freeze the backbone after the first stage: how that stage is trained, and the head that follows it."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from ccfa.data import Stage
from ccfa.errors import choose
from ccfa.losses import cross_entropy
from ccfa.methods.method import NOTHING, Method, Phase, Recipe, Term, nothing_to_prepare
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
