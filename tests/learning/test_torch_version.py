"""Versions of torch that were not tried are used with a notice."""

import warnings

import pytest
import torch

from ccfa import Learner, build_method, load
from ccfa.errors import Notice


@pytest.mark.parametrize(("version", "noticed"), [("2.15.1+cu132", 0), ("2.16.0", 1), ("3.0.0.dev20270101", 1)])
def test_newer_torch_is_noticed_once(version, noticed, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", Notice)
        for _ in range(3):
            Learner(build_method("finetune", "digits"), load("digits")[0], device="cpu")
    assert len(caught) == noticed
    assert all(version in str(warning.message) for warning in caught)
