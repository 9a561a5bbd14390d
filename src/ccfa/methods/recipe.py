"""The options that every method has, and how a function of options becomes a method with a name."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from ccfa.data import CIFAR100_PODNET, Transforms
from ccfa.errors import UsageError, unknown
from ccfa.methods.method import Method, Optimiser, ParameterSelector, Phase, RowSelector, Schedule
from ccfa.methods.parts import all_parameters, new_and_exemplars, sgd
from ccfa.models import BackboneBuilder, backbone_builder
from ccfa.plugins import Registry


@dataclass(frozen=True)
class Recipe:
    """How a method trains: the network, the images and the numbers of its main phase. Each field is an option."""

    backbone: str | BackboneBuilder = "resnet32-podnet"  # a name, or channels -> backbone
    transforms: Transforms = CIFAR100_PODNET
    epochs: int = 160
    batch_size: int = 128
    lr: float = 0.1
    weight_decay: float = 5e-4

    @property
    def builder(self) -> BackboneBuilder:
        """The function that makes the backbone."""
        return backbone_builder(self.backbone)

    def phase(
        self,
        schedule: Schedule,
        *,
        parameters: ParameterSelector = all_parameters,
        rows: RowSelector = new_and_exemplars,
        optimiser: Optimiser = sgd,
        clip_value: float | None = None,
        clip_norm: float | None = None,
    ) -> Phase:
        """The main phase; make others of it with `dataclasses.replace`."""
        return Phase(
            name="main",
            epochs=self.epochs,
            lr=self.lr,
            rows=rows,
            parameters=parameters,
            optimiser=optimiser,
            schedule=schedule,
            batch_size=self.batch_size,
            weight_decay=self.weight_decay,
            clip_value=clip_value,
            clip_norm=clip_norm,
        )


Factory = Callable[..., Method]
"""Keyword options -> a method; its typed signature lists them."""

METHODS: Registry[Factory] = Registry("method", "ccfa.methods")


def register_method(name: str, base: Recipe | Factory | None = None) -> Callable[[Factory], Factory]:
    """A decorator that makes a function a method, known by its name in Python and on the command line.

    Args:
        name: The name, which the method gets as well.
        base: What the function takes as its first argument, beside keyword options of its own: a recipe, or the method
            that another factory makes. The options of the base are then options of the new method too. Without a base
            the function takes nothing but its own options.

    Returns:
        A decorator, which returns a factory: a function of all the options together.
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
        own = _typed_parameters(function, num_other=0 if base is None else 1)
        inherited = {} if base is None else _fields(base) if isinstance(base, Recipe) else _typed_parameters(base)
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


def _fields(recipe: Recipe) -> dict[str, inspect.Parameter]:
    hints = get_type_hints(Recipe)
    return {
        field.name: _option(field.name, getattr(recipe, field.name), hints[field.name])
        for field in dataclasses.fields(recipe)
    }


def _typed_parameters(function: Factory, num_other: int = 0) -> dict[str, inspect.Parameter]:
    hints, parameters = get_type_hints(function), list(inspect.signature(function).parameters.values())[num_other:]
    if untyped := [option.name for option in parameters if option.name not in hints]:
        raise UsageError(f"Options of a method need types; {function.__name__} has none for {', '.join(untyped)}.")
    return {option.name: _option(option.name, option.default, hints[option.name]) for option in parameters}


def _option(name: str, default: Any, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
