"""What a learner tells whoever watches it."""

from typing import NamedTuple, Protocol

from torch import Tensor

from ccfa.data import Stage


class Progress(NamedTuple):
    """Where training stands."""

    stage: Stage
    phase: str
    epoch: int
    num_epochs: int
    batch: int
    num_batches: int
    batch_size: int

    @property
    def place(self) -> str:
        """Where this is, counted from 1 as people do; files count from 0."""
        return f"stage {self.stage.index + 1}, phase {self.phase}, epoch {self.epoch + 1} of {self.num_epochs}"


class Observer(Protocol):
    """Watches a learner without touching it."""

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        """After a step; reading the losses on a GPU makes it wait."""
        ...

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        """After an epoch, with the mean of each loss."""
        ...


class Unobserved:
    """Nobody watches."""

    def on_batch(self, progress: Progress, losses: dict[str, Tensor]) -> None:
        """Nothing."""

    def on_epoch(self, progress: Progress, losses: dict[str, float], lr: float, seconds: float) -> None:
        """Nothing."""
