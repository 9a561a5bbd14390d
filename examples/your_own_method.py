"""A method of your own in one file: replay plus distillation of the old logits (Learning without Forgetting)."""

from dataclasses import replace
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from ccfa import CCFA, METHODS, Learner, Method, build_method, load, register_method, split, with_augmentation
from ccfa.methods import Step, Term


class LogitDistillation(Term):
    """KL divergence between the old classes' softened predictions, before and now."""

    def __init__(self, temperature: float) -> None:
        super().__init__("logit-distillation")
        self.temperature = temperature

    def forward(self, step: Step) -> Tensor:
        """The penalty of a batch."""
        before = step.previous_logits
        now = step.head(step.head.embed(step.features.embedding))[:, : step.stage.num_old]
        return F.kl_div(
            F.log_softmax(now / self.temperature, dim=1),
            F.log_softmax(before / self.temperature, dim=1),
            log_target=True,
            reduction="batchmean",
        )


@register_method("distilled-replay", METHODS["replay"])
def distilled_replay(method: Method, *, temperature: float = 2.0) -> Method:
    """Replay with one more term. It has replay's options and presets too.

    Args:
        temperature: Logits are divided by it.
    """
    return replace(method, terms=(partial(LogitDistillation, temperature),))


# As a plug-in, `ccfa run distilled-replay --plugin examples/your_own_method.py`, this file only registers the method.
if __name__ == "__main__":
    train, test = load("digits")
    distilled = build_method("distilled-replay", "digits")
    for method in (distilled, with_augmentation(distilled, CCFA(count=1))):
        learner = Learner(method, train)
        for stage in split(train.num_classes, initial=6, increment=2):
            learner.learn(stage)
        correct = learner.predict(test.images) == test.labels
        print(f"{method.name} with {len(method.feature_augmentations)} augmentations: {correct.float().mean():.1%}")
