"""BiC: Wu, Chen, Wang, Ye, Liu, Guo and Fu, "Large Scale Incremental Learning", CVPR 2019."""

from dataclasses import replace
from functools import partial

from torch import Tensor

from ccfa.data import CIFAR100_UNJITTERED, Stage, Transforms
from ccfa.losses.classification import cross_entropy
from ccfa.losses.distillation import softened_cross_entropy
from ccfa.methods.correction import all_but_correction, correction_alone, sgd_decaying_the_last
from ccfa.methods.holding_out import held_out, herd_beside_held_out, not_held_out
from ccfa.methods.method import Budget, Method, Phase, Step, Term
from ccfa.methods.parts import Phases, Steps, nothing_to_prepare, sgd
from ccfa.models import CorrectedLinearHead
from ccfa.models.resnet import backbone_named


def bic(
    *,
    backbone: str = "resnet32-podnet",
    transforms: Transforms = CIFAR100_UNJITTERED,
    epochs: int = 250,
    batch_size: int = 128,
    lr: float = 0.1,
    weight_decay: float = 2e-4,
    milestones: tuple[float, ...] = (0.4, 0.6, 0.8),
    temperature: float = 2.0,
    correction_epochs: int = 500,
    correction_lr: float = 0.1,
    correction_decay: float = 0.1,
    memory: int = 20,
) -> Method:
    """BiC with its authors' loss: distillation and cross-entropy, then a correction fitted on held-out exemplars."""
    main = Phase(
        name="main",
        epochs=epochs,
        lr=lr,
        rows=not_held_out,
        parameters=all_but_correction,
        optimiser=sgd,
        schedule=Steps(milestones),
        batch_size=batch_size,
        weight_decay=weight_decay,
    )
    correction = replace(
        main,
        name="correction",
        epochs=correction_epochs,
        lr=correction_lr,
        rows=held_out,
        parameters=correction_alone,
        optimiser=sgd_decaying_the_last,
        weight_decay=correction_decay,  # the published penalty, correction_decay * gamma^2 / 2
        train_batch_norm=False,
        use_terms=False,
    )
    return Method(
        name="bic",
        transforms=transforms,
        backbone=backbone_named(backbone),
        head=partial(CorrectedLinearHead, bias=False, relu=True),
        criterion=cross_entropy,
        phases=Phases(first=(main,), later=(main, correction)),
        prepare=nothing_to_prepare,
        terms=(partial(OldLogitDistillation, temperature),),
        classification_weight=new_share,
        memory=Budget(per_class=memory),
        needs_memory=2,
        select_exemplars=herd_beside_held_out,
    )


def new_share(stage: Stage) -> float:
    """1 - lambda = new / seen."""
    return stage.num_new / stage.num_seen


class OldLogitDistillation(Term):
    """lambda * distillation of the previous network's logits, corrected as it predicts; lambda = old / seen."""

    def __init__(self, temperature: float) -> None:
        super().__init__("distillation")
        self.temperature = temperature

    def forward(self, step: Step) -> Tensor:
        """The penalty on the old classes' logits."""
        logits = step.head(step.samples.features)[:, : step.stage.num_old]
        previous = step.previous_head(step.previous_head.embed(step.previous_features.embedding))
        return (1 - new_share(step.stage)) * softened_cross_entropy(previous, logits, self.temperature)
