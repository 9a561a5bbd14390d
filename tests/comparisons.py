"""Invented reports, for tests of comparisons, tables and figures."""

import copy
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ccfa.evaluation import METRICS, Numbers, Report
from ccfa.evaluation import SIZES as SIZES_MB
from ccfa.experiments import Experiment
from ccfa.experiments.tables import Result

SIZES = (4, 3, 3)


def config(
    method="podnet", ccfa=False, seed=0, order=None, options=None, data="digits", sizes=SIZES, memory=20, **given
):
    """A configuration as config.json holds it; options change the resolved method, as they do in earnest."""
    options, classes = options or {}, order or list(range(sum(sizes)))
    scenario = ",".join(map(str, sizes))
    phase = {"name": "main", "epochs": 20, "lr": 0.1}
    phase |= {name: json.loads(text) for name, text in options.items() if not name.startswith("ccfa.")}
    resolved = {
        "name": method,
        "phases": [phase],
        "memory": {"per_class": memory},
        "feature_augmentations": [{"part": "CCFA", "count": options.get("ccfa.count", "1")}] if ccfa else [],
        "predict": "by_nearest_mean" if method == "icarl" else "by_logits",
    }
    return {
        "experiment": asdict(
            Experiment(method, ccfa, data=data, scenario=scenario, seed=seed, options=options, **given)
        ),
        "resolved": {
            "method": resolved,
            "stage_sizes": list(sizes),
            "class_order": classes,
            "class_names": [f"class {label}" for label in classes],
            "num_training_images": 1000,
            "num_test_images": 200,
        },
    }


def entry(path="runs/a", value=0.5, finished=True, environment=None, seconds=10.0, sizes_mb=(), **choices):
    """A run whose average is `value` (and its other metrics near it), after every stage or, unfinished, after two."""
    content = config(**choices)
    num_seen = np.cumsum(content["resolved"]["stage_sizes"]).tolist()[: None if finished else 2]
    overall = [min(value + 0.1 * (1 - stage), 1.0) for stage in range(len(num_seen))]
    numbers = Numbers(overall, {name: value + place / 1000 for place, name in enumerate(METRICS)})
    logits = Numbers([0.1] * len(num_seen), dict.fromkeys(METRICS, 0.1))
    nearest = content["experiment"]["method"] == "icarl"
    report = Report(
        name=Path(path).name,
        config=copy.deepcopy(content),
        num_seen=num_seen,
        own="nearest_mean" if nearest else "logits",
        rules={"logits": logits, "nearest_mean": numbers} if nearest else {"logits": numbers},
        environment=environment or {"acceleration": {"precision": "float32"}, "device": "cpu", "ccfa": "1"},
        seconds=seconds,
        finished=finished,
        **dict(zip(SIZES_MB, sizes_mb, strict=False)),
    )
    return Result(Path(path), report)


ALONE = {0: 0.6012, 1: 0.6234, 2: 0.5871}
PLUGGED = {2: 0.6102, 0: 0.6011, 1: 0.6459}  # the same seeds in another order


def podnets(**choices):
    """Three runs of podnet alone and three with CCFA."""
    alone = [entry(f"runs/p{seed}", value, seed=seed, **choices) for seed, value in ALONE.items()]
    plugged = [entry(f"runs/c{seed}", value, seed=seed, ccfa=True, **choices) for seed, value in PLUGGED.items()]
    return [*alone, *plugged]


def store(path, value=0.5, **choices):
    """A run directory as far as a comparison reads it."""
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "report.json").write_text(entry(path, value, **choices).report.to_json())
    return path
