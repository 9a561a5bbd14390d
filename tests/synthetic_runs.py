"""Run directories made up in a moment: any number of stages and classes, predictions drawn at random."""

import json

import numpy as np
import torch

from ccfa.data import ImageSet, split
from ccfa.evaluation import Numbers, Report, rule_name
from ccfa.experiments import Experiment
from ccfa.experiments.experiment import Resolved, experiment_method
from ccfa.experiments.running import environment
from ccfa.learning.acceleration import Acceleration
from toy_runs import begun

PER_CLASS = 20
CPU = torch.device("cpu")


def synthetic_resolved(names, increment=2, side=32, seed=0, **experiment):
    """An experiment with images of noise around a colour of each class."""
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(names)), PER_CLASS)
    colours = random.integers(0, 256, (len(names), 3, 1, 1))
    images = np.clip(colours[labels] + random.normal(0, 50, (len(labels), 3, side, side)), 0, 255).astype(np.uint8)
    train, test = (ImageSet(images[::step], labels[::step], names) for step in (1, -1))
    record = Experiment(**{"method": "podnet", "ccfa": True, **experiment})
    stages = split(len(names), increment, increment)
    return Resolved(record, experiment_method(record), train, test, stages, tuple(range(len(names))), ())


def synthetic_run(path, resolved, num_done=None, seed=0, state="finished", epochs=20):
    """A run directory as such a run leaves it: later classes are preferred, older ones forgotten."""
    random = np.random.default_rng(seed)
    surroundings = environment(CPU, Acceleration.for_device(CPU))
    directory = begun(path, resolved.config, {**surroundings, "commit": "0123456789ab"})
    stages = resolved.stages[:num_done]
    by_logits, by_mean, labels, rows = [], [], [], []
    for stage in stages:
        seen = resolved.test.labels[resolved.test.rows(0, stage.num_seen)].numpy()
        labels.append(seen)
        for kept, skill in ((by_logits, 0.75), (by_mean, 0.7)):
            wrong = random.random(len(seen)) > skill - 0.3 * (stage.num_seen - seen) / resolved.train.num_classes
            taken = np.minimum((stage.num_seen * random.beta(2, 1, len(seen))).astype(int), stage.num_seen - 1)
            kept.append(np.where(wrong, taken, seen))
        directory.write_predictions(
            stage.index, {"labels": seen, "by_logits": by_logits[-1], "by_nearest_mean": by_mean[-1]}
        )
        exemplars = [torch.arange(label * PER_CLASS, (label + 1) * PER_CLASS) for label in range(stage.num_seen)]
        directory.write_exemplars(stage.index, exemplars)
        rows.append({"stage": stage.index, "num_seen": stage.num_seen, "seconds": 10.0 + stage.index})
        for phase, num_epochs in (("main", epochs), ("balanced", epochs // 4)):
            for epoch in range(num_epochs):
                loss = {"classification": 2.0 / (epoch + 1), "pod_flat": 0.5}
                record = {"stage": stage.index, "phase": phase, "epoch": epoch, "lr": 0.1, "images_per_second": 1000.0}
                directory.append("metrics.jsonl", json.dumps({**record, **loss, "loss": sum(loss.values())}))
    num_seen = [stage.num_seen for stage in stages]
    report = Report(
        name=path.name,
        config=resolved.config,
        num_seen=num_seen,
        own=rule_name(resolved.method.predict),
        rules={
            "logits": Numbers.of(by_logits, labels, num_seen),
            "nearest_mean": Numbers.of(by_mean, labels, num_seen),
        },
        environment=surroundings,
        seconds=sum(row["seconds"] for row in rows),
        finished=state == "finished",
        parameters_mb=1.853,
        remembered_mb=0.25,
        exemplars_mb=6.144,
    )
    directory.write_results(report, rows)
    directory.set_status(state)
    return directory
