"""k-means on the device, for imprinting proxies: all restarts of all classes at once."""

import torch
from torch import Generator, Tensor
from torch.nn import functional as F


def kmeans(
    points: Tensor,
    num_clusters: int,
    generator: Generator,
    num_restarts: int = 10,
    max_iterations: int = 300,
) -> Tensor:
    """The best centres (..., k, d) of several k-means++ starts for points (..., n, d); too few points repeat."""
    *batch, num_points, dim = points.shape
    if num_points < num_clusters:
        points = points[..., torch.arange(num_clusters, device=points.device) % num_points, :]
    points = points.reshape(-1, 1, *points.shape[-2:]).expand(-1, num_restarts, -1, -1).flatten(0, 1)  # (B * R, n, d)
    centres = _plus_plus(points, num_clusters, generator)
    for _ in range(max_iterations):
        member = F.one_hot(torch.cdist(points, centres).argmin(dim=2), num_clusters).to(points)  # (B * R, n, k)
        sizes = member.sum(dim=1).unsqueeze(2)
        means = member.transpose(1, 2) @ points / sizes.clamp(min=1)
        updated = torch.where(sizes > 0, means, centres)  # an empty cluster stays where it is
        if torch.equal(updated, centres):
            break
        centres = updated
    inertia = torch.cdist(points, centres).amin(dim=2).square().sum(dim=1).view(-1, num_restarts)
    best = inertia.argmin(dim=1) + num_restarts * torch.arange(len(inertia), device=inertia.device)
    return centres[best].reshape(*batch, num_clusters, dim)


def _plus_plus(points: Tensor, num_clusters: int, generator: Generator) -> Tensor:
    """k-means++ seeding: each further centre is drawn with probability proportional to its squared distance."""
    weights = torch.ones(points.shape[:2], device=points.device, dtype=points.dtype)
    centres = points.new_empty(len(points), 0, points.shape[2])
    for _ in range(num_clusters):
        chosen = torch.multinomial(weights, 1, generator=generator)  # (B * R, 1)
        drawn = points.gather(1, chosen.unsqueeze(2).expand(-1, -1, points.shape[2]))
        centres = torch.cat([centres, drawn], dim=1)
        # All points may coincide with centres already: any choice is then as good.
        weights = torch.cdist(points, centres).amin(dim=2).square() + torch.finfo(points.dtype).tiny
    return centres
