"""A model as one file for other programs, ONNX or torch.export, compared with the model before it is written."""

import copy
import hashlib
import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.export import Dim, ExportedProgram

from ccfa import __version__
from ccfa.data import decode_files
from ccfa.deployment.model import Model, expanded
from ccfa.deployment.scoring import Classifier
from ccfa.errors import DataError, ModelError, UsageError, choose, installing
from ccfa.files import make_folder, require_place, write_atomically

TOLERANCE = 1e-4  # of a probability; of a score, as a share of the largest score
OPSET = 18  # of ONNX: what the exporter is written for, and what runtimes have known since 2023
OUTPUTS = ["scores", "probabilities", "familiarity"]
METADATA = "metadata.json"  # in a torch.export file
COMPARED = 256  # at most so many images of a kind
NOISE = 14
BATCH = 7  # some images are compared one by one, and all in batches of so many
ONNX_LIMIT = 2**31 - 2**24  # bytes of weights: a protobuf has less than 2 GiB

Facts = dict[str, Any]
Some = TypeVar("Some", list[Path], Tensor)
Runner = Callable[[Tensor], list[NDArray[np.float32]]]
"""uint8 images -> scores, probabilities and familiarity."""


class Exported(NamedTuple):
    """A file that was written, and how it compared with the model.

    Args:
        path: The file.
        size: Its bytes.
        compared: How many images of each kind it was compared on: photos, held-out images, exemplars, noise.
        difference: The largest difference between a probability of the file and of the model.
    """

    path: Path
    size: int
    compared: dict[str, int]
    difference: float


def export_model(model: Model, path: Path | str, format: str = "onnx", images: Path | str | None = None) -> Exported:
    """Write a model as one file that predicts without ccfa. The file has the network and the class names, no exemplars.

    Its input `images` is uint8 of shape (any number, channels, size, size), and its outputs are `scores`,
    `probabilities` and `familiarity`. Normalising is part of it; cropping and resizing are not, and its metadata say
    how to do them.

    The file is compared with the model on held-out images and exemplars, if the model keeps them, on photos, if they
    are given, and on noise. If it predicts anything else than the model does, it is not written.

    Args:
        model: The model.
        path: The file, which ends in .onnx or, for `torch`, in .pt2. An existing file is replaced.
        format: `onnx`, which needs the extra `onnx`, or `torch`, for `torch.export.load`.
        images: A photo, or a folder of photos, to compare on. The default, ranpac, keeps none.

    Returns:
        The file, and the largest difference that was found.

    Example:
        >>> import ccfa, tempfile
        >>> from PIL import Image
        >>> place = Path(tempfile.mkdtemp())
        >>> for name, grey in [("dark", 30), ("light", 200)]:
        ...     (place / "photos" / name).mkdir(parents=True)
        ...     for more in range(4):
        ...         Image.new("RGB", (8, 8), (grey + more,) * 3).save(place / "photos" / name / f"{more}.png")
        >>> asked = ccfa.Learning(method="finetune", image_size=8, options={"backbone": "small", "epochs": 1})
        >>> model = ccfa.learn(place / "model", place / "photos", asked)
        >>> exported = export_model(model, place / "model.pt2", "torch")
        >>> exported.path.name, exported.difference < 1e-4
        ('model.pt2', True)
    """
    path, chosen = Path(path), choose("format", format, FORMATS)
    if path.suffix != chosen.suffix:
        raise UsageError(
            f"A file of the format {format} must end in {chosen.suffix}, got {path.name!r}. Choose another name, or "
            f"another format ({', '.join(FORMATS)})."
        )
    if path.is_dir():
        raise UsageError(f"{path} is a folder. Name a file.")
    _require(chosen.packages)
    require_place(path.parent)
    classifier = copy.deepcopy(model.classifier).cpu()
    kinds = _images(model, images)
    pixels = torch.cat([*kinds.values()])
    with _quiet():
        try:
            program = _program(classifier, pixels.shape[1:])
            content = chosen.serialised(program, _facts(model))
        except ModelError:
            raise
        except Exception as error:  # a foreign backbone can be anything
            reason = str(error).strip().partition("\n")[0]
            raise ModelError(f"The network of {model.path} cannot be exported as {format}: {reason}") from error
        difference = _compared(classifier, chosen.opened(content), pixels)
    make_folder(path.parent)
    write_atomically(path, content)
    return Exported(path, len(content), {kind: len(some) for kind, some in kinds.items()}, difference)


def default_path(model: Path, format: str) -> Path:
    """The file in the current folder that has the name of the model's folder.

    >>> default_path(Path("models/birds"), "onnx")
    PosixPath('birds.onnx')
    """
    return Path(model.resolve().name + choose("format", format, FORMATS).suffix)


def _require(packages: tuple[str, ...]) -> None:
    for name in packages:
        try:
            import_module(name)
        except ImportError as error:
            raise UsageError(f"Exporting to ONNX needs {name}: {installing('onnx')}") from error


def _facts(model: Model) -> Facts:
    """What a program must know beside the network."""
    config = json.dumps(model.config, sort_keys=True).encode()
    return {
        "class_names": list(model.class_names),
        "channels": model.channels,
        **asdict(model.framing),
        "temperature": model.calibration.temperature,
        "unfamiliar_below": model.calibration.unfamiliar_below,
        "ccfa": __version__,
        "model": hashlib.sha256(config).hexdigest(),
    }


def _images(model: Model, given: Path | str | None) -> dict[str, Tensor]:
    """Images to compare on, by kind: photos that are given, what the model keeps of all classes, and noise."""
    kinds = {}
    if given is not None:
        pixels, _, unreadable = decode_files(_spread(list(expanded([given]))), model.framing)
        if not len(pixels):
            raise DataError(f"{unreadable[0][0]} {unreadable[0][1]}.")
        kinds["photo"] = model.gray_if_needed(torch.from_numpy(pixels))
    for kind, kept in (("held-out image", model.state.held_out), ("exemplar", model.state.memory)):
        if kept and len(kept.images):
            kinds[kind] = _spread(kept.images)
    shape = NOISE, model.channels, model.framing.size, model.framing.size
    kinds["noise image"] = torch.randint(256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return kinds


def _spread(images: Some) -> Some:
    """At most COMPARED of them, from all classes."""
    return images[:: math.ceil(len(images) / COMPARED)]


def _program(classifier: Classifier, shape: torch.Size) -> ExportedProgram:
    # Two zeros: an image of the model could stay in the program, and a batch of one would be taken for a constant.
    example = torch.zeros(2, *shape, dtype=torch.uint8)
    program = torch.export.export(classifier, (example,), dynamic_shapes={"images": {0: Dim("batch")}})
    program.example_inputs = None  # they would be stored as a pickle
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program


def _as_onnx(program: ExportedProgram, facts: Facts) -> bytes:
    weights = sum(tensor.nbytes for tensor in program.state_dict.values())
    if weights > ONNX_LIMIT:
        raise ModelError(
            f"An ONNX file holds less than 2 GB, and the weights have {weights / 1e9:.1f}. Export to torch."
        )
    made = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        input_names=["images"],
        output_names=OUTPUTS,
        dynamic_shapes={"images": {0: "batch"}},
        verbose=False,
    )
    assert made is not None
    parts: list[Any] = [made.model, made.model.graph, *made.model.graph.all_nodes()]
    for part in parts:
        part.metadata_props.clear()  # how each node came about, with paths of this machine
    made.model.metadata_props.update({name: json.dumps(value) for name, value in facts.items()})
    content: bytes = made.model_proto.SerializeToString()
    return content


def _open_onnx(content: bytes) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(OUTPUTS, {"images": images.numpy()})


def _as_torch(program: ExportedProgram, facts: Facts) -> bytes:
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={METADATA: json.dumps(facts)})
    return content.getvalue()


def _open_torch(content: bytes) -> Runner:
    module = torch.export.load(io.BytesIO(content)).module()  # made by this process: what is loaded can be trusted
    return lambda images: [output.numpy() for output in module(images)]


class _Format(NamedTuple):
    suffix: str
    packages: tuple[str, ...]
    serialised: Callable[[ExportedProgram, Facts], bytes]
    opened: Callable[[bytes], Runner]


FORMATS = {
    "onnx": _Format(".onnx", ("onnx", "onnxscript", "onnxruntime"), _as_onnx, _open_onnx),
    "torch": _Format(".pt2", (), _as_torch, _open_torch),
}


@torch.no_grad()
def _compared(classifier: Classifier, run: Runner, images: Tensor) -> float:
    """The largest difference of a probability. It is a ModelError if the file predicts anything else than the model."""
    batches = [*images[:BATCH].split(1), *images.split(BATCH)]
    scores, shares, familiar = _joined([[output.numpy() for output in classifier(batch)] for batch in batches])
    own_scores, own_shares, own_familiar = _joined([run(batch) for batch in batches])
    difference = float(np.abs(own_shares - shares).max())
    largest = float(np.abs(scores).max())
    of_scores = max(float(np.abs(own_scores - scores).max()), float(np.abs(own_familiar - familiar).max()))
    # A class may differ only where the model's own scores hardly do.
    lost = scores.max(axis=1) - np.take_along_axis(scores, own_scores.argmax(axis=1, keepdims=True), axis=1)[:, 0]
    wrong = int((lost > TOLERANCE * largest).sum())
    if not (difference <= TOLERANCE and of_scores <= TOLERANCE * largest and not wrong):  # NaN is not close either
        raise ModelError(
            f"The exported network differs from the model, so nothing was written: on {len(images)} images, "
            f"probabilities differ by up to {difference:.2g} (at most {TOLERANCE:g} is allowed), scores by up to "
            f"{of_scores:.2g}, and {wrong} predictions are others."
        )
    return difference


def _joined(parts: list[list[NDArray[np.float32]]]) -> list[NDArray[np.float32]]:
    return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks about packages and about itself, which nobody here can act on."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
