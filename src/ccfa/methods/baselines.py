"""What every method is compared with: no measure against forgetting, replay alone, and all data at once."""

from dataclasses import replace

from ccfa.losses import cross_entropy
from ccfa.methods.method import EVERYTHING, Budget, Method, Recipe, register_method
from ccfa.methods.parts import Phases, cosine, herd, pick_at_random, start_afresh
from ccfa.models import LinearHead


@register_method("finetune", Recipe())
def finetune(recipe: Recipe) -> Method:
    """The new classes alone: the lower bound."""
    main = recipe.phase(cosine)
    return Method(
        name="finetune",
        transforms=recipe.transforms,
        backbone=recipe.builder,
        head=LinearHead,
        criterion=cross_entropy,
        phases=Phases(first=(main,), later=(main,)),
    )


@register_method("replay", finetune)
def replay(method: Method, *, memory: int = 20) -> Method:
    """Fine-tuning on the new classes and the exemplars.

    Args:
        memory: Exemplars kept per class.
    """
    return replace(method, memory=Budget(per_class=memory), select_exemplars=herd)


@register_method("joint", finetune)
def joint(method: Method) -> Method:
    """From scratch on all data so far: the upper bound."""
    return replace(
        method,
        prepare=start_afresh,
        memory=EVERYTHING,
        select_exemplars=pick_at_random,
        no_old_head="it starts afresh at every stage with all data",
    )
