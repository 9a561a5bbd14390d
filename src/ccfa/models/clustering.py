"""k-means on the device, for imprinting proxies."""

import torch
from torch import Generator, Tensor


def kmeans(
    points: Tensor,
    num_clusters: int,
    generator: Generator,
    num_restarts: int = 10,
    max_iterations: int = 300,
) -> Tensor:
    """The best centres (k, d) of several k-means++ starts, all run at once; fewer points than clusters repeat."""
    if len(points) < num_clusters:
        points = points[torch.arange(num_clusters, device=points.device) % len(points)]
    centres = _plus_plus(points, num_clusters, num_restarts, generator)  # (R, k, d)
    batch = points.expand(num_restarts, -1, -1)
    for _ in range(max_iterations):
        nearest = torch.cdist(batch, centres).argmin(dim=2)  # (R, n)
        member = torch.nn.functional.one_hot(nearest, num_clusters).to(points)  # (R, n, k)
        sizes = member.sum(dim=1).unsqueeze(2)
        means = member.transpose(1, 2) @ batch / sizes.clamp(min=1)
        updated = torch.where(sizes > 0, means, centres)  # an empty cluster stays where it is
        if torch.equal(updated, centres):
            break
        centres = updated
    inertia = torch.cdist(batch, centres).amin(dim=2).square().sum(dim=1)
    return centres[inertia.argmin()]


def _plus_plus(points: Tensor, num_clusters: int, num_restarts: int, generator: Generator) -> Tensor:
    """k-means++ seeding: each further centre is drawn with probability proportional to its squared distance."""
    weights = torch.ones(num_restarts, len(points), device=points.device, dtype=points.dtype)
    centres = points.new_empty(num_restarts, 0, points.shape[1])
    for _ in range(num_clusters):
        chosen = torch.multinomial(weights, 1, generator=generator).squeeze(1)
        centres = torch.cat([centres, points[chosen].unsqueeze(1)], dim=1)
        distances = torch.cdist(points.expand(num_restarts, -1, -1), centres).amin(dim=2).square()
        # All points may coincide with centres already: any choice is then as good.
        weights = distances + torch.finfo(points.dtype).tiny
    return centres
