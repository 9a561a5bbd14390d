"""The learner, the only object that changes, and its memory M_k of exemplars."""

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor
from torch.nn import functional as F

from ccfa.data import ImageSet, Stage, Streamed
from ccfa.data.images import require_images
from ccfa.errors import DivergedError, ModelError, Notice, UsageError
from ccfa.files import read_tensors, write_tensors
from ccfa.learning.acceleration import Acceleration, images_on, pick_device, suit_threads
from ccfa.learning.loop import batches, named_generator, optimise
from ccfa.learning.processes import ALONE, Processes, require_shareable
from ccfa.learning.progress import (
    CONCLUDING,
    EVALUATING,
    EXEMPLARS,
    IDLE,
    PREPARING,
    Observer,
    Observers,
    ProgressLine,
    Unobserved,
)
from ccfa.learning.state import PhaseAtWork, StoredPhase, new_network, restore, state_of
from ccfa.methods import Budget, Method
from ccfa.methods.method import Term, missing_phases
from ccfa.models import Network, flattened

EVALUATION_BATCH = 500  # images of up to 64 x 64 pixels, and fewer of larger ones
SHOWN = ("method", "seed", "batch_seed")  # said when a file is refused; the rest of a learner's identity are digests
NEWEST_TORCH = (2, 15)  # the newest release that was tried; newer ones are used with a notice


class ExemplarMemory:
    """Rows kept of each class, in order of preference, within a budget."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.classes: list[Tensor] = []

    def rows(self, num_seen: int) -> list[Tensor]:
        """The rows kept of each stored class once `num_seen` classes share the memory."""
        return [rows[: self.budget.quota(num_seen)] for rows in self.classes]

    def update(self, new: list[Tensor]) -> None:
        """Store the exemplars of new classes. A shared memory keeps fewer of the old ones."""
        self.classes = self.rows(len(self.classes) + len(new)) + new

    def __len__(self) -> int:
        return sum(len(rows) for rows in self.classes)


def evaluation_batch(shape: Sequence[int]) -> int:
    """How many images of that shape are evaluated at a time."""
    return max(1, EVALUATION_BATCH * 64 * 64 // max(64 * 64, shape[-2] * shape[-1]))


def joined(rows: list[Tensor], device: torch.device) -> Tensor:
    """All rows of several classes as one tensor, also when there are none."""
    return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *rows])


def _notice_untried_torch() -> None:
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) > NEWEST_TORCH:
        tried = ".".join(map(str, NEWEST_TORCH))
        text = f"ccfa was tested with torch up to {tried}; this is torch {torch.__version__}. Results may differ."
        warnings.warn(Notice(text), stacklevel=2)


class Learner:
    """Learns the classes of a training set, stage by stage, with a method.

    Args:
        method: What to learn with, for example `podnet()`.
        train: The training images. The labels 0, 1, ... are the order in which the classes are learned.
        seed: The seed of the initial weights and, unless `batch_seed` is given, of batches and augmentation.
        batch_seed: The seed of batches and augmentation.
        device: `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`.
        observer: Its methods are called after each batch, each epoch, and when something else begins.
        progress: Show progress: a line that is redrawn in a terminal or a notebook, elsewhere one every half minute.
        acceleration: Precision, compilation and CUDA graphs; by default what suits the device.
        processes: The processes that share the work, see `ccfa.learning.processes.joined`; by default this one alone.

    Example:
        >>> import ccfa, tempfile
        >>> train, test = ccfa.load("digits")
        >>> method, stages = ccfa.build_method("finetune", "digits", epochs=1), ccfa.split(10, 2, 2)
        >>> learner, another = ccfa.Learner(method, train), ccfa.Learner(method, train)
        >>> learner.learn(stages[0])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     learner.save(folder + "/learner.safetensors")
        ...     another.load(folder + "/learner.safetensors")
        >>> another.learn(stages[1])
        >>> sorted(another.evaluate(test))
        ['accuracy', 'new_accuracy', 'old_accuracy']
        >>> another.predict(test.images[:3]).shape
        torch.Size([3])
    """

    def __init__(
        self,
        method: Method,
        train: ImageSet,
        *,
        seed: int = 0,
        batch_seed: int | None = None,
        device: torch.device | str = "auto",
        observer: Observer | None = None,
        progress: bool = False,
        acceleration: Acceleration | None = None,
        processes: Processes = ALONE,
    ) -> None:
        _notice_untried_torch()
        if processes.number > 1:
            require_shareable(method)
        method.transforms.require_room(*train.shape[1:])
        self.method = method
        self.device = pick_device(device) if isinstance(device, str) else device
        if self.device.type == "cpu":
            suit_threads(math.prod(train.shape))
        watching = [observer] if observer else []
        watching += [ProgressLine(method, train)] if progress else []
        self.observer: Observer = Observers(*watching) if len(watching) > 1 else [*watching, Unobserved()][0]
        self.train = images_on(self.device, train)
        self.seed = seed
        self.batch_seed = seed if batch_seed is None else batch_seed
        self.acceleration = (acceleration or Acceleration.for_device(self.device)).shared_by(processes.number)
        self.acceleration.set_rounding(self.device)
        self.processes = processes
        self.memory = ExemplarMemory(method.memory)
        self.terms = self.new_terms()
        self.previous: Network | None = None
        self.initial: Network | None = None
        self.stage = Stage(index=-1, num_old=0, num_seen=0)
        self.additional = torch.empty(0, dtype=torch.int64, device=self.device)  # rows of old classes, for this stage
        self.network = self._new_network()
        self.at_work: list[PhaseAtWork] = []  # outermost first
        self.compiled: set[tuple[str, bool]] = set()  # phases whose step was compiled, in the first stage and later
        self.is_learning = False  # inside a stage; it stays so if the stage fails
        self.interrupted: list[StoredPhase] = []  # where a restored learner continues
        self.on_pause: Callable[[], None] = lambda: None  # called between batches of embedding and evaluation

    def learn(self, stage: Stage) -> None:
        """Learn the new classes of the next stage.

        Args:
            stage: The stage that follows the last one learned. After `load`, an interrupted stage is continued.
        """
        self.begin(stage)
        self.optimise()
        self.conclude()
        self.tell(IDLE)

    def begin(self, stage: Stage) -> None:
        """Add the new classes and prepare the network, unless the learner was restored inside this stage."""
        if self.device.type == "cpu":
            suit_threads(math.prod(self.train.shape))  # another learner may have other images
        if self.is_learning:
            raise UsageError(
                f"Stage {self.stage.index + 1} was not learned to its end. Load a saved state, or make a new learner."
            )
        if self.interrupted:
            if stage != self.stage:
                raise UsageError(f"Stage {self.stage.index + 1} was interrupted: continue it first.")
            self.is_learning = True
            return
        if (stage.index, stage.num_old) != (self.stage.index + 1, self.stage.num_seen):
            raise UsageError(f"{stage} does not follow {self.stage}: learn the stages in order, each once.")
        if stage.num_new < 1:
            raise UsageError(f"{stage} has no new classes.")
        if stage.num_seen > self.train.num_classes:
            raise UsageError(f"{stage} goes beyond the {self.train.num_classes} classes of the training set.")
        if self.method.memory.quota(stage.num_seen) < self.method.needs_memory:
            raise UsageError(
                f"{self.method.name} needs exemplars, but a memory of {self.method.memory} leaves less than "
                f"{self.method.needs_memory:d} for each of {stage.num_seen} classes."
            )
        require_images(self.train, stage.num_old, stage.num_seen, self.method.needs_memory, self.method.name)
        if stage.index == 1:
            for name in missing_phases(self.method, (self.stage, stage)):
                text = f"{self.method.name} has no phase {name!r} so far. What is plugged in for it does nothing."
                warnings.warn(Notice(text), stacklevel=3)
        self.stage, self.is_learning = stage, True
        self.tell(PREPARING)
        auxiliary = self.method.auxiliary_classes(stage)
        self.network.head.grow(stage.num_new + auxiliary, self.cpu_generator("head"))
        self.network.head.num_auxiliary = auxiliary
        self.method.shape_network(self.network, stage.index)
        self.method.prepare(self)
        self.processes.agree(self.network.state_dict().values())

    def optimise(self) -> None:
        """Run the stage's phases, or those that are left."""
        first = self.interrupted[0].index[0] if self.interrupted else 0
        for index, phase in list(enumerate(self.method.phases(self.stage)))[first:]:
            optimise(self, phase, index)
        self.network.head.drop_auxiliary()
        self.method.reduce_network(self.network)

    def conclude(self) -> None:
        """Let the terms remember, choose exemplars, and keep the network as the next stage's `previous`."""
        self._require_finite()
        self.tell(CONCLUDING)
        for term in self.terms:
            term.conclude(self)
        for module in (self.network, *self.terms):
            self.processes.agree(module.state_dict().values())
        self.memory.update(self.select_new_exemplars())
        self.previous = self.network.frozen_copy()
        self.initial = self.initial or self.previous
        self.is_learning = False

    def tell(self, activity: str) -> None:
        """Tell the observer what the learner does beside training steps."""
        self.observer.on_activity(self.stage, activity)

    def predict(self, images: Tensor | NDArray[np.uint8]) -> Tensor:
        """Predict the class of each image by the method's own rule.

        Args:
            images: uint8, of shape (number of images, channels, height, width), as in an `ImageSet`.

        Returns:
            The labels (number of images,), int64, on the learner's device.
        """
        return self.method.predict(self, self._checked(images))

    def evaluate(self, test: ImageSet) -> dict[str, float]:
        """Measure the accuracy on the test images of the classes seen so far.

        Args:
            test: Test images, with the same classes as in training. Images of classes not yet seen are left out.

        Returns:
            `accuracy`, `new_accuracy` and `old_accuracy`, from 0 to 1. In the first stage there is no `old_accuracy`.
        """
        num_seen = self._num_to_predict()
        for label, (name, trained) in enumerate(zip(test.class_names, self.train.class_names[:num_seen], strict=False)):
            if name != trained:
                raise UsageError(
                    f"Class {label} is {trained!r} in training and {name!r} in the test images. Give both the same "
                    f"class names in the same order (see `ImageSet.reorder`)."
                )
        if not len(rows := test.rows(0, num_seen)):
            raise UsageError(f"There are no test images of the {num_seen} classes learned so far.")
        self.tell(EVALUATING)
        seen = test.to(self.device).subset(rows)
        right = self.predict(seen.images) == seen.labels
        self.tell(IDLE)
        is_old = seen.labels < self.stage.num_old
        parts = {"accuracy": right, "new_accuracy": right[~is_old], "old_accuracy": right[is_old]}
        return {name: float(part.float().mean()) for name, part in parts.items() if len(part)}

    def save(self, path: Path | str) -> None:
        """Store what is needed to continue, except the method and the training images.

        Args:
            path: The file to write. It holds tensors (safetensors) and no code.
        """
        tensors, facts = state_of(self)
        write_tensors(Path(path), tensors, {"learner": facts, **self._identity})

    def load(self, path: Path | str) -> None:
        """Continue from a file that `save` has written.

        Args:
            path: The file. Its learner must have had the same method, training images and seeds as this one. Options
                of the method are not compared.
        """
        tensors, facts = read_tensors(Path(path))
        if wrong := [name for name, value in self._identity.items() if facts.get(name) != value]:
            known = [f"{name} {facts.get(name)!r}, not {self._identity[name]!r}" for name in wrong if name in SHOWN]
            other = known + [f"other {name}" for name in wrong if name not in SHOWN]
            raise ModelError(f"{path} was saved by a learner with {', '.join(other)}.")
        restore(self, tensors, facts["learner"])

    @property
    def _identity(self) -> dict[str, str | int]:
        return {
            "method": self.method.name,
            "seed": self.seed,
            "batch_seed": self.batch_seed,
            "images": self.train.fingerprint,
            "classes": hashlib.sha256(repr(self.train.class_names).encode()).hexdigest(),
        }

    def predict_by_logits(self, images: Tensor) -> Tensor:
        """The class of each uint8 image, by the largest logit."""
        return self.class_by_logits(self.embed(images))

    def predict_by_nearest_mean(self, images: Tensor) -> Tensor:
        """The class of each uint8 image, by the nearest mean of exemplars (iCaRL's rule)."""
        return self.class_by_nearest_mean(self.embed(images))

    @torch.no_grad()
    def class_by_logits(self, embeddings: Tensor) -> Tensor:
        """The class of each embedding, by the largest logit."""
        head = self.network.eval().head
        parts = embeddings.split(evaluation_batch(self.train.shape))
        return torch.cat([head(head.embed(part)).argmax(dim=1) for part in parts])

    def class_by_nearest_mean(self, embeddings: Tensor) -> Tensor:
        """The class of each embedding, by the nearest mean of exemplars."""
        if not len(self.memory):
            raise UsageError(f"{self.method.name} keeps no exemplars, so there are no class means.")
        return torch.cdist(F.normalize(embeddings), self.class_means()).argmin(dim=1)

    def embed(self, images: Tensor) -> Tensor:
        """Embeddings of uint8 images, in evaluation mode with the test transform."""
        return self._embed(images.split(evaluation_batch(images.shape)))

    def class_means(self) -> Tensor:
        """The mean direction of each class's exemplars and, where flipping keeps the class, of their mirror images."""
        kept, sizes = joined(self.memory.classes, self.device), [len(rows) for rows in self.memory.classes]
        flips = (False, True) if self.method.transforms.flip else (False,)
        views = [F.normalize(self.embeddings(kept, flip)).split(sizes) for flip in flips]
        return torch.stack([F.normalize(torch.cat(parts).mean(dim=0), dim=0) for parts in zip(*views, strict=True)])

    def embeddings(self, rows: Tensor, flip: bool = False) -> Tensor:
        """Embeddings of training images, in evaluation mode with the test transform."""
        images, chosen = self.train.images, rows.split(evaluation_batch(self.train.shape))
        if isinstance(images, Streamed):
            parts = images.ahead(part.cpu() for part in chosen)
        else:
            parts = (images[part] for part in chosen)
        return self._embed(part.flip(3) if flip else part for part in parts)

    def labels(self, rows: Tensor) -> Tensor:
        """The labels of training images."""
        return self.train.labels[rows]

    def new_classes(self) -> list[Tensor]:
        """The training rows of each new class."""
        return [self.train.rows(label, label + 1) for label in range(self.stage.num_old, self.stage.num_seen)]

    def training_rows(self) -> Tensor:
        """D'_k: all new rows, the exemplars of old classes, and additional rows of old classes if there are any."""
        return joined([*self.new_classes(), *self.memory.rows(self.stage.num_old), self.additional], self.device)

    def balanced_rows(self) -> Tensor:
        """Equally many exemplars of every seen class, those of new classes selected now."""
        return joined(self.memory.rows(self.stage.num_seen) + self.select_new_exemplars(), self.device)

    def exemplars(self) -> list[Tensor]:
        """The rows stored of each old class, best first."""
        return self.memory.classes

    def training_batches(self, batch_size: int, *purpose: object) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch of D'_k in random order: images under the training transform, and their labels."""
        generator = self.generator(*purpose)
        for rows, *streamed in self.train.batches(batches(self.training_rows(), batch_size, generator)):
            self.on_pause()
            images = streamed[0] if streamed else self.train.images[rows]
            yield self.method.transforms.train(images, generator), self.train.labels[rows]

    def reset_network(self) -> None:
        """Replace the network by a newly initialised one over all seen classes."""
        self.network = self._new_network()
        self.network.head.grow(self.stage.num_seen, self.cpu_generator("head"))
        self.network.to(self.device)

    def generator(self, *purpose: object) -> Generator:
        """A generator of its own for each purpose, seeded by the batch seed and the stage."""
        return named_generator(self.device, self.batch_seed, self.stage.index, *purpose)

    def cpu_generator(self, *purpose: object) -> Generator:
        """A generator for initialisation, on the CPU so that every device starts from the same numbers."""
        return named_generator(torch.device("cpu"), self.seed, self.stage.index, *purpose)

    def select_new_exemplars(self) -> list[Tensor]:
        """The exemplars of each new class, chosen with the network as it is now."""
        quota = self.method.memory.quota(self.stage.num_seen)
        if quota == 0 or self.method.select_exemplars is None:
            return []
        self.tell(EXEMPLARS)
        classes = self.new_classes()
        embeddings = [self.embeddings(rows) for rows in classes]
        chosen = self.method.select_exemplars(embeddings, quota, self.generator("exemplars"))
        self.processes.agree(chosen)  # one memory, however many processes there are
        return [rows[picked] for rows, picked in zip(classes, chosen, strict=True)]

    def new_terms(self) -> list[Term]:
        """The method's loss terms, which remember nothing yet."""
        terms = [term().to(self.device) for term in self.method.terms]
        for term in terms:
            term.fuse(self.acceleration.fused)
        return terms

    def _new_network(self) -> Network:
        network = new_network(self.method, self.train.images.shape[1], self.cpu_generator("backbone").initial_seed())
        return self.acceleration.place(network, self.device)

    @torch.no_grad()
    def _embed(self, parts: Iterable[Tensor]) -> Tensor:
        """Embeddings of uint8 images, batch by batch."""
        self.network.eval()
        transform = self.method.transforms.test
        found = []
        for part in parts:
            self.on_pause()
            own = part[self.processes.own(len(part))]
            images = own if len(own) else part[:1]  # not every backbone takes an empty batch
            embeddings = self.network.backbone(transform(images.to(self.device))).embedding[: len(own)]
            found.append(self.processes.whole(embeddings, len(part)))
        return torch.cat(found)

    def _checked(self, images: Tensor | NDArray[np.uint8]) -> Tensor:
        self._num_to_predict()
        given = images if isinstance(images, Tensor | Streamed) else torch.as_tensor(images)
        channels = self.train.images.shape[1]
        if given.dtype != torch.uint8 or given.ndim != 4 or given.shape[1] != channels:
            raise UsageError(
                f"Images must be uint8, 0 to 255, of shape (number of images, {channels}, height, width); got "
                f"{str(given.dtype).removeprefix('torch.')} of shape {tuple(given.shape)}."
            )
        return given

    def _num_to_predict(self) -> int:
        if self.stage.num_seen == 0:
            raise UsageError("There are no classes to predict yet: learn a stage first.")
        return self.stage.num_seen

    def _require_finite(self) -> None:
        """Check the weights, which the last step of a stage can break without any loss becoming infinite."""
        state = self.network.state_dict()
        if not flattened(state).isfinite().all():  # asked once: a GPU that runs share answers late
            broken = next(name for name, tensor in state.items() if not tensor.isfinite().all())
            raise DivergedError(
                f"After stage {self.stage.index + 1} the weights {broken} are no longer finite. Try a smaller learning "
                f"rate.",
                {"stage": self.stage.index},
            )
