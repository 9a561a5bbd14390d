"""Draw the README's picture from the stored reports: PODNet with and without CCFA on CIFAR-100.

    python benchmarks/accuracy_figure.py                    # writes docs/accuracy.svg
    python benchmarks/accuracy_figure.py --out figure.png   # any format that matplotlib knows

A line is the mean over three class orders of the accuracy on all classes seen so far, a band one sample standard
deviation. The background is opaque, so that the picture can be read on light and on dark pages.
"""

import argparse
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

from ccfa.evaluation.report import Report

ROOT = Path(__file__).resolve().parents[1]
PANELS = {"5 tasks": "B50-inc10", "10 tasks": "B50-inc5", "25 tasks": "B50-inc2", "50 tasks": "B50-inc1"}
LINES = {"podnet-ccfa": ("PODNet + CCFA", "#0072b2", "-"), "podnet": ("PODNet", "#d55e00", "--")}  # Okabe and Ito
ORDERS = ("podnet-0", "podnet-1", "podnet-2")
STYLE = {"font.size": 13, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "ccfa"}


def curves(scenario: str, run: str) -> tuple[np.ndarray, np.ndarray]:
    """Classes seen after each stage, and the accuracy in percent on them: one row per class order."""
    folder = ROOT / "results" / f"cifar100-{scenario}"
    paths = [folder / f"cifar100-{scenario}-{order}-{run}-seed1.json" for order in ORDERS]
    reports = [Report.from_json(path.read_text()) for path in paths]
    return np.array(reports[0].num_seen), 100 * np.array([report.overall for report in reports])


def main() -> None:
    """Draw one panel per number of tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "accuracy.svg")
    out: Path = parser.parse_args().out
    with mpl.rc_context(STYLE):
        figure, panels = plt.subplots(1, len(PANELS), figsize=(12.5, 3.9), sharey=True, layout="constrained")
        for panel, (title, scenario) in zip(panels, PANELS.items(), strict=True):
            averages = []
            for run, (label, colour, dashes) in LINES.items():
                num_seen, accuracy = curves(scenario, run)
                mean, spread = accuracy.mean(0), accuracy.std(0, ddof=1)
                panel.plot(num_seen, mean, dashes, color=colour, label=label, linewidth=2.2)
                panel.fill_between(num_seen, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
                averages.append(accuracy.mean())
            panel.set_title(f"{title}: {averages[0] - averages[1]:+.1f} on average", fontsize=13)
            panel.set_xlabel("classes seen")
            panel.grid(axis="y", color="0.9")
        panels[0].set_ylabel("accuracy, percent")
        panels[0].legend(frameon=False, loc="lower left")
        figure.savefig(out, facecolor="white", dpi=150, metadata={"Date": None} if out.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
