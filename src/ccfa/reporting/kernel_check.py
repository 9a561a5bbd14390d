"""Whether the kernels compute what torch computes: two training steps, by them and by torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn

from ccfa.augmentation import CCFA
from ccfa.data import ImageSet, split
from ccfa.kernels import LAUNCHED, kernels_left_out
from ccfa.learning import Learner
from ccfa.learning.acceleration import Acceleration
from ccfa.learning.loop import prepare_phase
from ccfa.methods import METHODS, Method, with_augmentation
from ccfa.models.resnet import Block

STAGES = split(12, 6, 3)
PER_CLASS = 16  # images
CLIP_VALUE = 0.01  # so small that it clips
SMALL = 0.05  # errors of smaller losses are shares of this


@dataclass(frozen=True)
class Comparison:
    """What two steps made, beside what torch makes in float32.

    An error is the length of a difference, as a share of the length of what it should be: of each loss, and of the
    change of each tensor of the network.
    """

    by_kernels: Mapping[str, float]
    by_torch: Mapping[str, float]  # in bfloat16, like the kernels
    sources: tuple[str, ...]  # of the kernels that were launched

    @property
    def agrees(self) -> bool:
        """Whether the kernels are as near as torch: on average, and nearly so in each."""
        pairs = [(self.by_kernels[name], usual) for name, usual in self.by_torch.items()]
        is_near = all(found < 2 * usual + 0.05 for found, usual in pairs)
        return is_near and fmean(found for found, _ in pairs) < 1.2 * fmean(usual for _, usual in pairs)

    def __str__(self) -> str:
        def shown(kernels: float, usual: float) -> str:
            return f"{kernels:.1%} (torch in bfloat16: {usual:.1%})"

        mean = shown(fmean(self.by_kernels.values()), fmean(self.by_torch.values()))
        worst = max(self.by_torch, key=lambda name: self.by_kernels[name] / (2 * self.by_torch[name] + 0.05))
        names = ", ".join(source.removesuffix(".cu") for source in self.sources) or "no kernel of ours"
        return (
            f"by {names}: {'agrees with torch' if self.agrees else 'WRONG'}. Mean difference from float32 {mean}, "
            f"worst of {worst} {shown(self.by_kernels[worst], self.by_torch[worst])}"
        )


def compare_steps(name: str, device: torch.device, batch_size: int) -> Comparison:
    """Make the first two steps of a method's last stage with CCFA on noise: by kernels, and by torch.

    Nothing is compiled but kernels, and no graph is captured.
    """
    method = with_augmentation(METHODS[name](batch_size=batch_size), CCFA(count=2))
    with torch.compiler.set_stance("force_eager"):
        LAUNCHED.clear()
        found = _two_steps(method, device, Acceleration("bf16", compile=True))
        sources = tuple(sorted({source for source, _ in LAUNCHED}))
        with kernels_left_out():
            usual, wanted = (_two_steps(method, device, Acceleration(precision)) for precision in ("bf16", "float32"))
    return Comparison(_errors(found, wanted), _errors(usual, wanted), sources)


def _two_steps(method: Method, device: torch.device, acceleration: Acceleration) -> dict[str, Tensor]:
    """All losses of the second step, and what both changed."""
    pixels = np.random.default_rng(0).integers(0, 256, (12 * PER_CLASS, 3, 32, 32), dtype=np.uint8)
    images = ImageSet(pixels, np.repeat(np.arange(12), PER_CLASS), tuple(map(str, range(12))))
    learner = Learner(method, images, device=device, acceleration=acceleration)
    Acceleration().set_rounding(device)  # exemplars and new proxies are the same in each precision
    learner.begin(STAGES[0])
    for module in learner.network.backbone.modules():
        if isinstance(module, Block):  # so that residuals count, but do not amplify rounding
            nn.init.constant_(module.norm2.weight, 0.1)
    for stage in STAGES[1:]:
        learner.conclude()
        learner.begin(stage)
    phase = prepare_phase(learner, replace(method.phases(stage)[0], clip_value=CLIP_VALUE), 0)
    before = {name: tensor.clone() for name, tensor in learner.network.state_dict().items()}
    rows = phase.rows[:: len(phase.rows) // phase.batch_size][: phase.batch_size]
    for _ in range(2):
        losses = phase.step(rows)
    changes = {name: after - before[name] for name, after in learner.network.state_dict().items()}
    return {f"loss: {name}": loss.clone() for name, loss in losses.items()} | changes


def _errors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    if found.keys() != wanted.keys():
        raise RuntimeError(f"Only one of two steps has {', '.join(sorted(found.keys() ^ wanted.keys()))}.")
    errors = {}
    for name, one in wanted.items():
        least = SMALL if name.startswith("loss: ") else 1e-12  # what should not change must not
        errors[name] = ((found[name] - one).double().norm() / one.double().norm().clamp(least)).item()
    return errors
