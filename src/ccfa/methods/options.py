"""The options of methods that other methods are made of; the type checker compares them with the signatures."""

from typing import Literal, TypedDict

from ccfa.data import Transforms


class PodnetTraining(TypedDict, total=False):
    """The options of `podnet` but those of its distillation."""

    backbone: str
    transforms: Transforms
    epochs: int
    batch_size: int
    lr: float
    weight_decay: float
    balanced_epochs: int
    balanced_lr: float
    num_proxies: int
    memory: int
    nca: Literal["code", "paper"]
    margin: float


class PodnetOptions(PodnetTraining, total=False):
    """The options of `podnet`."""

    lambda_spatial: float
    lambda_flat: float
    pod: Literal["code", "paper"]


class AfcOptions(PodnetTraining, total=False):
    """The options of `afc`."""

    lambda_disc: float
    discrepancy: Literal["code", "paper"]


class UcirOptions(TypedDict, total=False):
    """The options of `ucir`."""

    backbone: str
    transforms: Transforms
    epochs: int
    batch_size: int
    lr: float
    weight_decay: float
    milestones: tuple[float, ...]
    lambda_base: float
    margin: float
    num_negatives: int
    balanced_epochs: int
    balanced_lr: float
    memory: int
