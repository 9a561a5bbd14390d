"""Prints every loss, and a digest of the weights, of toy runs of every method, exactly as float32 has them.

Two commits whose output is equal on one machine train bit for bit alike:

    PYTHONPATH=src:tests python tests/bits.py > after.json    # and the same in a checkout of the commit before
"""

import hashlib
import json
import sys

import torch

from ccfa.errors import CcfaError
from ccfa.learning import Learner
from ccfa.methods import METHODS
from toys import STAGES, Recorder, plugged, tiny, toy_images


def bits(name: str, augmentation: str) -> list[str]:
    recorder = Recorder()
    method = plugged(tiny(name, epochs=2), augmentation)
    learner = Learner(method, toy_images(), observer=recorder, device=torch.device("cpu"))
    for stage in STAGES:
        learner.learn(stage)
    weights = b"".join(tensor.numpy().tobytes() for tensor in learner.network.state_dict().values())
    return [*(float(losses["loss"]).hex() for _, losses in recorder.batches), hashlib.sha256(weights).hexdigest()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for name in METHODS:
        for augmentation in ("nothing", "ccfa", "mixup"):
            try:
                found[f"{name} {augmentation}"] = bits(name, augmentation)
            except CcfaError:  # the method does not take it
                continue
    json.dump(found, sys.stdout, indent=1)
