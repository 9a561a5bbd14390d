"""Parts of other people: entry points and plug-in files."""

import hashlib
import importlib.metadata
import json
import sys

import pytest

from ccfa import METHODS, Learning, Running, learn, load_model, load_plugin, plugins, register_method
from ccfa.errors import Notice, UsageError
from ccfa.plugins import Registry, loaded_plugins, plugins_digest
from pictures import SIZE, draw


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


@pytest.fixture
def forget(monkeypatch):
    """Forgets plug-ins, as another process does."""
    known = [(registry, dict(registry._added)) for registry in Registry.every]

    def forgotten():
        plugins._loaded.clear()
        for registry, added in known:
            monkeypatch.setattr(registry, "_added", dict(added))
        for name in [name for name in sys.modules if name.startswith("ccfa_plugin_")]:
            del sys.modules[name]

    return forgotten


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


def test_the_command_line_sees_a_plugin(call, forget, tmp_path):
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
    forget()
    assert call("model", "run", "model")[0] == 2
    assert call("model", "run", "model", "--plugin", "mine.py")[0] == 0
    assert json.loads((tmp_path / "model" / "config.json").read_text())["plugins"] == {"mine.py": digest}


def test_a_model_needs_its_plugin_and_never_loads_it(call, forget, tmp_path):
    draw(tmp_path / "first", "ab", 4)
    draw(tmp_path / "second", "cd", 4)
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    plugin = ("--plugin", "mine.py")
    words = ("--method", "from-file", "--image-size", SIZE, "--set", "epochs=1", "backbone=net-from-file")
    assert call("learn", "model", "first", *plugin, *words)[0] == 0
    assert "mine.py" in (tmp_path / "model" / "README.md").read_text()
    for verb in ("predict", "evaluate", "learn"):
        forget()
        code, _, err = call(verb, "model", "second" if verb == "learn" else "first")
        assert code == 2
        assert "--plugin mine.py" in err
        assert not loaded_plugins()
        assert call(verb, "model", "second" if verb == "learn" else "first", *plugin)[0] == 0
    forget()
    assert call("export", "model", "--format", "torch")[0] == 2
    assert call("serve", "model", "--port", 0)[0] == 2
    assert "--plugin mine.py" in call("history", "model")[1]
    load_plugin(file)
    assert len(load_model("model").class_names) == 4
    forget()
    file.write_text(PLUGIN + "# changed")
    load_plugin(file)
    with pytest.warns(Notice, match="another version of mine.py"):
        load_model("model")


def test_a_model_keeps_the_record_of_its_plugin(forget, tmp_path):
    """Also where the method is registered by an import."""
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    asked = Learning(method="from-file", options={"backbone": "small", "epochs": 1}, image_size=SIZE)
    learn(tmp_path / "model", draw(tmp_path / "first", "ab", 4), asked, Running(plugin=(file,)))
    forget()
    register_method("from-file", METHODS["finetune"])(lambda method: method)
    model = load_model(tmp_path / "model").learn(draw(tmp_path / "second", "cd", 4))
    assert list(model.config["plugins"]) == ["mine.py"]


def test_a_plugin_without_a_part_is_noticed(forget, tmp_path):
    (tmp_path / "nothing.py").write_text("x = 1")
    with pytest.warns(Notice, match="registers no method"):
        load_plugin(tmp_path / "nothing.py")
    forget()


def test_bad_plugin_files_are_refused(tmp_path):
    (tmp_path / "bad.py").write_text("1 / 0")
    (tmp_path / "notes.txt").write_text("not code")
    for name, told in [("bad.py", "ZeroDivisionError"), ("none.py", "none.py"), ("notes.txt", "notes.txt")]:
        with pytest.raises(UsageError, match=told):
            load_plugin(tmp_path / name)
    assert not {"bad.py", "none.py", "notes.txt"} & loaded_plugins().keys()
