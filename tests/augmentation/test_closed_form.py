import pytest
import torch

from ccfa.augmentation.closed_form import closed_form_gradient
from ccfa.losses.classification import cross_entropy, nca, nca_exclusive
from ccfa.models import CosineHead, LinearHead, LocalSimilarityHead

HEADS = {
    "linear": lambda: LinearHead(8),
    "linear without bias, at a temperature": lambda: LinearHead(8, bias=False, temperature=0.1),
    "cosine": lambda: CosineHead(8),
    "local similarity": lambda: LocalSimilarityHead(8, num_proxies=3),
    "local similarity with a margin": lambda: LocalSimilarityHead(8, num_proxies=3, margin=0.6),
}


def grown(name):
    head = HEADS[name]()
    for num_new in (4, 3):
        head.grow(num_new, torch.Generator().manual_seed(num_new))
    if isinstance(head.scale, torch.nn.Parameter):
        head.scale.data.fill_(3.0)
    return head.double()


@pytest.mark.parametrize("criterion", [cross_entropy, nca, nca_exclusive])
@pytest.mark.parametrize("name", HEADS)
def test_the_closed_form_is_autograds(name, criterion):
    head = grown(name)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(40, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(7, (40,), generator=generator)
    (expected,) = torch.autograd.grad(criterion(head(features, labels), labels).sum(), features)
    gradient = closed_form_gradient(head, criterion)
    assert gradient is not None
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(gradient(features.detach(), labels), expected, rtol=1e-10, atol=1e-12)


def test_foreign_heads_and_criteria_are_left_to_autograd():
    class Foreign(CosineHead):
        pass

    assert closed_form_gradient(Foreign(8), cross_entropy) is None
    assert closed_form_gradient(CosineHead(8), lambda logits, labels: logits.sum(dim=1)) is None
