"""AANet's bilevel step: the blend of the two branches, learned alone on balanced data after each epoch."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from ccfa.data import Stage
from ccfa.methods.method import ParameterSelector, Phase
from ccfa.methods.parts import balanced_exemplars, constant
from ccfa.models import Network
from ccfa.models.aggregation import FusedLevel


@dataclass(frozen=True)
class BlendLearned:
    """The method's phases; from stage 1 on, each epoch of the first is followed by one that moves the blend alone."""

    phases: Callable[[Stage], tuple[Phase, ...]]
    lr: float

    def __call__(self, stage: Stage) -> tuple[Phase, ...]:
        """The phases of that stage."""
        main, *others = self.phases(stage)
        if stage.index == 0:
            return (main, *others)
        blend = Phase(
            name="blend",
            epochs=1,
            lr=self.lr,
            rows=balanced_exemplars,
            parameters=blends,
            optimiser=main.optimiser,
            schedule=constant,
            batch_size=main.batch_size,
            weight_decay=main.weight_decay,
            train_batch_norm=False,
            use_terms=False,
        )
        return (replace(main, parameters=AllButBlends(main.parameters), after_epoch=blend), *others)


@dataclass(frozen=True)
class AllButBlends:
    """The selected parameters without the blend of any level."""

    selected: ParameterSelector

    def __call__(self, network: Network) -> list[nn.Parameter]:
        """What else the phase trains."""
        excluded = {id(blend) for blend in blends(network)}
        return [parameter for parameter in self.selected(network) if id(parameter) not in excluded]


def blends(network: Network) -> list[nn.Parameter]:
    """The learned blend of each level."""
    levels = [level for level in network.backbone.levels if isinstance(level, FusedLevel)]
    return [level.blend for level in levels if isinstance(level.blend, nn.Parameter)]
