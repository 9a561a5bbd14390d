"""Whether the disk has room for a whole run."""

import shutil
import warnings
from pathlib import Path

from torch import nn

from ccfa.errors import Notice
from ccfa.experiments.checkpoint import KEPT

NETWORKS_STORED = 4  # in a checkpoint: the network, the previous one, the first one, and momentum


def warn_if_short(folder: Path, network: nn.Module, num_stages: int) -> None:
    """A notice at the start of a run that will fill the disk: its networks, and one checkpoint more than are kept."""
    one = sum(tensor.nbytes for tensor in network.state_dict().values())
    needed = one * (num_stages + NETWORKS_STORED * (KEPT + 1))
    free = shutil.disk_usage(folder).free
    if free < needed:
        warnings.warn(
            f"The run needs about {needed:,} bytes in {folder}, where {free:,} are free. Should the disk become full, "
            f"the run ends and can be continued when there is room.",
            Notice,
            stacklevel=2,
        )
