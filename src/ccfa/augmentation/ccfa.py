"""Cross-Class Feature Augmentation: the paper's section 3.3 and algorithm 1.

`CCFA` is the option of a method, `cross_class_features` the same for any training loop, `attack` their core.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor

from ccfa.augmentation.samples import Criterion, Samples, compared_directions, weighing_labels
from ccfa.augmentation.targets import TargetRule, Targets, finds_any_other, most_confident, own_classes, target_rule
from ccfa.errors import UsageError
from ccfa.kernels import confident_classes, full_precision, sphere_attack
from ccfa.models import Head
from ccfa.options import checked, schema

PAPER_DIM = 64
PAPER_STEP_SIZE = (2 / 255, 5 / 255)  # of alpha at that dimension; 2/2040 to 5/2040 at 512

Scorer = Callable[[Tensor], Tensor]
"""A head as somebody else's loop may have it: features (N, dim) -> logits."""


@dataclass(frozen=True)
class CCFA:
    """Cross-Class Feature Augmentation: pushes features across the previous head's boundary into old classes.

    Add it to a method with `with_augmentation`. Calling it makes augmented samples of a batch (see
    `FeatureAugmentation`); in the first stage it does nothing.

    Args:
        count: Augmented features per image.
        steps: Steps of the attack.
        step_size: The range of alpha, drawn for each image and copy; if None, the paper's, which falls with the
            dimension of the features.
        start: Attack from the features Z_k or from Gaussian noise, N(0, I).
        target: The rule for target classes: most-confident, least-confident, random, own-label, balanced-K or
            balanced-K-logits.
        stop_at_target: Stop moving a feature as soon as the old head takes it for its target. A linear head, whose
            gradient never vanishes, otherwise moves it far beyond.
        gradient_to_backbone: Let the gradient of augmented features reach the backbone.
        weight: The weight of an augmented row in L_cls; a real row has a weight of 1.
        backbone_weight: The weight of the real rows' mean loss in the backbone's gradient; if None, their share of
            L_cls.
        phases: The names of the phases it acts in.

    Example:
        >>> import ccfa
        >>> method = ccfa.with_augmentation(ccfa.build_method("podnet", "digits"), CCFA(count=3))
        >>> method.feature_augmentations[0].count
        3
    """

    count: int = 5
    steps: int = 10
    step_size: tuple[float, float] | None = None
    start: Literal["feature", "noise"] = "feature"
    target: str = "most-confident"
    stop_at_target: bool = False
    gradient_to_backbone: bool = False
    weight: float = 1.0
    backbone_weight: float | None = None
    phases: tuple[str, ...] = ("main", "balanced")

    needs_old_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checked(vars(self), schema(type(self)), type(self).__name__)
        target_rule(self.target)
        low, high = self.step_size or PAPER_STEP_SIZE
        if low > high:
            raise UsageError(f"CCFA needs step_size[0] <= step_size[1]; got step_size={self.step_size}.")
        if self.gradient_to_backbone and self.start == "noise":
            raise UsageError("CCFA with start=noise has no gradient to the backbone: leave gradient_to_backbone out.")

    def step_size_for(self, dim: int) -> tuple[float, float]:
        """The range of alpha for features of that dimension: `step_size`, or the paper's."""
        low, high = PAPER_STEP_SIZE
        return self.step_size or (low * PAPER_DIM / dim, high * PAPER_DIM / dim)

    def __call__(
        self, samples: Samples, head: Head, old_head: Head | None, criterion: Criterion, generator: Generator
    ) -> Samples:
        """The samples followed by `count` augmented ones per row: [Z_k, Z'_k] with [Y, Y_pseudo]."""
        if old_head is None or self.count == 0:
            return samples
        features, labels, weights = self.added(samples, head, old_head, criterion, generator)
        if self.backbone_weight is None:
            return samples.and_also(features, labels, weights)
        real = samples.weights.sum()
        rescaled = scale_gradient(samples.features, self.backbone_weight * (real + weights.sum()) / real)
        return samples._replace(features=rescaled).and_also(features, labels, weights)

    def may_be_late(self) -> bool:
        """Whether its samples are constants whose weights follow from the batch's labels.

        This holds for features as wide as the old head. A subclass may do anything.
        """
        constant = not self.gradient_to_backbone and self.backbone_weight is None
        return type(self) is CCFA and self.count > 0 and constant and finds_any_other(target_rule(self.target))

    def weights_ahead(self, labels: Tensor, old_head: Head) -> Tensor:
        """The weights (count * N,) of what it will add to samples with these labels (N, L), if it may be late.

        Labels of weight 0 are replaced before (`weighing_labels`).
        """
        valid = ~own_classes(labels, old_head.num_classes).all(dim=1)
        return self.weight * valid.float().repeat(self.count)

    def added(
        self, samples: Samples, head: Head, old_head: Head, criterion: Criterion, generator: Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What is added to the samples: features, labels and weights of `count` rows per row."""
        own = weighing_labels(samples.labels, samples.weights)
        num_old, rule = old_head.num_classes, target_rule(self.target)

        def targets(features: Tensor) -> Targets:
            if rule is most_confident and (problem := compared_directions(head, criterion)):
                proxies, scale, similarity, _ = problem
                found = confident_classes(features, own, proxies[:num_old], scale, similarity)
                if found:
                    return Targets(*(part.expand(self.count, -1) for part in found))
            logits: Tensor = head(features)
            return rule(logits[:, : head.num_classes - head.num_auxiliary], own, num_old, self.count, generator)

        features, labels, weights = self.augment(
            samples.features, own, targets, old_head, criterion, num_old, generator
        )
        return features, labels, weights if self.weight == 1 else self.weight * weights

    def augment(
        self,
        features: Tensor,
        labels: Tensor,
        targets_of: Callable[[Tensor], Targets],
        old_head: Scorer | Head,
        criterion: Criterion,
        num_old: int,
        generator: Generator | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Z'_k, Y_pseudo and their weights: choose targets, attack the old head, label by the old head.

        Where features have become wider than the old head, with the columns of a newer backbone, those stay as they
        are. They would contradict the pseudo-label of a new class's row, so such a row gets a weight of 0.
        """
        with full_precision(features.device):  # a sign must not depend on rounding to 16 bits
            whole = features.detach().to(torch.promote_types(features.dtype, torch.float32))
            with torch.no_grad():
                targets = targets_of(whole)
            valid = targets.valid.flatten()
            source, newer = whole.tensor_split([old_head.dim if isinstance(old_head, Head) else whole.shape[1]], dim=1)
            if newer.shape[1]:
                valid = valid & (labels < num_old).all(dim=1).repeat(self.count)
            norm = source.norm(dim=1, keepdim=True)  # 1 for heads that normalise; others keep their own scale
            copies = (source / norm.clamp(min=1e-12)).repeat(self.count, 1)
            norms = norm.repeat(self.count, 1)
            if self.start == "noise":
                copies = torch.randn(copies.shape, generator=generator, device=copies.device, dtype=copies.dtype)
            low, high = self.step_size_for(copies.shape[1])
            draws = torch.rand(len(copies), 1, generator=generator, device=copies.device, dtype=copies.dtype)
            alpha = low + (high - low) * draws
            chosen = targets.classes.flatten()
            attacked, pseudo_labels = attack(
                old_head, criterion, copies, norms, chosen, alpha, self.steps, self.stop_at_target
            )
            if newer.shape[1]:
                attacked = torch.cat([attacked, newer.repeat(self.count, 1)], dim=1)
        if self.gradient_to_backbone:
            # z' = z + constant: the attack itself is not differentiated.
            attacked = features.repeat(self.count, 1) + (attacked - whole.repeat(self.count, 1))
        return attacked.to(features.dtype), pseudo_labels, valid.to(features.dtype)


def scale_gradient(features: Tensor, factor: Tensor) -> Tensor:
    """The same features, whose gradient is multiplied by a factor on its way back."""
    constant = features.detach()
    return constant + factor * (features - constant)


def cross_class_features(
    features: Tensor,
    labels: Tensor,
    head: Scorer,
    old_head: Scorer,
    criterion: Criterion,
    num_old: int,
    *,
    generator: Generator | None = None,
    count: int = 5,
    steps: int = 10,
    step_size: tuple[float, float] | None = None,
    target: str | TargetRule = "most-confident",
    start: Literal["feature", "noise"] = "feature",
    stop_at_target: bool = False,
    gradient_to_backbone: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Augmented features Z'_k for any training loop.

    Args:
        features: The features Z_k (N, dim) that enter the head.
        labels: Their classes (N,), old classes first.
        head: The current head: features -> logits over all classes.
        old_head: The previous stage's head: features -> logits over exactly the old classes.
        criterion: l_cls: (logits, labels) -> one loss per row.
        num_old: The number of old classes.
        generator: Draws the step sizes, and random targets or starts; torch's default generator if None.
        count: Augmented features per feature.
        steps: Steps of the attack.
        step_size: The range of alpha; if None, the paper's, which depends on dim.
        target: A rule by name, as `CCFA` takes it, or a function.
        start: Attack from the features or from Gaussian noise.
        stop_at_target: Stop moving a feature as soon as the old head takes it for its target.
        gradient_to_backbone: Let gradients of the augmented features reach `features`.

    Returns:
        Features (count * N, dim), pseudo-labels and weights (count * N,). A weight is 0 where a row has no class to go
        to, otherwise 1. Divide the weighted sum of losses by the sum of weights, as the library does.

    Example:
        >>> z, y, old = torch.randn(4, 8), torch.tensor([0, 1, 2, 3]), torch.nn.Linear(8, 2)
        >>> loss = torch.nn.CrossEntropyLoss(reduction="none")
        >>> augmented, pseudo_labels, weights = cross_class_features(z, y, torch.nn.Linear(8, 4), old, loss, 2, count=3)
        >>> augmented.shape, pseudo_labels.shape, weights.tolist() == [1.0] * 12
        (torch.Size([12, 8]), torch.Size([12]), True)
    """
    if features.dim() != 2 or labels.shape != features.shape[:1]:
        raise UsageError(
            f"Features must be (N, dim) and labels (N,), got {tuple(features.shape)} and {tuple(labels.shape)}."
        )
    rule = target_rule(target) if isinstance(target, str) else target
    if isinstance(old_head, Head) and old_head.num_classes != num_old:
        raise UsageError(f"old_head has {old_head.num_classes} classes, but num_old is {num_old}.")
    if not isinstance(old_head, Head):
        old_head = _with_outputs(old_head, "old_head", num_old, exactly=True)
    head = _with_outputs(head, "head", num_old)
    options = CCFA(
        count, steps, step_size, start, stop_at_target=stop_at_target, gradient_to_backbone=gradient_to_backbone
    )
    own = labels[:, None]

    def targets(features: Tensor) -> Targets:
        return rule(head(features), own, num_old, count, generator)

    return options.augment(features, own, targets, old_head, criterion, num_old, generator)


def _with_outputs(head: Scorer, name: str, num_old: int, exactly: bool = False) -> Scorer:
    """The head, with a check that its logits are those of the old classes, or of these and others."""

    def checked(features: Tensor) -> Tensor:
        logits = head(features)
        if logits.dim() != 2 or logits.shape[1] < num_old or (exactly and logits.shape[1] > num_old):
            wanted = f"{'exactly' if exactly else 'at least'} the {num_old} old classes"
            raise UsageError(f"{name} must give logits (N, classes) for {wanted}, got {tuple(logits.shape)}.")
        return logits

    return checked


def attack(
    old_head: Scorer | Head,
    criterion: Criterion,
    start: Tensor,
    norms: Tensor,
    targets: Tensor,
    alpha: Tensor,
    steps: int,
    stop_at_target: bool = False,
) -> tuple[Tensor, Tensor]:
    """Push features towards target classes: z^{n+1} = z^n - alpha sign(grad l_cls(g_{k-1}(z^n), Y_target)).

    Args:
        old_head: g_{k-1}.
        criterion: l_cls: (logits, labels) -> one loss per row.
        start: z^0, features (N, dim) of unit length.
        norms: The lengths (N, 1) at which the head sees them.
        targets: Y_target (N,).
        alpha: The step size of each feature (N, 1).
        steps: N.
        stop_at_target: Whether a feature stays where it is once g_{k-1} takes it for its target.

    Returns:
        Z' = z^N * norms, and Y_pseudo = argmax g_{k-1}(Z').
    """
    done = None if stop_at_target else _by_kernel(old_head, criterion, start, targets, alpha, steps)
    if done:
        return done[0] * norms, done[1]
    z = start
    for _ in range(steps):
        gradient, predicted = _gradient(old_head, criterion, z * norms, targets)
        step = alpha * gradient.sign()
        z = z - (step * (predicted != targets)[:, None] if stop_at_target else step)
    with torch.no_grad():
        attacked = z * norms
        return attacked, old_head(attacked).argmax(dim=1)


def _by_kernel(
    old_head: Scorer | Head, criterion: Criterion, start: Tensor, targets: Tensor, alpha: Tensor, steps: int
) -> tuple[Tensor, Tensor] | None:
    """The attack on a head that does not see the features' lengths; None where the kernel does not know it."""
    problem = compared_directions(old_head, criterion)
    return sphere_attack(*problem, start, targets, alpha, steps) if problem else None


def _gradient(
    old_head: Scorer | Head, criterion: Criterion, features: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of l_cls with respect to the features, and the classes that the head gives them."""
    with torch.enable_grad():
        features = features.detach().requires_grad_()
        logits = old_head(features, targets) if isinstance(old_head, Head) else old_head(features)
        (gradient,) = torch.autograd.grad(criterion(logits, targets).sum(), features)
    return gradient, logits.detach().argmax(dim=1)
