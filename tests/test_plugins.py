"""Parts of other people: entry points and plug-in files."""

import importlib.metadata
import sys

import pytest

from ccfa import load_plugin, plugins
from ccfa.errors import UsageError
from ccfa.experiments import build_method
from ccfa.methods import METHODS
from ccfa.models import BACKBONES
from ccfa.plugins import Registry, plugins_digest


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """What a test registers is forgotten after it."""
    for registry in (METHODS, BACKBONES):
        monkeypatch.setattr(registry, "_added", dict(registry._added))


def test_entry_points_are_found_lazily(monkeypatch, tmp_path):
    (tmp_path / "foreign_parts.py").write_text("answer = 42\n")
    (tmp_path / "broken_parts.py").write_text("import nothing_of_that_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    offered = [
        importlib.metadata.EntryPoint(name, value, "ccfa.things")
        for name, value in [("foreign", "foreign_parts:answer"), ("broken", "broken_parts:answer"), ("own", "x:y")]
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: offered if group == "ccfa.things" else [])
    things: Registry[int] = Registry("thing")
    things.add("own", 1)
    with pytest.warns(match="'own'"):
        assert list(things) == ["own", "foreign", "broken"]
    assert "foreign_parts" not in sys.modules
    assert (things["own"], things["foreign"], len(things)) == (1, 42, 3)
    with pytest.raises(UsageError, match="nothing_of_that_name"):
        _ = things["broken"]
    with pytest.raises(KeyError):
        _ = things["unknown"]


PLUGIN = """
from torch import nn
from ccfa import METHODS, Method, register_backbone, register_method, wrap

@register_method("from-file", METHODS["finetune"])
def from_file(method: Method) -> Method:
    return method

@register_backbone("net-from-file")
def net(channels: int):
    return wrap(nn.Sequential(nn.Conv2d(channels, 4, 3), nn.ReLU()), ["1"])
"""


def test_plugin_file_registers_parts(tmp_path):
    before = plugins_digest()
    (tmp_path / "plugin.py").write_text(PLUGIN)
    module = load_plugin(tmp_path / "plugin.py")
    assert load_plugin(tmp_path / "plugin.py") is module
    method = build_method("from-file", "digits", backbone="net-from-file")
    assert method.backbone(1).dim == 4
    assert plugins_digest() != before


def test_bad_plugin_files_are_refused(tmp_path):
    (tmp_path / "bad.py").write_text("1 / 0")
    for name, told in [("bad.py", "ZeroDivisionError"), ("none.py", "none.py")]:
        with pytest.raises(UsageError, match=told):
            load_plugin(tmp_path / name)
