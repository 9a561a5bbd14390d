"""The exemplar memory M_k: rows of the training set, best first, for each seen class."""

import torch
from torch import Tensor

from ccfa.methods import Budget


class ExemplarMemory:
    """Rows kept of each class, in order of preference, within a budget."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.classes: list[Tensor] = []

    def quota(self, num_seen: int) -> int:
        """Exemplars a class may keep."""
        return self.budget.quota(num_seen)

    def rows(self, num_seen: int) -> list[Tensor]:
        """The rows kept of each stored class once `num_seen` classes share the memory."""
        return [rows[: self.quota(num_seen)] for rows in self.classes]

    def update(self, new: list[Tensor]) -> None:
        """Store the new classes' exemplars and let a shared memory shrink the old ones."""
        self.classes = self.rows(len(self.classes) + len(new)) + new

    def __len__(self) -> int:
        return sum(len(rows) for rows in self.classes)


def joined(rows: list[Tensor], device: torch.device) -> Tensor:
    """All rows of several classes as one tensor, also when there are none."""
    return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *rows])
