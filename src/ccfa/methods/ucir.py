"""UCIR: Hou, Pan, Loy, Wang and Lin, "Learning a Unified Classifier Incrementally via Rebalancing", CVPR 2019."""

from dataclasses import replace
from functools import partial

from torch import Tensor

from ccfa.data import CIFAR100_UCIR
from ccfa.errors import UsageError
from ccfa.losses import cosine_distance, cross_entropy, margin_ranking
from ccfa.methods.method import Budget, Method, Recipe, Step, Term, options_of, register_method
from ccfa.methods.parts import (
    EmbeddingDistillation,
    Phases,
    Steps,
    all_but_old_classes,
    balanced_exemplars,
    class_blocks,
    herd,
    imprint,
    old_to_new,
)
from ccfa.models import CosineHead


@options_of(Recipe(backbone="resnet32-ucir", transforms=CIFAR100_UCIR))
def without_distillation(
    recipe: Recipe,
    *,
    milestones: tuple[float, ...] = (0.5, 0.75),
    balanced_epochs: int = 0,
    balanced_lr: float = 0.01,
    memory: int = 20,
) -> Method:
    """UCIR's head and training, which GeoDL has too.

    Args:
        milestones: Fractions of the epochs at which the learning rate is divided by 10.
        balanced_epochs: Epochs of the balanced phase, on equally many images of each class; 0 leaves it out.
        balanced_lr: The learning rate of the balanced phase.
        memory: Exemplars kept per class.
    """
    main = recipe.phase(Steps(milestones), parameters=all_but_old_classes)
    balanced = replace(
        main,
        name="balanced",
        epochs=balanced_epochs,
        lr=balanced_lr,
        rows=balanced_exemplars,
        parameters=class_blocks,
        schedule=Steps((0.5,)),
        train_batch_norm=False,
    )
    return Method(
        name="ucir",
        transforms=recipe.transforms,
        backbone=recipe.builder,
        head=CosineHead,
        criterion=cross_entropy,
        phases=Phases(first=(main,), later=(main, balanced) if balanced_epochs else (main,)),
        prepare=imprint,
        memory=Budget(per_class=memory),
        needs_memory=balanced_epochs > 0,
        select_exemplars=herd,
    )


@register_method("ucir", without_distillation)
def ucir(method: Method, *, lambda_base: float = 5.0, margin: float = 0.5, num_negatives: int = 2) -> Method:
    """UCIR: a cosine head, less-forget loss, margin ranking.

    This is how its published code runs, with a balanced phase of 20 epochs for ImageNet-1000 only.

    Args:
        lambda_base: The weight of the less-forget loss before it is adapted to the number of classes.
        margin: The margin of margin ranking.
        num_negatives: How many of the hardest new classes an exemplar is ranked against.
    """
    return replace(
        method,
        terms=(
            partial(EmbeddingDistillation, "less-forget", lambda_base, old_to_new, cosine_distance),
            partial(MarginRanking, margin, num_negatives),
        ),
    )


class MarginRanking(Term):
    """L_mr: exemplars stay nearer to their own class than to the hardest new ones."""

    def __init__(self, margin: float, num_negatives: int) -> None:
        super().__init__("margin-ranking")
        if num_negatives < 1:
            raise UsageError(f"Margin ranking needs at least 1 negative class, got {num_negatives}.")
        self.margin = margin
        self.num_negatives = num_negatives

    def forward(self, step: Step) -> Tensor:
        similarities = step.head.similarities(step.head.embed(step.features.embedding))
        return margin_ranking(similarities, step.labels, step.stage.num_old, self.margin, self.num_negatives)
