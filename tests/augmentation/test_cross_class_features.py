"""The pure function for other people's loops: what it accepts and what it refuses."""

import pytest
import torch
from torch import nn

from ccfa import cross_class_features
from ccfa.augmentation.targets import random_class
from ccfa.errors import UsageError
from ccfa.losses.classification import cross_entropy
from ccfa.models import LinearHead


def features_of(num_rows=6, dim=8, head=4, old=2, num_old=2, **options):
    torch.manual_seed(0)
    parts = nn.Linear(dim, head), nn.Linear(dim, old)
    labels = torch.arange(num_rows) % 4
    return cross_class_features(torch.randn(num_rows, dim), labels, *parts, cross_entropy, num_old, **options)


def test_the_default_generator_draws_without_one():
    first, second = features_of(), features_of()
    assert all(map(torch.equal, first, second))
    other = features_of(generator=torch.Generator().manual_seed(7))
    assert not torch.equal(first[0], other[0])
    assert features_of(target="balanced-2", start="noise", count=2)[0].shape == (12, 8)


def test_targets_by_name_or_function():
    by_name, by_function = (
        features_of(target=target, generator=torch.Generator().manual_seed(0)) for target in ("random", random_class)
    )
    assert all(map(torch.equal, by_name, by_function))
    with pytest.raises(UsageError, match="'random'"):
        features_of(target="randm")


@pytest.mark.parametrize(
    ("sizes", "told"), [({"num_old": 5, "old": 3}, "head"), ({"old": 3}, "old_head"), ({"head": 1}, "head")], ids=str
)
def test_heads_of_other_sizes_are_refused(sizes, told):
    with pytest.raises(UsageError, match=told):
        features_of(**sizes)


def test_shapes_that_do_not_fit():
    head, old_head = nn.Linear(8, 4), LinearHead(8)
    old_head.grow(2)
    for features, labels in [(torch.randn(3, 8, 1), torch.zeros(3)), (torch.randn(3, 8), torch.zeros(4))]:
        with pytest.raises(UsageError, match="labels"):
            cross_class_features(features, labels.long(), head, old_head, cross_entropy, 2)
    with pytest.raises(UsageError, match="num_old"):
        cross_class_features(torch.randn(3, 8), torch.zeros(3).long(), head, old_head, cross_entropy, 3)
