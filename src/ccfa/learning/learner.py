"""The learner: the only object that changes."""

from collections.abc import Callable, Iterator

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from ccfa.data import ImageSet, Stage
from ccfa.errors import UsageError
from ccfa.failpoints import failpoint
from ccfa.learning.acceleration import Acceleration
from ccfa.learning.batches import batches, named_generator
from ccfa.learning.memory import ExemplarMemory, joined
from ccfa.learning.networks import new_network
from ccfa.learning.optimisation import optimise
from ccfa.learning.position import InterruptedPhase, PhaseAtWork
from ccfa.learning.progress import Observer, Unobserved
from ccfa.methods import Method
from ccfa.models import Network

EVALUATION_BATCH = 500


class Learner:
    """Learns the classes of a training set stage by stage, as a method says.

    The training set's labels are in learning order. Two seeds are kept apart: one for initialisation, one for batches
    and augmentation; the class order is the training set's own.
    """

    def __init__(
        self,
        method: Method,
        train: ImageSet,
        *,
        seed: int = 0,
        batch_seed: int | None = None,
        device: torch.device | str = "cpu",
        observer: Observer | None = None,
        acceleration: Acceleration | None = None,
    ) -> None:
        self.method = method
        self.device = torch.device(device)
        self.train = train.to(self.device)
        self.seed = seed
        self.batch_seed = seed if batch_seed is None else batch_seed
        self.observer: Observer = observer or Unobserved()
        self.acceleration = acceleration or Acceleration.for_device(self.device)
        self.memory = ExemplarMemory(method.memory)
        self.terms = [term().to(self.device) for term in method.terms]
        for term in self.terms:
            term.fuse(self.acceleration.fused)
        self.previous: Network | None = None
        self.initial: Network | None = None
        self.stage = Stage(index=-1, num_old=0, num_seen=0)
        self.network = self._new_network()
        self.at_work: list[PhaseAtWork] = []  # outermost first
        self.interrupted: list[InterruptedPhase] = []  # where a restored learner goes on
        self.on_pause: Callable[[], None] = do_nothing  # between two batches that are no steps

    def learn(self, stage: Stage) -> None:
        """Learn the new classes of the next stage."""
        self.begin(stage)
        self.optimise()
        self.conclude()

    def begin(self, stage: Stage) -> None:
        """Make room for the new classes and prepare them; done already where the learner was restored in that stage."""
        if self.interrupted and stage == self.stage:
            return
        if (stage.index, stage.num_old) != (self.stage.index + 1, self.stage.num_seen):
            raise UsageError(f"{stage} does not follow {self.stage}: learn the stages in order, each once.")
        if stage.num_seen > self.train.num_classes:
            raise UsageError(f"{stage} goes beyond the {self.train.num_classes} classes of the training set.")
        if self.memory.quota(stage.num_seen) < self.method.needs_memory:
            raise UsageError(
                f"{self.method.name} needs exemplars, but a memory of {self.method.memory} leaves less than "
                f"{self.method.needs_memory:d} for each of {stage.num_seen} classes."
            )
        self.stage = stage
        auxiliary = self.method.auxiliary_classes(stage)
        self.network.head.grow(stage.num_new + auxiliary, self.cpu_generator("head"))
        self.network.head.num_auxiliary = auxiliary
        self.method.shape_network(self.network, stage.index)
        self.method.prepare(self)

    def optimise(self) -> None:
        """Run the stage's phases, or those that are left."""
        first = self.interrupted[0].index[0] if self.interrupted else 0
        for index, phase in list(enumerate(self.method.phases(self.stage)))[first:]:
            optimise(self, phase, index)
        self.network.head.drop_auxiliary()

    def conclude(self) -> None:
        """Let the terms remember, choose exemplars, and keep the network as the next stage's `previous`."""
        for term in self.terms:
            term.conclude(self)
        chosen = self.select_new_exemplars()
        failpoint("select")
        self.memory.update(chosen)
        self.previous = self.network.frozen_copy()
        self.initial = self.initial or self.previous

    def predict(self, images: Tensor) -> Tensor:
        """The class of each uint8 image, as the method predicts."""
        return self.method.predict(self, images)

    def predict_by_logits(self, images: Tensor) -> Tensor:
        """The class of each uint8 image, by the largest logit."""
        if self.stage.num_seen == 0:
            raise UsageError("Nothing to predict yet: learn a stage first.")
        return self._evaluated(images, lambda batch: self.network(batch).argmax(dim=1))

    def predict_by_nearest_mean(self, images: Tensor) -> Tensor:
        """The class of each uint8 image, by the nearest mean of exemplars (iCaRL's rule)."""
        if not len(self.memory):
            raise UsageError(f"{self.method.name} keeps no exemplars, so there are no class means.")
        embeddings = F.normalize(self._embed(images))
        return torch.cdist(embeddings, self._class_means()).argmin(dim=1)

    def _class_means(self) -> Tensor:
        """The mean direction of each class's exemplars and, where flipping keeps the class, of their mirror images."""
        kept, sizes = joined(self.memory.classes, self.device), [len(rows) for rows in self.memory.classes]
        flips = (False, True) if self.method.transforms.flip else (False,)
        views = [F.normalize(self.embeddings(kept, flip)).split(sizes) for flip in flips]
        return torch.stack([F.normalize(torch.cat(parts).mean(dim=0), dim=0) for parts in zip(*views, strict=True)])

    def embeddings(self, rows: Tensor, flip: bool = False) -> Tensor:
        """Embeddings of training images, in evaluation mode with the test transform."""
        images = self.train.images[rows]
        return self._embed(images.flip(3) if flip else images)

    def new_classes(self) -> list[Tensor]:
        """The training rows of each new class."""
        return [self.train.rows(label, label + 1) for label in range(self.stage.num_old, self.stage.num_seen)]

    def training_rows(self) -> Tensor:
        """D'_k: all new rows and the exemplars of old classes."""
        return joined(self.new_classes() + self.memory.rows(self.stage.num_old), self.device)

    def balanced_rows(self) -> Tensor:
        """Equally many exemplars of every seen class, those of new classes selected now."""
        return joined(self.memory.rows(self.stage.num_seen) + self.select_new_exemplars(), self.device)

    def exemplars(self) -> list[Tensor]:
        """The rows stored of each old class, best first."""
        return self.memory.classes

    def training_batches(self, batch_size: int, *purpose: object) -> Iterator[tuple[Tensor, Tensor]]:
        """D'_k once over, in random order: images under the training transform, and their labels."""
        generator = self.generator(*purpose)
        for rows in batches(self.training_rows(), batch_size, generator):
            self.on_pause()
            yield self.method.transforms.train(self.train.images[rows], generator), self.train.labels[rows]

    def reset_network(self) -> None:
        """Replace the network by a newly initialised one over all seen classes."""
        self.network = self._new_network()
        self.network.head.grow(self.stage.num_seen, self.cpu_generator("head"))
        self.network.to(self.device)

    def generator(self, *purpose: object) -> Generator:
        """A generator of its own for each purpose, seeded by the batch seed and the stage."""
        return named_generator(self.device, self.batch_seed, self.stage.index, *purpose)

    def cpu_generator(self, *purpose: object) -> Generator:
        """The like for initialisation: on the CPU, so that every device starts from the same numbers."""
        return named_generator(torch.device("cpu"), self.seed, self.stage.index, *purpose)

    def select_new_exemplars(self) -> list[Tensor]:
        """The exemplars of each new class, chosen with the network as it is now."""
        quota = self.memory.quota(self.stage.num_seen)
        if quota == 0 or self.method.select_exemplars is None:
            return []
        classes = self.new_classes()
        embeddings = [self.embeddings(rows) for rows in classes]
        chosen = self.method.select_exemplars(embeddings, quota, self.generator("exemplars"))
        return [rows[picked] for rows, picked in zip(classes, chosen, strict=True)]

    def _new_network(self) -> Network:
        """A freshly initialised network without classes."""
        network = new_network(self.method, self.train.images.shape[1], self.cpu_generator("backbone").initial_seed())
        return self.acceleration.place(network, self.device)

    def _embed(self, images: Tensor) -> Tensor:
        """Embeddings of uint8 images."""
        return self._evaluated(images, lambda batch: self.network.backbone(batch).embedding)

    @torch.no_grad()
    def _evaluated(self, images: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A function of normalised images, batch by batch, in evaluation mode."""
        self.network.eval()
        transform = self.method.transforms.test
        parts = []
        for part in images.split(EVALUATION_BATCH):
            self.on_pause()
            parts.append(function(transform(part.to(self.device))))
        return torch.cat(parts)


def do_nothing() -> None:
    """Nobody waits for a pause."""
