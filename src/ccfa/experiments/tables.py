"""The paper's numbers as data, and which of them our runs reached."""

from typing import NamedTuple

# Average incremental accuracy in percent: the paper's table 1 (CIFAR-100, 50 classes first, 20 exemplars per class).


class Published(NamedTuple):
    """A row of the paper's table 1; None where the paper has a dash."""

    inc1: float | None
    inc2: float | None
    inc5: float | None
    inc10: float | None

    def cell(self, scenario: str) -> float | None:
        """The value for a scenario such as B50-inc10."""
        increment = scenario.removeprefix("B50-")
        return getattr(self, increment) if increment in self._fields else None


# (method, with CCFA) -> row. Re-runs by the paper's authors where they give them; the first four are other papers'.
CIFAR100: dict[tuple[str, bool], Published] = {
    ("icarl", False): Published(44.20, 50.60, 53.78, 58.08),
    ("bic", False): Published(47.09, 48.96, 53.21, 56.86),
    ("gdumb", False): Published(59.76, 59.97, 60.24, 60.70),
    ("ucir", False): Published(50.44, 56.61, 60.47, 63.76),
    ("ucir", True): Published(52.64, 57.42, 61.58, 64.13),
    ("podnet", False): Published(57.84, 60.50, 62.77, 64.62),
    ("podnet", True): Published(60.69, 62.91, 65.50, 67.24),
    ("aanet", False): Published(60.91, 62.34, 64.49, 66.34),
    ("aanet", True): Published(62.20, 63.74, 66.16, 67.37),
    ("afc", False): Published(61.74, 63.78, 64.63, 66.02),
    ("afc", True): Published(63.11, 64.59, 65.61, 66.47),
    ("il2a", False): Published(None, None, 58.42, None),
    ("il2a", True): Published(None, None, 60.78, None),
}

# Methods that appear in the paper's table but not here: their published values are all there is.
CITED_ONLY: dict[str, Published] = {
    "Mnemonics": Published(None, 60.96, 62.28, 63.34),
    "TPCIL": Published(None, None, 63.58, 65.34),
    "GeoDL": Published(52.28, 60.21, 63.61, 65.34),
}

PAPERS: dict[str, str] = {
    "ucir": "Hou et al., CVPR 2019",
    "podnet": "Douillard et al., ECCV 2020",
    "afc": "Kang et al., CVPR 2022",
    "aanet": "Liu et al., CVPR 2021, over PODNet",
    "aanet-ucir": "Liu et al., CVPR 2021, over UCIR",
    "aanet-afc": "Liu et al., CVPR 2021, over AFC",
    "icarl": "Rebuffi et al., CVPR 2017",
    "bic": "Wu et al., CVPR 2019",
    "gdumb": "Prabhu et al., ECCV 2020",
    "il2a": "Zhu et al., NeurIPS 2021",
    "pass": "Zhu et al., CVPR 2021",
}

# Whether a published number was reached on CIFAR-100; the runs are in benchmarks/RESULTS.md.
REPRODUCED: dict[str, str] = {
    "podnet": "yes, on one order: 65.3 at B50-inc10, podnet-0 (paper 64.6 ± 0.65); with CCFA, three: 66.8 ± 1.3 (67.2)",
}
NOT_MEASURED = "not yet measured"


def published(method: str, ccfa: bool, data: str, scenario: str) -> float | None:
    """The paper's cell for a method, in percent."""
    row = CIFAR100.get((method, ccfa)) if data == "cifar100" else None
    return row.cell(scenario) if row else None
