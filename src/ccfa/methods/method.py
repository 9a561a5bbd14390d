"""What a method is: a value made of parts, with the records they pass to each other; and how options make one."""

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, get_type_hints

import torch
from torch import Generator, Tensor, nn, optim

from ccfa.augmentation import Criterion, FeatureAugmentation, ImageAugmentation, Samples
from ccfa.data import CIFAR100_PODNET, Stage, Transforms
from ccfa.errors import UsageError
from ccfa.models import BackboneBuilder, Features, Head, Network, backbone_builder
from ccfa.options import checked, meanings
from ccfa.plugins import Registry


@dataclass(frozen=True)
class Step:
    """What a term may look at: one batch as the current and the previous network see it."""

    stage: Stage
    labels: Tensor  # (B,); of mixed images the first label
    network: Network
    features: Features
    previous: Network
    previous_features: Features
    generator: Generator
    samples: Samples  # the batch in the head's space, as L_cls has it before feature augmentation
    _total_weight: Callable[[], Tensor]  # of all samples of L_cls, which may still be computed

    @property
    def head(self) -> Head:
        """The current network's head."""
        return self.network.head

    @property
    def share(self) -> Tensor:
        """The part of L_cls that comes from `samples`, a scalar; 1 without feature augmentation."""
        return self.samples.weights.sum() / self._total_weight()

    @property
    def previous_logits(self) -> Tensor:
        """The previous network's logits (B, old classes)."""
        head = self.previous.head
        logits: Tensor = head(head.embed(self.previous_features.embedding))
        return logits


class LearnerView(Protocol):
    """What the parts of a method may use of the learner; see the methods of `Learner`."""

    method: "Method"
    network: Network
    initial: Network | None  # the network after the first stage, frozen
    terms: list["Term"]
    stage: Stage
    additional: Tensor  # rows of old classes beside the exemplars, for this stage

    def reset_network(self) -> None: ...
    def new_classes(self) -> list[Tensor]: ...
    def training_rows(self) -> Tensor: ...
    def balanced_rows(self) -> Tensor: ...
    def exemplars(self) -> list[Tensor]: ...
    def select_new_exemplars(self) -> list[Tensor]: ...
    def training_batches(self, batch_size: int, *purpose: object) -> Iterator[tuple[Tensor, Tensor]]: ...
    def embeddings(self, rows: Tensor, flip: bool = False) -> Tensor: ...
    def labels(self, rows: Tensor) -> Tensor: ...
    def predict_by_logits(self, images: Tensor) -> Tensor: ...
    def predict_by_nearest_mean(self, images: Tensor) -> Tensor: ...
    def generator(self, *purpose: object) -> Generator: ...
    def cpu_generator(self, *purpose: object) -> Generator: ...


class Term(nn.Module, ABC):
    """A penalty of L_dist, logged under its name. What it remembers between stages must be in its buffers.

    On a GPU the terms of a step may be computed at the same time, so none may read what another one has computed.
    """

    # Whether it is a mean over the rows of a batch and does not read `share`. Of several processes, each then computes
    # that of its own rows. Other terms see the features of all rows, and the maps that they read have to be gathered.
    is_row_mean: ClassVar[bool] = False
    # Whether a step with this term can be one CUDA graph: nothing in it waits for the host.
    can_be_captured: ClassVar[bool] = True

    # Whether it reads what the previous network computes of a batch. If no term does, that is not computed.
    reads_previous: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def forward(self, step: Step) -> Tensor:
        """The penalty of a batch, a scalar."""

    def conclude(self, learner: LearnerView) -> None:
        """Refresh what the term remembers, after a stage."""

    def fuse(self, fused: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
        """Replace a loss of tensors by its fused form, where the term has one that pays."""


Optimiser = Callable[[Sequence[nn.Parameter], float, float], optim.Optimizer]
Schedule = Callable[[int, int], float]
RowSelector = Callable[[LearnerView], Tensor]
SampleSource = Callable[[LearnerView], Samples]
ParameterSelector = Callable[[Network], list[nn.Parameter]]
ExemplarSelector = Callable[[Sequence[Tensor], int, Generator], list[Tensor]]


def new_and_exemplars(learner: LearnerView) -> Tensor:
    """D'_k: the new classes' images and the exemplars."""
    return learner.training_rows()


def all_parameters(network: Network) -> list[nn.Parameter]:
    return list(network.parameters())


def sgd(parameters: Sequence[nn.Parameter], lr: float, weight_decay: float) -> optim.Optimizer:
    """Stochastic gradient descent with momentum 0.9."""
    # The rate is a tensor so that a captured step reads it anew each time.
    rate = torch.tensor(lr, device=parameters[0].device, dtype=torch.float32)  # the only precision a fused step takes
    return optim.SGD(parameters, rate, momentum=0.9, weight_decay=weight_decay, fused=True)


def constant(epoch: int, epochs: int) -> float:
    return 1.0


def nothing_to_prepare(learner: LearnerView) -> None:
    """Keep the network as it is."""


def no_change(network: Network) -> None:
    """Keep the network's structure."""


LARGEST = torch.finfo(torch.float32).max  # optimisers hold their rate in that precision


@dataclass(frozen=True)
class Phase:
    """One optimisation run inside a stage."""

    name: str
    epochs: int
    lr: float
    rows: RowSelector = new_and_exemplars
    parameters: ParameterSelector = all_parameters
    optimiser: Optimiser = sgd
    schedule: Schedule = constant  # (epoch, epochs) -> factor on lr
    batch_size: int = 128
    weight_decay: float = 0.0
    clip_value: float | None = None  # element-wise clamp of gradients
    clip_norm: float | None = None  # limit on the norm of all gradients together
    train_batch_norm: bool = True  # False: normalise with the running statistics and leave them alone
    use_terms: bool = True  # False: L_cls alone, with a weight of 1
    samples: SampleSource | None = None  # made once; the head trains on them instead of on the images of `rows`
    prepare: Callable[[LearnerView], None] = nothing_to_prepare  # called before rows and parameters are chosen
    classification_weight: float = 1.0  # multiplies L_cls
    enter: Callable[[Network], None] = no_change  # called whenever the phase begins or is continued
    after_epoch: "Phase | None" = None  # run for its own epochs after each epoch of this phase

    def __post_init__(self) -> None:
        for name, least in (("epochs", 0), ("batch_size", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"{name} of phase {self.name} must be a whole number >= {least}, got {value!r}.")
        for name in ("lr", "weight_decay", "clip_value", "clip_norm"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or not 0 <= value <= LARGEST):
                raise UsageError(
                    f"{name} of phase {self.name} must be a number from 0 to {LARGEST:.1e}, got {value!r}."
                )
        if self.samples and self.use_terms:
            raise UsageError(f"Phase {self.name} sees samples and no images, so it has no terms: set use_terms=False.")


MAX_EXEMPLARS = 2**31


@dataclass(frozen=True)
class Budget:
    """How many exemplars may be kept: a number per class or in total; none if neither is given."""

    per_class: int | None = None
    total: int | None = None

    def __post_init__(self) -> None:
        if self.per_class is not None and self.total is not None:
            raise UsageError("Give a memory per class (--memory) or in total (--memory-total), not both.")
        for number in (self.per_class, self.total):
            if number is not None and not 0 <= number <= MAX_EXEMPLARS:
                raise UsageError(
                    f"A memory of exemplars cannot be negative or over {MAX_EXEMPLARS} images, got {self}."
                )

    def quota(self, num_seen: int) -> int:
        """Exemplars for each class once `num_seen` classes share the memory."""
        if self.total is not None:
            return self.total // num_seen
        return self.per_class or 0


NOTHING = Budget()
EVERYTHING = Budget(per_class=MAX_EXEMPLARS)


def by_logits(learner: LearnerView, images: Tensor) -> Tensor:
    """Predict by the largest logit."""
    return learner.predict_by_logits(images)


def by_nearest_mean(learner: LearnerView, images: Tensor) -> Tensor:
    """Predict by the nearest mean of exemplars (iCaRL's rule)."""
    return learner.predict_by_nearest_mean(images)


def always_one(stage: Stage) -> float:
    """The weight 1 in every stage."""
    return 1.0


def no_auxiliary_classes(stage: Stage) -> int:
    """Every output is a class."""
    return 0


def same_shape(network: Network, stage_index: int) -> None:
    """Keep the network's structure."""


@dataclass(frozen=True)
class Method:
    """A class-incremental method: a frozen record of parts.

    Methods are made by factories such as `METHODS["podnet"]` or `build_method`. Make variants with
    `dataclasses.replace`, `with_augmentation`, `with_image_augmentation` and `with_memory`.

    Args:
        name: The name in reports.
        transforms: What is done to training and test images.
        backbone: channels of the images -> f.
        head: dim of the embedding -> g.
        criterion: l_cls: (logits, labels) -> one value per row.
        phases: stage -> its phases, in order.
        prepare: Called once the head has grown, before the first phase.
        shape_network: Gives the network the structure that it has at a stage; called before `prepare`.
        reduce_network: Takes away what the network needs in training only, after the last phase.
        terms: Functions that make the penalties of L_dist.
        classification_weight: stage -> the weight of L_cls beside the terms.
        auxiliary_classes: stage -> the number of outputs that serve training only.
        image_augmentation: Changes the images of a batch, if any.
        feature_augmentations: Add samples to L_cls, one after the other.
        memory: How many exemplars are kept.
        needs_memory: The least number of exemplars per class.
        select_exemplars: (embeddings of each class, number, generator) -> the rows to keep, best first.
        predict: The rule of prediction.
        no_old_head: The reason why the method keeps no old head to learn from, if it keeps none.
        first: The method whose first stage this one has, if it trains that one with another head (`methods/frozen.py`).

    Example:
        >>> from dataclasses import replace
        >>> import ccfa
        >>> podnet = ccfa.METHODS["podnet"]()
        >>> podnet.memory
        Budget(per_class=20, total=None)
        >>> replace(podnet, name="podnet without distillation", terms=()).name
        'podnet without distillation'
    """

    name: str
    transforms: Transforms
    backbone: BackboneBuilder
    head: Callable[[int], Head]
    criterion: Criterion
    phases: Callable[[Stage], tuple[Phase, ...]]
    prepare: Callable[[LearnerView], None] = nothing_to_prepare
    shape_network: Callable[[Network, int], None] = same_shape
    reduce_network: Callable[[Network], None] = no_change
    terms: tuple[Callable[[], Term], ...] = ()
    classification_weight: Callable[[Stage], float] = always_one
    auxiliary_classes: Callable[[Stage], int] = no_auxiliary_classes
    image_augmentation: ImageAugmentation | None = None
    feature_augmentations: tuple[FeatureAugmentation, ...] = ()
    memory: Budget = NOTHING
    needs_memory: int = 0
    select_exemplars: ExemplarSelector | None = None
    predict: Callable[[LearnerView, Tensor], Tensor] = by_logits
    no_old_head: str = ""
    first: "Method | None" = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.memory.quota(1) < self.needs_memory:
            images = "image" if self.needs_memory == 1 else "images"
            raise UsageError(
                f"{self.name} needs exemplars, but the memory is {self.memory.quota(1)}. Give it at least "
                f"{self.needs_memory:d} {images} per class, or use a method without memory, such as finetune."
            )


def phase_names(method: Method, stages: Iterable[Stage]) -> set[str]:
    """The names of the phases of some stages, and those that plug-ins name by default."""
    found = {"main", "balanced"}
    for phase in (phase for stage in stages for phase in method.phases(stage)):
        current: Phase | None = phase
        while current:
            found.add(current.name)
            current = current.after_epoch
    return found


def missing_phases(method: Method, stages: Iterable[Stage]) -> list[str]:
    """The phases in which plug-ins act, but which none of these stages has."""
    names = [name for augmentation in method.feature_augmentations for name in augmentation.phases]
    names += method.image_augmentation.phases if method.image_augmentation else ()
    known = phase_names(method, stages)
    return [name for name in names if name not in known]


def with_augmentation(method: Method, augmentation: FeatureAugmentation) -> Method:
    """Return a method with a feature augmentation added.

    Args:
        method: Any method. It stays as it is.
        augmentation: For example `CCFA()`, or an augmentation of your own (see `FeatureAugmentation`).

    Returns:
        The method with the augmentation after those that it already has. A method that keeps no old head, such as
        GDumb, is refused if the augmentation needs one.

    Example:
        >>> import ccfa
        >>> method = with_augmentation(ccfa.METHODS["podnet"](), ccfa.CCFA(count=3))
        >>> len(method.feature_augmentations)
        1
    """
    if augmentation.needs_old_head and method.no_old_head:
        raise UsageError(f"{type(augmentation).__name__} has no meaning for {method.name}: {method.no_old_head}.")
    weighs_backbone = getattr(augmentation, "backbone_weight", None) is not None
    if weighs_backbone and method.auxiliary_classes is not no_auxiliary_classes:
        raise UsageError(f"backbone_weight is not defined for {method.name}, which adds images of auxiliary classes.")
    return replace(method, feature_augmentations=(*method.feature_augmentations, augmentation))


def with_image_augmentation(method: Method, augmentation: ImageAugmentation) -> Method:
    """The method with an image augmentation added. A method that has one already is refused."""
    if method.image_augmentation:
        raise UsageError(f"{method.name} makes {type(method.image_augmentation).__name__} of its images already.")
    return replace(method, image_augmentation=augmentation)


def with_memory(method: Method, budget: Budget) -> Method:
    """The method with another exemplar memory."""
    if method.memory in (NOTHING, EVERYTHING):
        kept = "no exemplars" if method.memory == NOTHING else "every image"
        raise UsageError(f"{method.name} keeps {kept}; a memory size has no meaning for it.")
    return replace(method, memory=budget)


@dataclass(frozen=True)
class Recipe:
    """How a method trains: the network, the images and the numbers of its main phase.

    Each field is an option of the methods that are built on the recipe.

    Args:
        backbone: The name of a backbone; in Python also a function `channels -> backbone`, or a module made by `wrap`.
        transforms: What is done to training and test images.
        epochs: Epochs of the main phase of a stage.
        batch_size: Images per batch.
        lr: The learning rate at the start.
        weight_decay: The weight decay.
        policy: A policy of image augmentation that is added to the transforms; None leaves them as they are.
        cutout: The side of a square that the transforms cut out of each image; 0 leaves them as they are.

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
    policy: Literal["autoaugment", "trivial"] | None = None
    cutout: int = 0

    def __post_init__(self) -> None:
        if given := {name: value for name in ("policy", "cutout") if (value := getattr(self, name))}:
            object.__setattr__(self, "transforms", replace(self.transforms, **given))

    @property
    def builder(self) -> BackboneBuilder:
        """The function that makes the backbone."""
        return backbone_builder(self.backbone)

    def phase(self, schedule: Schedule, **fields: Any) -> Phase:
        """The main phase, with other fields of `Phase` as given."""
        main = Phase("main", self.epochs, self.lr, batch_size=self.batch_size, weight_decay=self.weight_decay)
        return replace(main, schedule=schedule, **fields)


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
        function of all options, those of the base included. The factory refuses values of other types. In `ccfa list`,
        the first line of the function's docstring describes the method, and its Args describe the options.

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
            return replace(build(**checked(options, known, name)), name=name)

        known = {option.name: option.annotation for option in inspect.signature(named).parameters.values()}
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
        inherited_meanings = meanings(Recipe if isinstance(base, Recipe) else base) if base else {}
        vars(factory).update(inherited_meanings=inherited_meanings)
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
