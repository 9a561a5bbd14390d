"""Linear heads with an addition: BiC's correction of the newest classes, GDumb's batch norm, PASS's turned classes."""

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ccfa.models.heads import LinearHead


class CorrectedLinearHead(LinearHead):
    """BiC's head: the new classes' logits o become beta * o + gamma, two numbers fitted after each stage.

    They act on the new block alone, and a head that grows drops them: only the latest correction counts, and a frozen
    copy of the head carries its own.
    """

    def __init__(self, dim: int, bias: bool = True, relu: bool = False) -> None:
        super().__init__(dim, bias, relu=relu)
        self.beta = nn.Parameter(torch.ones(()))
        self.gamma = nn.Parameter(torch.zeros(()))

    def grow(self, num_new: int, generator: Generator | None = None) -> None:
        """Add new classes, uncorrected, and drop the correction of those that were new."""
        super().grow(num_new, generator)
        with torch.no_grad():
            self.beta.fill_(1)
            self.gamma.zero_()

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Tensor:
        """The logits, those of new classes corrected."""
        old, new = super().forward(features, labels).split([len(self.old), len(self.new)], dim=1)
        return torch.cat([old, self.beta * new + self.gamma], dim=1)


class NormalisedLinearHead(LinearHead):
    """GDumb's head: a linear map without bias and a batch norm over its logits, which starts anew as the head grows."""

    eps = 1e-6

    def __init__(self, dim: int, relu: bool = False) -> None:
        super().__init__(dim, bias=False, relu=relu, uniform=True)
        self.norm = nn.BatchNorm1d(0, self.eps)

    def grow(self, num_new: int, generator: Generator | None = None) -> None:
        """Add new classes; every class's statistics start anew."""
        super().grow(num_new, generator)
        self.norm = nn.BatchNorm1d(self.num_classes, self.eps).to(self.new)

    def similarities(self, features: Tensor) -> Tensor:
        """w_c . f, normalised over the batch in training."""
        norm, scores = self.norm, super().similarities(features)
        in_training = self.training and len(scores) > 1  # a single row has no spread
        statistics = norm.running_mean, norm.running_var
        return F.batch_norm(scores, *statistics, norm.weight, norm.bias, in_training, norm.momentum or 0.0, norm.eps)


class KeepingLinearHead(LinearHead):
    """PASS's head: auxiliary outputs leave the head with their stage, and come back as its last outputs in the next."""

    kept: Tensor  # (auxiliary outputs, dim + 1), those of the newest classes first

    def __init__(self, dim: int, temperature: float = 1.0) -> None:
        super().__init__(dim, temperature=temperature, uniform=True)
        self.register_buffer("kept", torch.empty(0, dim + 1))

    def grow(self, num_new: int, generator: Generator | None = None) -> None:
        """Add outputs, the last of which are those kept."""
        super().grow(num_new, generator)
        with torch.no_grad():
            self.new[num_new - len(self.kept) :] = self.kept

    def drop_auxiliary(self) -> None:
        """Set the outputs that served training aside."""
        self.kept = self.new.detach()[len(self.new) - self.num_auxiliary :].clone()
        super().drop_auxiliary()
