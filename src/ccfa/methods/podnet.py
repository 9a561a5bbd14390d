"""PODNet: Douillard, Cord, Ollion, Robert and Valle, "PODNet: Pooled Outputs Distillation", ECCV 2020."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from ccfa.data import Stage
from ccfa.errors import choose
from ccfa.losses import cosine_distance, nca_exclusive, pod_spatial, pod_spatial_paper, squared_distance
from ccfa.losses import nca as nca_code
from ccfa.methods.method import Budget, Method, Recipe, always_one, constant, options_of, register_method
from ccfa.methods.parts import (
    EmbeddingDistillation,
    MapDistillation,
    Phases,
    all_but_old_classes,
    balanced_exemplars,
    class_blocks,
    cosine,
    herd,
    imprint,
    seen_to_new,
)
from ccfa.models import LocalSimilarityHead


@options_of(Recipe())
def without_distillation(
    recipe: Recipe,
    *,
    balanced_epochs: int = 20,
    balanced_lr: float = 0.05,
    num_proxies: int = 10,
    memory: int = 20,
    nca: Literal["code", "paper"] = "code",
    margin: float = 0.6,
    lambda_classification: float = 1.0,
) -> Method:
    """PODNet's head, classification loss and training, which AFC has too.

    Args:
        balanced_epochs: Epochs of the balanced phase, on equally many images of each class, after the main phase.
        balanced_lr: The learning rate of the balanced phase.
        num_proxies: Proxies per class in the head.
        memory: Exemplars kept per class.
        nca: The classification loss as in the published code, or by the paper's formula.
        margin: The margin of the paper's NCA; in the published code it cancels.
        lambda_classification: The weight of L_cls beside the distillation, from the second stage on.
    """
    main = recipe.phase(cosine, parameters=all_but_old_classes, clip_value=5.0)
    balanced = replace(
        main,
        name="balanced",
        epochs=balanced_epochs,
        lr=balanced_lr,
        rows=balanced_exemplars,
        parameters=class_blocks,
        schedule=constant,
        # Batch norm stays in training mode here as well: the published results depend on it.
    )
    return Method(
        name="podnet",
        transforms=recipe.transforms,
        backbone=recipe.builder,
        head=partial(LocalSimilarityHead, num_proxies=num_proxies, margin=margin if nca == "paper" else 0.0),
        criterion=choose("NCA formula", nca, {"code": nca_code, "paper": nca_exclusive}),
        phases=Phases(first=(main,), later=(main, balanced)),
        prepare=imprint,
        memory=Budget(per_class=memory),
        needs_memory=True,
        select_exemplars=herd,
        classification_weight=always_one if lambda_classification == 1 else LaterWeight(lambda_classification),
    )


@register_method("podnet", without_distillation)
def podnet(
    method: Method,
    *,
    lambda_spatial: float = 3.0,
    lambda_flat: float = 1.0,
    pod: Literal["code", "paper"] = "code",
) -> Method:
    """PODNet: pooled outputs distilled, several proxies per class.

    This is how its published code runs; `nca` and `pod` choose the paper's formulas instead.

    Args:
        lambda_spatial: The weight of POD-spatial, the distillation of pooled maps.
        lambda_flat: The weight of POD-flat, the distillation of embeddings.
        pod: The distillation as in the published code, or by the paper's formulas.
    """
    formulas = {"code": (pod_spatial, cosine_distance), "paper": (pod_spatial_paper, squared_distance)}
    spatial, flat = choose("POD formula", pod, formulas)
    return replace(
        method,
        terms=(
            partial(EmbeddingDistillation, "pod-flat", lambda_flat, seen_to_new, flat),
            partial(MapDistillation, "pod-spatial", lambda_spatial, seen_to_new, spatial),
        ),
    )


@dataclass(frozen=True)
class LaterWeight:
    """1 in the first stage, where L_cls stands alone, and a weight in every later one."""

    weight: float

    def __call__(self, stage: Stage) -> float:
        return self.weight if stage.index else 1.0
