"""Cross-class features in a training loop of your own: nothing of the library but one pure function."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from ccfa import cross_class_features, load


def criterion(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Your loss, one value per row."""
    return F.cross_entropy(logits, labels, reduction="none")


def train_on(backbone: nn.Module, head: nn.Linear, old_head: nn.Linear | None, rows: torch.Tensor) -> None:
    """Your loop: full-batch steps on some rows, with augmented features once there is an old head."""
    optimiser = torch.optim.Adam([*backbone.parameters(), *head.parameters()], lr=1e-2)
    x, y = pixels[rows], train.labels[rows]
    for _ in range(60):
        features = backbone(x)
        losses, weights = criterion(head(features), y), torch.ones(len(y))
        if old_head is not None:
            augmented, pseudo_labels, counted = cross_class_features(
                features, y, head, old_head, criterion, num_old=old_head.out_features, count=1
            )
            losses = torch.cat([losses, criterion(head(augmented), pseudo_labels)])
            weights = torch.cat([weights, counted])
        loss = (weights * losses).sum() / weights.sum()  # L_cls: rows of weight 0 do not count
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


torch.manual_seed(0)
train, test = load("digits")
pixels = train.images.flatten(1) / 255
backbone = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

old_head = nn.Linear(32, 5)
train_on(backbone, old_head, None, train.rows(0, 5))

head = nn.Linear(32, 10)
with torch.no_grad():
    head.weight[:5], head.bias[:5] = old_head.weight, old_head.bias
exemplars = torch.cat([train.rows(label, label + 1)[:2] for label in range(5)])
train_on(backbone, head, copy.deepcopy(old_head).requires_grad_(False), torch.cat([exemplars, train.rows(5, 10)]))

accuracy = (head(backbone(test.images.flatten(1) / 255)).argmax(dim=1) == test.labels).float().mean()
print(f"10 digits, 2 exemplars of each old one: {accuracy:.1%}")
