"""A network's weights as a file: safetensors, which cannot execute anything, with a digest that shows any change."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from ccfa.errors import ModelError

MAX_HEADER = 2**24  # bytes
_KEY = "sha256"


def pack(network: nn.Module) -> bytes:
    """The bytes of a file that holds a network's weights."""
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    return save(weights, metadata={_KEY: _digest(weights)})


def unpack(path: Path, remedy: str) -> dict[str, Tensor]:
    """The weights in a file, which must be as they were written; else an error that ends with the remedy."""
    try:
        content = path.read_bytes()
        if content[8:9] != b"{" or int.from_bytes(content[:8], "little") > min(MAX_HEADER, len(content)):
            raise ValueError("no safetensors file")
        weights = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}. {remedy}") from error
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path} is damaged ({error}). {remedy}") from error
    expected = header.get("__metadata__", {}).get(_KEY)
    if expected is not None and expected != _digest(weights):  # ccfa 0.1.0 wrote none
        raise ModelError(f"{path} is damaged: its digest is not {expected}. {remedy}")
    return weights


def _digest(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).numpy().tobytes())
    return digest.hexdigest()
