"""A model's folder: read with every file verified, replaced in one step, with earlier states to go back to.

A new state is written into `.next`. Renaming that to `.ready` is the moment at which it becomes the model. Its files
are then moved to their places, and those of the state before into `history`. A process that is killed before the rename
leaves the old model, and one that is killed after it leaves the new one: a reader looks into `.ready` first, and the
next writer finishes the moves.
"""

import hashlib
import io
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ccfa.deployment.card import model_card
from ccfa.errors import DamagedError, DataError, LockedError, ModelError, UsageError
from ccfa.files import (
    LOCK,
    TENSOR_LIMIT,
    TEXT_LIMIT,
    damage_named,
    disk_errors,
    locked,
    make_folder,
    read_file,
    read_regular,
    sync,
    unpacked,
    write_atomically,
    write_json,
    write_tensors,
)

CONFIG, NETWORK, LEARNER, CARD, EXEMPLARS = (
    "config.json",
    "model.safetensors",
    "learner.safetensors",
    "README.md",
    "exemplars",
)
FORMAT = 2
HISTORY = "history"
HISTORY_KEPT = 5
_PARTS = (EXEMPLARS, CARD, LEARNER, NETWORK, CONFIG)  # in the order of the moves: the configuration comes last
_NEXT, _READY, _DISCARDED = ".next", ".ready", ".discarded"
_IMAGE = re.compile(r"exemplars/(memory|held-out)/(\d{5})-[\w.-]*/(\d{5})\.png")
_ATTEMPTS = 5  # of a reader, while another process moves a new state into place


class Images(NamedTuple):
    """Stored images with their labels; those of a class are in order of preference."""

    images: Tensor  # uint8 (N, C, H, W)
    labels: Tensor  # (N,)


class State(NamedTuple):
    """Everything a model is at one time."""

    config: dict[str, Any]  # without the digests
    network: dict[str, Tensor]
    learner: dict[str, Tensor]  # what learning needs besides the network and the memory
    card: str
    memory: Images | None  # None if exemplars/ was left out
    held_out: Images | None


class ModelFolder:
    """The folder of a model; the only reader and writer of its files.

        config.json           the method, the classes, the preprocessing, and a digest of every other file
        model.safetensors     the network: all that predicting needs
        learner.safetensors   what else learning more classes needs
        exemplars/memory      images of each class to learn from again
        exemplars/held-out    images of each class that are never trained on, to measure with
        README.md             the model card
        history/00001         earlier states

    Args:
        path: The folder. It need not exist yet.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"ModelFolder({str(self.path)!r})"

    def holds_model(self) -> bool:
        return any((self.path / place / CONFIG).exists() for place in (_READY, ""))

    def require_unused(self) -> None:
        """Refuse a folder that holds something else than a model."""
        ours = {_NEXT, _READY, _DISCARDED, HISTORY, LOCK}
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file. Name a new folder for the model.")
        if self.path.exists() and not self.holds_model():
            with disk_errors(f"read {self.path}"):
                foreign = sorted(set(os.listdir(self.path)) - ours)
            if foreign:
                raise UsageError(
                    f"{self.path} is not a model and not an empty folder (it holds {foreign[0]!r}). "
                    f"Name a new folder for the model."
                )

    def read(self) -> State:
        """Return the model as it is, with every file verified; anything damaged is a ModelError."""
        if not self.holds_model():
            reason = (
                f"it has no {CONFIG}"
                if self.path.is_dir()
                else "it is a file"
                if self.path.exists()
                else "it does not exist"
            )
            raise ModelError(f"{self.path} is not a model: {reason}. `ccfa learn` or `ccfa model` makes one.")
        for attempt in range(_ATTEMPTS):
            try:
                return self._read(self._place)
            except ModelError:
                if attempt == _ATTEMPTS - 1:
                    raise
                if not self._is_moving():
                    return self._read(self._place)  # once more: the move may just have ended
                time.sleep(0.05)
        raise AssertionError  # the last attempt returns or raises

    def _is_moving(self) -> bool:
        return (self.path / _READY).exists() or (self.path / _DISCARDED).exists()

    def _place(self, name: str) -> Path:
        """Where a file of the newest state is."""
        ready = self.path / _READY / name
        return ready if ready.exists() else self.path / name

    def read_earlier(self, number: int) -> State:
        """Return a state of the history."""
        return self._read(lambda name: self._earlier(number) / name)

    def _earlier(self, number: int) -> Path:
        return self.path / HISTORY / f"{number:05d}"

    def earlier(self) -> list[int]:
        """Return the numbers of the stored earlier states, oldest first."""
        try:
            present = float(self.read_config()["state"])
        except ModelError:
            present = math.inf  # it is damaged, and any stored state is earlier
        return [number for number in self._stored() if number < present]

    def _stored(self) -> list[int]:
        folder = self.path / HISTORY
        names = os.listdir(folder) if folder.is_dir() else []
        return sorted(int(name) for name in names if re.fullmatch(r"\d{5}", name))

    def read_card(self) -> str:
        """Return the model card, or nothing if its owner has removed it."""
        return _card(self._place(CARD))

    def read_config(self, number: int | None = None) -> dict[str, Any]:
        """Return the configuration, of the model as it is or of an earlier state, without the digests."""
        config, _ = _checked_config(self._place(CONFIG) if number is None else self._earlier(number) / CONFIG)
        return config

    def _read(self, place: Any) -> State:
        config, files = _checked_config(place(CONFIG))
        network = _verified_tensors(place(NETWORK), files.get(NETWORK))
        learner = _verified_tensors(place(LEARNER), files.get(LEARNER))
        memory = held_out = None
        if place(EXEMPLARS).is_dir():
            shape = (config["preprocessing"]["channels"], *(config["preprocessing"]["size"],) * 2)
            memory, held_out = (_verified_images(place, files, kind, shape) for kind in ("memory", "held-out"))
        elif self._is_moving():
            raise ModelError(f"{self.path} is being changed.")  # and read again
        return State(config, network, learner, _card(place(CARD)), memory, held_out)

    def replace(self, state: State, keep: int | None = HISTORY_KEPT) -> None:
        """Make this the model's state, in one step. The state before goes into the history. Hold the folder first.

        At most `keep` earlier states stay; None keeps all of them.
        """
        try:
            self._write_next(state)
        except BaseException:
            shutil.rmtree(self.path / _NEXT, ignore_errors=True)  # the disk may be full
            raise
        with disk_errors(f"replace the model in {self.path}"):
            os.replace(self.path / _NEXT, self.path / _READY)
            sync(self.path)
        self._settle(keep)

    def undo(self) -> None:
        """Go back to the state before the last one. Hold the folder first."""
        earlier = self.earlier()
        if not earlier:
            raise UsageError(f"{self.path} has no earlier state to go back to.")
        state = self.read_earlier(earlier[-1])
        self.replace(state._replace(card=model_card(state.config, self.read_card())), keep=None)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder against other writers, and finish what a killed one has left."""
        self.require_unused()
        created = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        make_folder(self.path)
        with ExitStack() as lock:
            try:
                lock.enter_context(locked(self.path))
            except LockedError:
                told = f"{self.path} is in use: another process is changing it. Wait for it to end."
                raise LockedError(told) from None
            try:
                self._settle()
                yield
            finally:
                if not self.holds_model():  # nothing came of it
                    with suppress(OSError):
                        (self.path / LOCK).unlink(missing_ok=True)
                        for folder in created:
                            folder.rmdir()

    def _write_next(self, state: State) -> None:
        """Write a whole state beside the present one. Images that are stored already are linked, not written."""
        following = self.path / _NEXT
        with disk_errors(f"write {following}"):
            shutil.rmtree(following, ignore_errors=True)
            following.mkdir()
            (following / EXEMPLARS).mkdir()
        known: dict[str, str] = {}
        with suppress(ModelError):
            known = _checked_config(self.path / CONFIG)[1]
        names = [str(one["name"]) for one in state.config["classes"]]
        files: dict[str, str] = {}
        for kind, kept in (("memory", state.memory), ("held-out", state.held_out)):
            for name, content in _encoded(kind, kept, names):
                files[name] = hashlib.sha256(content).hexdigest()
                with disk_errors(f"write {following / name}"):
                    _link_or_write(
                        following / name, content, self.path / name if known.get(name) == files[name] else None
                    )
        write_tensors(following / NETWORK, state.network, {})
        write_tensors(following / LEARNER, state.learner, {})
        write_atomically(following / CARD, state.card)
        for name in (NETWORK, LEARNER):
            files[name] = hashlib.sha256(read_file(following / name, TENSOR_LIMIT)).hexdigest()
        config = {"format": FORMAT, **state.config, "files": files}
        write_json(following / CONFIG, {**config, "digest": _digest(config)})
        with disk_errors(f"write {following}"):
            for folder, _, _ in os.walk(following):
                sync(Path(folder))

    def _settle(self, keep: int | None = None) -> None:
        """Finish what a killed writer began after its new state was ready, and remove what it left before that."""
        for name in (_NEXT, _READY, _DISCARDED, HISTORY, EXEMPLARS):
            if (self.path / name).is_symlink():
                raise ModelError(f"{self.path / name} is a link, so files elsewhere would be changed. Remove it.")
        with disk_errors(f"put the new state of {self.path} in place"):
            shutil.rmtree(self.path / _NEXT, ignore_errors=True)
            ready = self.path / _READY
            if ready.exists():
                if any(ready.iterdir()):
                    _checked_config(ready / CONFIG)  # written by us, and the last to be moved
                aside = self.path / _DISCARDED
                if (self.path / CONFIG).exists() and (ready / CONFIG).exists():
                    present, coming = (_number(place / CONFIG) for place in (self.path, ready))
                    aside = self._earlier(present) if coming > present > 0 else aside
                aside.mkdir(parents=True, exist_ok=True)
                for name in _PARTS:
                    if (ready / name).exists():
                        if (self.path / name).exists():
                            _move(self.path / name, aside / name)
                        _move(ready / name, self.path / name)
                shutil.rmtree(ready, ignore_errors=True)
                sync(self.path)
            shutil.rmtree(self.path / _DISCARDED, ignore_errors=True)
            self._prune(keep)

    def _prune(self, keep: int | None) -> None:
        """Remove the oldest states, and those that an undo has made the present one or later ones."""
        if self.holds_model():
            earlier = self.earlier()
            kept = earlier if keep is None else earlier[len(earlier) - keep :] if keep < len(earlier) else earlier
            for number in set(self._stored()) - set(kept):
                shutil.rmtree(self._earlier(number), ignore_errors=True)


def _number(path: Path) -> int:
    """The number of a state, or 0 if its configuration is damaged."""
    try:
        return int(_checked_config(path)[0]["state"])
    except ModelError:
        return 0


def _card(path: Path) -> str:
    try:
        return _content(path, TEXT_LIMIT).decode(errors="replace")
    except ModelError:  # its owner may change or remove it
        return ""


def _move(source: Path, target: Path) -> None:
    if target.is_dir():  # of an earlier attempt
        shutil.rmtree(target)
    os.replace(source, target)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _checked_config(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The configuration without its digests, and the digest of each file."""
    text = _content(path, TEXT_LIMIT)
    with damage_named(path):
        content = json.loads(text)
        written = content.get("format")
    if written != FORMAT:
        raise ModelError(f"{path} has the format {written!r:.20}, and this version of ccfa reads {FORMAT}.")
    with damage_named(path):
        digest = content.pop("digest", None)
        if digest != _digest(content):
            raise ValueError("its digest is wrong")
        files = {str(name): str(value) for name, value in content.pop("files").items()}
        del content["format"]
        shown, names = content["preprocessing"], [one["name"] for one in content["classes"]]
        sound = {
            "the number of the state": type(content["state"]) is int and content["state"] > 0,
            "the size of the images": shown["channels"] in (1, 3) and type(shown["size"]) is int,
            "the plug-ins": isinstance(content.get("plugins", {}), dict),
            "the classes": len(set(names)) == len(names) > 0,
        }
        if wrong := [name for name, holds in sound.items() if not holds]:
            raise ValueError(f"{wrong[0]} cannot be right")
        return content, files


def _content(path: Path, limit: int) -> bytes:
    """The bytes of a file or, as in a cache of the Hub, of what a link leads to; digests tell what it must be."""
    try:
        return read_regular(path, limit)
    except DataError as error:
        raise ModelError(f"{path} {error}.") from error


def _verified(path: Path, digest: str | None) -> bytes:
    content = _content(path, TENSOR_LIMIT)
    if hashlib.sha256(content).hexdigest() != digest:
        raise DamagedError(f"{path} is damaged or of another model: its digest is wrong.")
    return content


def _verified_tensors(path: Path, digest: str | None) -> dict[str, Tensor]:
    content = _verified(path, digest)
    with damage_named(path):
        return unpacked(content)[0]


def _verified_images(place: Any, files: Mapping[str, str], kind: str, shape: tuple[int, int, int]) -> Images:
    """The stored images of one kind, sorted by class and then by preference."""
    names = sorted(name for name in files if name.startswith(f"{EXEMPLARS}/{kind}/"))
    images, labels = [torch.empty(0, *shape, dtype=torch.uint8)], []
    for name in names:
        found = _IMAGE.fullmatch(name)
        if not found:
            raise DamagedError(f"{CONFIG} names {name!r:.80}, which is not an exemplar: it is damaged.")
        path = place(EXEMPLARS) / name.removeprefix(f"{EXEMPLARS}/")
        content = _verified(path, files[name])
        with damage_named(path), Image.open(io.BytesIO(content), formats=("PNG",)) as file:
            if (len(file.getbands()), file.height, file.width) != shape:
                raise ValueError(f"it has {file.width} x {file.height} pixels of {file.mode}, expected {shape}")
            pixels = np.asarray(file)
        images.append(torch.from_numpy(pixels.reshape(1, *shape[1:], shape[0]).transpose(0, 3, 1, 2).copy()))
        labels.append(int(found[2]))
    return Images(torch.cat(images), torch.tensor(labels, dtype=torch.int64))


def _encoded(kind: str, kept: Images | None, names: list[str]) -> Iterator[tuple[str, bytes]]:
    """Each image as the name and the content of a file."""
    counts: dict[int, int] = {}
    for image, label in zip(*kept, strict=True) if kept else ():
        number = counts[int(label)] = counts.get(int(label), -1) + 1
        pixels = image.permute(1, 2, 0).numpy()
        content = io.BytesIO()
        Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0]).save(content, "PNG")
        word = re.sub(r"[^\w.-]+", "_", names[int(label)])[:40]
        yield f"{EXEMPLARS}/{kind}/{int(label):05d}-{word}/{number:05d}.png", content.getvalue()


def _link_or_write(path: Path, content: bytes, stored: Path | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if stored is not None:
        try:
            os.link(stored, path, follow_symlinks=False)
            return
        except OSError:  # a file system without links
            pass
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
