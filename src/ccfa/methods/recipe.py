"""The options that every method has, and how a function of options becomes a method with a name."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from ccfa.data import CIFAR100_PODNET, Transforms
from ccfa.errors import UsageError, unknown
from ccfa.methods.method import Method, Phase, Schedule
from ccfa.methods.parts import all_parameters, new_and_exemplars, sgd
from ccfa.models import BackboneBuilder, backbone_builder
from ccfa.plugins import Registry


@dataclass(frozen=True)
class Recipe:
    """How a method trains: the network, the images and the numbers of its main phase.

    Each field is an option of the methods that are built on the recipe.

    Args:
        backbone: The name of a backbone, a function `channels -> backbone`, or a module made by `wrap`.
        transforms: What is done to training and test images.
        epochs: Epochs of the main phase of a stage.
        batch_size: Images per batch.
        lr: The learning rate at the start.
        weight_decay: The weight decay.

    Example:
        >>> from ccfa.methods.parts import cosine
        >>> phase = Recipe(epochs=3).phase(cosine, clip_norm=10.0)
        >>> phase.name, phase.epochs, phase.clip_norm
        ('main', 3, 10.0)
    """

    backbone: str | BackboneBuilder = "resnet32-podnet"
    transforms: Transforms = CIFAR100_PODNET
    epochs: int = 160
    batch_size: int = 128
    lr: float = 0.1
    weight_decay: float = 5e-4

    @property
    def builder(self) -> BackboneBuilder:
        """The function that makes the backbone."""
        return backbone_builder(self.backbone)

    def phase(self, schedule: Schedule, **fields: Any) -> Phase:
        """The main phase: SGD of all parameters on new images and exemplars, except for the given fields of `Phase`."""
        parts = new_and_exemplars, all_parameters, sgd, schedule
        main = Phase("main", self.epochs, self.lr, *parts, self.batch_size, self.weight_decay)
        return replace(main, **fields)


Factory = Callable[..., Method]
"""Keyword options -> a method; its typed signature lists them."""

METHODS: Registry[Factory] = Registry("method", "ccfa.methods")


def register_method(name: str, base: Recipe | Factory | None = None) -> Callable[[Factory], Factory]:
    """Give a method a name, under which Python, the command line and presets know it.

    Args:
        name: The name. A name that is taken is refused.
        base: What the function takes as its first argument: a recipe, or the method that another factory makes. The
            options of the base become options of the new method too. Without a base the function takes its own
            options only.

    Returns:
        A decorator for a function that takes typed keyword options and returns a `Method`. It returns a factory: a
        function of all options, those of the base included.

    Example:
        >>> from dataclasses import replace
        >>> @register_method("twice-weighted", METHODS["replay"])
        ... def weighted(method: Method, *, factor: float = 2.0) -> Method:
        ...     return replace(method, classification_weight=lambda stage: factor)
        >>> method = METHODS["twice-weighted"](memory=5, factor=3.0)
        >>> method.name, method.memory.per_class
        ('twice-weighted', 5)
    """

    def register(function: Factory) -> Factory:
        build = options_of(base)(function)

        @functools.wraps(build)
        def named(**options: Any) -> Method:
            if surplus := options.keys() - known.keys():
                raise unknown(f"option of {name}", min(surplus), known)
            return replace(build(**options), name=name)

        known = inspect.signature(named).parameters
        vars(named).update(registered_as=name, built_on=getattr(base, "registered_as", None))
        return METHODS.add(name, named)

    return register


def options_of(base: Recipe | Factory | None) -> Callable[[Factory], Factory]:
    """A decorator for a function of what `base` makes and of options of its own: it takes them all together."""

    def decorate(function: Factory) -> Factory:
        inherited = _options(base) if base else {}
        own = _options(function, num_other=1 if base else 0)
        if both := own.keys() & inherited.keys():
            raise UsageError(f"{function.__name__} has options that its base has: {', '.join(sorted(both))}.")

        @functools.wraps(function)
        def factory(**options: Any) -> Method:
            given = {name: options.pop(name) for name in inherited.keys() & options.keys()}
            if base is None:
                return function(**options)
            return function(replace(base, **given) if isinstance(base, Recipe) else base(**given), **options)

        everything = inherited | own
        factory.__signature__ = inspect.Signature(list(everything.values()))  # type: ignore[attr-defined]
        factory.__annotations__ = {name: option.annotation for name, option in everything.items()}
        return factory

    return decorate


def _options(owner: Recipe | Factory, num_other: int = 0) -> dict[str, inspect.Parameter]:
    """The fields of a recipe with its values as defaults, or the parameters of a function after the first ones."""
    function = Recipe if isinstance(owner, Recipe) else owner
    values = vars(owner) if isinstance(owner, Recipe) else {}
    hints, options = get_type_hints(function), {}
    for name, parameter in list(inspect.signature(function).parameters.items())[num_other:]:
        if name not in hints:
            raise UsageError(f"Options of a method need types; {function.__name__} has none for {name}.")
        default = values.get(name, parameter.default)
        options[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
    return options
