"""The network of a stage: backbone f and head g."""

import copy

from torch import Tensor, nn

from ccfa.models.backbone import Backbone
from ccfa.models.heads import Head


class Network(nn.Module):
    """Theta_k: the backbone and the head of one stage."""

    def __init__(self, backbone: Backbone, head: Head) -> None:
        super().__init__()
        self.backbone: Backbone = backbone
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        """The logits of normalised images."""
        logits: Tensor = self.head(self.head.embed(self.backbone(images).embedding))
        return logits

    def frozen_copy(self) -> "Network":
        """A copy that never changes: the `previous` of the next stage."""
        return copy.deepcopy(self).eval().requires_grad_(False)
