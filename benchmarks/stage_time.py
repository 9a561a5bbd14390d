"""Where the seconds of a stage go: imprinting, capturing, training, herding, evaluation.

    python benchmarks/stage_time.py                 # on a GPU: PODNet + CCFA, 50 classes, then stages of one class
    python benchmarks/stage_time.py --device cpu    # small, to see that it works

A run of 50 one-class stages is mostly such stages: what they spend beside training is what it spends. Images are
random.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from step_time import random_images

from ccfa import CCFA, METHODS, ImageSet, Learner, Stage, split, with_augmentation
from ccfa.learning.acceleration import Acceleration, describe_device, pick_device
from ccfa.learning.loop import prepare_phase


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """The time of an action, the device's work included."""
    began = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def stage_seconds(learner: Learner, stage: Stage, test: ImageSet, train: bool) -> dict[str, float]:
    """One stage, part by part; captures are timed once more by themselves, since training contains them."""
    device = learner.device
    seen = test.subset(test.rows(0, stage.num_seen))
    spent = {"imprinting": seconds(lambda: learner.begin(stage), device)}
    if train:
        phases = learner.method.phases(stage)
        spent["capturing"] = sum(seconds(lambda p=p: prepare_phase(learner, p, 0), device) for p in phases)
        spent["training"] = seconds(learner.optimise, device)
    spent["herding"] = seconds(learner.conclude, device)

    def evaluate() -> None:
        learner.predict_by_logits(seen.images)
        learner.predict_by_nearest_mean(seen.images)

    spent["evaluation"] = seconds(evaluate, device)
    return spent


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--stages", type=int, default=3, help="one-class stages to measure, after one to warm up")
    parser.add_argument("--json", type=Path, default=None, help="write the figures there too")
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    on_gpu = device.type == "cuda"
    small = {} if on_gpu else {"backbone": "small", "epochs": 2, "balanced_epochs": 1}
    method = with_augmentation(METHODS["podnet"](**small), CCFA())
    per_class, initial = (500, 50) if on_gpu else (30, 4)
    num_stages = arguments.stages + 2
    images = random_images(initial + num_stages, per_class, 32)
    test = random_images(initial + num_stages, 100 if on_gpu else 10, 32).to(device)
    learner = Learner(method, images, device=device, acceleration=Acceleration.for_device(device))
    print(f"{describe_device(device)}, torch {torch.__version__}, {learner.acceleration}")
    stages = split(images.num_classes, initial, 1)
    found = [stage_seconds(learner, stage, test, train=stage.index > 0) for stage in stages[:num_stages]]
    print(f"{initial} classes at once, not trained: " + ", ".join(f"{k} {v:.2f} s" for k, v in found[0].items()))
    means = {part: sum(spent[part] for spent in found[2:]) / len(found[2:]) for part in found[1]}
    print("a stage of one class: " + ", ".join(f"{part} {value:.3f} s" for part, value in means.items()))
    beside = means["imprinting"] + means["herding"] + means["evaluation"]
    whole = beside + means["training"]
    print(f"captures {means['capturing'] / whole:.1%} of a stage; imprinting, herding, evaluation {beside / whole:.1%}")
    if arguments.json:
        figures = {
            "device": describe_device(device),
            "torch": str(torch.__version__),
            "first": found[0],
            "later": means,
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
