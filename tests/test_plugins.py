"""Parts of other people: entry points and plug-in files."""

import hashlib
import importlib.metadata
import json
import sys

import pytest

from ccfa import load_plugin, plugins
from ccfa.errors import UsageError
from ccfa.plugins import Registry, plugins_digest


def test_entry_points_are_found_lazily(monkeypatch, tmp_path):
    (tmp_path / "foreign_parts.py").write_text("answer = 42\n")
    (tmp_path / "broken_parts.py").write_text("import nothing_of_that_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    offered = [
        importlib.metadata.EntryPoint(name, value, "ccfa.things")
        for name, value in [("foreign", "foreign_parts:answer"), ("broken", "broken_parts:answer"), ("own", "x:y")]
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: offered if group == "ccfa.things" else [])
    things: Registry[int] = Registry("thing", "ccfa.things")
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


def test_plugin_files_are_loaded_once_and_change_the_digest(tmp_path):
    before = plugins_digest()
    (tmp_path / "plugin.py").write_text(PLUGIN)
    module = load_plugin(tmp_path / "plugin.py")
    assert load_plugin(tmp_path / "plugin.py") is module
    assert plugins_digest() != before


def test_a_notebook_s_cell_may_be_run_again():
    things: Registry[object] = Registry("thing", "ccfa.nothing")

    def cell(answer):
        def function():
            return answer

        return things.add("function", function)

    assert cell(1) is not cell(2)
    assert things["function"]() == 2
    with pytest.raises(UsageError, match="function"):
        things.add("function", print)


def test_the_command_line_sees_a_plugin(call, tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN)
    words = ("from-file", "--scenario", "9,1", "--set", "epochs=0", "backbone=net-from-file")
    assert call("run", *words)[0] == 2
    assert call("run", *words, "--plugin", "mine.py", "--max-minutes", "0", "--out", "run")[0] == 75
    digest = json.loads((tmp_path / "run" / "config.json").read_text())["plugins"]["mine.py"]
    assert digest == hashlib.sha256(PLUGIN.encode()).hexdigest()
    assert "from-file" in call("list", "methods", "--plugin", "mine.py")[1]
    assert "net-from-file" in call("list", "backbones", "--plugin", "mine.py")[1]
    plugins._loaded.clear()  # as in another process
    code, _, err = call("resume", "run")
    assert code == 2
    assert "--plugin mine.py" in err
    plugins._loaded["mine.py"] = "another version"
    code, _, err = call("resume", "run")
    assert code == 4
    assert "version of mine.py" in err
    plugins._loaded.clear()
    assert call("resume", "run", "--plugin", "mine.py")[0] == 0


def test_bad_plugin_files_are_refused(tmp_path):
    (tmp_path / "bad.py").write_text("1 / 0")
    for name, told in [("bad.py", "ZeroDivisionError"), ("none.py", "none.py")]:
        with pytest.raises(UsageError, match=told):
            load_plugin(tmp_path / name)
