"""PODNet: Douillard, Cord, Ollion, Robert and Valle, "PODNet: Pooled Outputs Distillation", ECCV 2020."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from ccfa.data import CIFAR100_PODNET, Stage, Transforms
from ccfa.errors import choose
from ccfa.losses.classification import nca as nca_code
from ccfa.losses.classification import nca_exclusive
from ccfa.losses.distillation import cosine_distance, pod_spatial, pod_spatial_paper, squared_distance
from ccfa.methods.method import Budget, Method, Phase, always_one
from ccfa.methods.parts import (
    EmbeddingDistillation,
    MapDistillation,
    Phases,
    all_but_old_classes,
    balanced_exemplars,
    class_blocks,
    constant,
    cosine,
    imprint,
    new_and_exemplars,
    seen_to_new,
    sgd,
)
from ccfa.methods.selection import herd
from ccfa.models import LocalSimilarityHead
from ccfa.models.resnet import backbone_named


@dataclass(frozen=True)
class LaterWeight:
    """1 in the first stage, where L_cls stands alone, and a weight in every later one."""

    weight: float

    def __call__(self, stage: Stage) -> float:
        """The weight on L_cls at that stage."""
        return self.weight if stage.index else 1.0


def podnet(
    *,
    backbone: str = "resnet32-podnet",
    transforms: Transforms = CIFAR100_PODNET,
    epochs: int = 160,
    batch_size: int = 128,
    lr: float = 0.1,
    weight_decay: float = 5e-4,
    balanced_epochs: int = 20,
    balanced_lr: float = 0.05,
    lambda_classification: float = 1.0,
    lambda_spatial: float = 3.0,
    lambda_flat: float = 1.0,
    num_proxies: int = 10,
    memory: int = 20,
    nca: Literal["code", "paper"] = "code",
    margin: float = 0.6,
    pod: Literal["code", "paper"] = "code",
) -> Method:
    """PODNet as its published code runs; `nca` and `pod` choose the paper's formulas instead.

    The margin acts in the paper's NCA only: in the published code it cancels. `lambda_classification` multiplies L_cls
    where it stands beside the distillation terms, from the second stage on.
    """
    spatial, flat = choose(
        "POD formula",
        pod,
        {"code": (pod_spatial, cosine_distance), "paper": (pod_spatial_paper, squared_distance)},
    )
    main = Phase(
        name="main",
        epochs=epochs,
        lr=lr,
        rows=new_and_exemplars,
        parameters=all_but_old_classes,
        optimiser=sgd,
        schedule=cosine,
        batch_size=batch_size,
        weight_decay=weight_decay,
        clip_value=5.0,
    )
    balanced = Phase(
        name="balanced",
        epochs=balanced_epochs,
        lr=balanced_lr,
        rows=balanced_exemplars,
        parameters=class_blocks,
        optimiser=sgd,
        schedule=constant,
        batch_size=batch_size,
        weight_decay=weight_decay,
        clip_value=5.0,
        # Batch norm stays in training mode here as well: the published results depend on it.
    )
    return Method(
        name="podnet",
        transforms=transforms,
        backbone=backbone_named(backbone),
        head=partial(LocalSimilarityHead, num_proxies=num_proxies, margin=margin if nca == "paper" else 0.0),
        criterion=choose("NCA formula", nca, {"code": nca_code, "paper": nca_exclusive}),
        phases=Phases(first=(main,), later=(main, balanced)),
        prepare=imprint,
        terms=(
            partial(EmbeddingDistillation, "pod-flat", lambda_flat, seen_to_new, flat),
            partial(MapDistillation, "pod-spatial", lambda_spatial, seen_to_new, spatial),
        ),
        classification_weight=always_one if lambda_classification == 1 else LaterWeight(lambda_classification),
        memory=Budget(per_class=memory),
        needs_memory=True,
        select_exemplars=herd,
    )
