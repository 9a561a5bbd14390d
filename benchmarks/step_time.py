"""Milliseconds per training step, with a plain eager float32 baseline measured in the same run.

    python benchmarks/step_time.py                 # on a GPU: PODNet's ResNet-32, batch 128
    python benchmarks/step_time.py --method aanet  # in its third stage the previous network has two branches, too
    python benchmarks/step_time.py --device cpu    # small, to see that it works

Images are random: a step's time does not depend on what they show. Several runs at once are threads with a stream and a
graph each, as `ccfa sweep --at-once` makes them. The baseline's images come from a PIL data loader, one by one.
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageEnhance

from ccfa import CCFA, METHODS, ImageSet, Learner, Method, split, with_augmentation
from ccfa.kernels.graphs import own_stream
from ccfa.learning.acceleration import Acceleration, describe_device, pick_device
from ccfa.learning.loop import prepare_phase
from ccfa.learning.state import PhaseAtWork

EAGER = Acceleration()


def random_images(num_classes: int, per_class: int, size: int) -> ImageSet:
    """Images of noise."""
    pixels = np.random.default_rng(0).integers(0, 256, (num_classes * per_class, 3, size, size), dtype=np.uint8)
    return ImageSet(pixels, np.repeat(np.arange(num_classes), per_class), tuple(map(str, range(num_classes))))


def prepared(
    method: Method, images: ImageSet, stage: int, acceleration: Acceleration, device: torch.device
) -> PhaseAtWork:
    """The main phase of a stage, ready to run; nothing was trained before it."""
    learner = Learner(method, images, device=device, acceleration=acceleration)
    stages = split(images.num_classes, images.num_classes - 20, 10)
    learner.begin(stages[0])
    for later in stages[1 : stage + 1]:
        learner.conclude()
        learner.begin(later)
    return prepare_phase(learner, method.phases(stages[stage])[0], 0)


def run_steps(phase: PhaseAtWork, num_steps: int, device: torch.device) -> None:
    """So many steps, and wait for them."""
    batch = phase.rows[: phase.batch_size]
    for _ in range(num_steps):
        phase.step(batch)
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def milliseconds(phases: list[PhaseAtWork], num_steps: int, device: torch.device) -> float:
    """Time per step of each of several runs at once."""

    def work(phase: PhaseAtWork, steps: int) -> None:
        with own_stream(device):
            run_steps(phase, steps, device)

    def all_at_once(steps: int) -> None:
        threads = [threading.Thread(target=work, args=(phase, steps)) for phase in phases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    all_at_once(max(2, num_steps // 10))
    began = time.perf_counter()
    all_at_once(num_steps)
    return (time.perf_counter() - began) / num_steps * 1e3


KINDS = {  # the first whose part a kernel's name has
    "attack and targets": ("attack", "most_confident", "balance"),
    "gradients of weights": ("weights_", "add_parts"),
    "chains of convolutions": (
        *("forward_", "backward_", "evaluate", "fold_norms", "reorder_weights"),
        *("project_", "normalise_32", "normalise_64", "sum_gradients_"),  # of shortcuts
    ),
    "losses": ("head_loss", "compare", "gradients", "normalise", "cosine_distance"),
    "reduction (batch norm, losses)": ("triton_red", "triton_per", "reduce_kernel"),
    "element-wise, fused": ("triton_poi", "triton_for"),
    "convolution and product": ("conv", "_correlate", "cudnn", "gemm", "cutlass", "nvjet", "cublas"),
    "optimiser and clipping": ("multi_tensor", "sgd"),
    "random numbers": ("distribution", "philox"),
    "copy": ("memcpy", "memset", "copy"),
}


def kernel_profile(phase: PhaseAtWork, num_steps: int, device: torch.device) -> list[tuple[str, str, float, float]]:
    """(kind, kernel, launches a step, microseconds a step), the longest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run_steps(phase, num_steps, device)
    found: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(event.name, []).append(event.device_time)
    rows = [(_kind(name), name, len(times) / num_steps, sum(times) / num_steps) for name, times in found.items()]
    return sorted(rows, key=lambda row: -row[3])


def _kind(name: str) -> str:
    matching = (kind for kind, parts in KINDS.items() if any(part in name.lower() for part in parts))
    return next(matching, "other")


def print_profile(title: str, rows: list[tuple[str, str, float, float]], num_longest: int) -> None:
    """The time of each kind of kernel, then the longest kernels."""
    print(f"{title}: {sum(row[2] for row in rows):.0f} kernels, {sum(row[3] for row in rows) / 1e3:.2f} ms busy a step")
    for kind in dict.fromkeys(row[0] for row in rows):
        alike = [row for row in rows if row[0] == kind]
        print(f"  {kind:32}{sum(row[2] for row in alike):>7.0f} kernels{sum(row[3] for row in alike):>9.0f} us")
    for kind, name, launches, microseconds in rows[:num_longest]:
        print(f"    {microseconds:>7.0f} us{launches:>6.0f} x  [{kind}] {name[:110]}")


def timeline(phase: PhaseAtWork, device: torch.device) -> list[str]:
    """The kernels of one step as lines: start and duration in microseconds, stream, grid, name, divided by tabs."""
    with tempfile.TemporaryDirectory() as folder:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run_steps(phase, 6, device)
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    on_gpu = sorted(
        (event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")),
        key=lambda event: event["ts"],
    )
    first = len(on_gpu) // 2
    lines, began = [], on_gpu[first]["ts"]
    for event in on_gpu[first : first + len(on_gpu) // 6]:
        details = event.get("args", {})
        place = f"{event['ts'] - began:.1f}\t{event['dur']:.1f}\t{details.get('stream')}\t{details.get('grid')}"
        lines.append(f"{place}\t{event['name'][:90]}")
    return lines


def pil_loader_milliseconds(images: ImageSet, batch_size: int) -> float:
    """What a data loader that decodes and augments images one by one spends on a batch (one worker)."""
    generator = np.random.default_rng(0)
    arrays = images.images[:batch_size].permute(0, 2, 3, 1).numpy()

    def one(array: np.ndarray) -> torch.Tensor:
        picture = Image.fromarray(np.pad(array, ((4, 4), (4, 4), (0, 0))))
        x, y = generator.integers(0, 9, 2)
        picture = picture.crop((x, y, x + array.shape[1], y + array.shape[0]))
        if generator.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        picture = ImageEnhance.Brightness(picture).enhance(generator.uniform(0.75, 1.25))
        return torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1).float().div(255)

    began = time.perf_counter()
    torch.stack([one(array) for array in arrays])
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--method", default="podnet", choices=["podnet", "afc", "ucir", "aanet"])
    parser.add_argument("--precision", default=None, choices=["float32", "tf32", "bf16"])
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--at-once", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--resnet18", action="store_true", help="also ResNet-18 at 224 pixels")
    parser.add_argument("--json", type=Path, default=None, help="write the figures there too")
    parser.add_argument("--profile", type=int, metavar="N", help="on a GPU: kernels by kind, and the N longest")
    parser.add_argument("--timeline", type=Path, metavar="FOLDER", help="on a GPU: write the kernels of one step there")
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    on_gpu = device.type == "cuda"
    fast = Acceleration.for_device(device, arguments.precision)
    steps = arguments.steps or (200 if on_gpu else 2)
    batch = 128 if on_gpu else 16
    plain = METHODS[arguments.method](batch_size=batch, **({} if on_gpu else {"backbone": "small"}))
    plugged, later = with_augmentation(plain, CCFA()), 2 if arguments.method == "aanet" else 1
    variants: dict[str, tuple[Method, int]] = {
        "stage 0": (plain, 0),
        "later stage": (plain, later),
        "later stage + CCFA": (plugged, later),
        "later stage + CCFA balanced-10": (with_augmentation(plain, CCFA(target="balanced-10")), later),
    }
    images = random_images(70, 100 if on_gpu else 4, 32)
    figures: dict[str, object] = {"device": describe_device(device), "torch": str(torch.__version__), "batch": batch}
    print(f"{describe_device(device)}, torch {torch.__version__}, batch {batch}, {fast}")
    loader = pil_loader_milliseconds(images, batch)
    print(f"PIL data loader, one worker: {loader:.1f} ms a batch")
    figures["pil_loader_ms"] = loader
    print(f"{'':32}{'eager float32':>15}{'accelerated':>13}{'images/s':>10}{'kernels':>9}{'MiB':>7}")
    for name, (method, stage) in variants.items():
        row = measured(partial(prepared, method, images, stage), fast, steps, device)
        figures[name] = row
        print_row(name, row, batch)
    if arguments.profile is not None and on_gpu:
        for name, (method, stage) in variants.items():
            print_profile(
                name, kernel_profile(prepared(method, images, stage, fast, device), 5, device), arguments.profile
            )
    if arguments.timeline and on_gpu:
        arguments.timeline.mkdir(parents=True, exist_ok=True)
        for name, (method, stage) in variants.items():
            lines = timeline(prepared(method, images, stage, fast, device), device)
            (arguments.timeline / f"{name.replace(' ', '-')}.tsv").write_text("\n".join(lines) + "\n")
    for count in arguments.at_once if on_gpu else []:
        for name in ("later stage + CCFA", "later stage + CCFA balanced-10"):
            method, stage = variants[name]
            phases = [prepared(method, images, stage, fast, device) for _ in range(count)]
            time_each = milliseconds(phases, steps, device)
            figures[f"{name}, {count} at once"] = {"ms": time_each, "iterations_per_second": count / time_each * 1e3}
            print(
                f"{name}, {count} at once: {count / time_each * 1e3:,.0f} iterations/s in all ({time_each:.2f} ms each)"
            )
    if arguments.resnet18 and on_gpu:
        large = METHODS["podnet"](backbone="resnet18-podnet", batch_size=128)
        pictures = random_images(70, 10, 224)
        for name, method in {
            "ResNet-18": large,
            "ResNet-18 + CCFA": with_augmentation(large, CCFA(count=1)),
        }.items():
            phase = prepared(method, pictures, 1, fast, device)
            time_each = milliseconds([phase], max(10, steps // 10), device)
            figures[name] = {"ms": time_each}
            print(f"{name}, 224 pixels, later stage: {time_each:.2f} ms")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def measured(
    prepare: Callable[[Acceleration, torch.device], PhaseAtWork], fast: Acceleration, steps: int, device: torch.device
) -> dict[str, float | int | None]:
    """Eager and accelerated time of one variant."""
    eager = milliseconds([prepare(EAGER, device)], max(2, steps // 4), device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    phase = prepare(fast, device)
    accelerated = milliseconds([phase], steps, device)
    memory = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None
    num_kernels = round(sum(row[2] for row in kernel_profile(phase, 5, device))) if device.type == "cuda" else None
    return {"eager_ms": eager, "ms": accelerated, "kernels": num_kernels, "peak_mib": memory}


def print_row(name: str, row: dict[str, float | int | None], batch: int) -> None:
    """One line of the table."""
    eager, fast, count, memory = (row[key] for key in ("eager_ms", "ms", "kernels", "peak_mib"))
    rest = "" if count is None or memory is None else f"{count:>9}{memory:>7.0f}"
    print(f"{name:32}{eager:>12.2f} ms{fast:>10.2f} ms{batch / (fast or 1) * 1e3:>10,.0f}{rest}")


if __name__ == "__main__":
    main()
