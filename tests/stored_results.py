"""Reports of runs that measure cells of the paper, as results/ holds them."""

import json
from dataclasses import asdict, replace
from pathlib import Path

from ccfa.evaluation import METRICS, Numbers, Report
from ccfa.experiments.experiment import describe, experiment_method
from ccfa.experiments.tables import PaperSetting, experiment_for

STORED = Path(__file__).parents[1] / "results/cifar100-B50-inc10/cifar100-B50-inc10-podnet-0-podnet-ccfa-seed1.json"
PODNET = PaperSetting("cifar100", "B50-inc10", "podnet")


def result_report(setting: PaperSetting, order: str, value: float, seed: int = 1) -> Report:
    """The report of a finished run of a setting, all of whose accuracies are `value`."""
    report = Report.from_json(STORED.read_text())
    experiment = experiment_for(setting, order, seed)
    method = json.loads(json.dumps(describe(experiment_method(experiment))))
    return replace(
        report,
        name=experiment.name,
        config={
            "experiment": asdict(experiment),
            "resolved": {**report.config["resolved"], "method": method, "class_order": [order]},
        },
        rules={report.own: Numbers([value] * len(report.overall), dict.fromkeys(METRICS, value))},
        environment={**report.environment, "commit": "0123456789ab", "at_once": 8},
    )
