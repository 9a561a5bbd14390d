"""Images per second at the size of ImageNet: training steps, the reader of a prepared file, and both together.

    python benchmarks/imagenet.py --out figures.jsonl    # on a GPU: PODNet's ResNet-18 at 224 pixels
    python benchmarks/imagenet.py --tiny --device cpu    # small, to see that it works

Images are random. A step is that of `ccfa run podnet --data imagenet100`: windows of images of 256 pixels, resized on
the device. The reader checks each image. A file is cold after the system was asked to drop it from its memory. Some
file systems, such as one in memory, keep it. A stage waits while no step runs: for images, or for their copy to the
device.
"""

import argparse
import json
import os
import tempfile
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step_time import prepared, random_images, run_steps

from ccfa import ImageSet, Learner, Method, build_method, split
from ccfa.data import Streamed, streamed
from ccfa.experiments.running import environment
from ccfa.learning import acceleration as placement
from ccfa.learning.acceleration import Acceleration, pick_device
from ccfa.learning.loop import batches, named_generator, prepare_phase
from ccfa.learning.state import PhaseAtWork

COMPILING = 30  # seconds that one more compiled variant may take


def stream_images(folder: Path, num: int, size: int) -> Streamed:
    """Write a file of random images as `ccfa prepare` does."""
    path, random = folder / "train.pixels", np.random.default_rng(0)
    checks = []
    with open(path, "wb") as file:
        for _ in range(num):
            pixels = random.bytes(3 * size * size)
            file.write(pixels)
            checks.append(zlib.crc32(pixels))
        file.flush()
        os.fsync(file.fileno())
    return Streamed(path, (3, size, size), np.array(checks))


def forget(path: Path) -> None:
    """Ask the system to drop a file from its memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def reading_rate(images: Streamed, batch: int, num_threads: int, device: torch.device) -> float:
    """Images per second, in random order and onto the device."""
    before, streamed.NUM_READERS = streamed.NUM_READERS, num_threads
    order = torch.randperm(len(images))
    began = time.perf_counter()
    for part in images.to(device).ahead(order.split(batch)):
        del part
    synchronise(device)
    took = time.perf_counter() - began
    streamed.NUM_READERS = before
    return len(images) / took


def step_rate(phase: PhaseAtWork, steps: int, device: torch.device) -> float:
    """Images per second of a phase whose images are on the device."""
    run_steps(phase, 2, device)
    began = time.perf_counter()
    run_steps(phase, steps, device)
    return steps * phase.batch_size / (time.perf_counter() - began)


def streamed_phase(method: Method, images: Streamed, acceleration: Acceleration, device: torch.device) -> Learner:
    """A learner in its first stage, with images that stay in their file."""
    placement.RESIDENT_SHARE = 0.0
    names = tuple(map(str, range(10)))
    train = ImageSet(images, np.arange(len(images)) % len(names), names)
    learner = Learner(method, train, device=device, acceleration=acceleration)
    learner.begin(split(len(names), len(names), 1)[0])
    return learner


def fed_epoch(learner: Learner, work: PhaseAtWork, epoch: int) -> tuple[float, float]:
    """Images per second of an epoch, and the share of its time in which no step ran."""
    device = learner.device
    order = batches(work.rows, work.batch_size, named_generator(device, "epoch", epoch))
    steps = [(Clock(device), Clock(device)) for _ in order]
    synchronise(device)
    began = time.perf_counter()
    for (before, after), batch in zip(steps, learner.train.batches(order), strict=True):
        before.record()
        work.step(*batch)
        after.record()
    synchronise(device)
    took = time.perf_counter() - began
    busy = sum(before.seconds_to(after) for before, after in steps)
    return order.numel() / took, 1 - busy / took


class Clock:
    """A moment in the work of a device."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self.moment = 0.0

    def record(self) -> None:
        """This moment: on a GPU, when it gets here."""
        if self.event:
            self.event.record()
        self.moment = time.perf_counter()

    def seconds_to(self, later: "Clock") -> float:
        """The time between two moments."""
        if self.event and later.event:
            return float(self.event.elapsed_time(later.event)) / 1e3
        return later.moment - self.moment


class Table:
    """Prints each figure, and appends it to a file as a line of JSON."""

    def __init__(self, facts: dict[str, Any], out: Path | None) -> None:
        self.facts, self.out, self.began = facts, out, time.monotonic()
        print(", ".join(f"{name} {value}" for name, value in facts.items()))
        print(f"{'':60}{'images/s':>10}{'waiting':>9}")

    @property
    def seconds(self) -> float:
        """How long the benchmark has run."""
        return time.monotonic() - self.began

    def add(self, what: str, rate: float, waiting: float | None = None) -> None:
        """One more figure."""
        print(f"{what:60}{rate:>10,.0f}" + ("" if waiting is None else f"{waiting:>9.1%}"), flush=True)
        if self.out:
            line = {**self.facts, "what": what, "images_per_second": rate, "waiting": waiting}
            with open(self.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="a small network on small images")
    parser.add_argument("--images", type=int, default=4000, help="in the prepared file, 196,608 bytes each")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8], help="that read the prepared file")
    parser.add_argument("--folder", type=Path, default=None, help="for the prepared file; by default a temporary one")
    parser.add_argument("--limit", type=float, default=90, help="seconds: later compiled variants are left out")
    parser.add_argument("--out", type=Path, default=None, help="append the figures there, as lines of JSON")
    given = parser.parse_args()
    device, size, options = pick_device(given.device), 256, {}
    if given.tiny:
        size, options = 32, {"backbone": "small"}
        given.images, given.steps, given.batch, given.threads = 64, 2, [8, 16], [1, 2]
    fast = Acceleration.for_device(device)
    facts = environment(device, fast)
    named = ("device", "commit", "ccfa", "python", "torch", "numpy")
    table = Table({**{name: facts[name] for name in named}, "cores": len(os.sched_getaffinity(0))}, given.out)
    methods = {batch: build_method("podnet", "imagenet100", batch_size=batch, **options) for batch in given.batch}
    first = given.batch[0]
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        images = stream_images(Path(place), given.images, size)
        reading_rate(images, first, max(given.threads), device)  # the host's memory for copies is made once
        for num in given.threads:
            forget(images.path)
            for state in ("cold", "warm"):
                table.add(f"reading, {num} threads, {state}", reading_rate(images, first, num, device))

        few = random_images(30, 2 * max(given.batch) // 10, size)
        kinds = {"eager": replace(fast, compile=False, graph=False)}
        if device.type == "cuda":
            kinds |= {"captured": replace(fast, compile=False), "compiled": replace(fast, graph=False)}
            kinds |= {"compiled and captured": fast}
        for batch, method in methods.items():
            for name, kind in kinds.items():
                if kind.compile and table.seconds > given.limit - COMPILING:
                    print(f"{name}, batch {batch}: left out after {table.seconds:.0f} seconds, see --limit")
                    continue
                for stage in ("first", "later"):
                    phase = prepared(method, few, int(stage == "later"), kind, device)
                    table.add(f"{stage} stage, batch {batch}, {name}", step_rate(phase, given.steps, device))
                    del phase

        name = next(reversed(kinds))
        learner = streamed_phase(methods[first], images, kinds[name], device)
        work = prepare_phase(learner, learner.method.phases(learner.stage)[0], 0)
        forget(images.path)
        for epoch, state in enumerate(("cold", "warm")):
            table.add(f"first stage from the file, batch {first}, {name}, {state}", *fed_epoch(learner, work, epoch))
    print(f"{table.seconds:.0f} seconds")


if __name__ == "__main__":
    main()
