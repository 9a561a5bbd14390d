"""A network's weights as a file: safetensors, which cannot execute anything, with a digest that shows any change."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from ccfa.errors import ModelError
from ccfa.experiments.files import read_bounded

MAX_HEADER, MAX_TENSORS = 2**24, 2**32  # bytes; no network comes near them
_KEY = "sha256"


def pack(network: nn.Module) -> bytes:
    """The bytes of a file that holds a network's weights."""
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    return save(weights, metadata={_KEY: _digest(weights)})


def unpack(path: Path, remedy: str) -> dict[str, Tensor]:
    """The weights in a file, which must be as they were written; else an error that ends with the remedy."""
    try:
        weights, metadata = parsed(read_bounded(path, MAX_TENSORS))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}. {remedy}") from error
    except (ModelError, ValueError) as error:
        raise ModelError(f"{path} is damaged ({error}). {remedy}") from error
    expected = metadata.get(_KEY)
    if expected is not None and expected != _digest(weights):  # ccfa 0.1.0 wrote none
        raise ModelError(f"{path} is damaged: its digest is not {expected}. {remedy}")
    return weights


def parsed(content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a safetensors file, and what it says about itself; a ValueError where it is none."""
    length = int.from_bytes(content[:8], "little")
    if content[8:9] != b"{" or not 0 < length <= min(MAX_HEADER, len(content)):
        raise ValueError("no safetensors file")
    try:
        return load(content), json.loads(content[8 : 8 + length]).get("__metadata__") or {}
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"no whole safetensors file: {error}") from error


def _digest(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).numpy().tobytes())
    return digest.hexdigest()
