"""Readings of the paper's loss, on held-out training images: which share of L_cls goes where.

    python benchmarks/readings.py --data-dir DIR --at-once 8      # the main ones, one order and seed
    python benchmarks/readings.py --only podnet ccfa full --seeds 1 2 3 --orders podnet-0 podnet-1
    python benchmarks/readings.py --again podnet ccfa full --again-seeds 2 3      # all once, these with more seeds

L_cls is a mean over real rows and five augmented rows for each. Its weights are written (b, h, a): of the real rows'
mean loss in the backbone's gradient, of the same in the head's gradient, and of the augmented rows' mean in the head's.
As printed in the paper they are (1/6, 1/6, 5/6). The backbone does not learn in the balanced phase.
"""

import argparse
import math
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console

from ccfa import Experiment, Running, sweep
from ccfa.errors import Stopped
from ccfa.evaluation import Report

SIXTH = f"{1 / 6:.6f}"
READINGS: dict[str, tuple[bool, dict[str, str]]] = {  # with CCFA or not, options
    "podnet": (False, {}),
    "ccfa": (True, {}),
    "full": (True, {"ccfa.backbone_weight": "1"}),  # (1, 1/6, 5/6)
    "slow-balanced": (False, {"balanced_lr": f"{0.05 / 6:.6f}"}),  # control
    "full, balanced 1:1": (True, {"ccfa.backbone_weight": "1", "ccfa.balanced.weight": "0.2"}),
    "full, main 1:1": (True, {"ccfa.backbone_weight": "1", "ccfa.weight": "0.2", "ccfa.balanced.weight": "1"}),
    "weak": (False, {"lambda_classification": SIXTH}),  # control
    "real + joint": (  # (7/6, 7/6, 5/6) in the main phase
        True,
        {"lambda_classification": "2", "ccfa.weight": f"{5 / 7:.6f}", "ccfa.balanced.weight": "1"},
    ),
    "full, random": (True, {"ccfa.backbone_weight": "1", "ccfa.target": "random"}),  # control
    "full, own label": (True, {"ccfa.backbone_weight": "1", "ccfa.target": "own-label"}),  # control
    "full, flows": (True, {"ccfa.backbone_weight": "1", "ccfa.gradient_to_backbone": "true"}),
    "full, balanced-10": (True, {"ccfa.backbone_weight": "1", "ccfa.target": "balanced-10"}),
}


def main() -> None:
    """Run what is asked for and print a table, also of what is done when the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(READINGS), choices=list(READINGS))
    parser.add_argument("--data", default="cifar100")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--scenario", default="B50-inc10")
    parser.add_argument("--memory", type=int)
    parser.add_argument("--orders", nargs="*", default=["podnet-0"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[1])
    parser.add_argument("--again", nargs="*", default=[], choices=list(READINGS), help="those to run with more seeds")
    parser.add_argument("--again-seeds", nargs="*", type=int, default=[2, 3])
    parser.add_argument("--validation", type=float, default=0.1)
    parser.add_argument("--set", nargs="*", default=[], help="further options for all, NAME=VALUE")
    parser.add_argument("--out", type=Path, default=Path("runs/readings"))
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    common = dict(text.split("=", 1) for text in asked.set)
    runs: dict[str, tuple[str, tuple[str, int], Experiment]] = {}
    for names, seeds in ((asked.only, asked.seeds), (asked.again, asked.again_seeds)):
        for name, order, seed in product(names, asked.orders, seeds):
            ccfa, options = READINGS[name]
            experiment = Experiment(
                "podnet",
                ccfa,
                data=asked.data,
                scenario=asked.scenario,
                memory=asked.memory,
                order=order,
                seed=seed,
                validation=asked.validation,
                options={**common, **options},
            )
            runs[experiment.name] = name, (order, seed), experiment
    how = Running(device=asked.device, at_once=asked.at_once, data_dir=asked.data_dir, max_minutes=asked.minutes)
    try:
        sweep([one for *_, one in runs.values()], asked.out, how, compared=False, console=Console(width=200))
    except Stopped as stopped:
        print(stopped)
    reports: dict[str, dict[tuple[str, int], Report]] = {}
    for folder, (name, key, _) in runs.items():
        path = asked.out / folder / "report.json"
        if path.exists():
            reports.setdefault(name, {})[key] = Report.from_json(path.read_text())
    print_table(reports)


def print_table(reports: dict[str, dict[tuple[str, int], Report]]) -> None:
    """Averages over the stages that a run and the plain one of its order and seed both have, and the paired gain."""
    print(f"{'reading':22}{'runs':>5}{'stages':>8}{'average':>9}{'new':>7}{'old':>7}{'gain over podnet':>24}")
    for name, found in reports.items():
        stages = min(len(report.overall) for report in found.values())
        averages = {key: 100 * float(np.mean(report.overall[:stages])) for key, report in found.items()}
        plain = reports.get("podnet", {})
        gains = [
            averages[key] - 100 * float(np.mean(plain[key].overall[:stages]))
            for key in found
            if key in plain and len(plain[key].overall) >= stages
        ]
        error = np.std(gains, ddof=1) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
        gain = f"{np.mean(gains):+.2f} ± {error:.2f} (s.e.)" if gains else "-"
        new, old = (
            100 * float(np.mean([report.metrics[metric] for report in found.values()]))
            for metric in ("new_class_accuracy", "old_class_accuracy")
        )
        average = float(np.mean(list(averages.values())))
        print(f"{name:22}{len(found):>5}{stages:>8}{average:>9.2f}{new:>7.2f}{old:>7.2f}{gain:>24}")


if __name__ == "__main__":
    main()
