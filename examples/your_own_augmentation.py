"""A feature augmentation of your own: noisy copies of the features of old classes."""

from dataclasses import dataclass

import torch
from torch import Generator

from ccfa import METHODS, Learner, Method, Samples, build_method, load, register_method, split, with_augmentation
from ccfa.augmentation import Criterion
from ccfa.models import Head


@dataclass(frozen=True)
class NoisyExemplars:
    """One noisy copy of each feature; only those of old classes count."""

    strength: float = 0.1
    phases: tuple[str, ...] = ("main", "balanced")
    needs_old_head: bool = True

    def __call__(
        self, samples: Samples, head: Head, old_head: Head | None, criterion: Criterion, generator: Generator
    ) -> Samples:
        """The samples followed by their noisy copies."""
        if old_head is None:
            return samples
        noise = torch.randn(samples.features.shape, generator=generator, device=samples.features.device)
        labels = samples.labels[:, 0]
        # A weight of 0 instead of picking rows: shapes never depend on data inside the step.
        weights = (labels < old_head.num_classes).to(samples.features)
        return samples.and_also(samples.features + self.strength * noise, labels, weights)


@register_method("noisy-podnet", METHODS["podnet"])
def noisy_podnet(method: Method, *, strength: float = 0.1) -> Method:
    """PODNet with noisy copies of the features of old classes.

    Args:
        strength: The standard deviation of the noise.
    """
    return with_augmentation(method, NoisyExemplars(strength))


# As a plug-in, `ccfa run noisy-podnet --plugin examples/your_own_augmentation.py`, this file only registers the method.
if __name__ == "__main__":
    train, test = load("digits")
    learner = Learner(build_method("noisy-podnet", "digits"), train)
    for stage in split(train.num_classes, initial=6, increment=2):
        learner.learn(stage)
    correct = learner.predict(test.images) == test.labels
    print(f"PODNet with noisy exemplars: {correct.float().mean():.1%}")
