"""The kernels of L_cls against float64."""

import itertools

import pytest
import torch

from ccfa.augmentation import Samples, classification_loss
from ccfa.kernels.head_loss import DIMS, _layout, head_loss
from ccfa.losses import cross_entropy, nca, nca_exclusive
from ccfa.models import CosineHead, LocalSimilarityHead
from cuda_on_cpu import in_reverse

CRITERIA = [cross_entropy, nca, nca_exclusive]


def problem(device, dim=64, num_classes=60, num_proxies=10, num_rows=768, num_labels=1):
    """Samples, fewer where kernels are slow, and a head with old and new classes; without proxies a `CosineHead`."""
    num_rows = num_rows if device.type == "cuda" else min(num_rows, 21 if num_classes > 2 else 140)
    generator = torch.Generator().manual_seed(0)
    head = LocalSimilarityHead(dim, num_proxies) if num_proxies else CosineHead(dim)
    head.grow(num_classes // 2, generator)
    head.grow(num_classes - num_classes // 2, generator)
    head.scale.data.fill_(4.0)
    labels = torch.randint(num_classes, (num_rows, num_labels), generator=generator)
    features = 0.5 * torch.randn(num_rows, dim, generator=generator)
    own = head.weights.detach().view(num_classes, -1, dim)[labels[:, 0], 0]
    is_near = torch.rand(num_rows, 1, generator=generator) < 0.5  # some losses are small, and some are 0
    features = torch.where(is_near, 3 * own + features, features)
    weights = torch.rand(num_rows, num_labels, generator=generator)
    weights[1::3, -1] = 0
    return Samples(features.to(device), labels.to(device), weights.to(device)), head.to(device)


def by_kernel(samples, head, criterion):
    """The loss."""
    is_cosine = isinstance(head, CosineHead)
    proxies = head.weights[:, None] if is_cosine else head.weights
    return head_loss(*samples, proxies, head.scale, "cosine" if is_cosine else "distance", criterion.__name__)


def gradients(loss, samples, head):
    """Those of a multiple of the loss, with respect to all that is learned."""
    return torch.autograd.grad(1.7 * loss, [samples.features, head.old, head.new, head.scale])


def precisely(samples, head, criterion):
    """The loss in float64, which no kernel computes, and its samples; the head stays in float64."""
    features = samples.features.detach().double().requires_grad_(samples.features.requires_grad)
    precise = Samples(features, samples.labels, samples.weights.double())
    return classification_loss(precise, head.double(), criterion), precise


def compare(samples, head, criterion):
    samples = samples._replace(features=samples.features.detach().requires_grad_())
    loss = by_kernel(samples, head, criterion)
    assert loss.shape == ()
    found = gradients(loss, samples, head)
    wanted, precise = precisely(samples, head, criterion)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-7)
    for ours, theirs in zip(found, gradients(wanted, precise, head), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.parametrize("criterion", CRITERIA)
def test_without_a_gpu_no_kernel_is_used(criterion):
    assert by_kernel(*problem(torch.device("cpu")), criterion) is None


def test_blocks_stay_within_their_memory():
    sizes = itertools.product([1, 5, 768, 5000], [1, 60, 100, 1000], [1, 10], DIMS, [1, 132], [49152, 101376, 232448])
    for num_rows, num_classes, num_proxies, dim, multiprocessors, limit in sizes:
        layout = _layout(num_rows, num_classes, num_proxies, dim, multiprocessors, limit)
        assert layout is not None or num_classes == 1000
        if layout:
            slabs = -(-num_classes * num_proxies // 32)
            cosines = 0 if layout.in_global else layout.rows * 32 * slabs
            others = 32 * slabs + layout.rows * (dim + 1 + 3 * num_classes) + layout.most_warps
            assert layout.shared == 4 * (layout.places * 32 * (dim + 4) + cosines + others) <= limit
            assert layout.places == slabs or layout.places % layout.warps == 0
            assert 1 <= layout.rows <= 8
            assert 1 <= layout.warps <= layout.most_warps
            assert layout.places >= 1


@pytest.mark.parametrize("num_labels", [1, 2])
@pytest.mark.parametrize("num_proxies", [None, 1, 3, 10])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_loss_and_gradients_against_float64(device, criterion, num_proxies, num_labels):
    compare(*problem(device, num_proxies=num_proxies, num_labels=num_labels), criterion)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("num_classes", "num_rows"), [(2, 1), (2, 140), (7, 5), (100, 128), (300, 1061)])
def test_other_sizes_against_float64(device, dim, num_classes, num_rows):
    compare(*problem(device, dim, num_classes, 10, num_rows), nca)


def test_many_classes_against_float64(device):
    compare(*problem(device, num_classes=1500, num_rows=140), cross_entropy)  # cosines do not fit into shared memory


@pytest.mark.parametrize("num_classes", [60, 100])
def test_results_are_bit_identical(device, num_classes):
    samples, head = problem(device, num_classes=num_classes)
    samples.features.requires_grad_()
    first = by_kernel(samples, head, nca)
    with in_reverse():
        second = by_kernel(samples, head, nca)
    assert torch.equal(first, second)
    for one, other in zip(gradients(first, samples, head), gradients(second, samples, head), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("learned", ["features", "old", "scale"])
def test_gradients_only_where_needed(device, learned):
    samples, head = problem(device)
    head.requires_grad_(False)

    def gradient(loss, samples):
        return torch.autograd.grad(loss, samples.features if learned == "features" else getattr(head, learned))[0]

    (samples.features if learned == "features" else getattr(head, learned)).requires_grad_()
    found = gradient(by_kernel(samples, head, nca), samples).double()
    wanted = gradient(*precisely(samples, head, nca))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * wanted.abs().max().item())


def test_other_weights_count_in_the_mean(device):
    samples, head = problem(device)
    others = torch.rand(7, 2, generator=torch.Generator().manual_seed(5)).to(device)
    found = head_loss(*samples, head.weights, head.scale, "distance", "nca", other_weights=others)
    alone, _ = precisely(samples, head, nca)
    total = samples.weights.double().sum()
    torch.testing.assert_close(found.double(), alone * total / (total + others.double().sum()), rtol=1e-5, atol=0)


def test_loss_without_gradients(device):
    samples, head = problem(device)
    head.requires_grad_(False)
    loss = by_kernel(samples, head, nca)
    assert not loss.requires_grad
    torch.testing.assert_close(loss.double(), precisely(samples, head, nca)[0], rtol=1e-5, atol=0)


@pytest.mark.gpu
def test_a_graph_replays_the_same_loss():
    samples, head = problem(torch.device("cuda"))
    samples.features.requires_grad_()
    expected = gradients(by_kernel(samples, head, nca), samples, head)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(by_kernel(samples, head, nca), samples, head)
    graph.replay()
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_other_dimensions_and_precisions_use_no_kernel(device):
    assert by_kernel(*problem(device, dim=48), nca) is None
    samples, head = problem(device)
    assert by_kernel(samples._replace(features=samples.features.double()), head, nca) is None
    assert by_kernel(samples._replace(features=samples.features.bfloat16()), head, nca) is None
