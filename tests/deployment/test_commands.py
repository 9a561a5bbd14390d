"""`ccfa learn`, `predict`, `evaluate`, `history`, `undo` and `model`, as they are typed."""

import csv
import errno
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import ccfa
from ccfa import plugins
from ccfa.deployment import ModelFolder
from ccfa.deployment import model as deployed
from ccfa.errors import ResourceError, UsageError
from ccfa.reporting.models import predict_shown
from commands import COMMAND, contents, environment
from pictures import QUICK, SIZE, draw

ROOT = Path(__file__).parents[2]
WORDS = [
    "--method",
    "replay",
    "--image-size",
    SIZE,
    "--memory",
    4,
    "--set",
    "backbone=small",
    "epochs=3",
    "batch_size=8",
]


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    place = tmp_path_factory.mktemp("learned")
    ccfa.learn(place / "model", draw(place / "first", "abc"), QUICK)
    return place


@pytest.fixture
def place(learned, tmp_path):
    draw(tmp_path / "second", "de")
    return shutil.copytree(learned, tmp_path, dirs_exist_ok=True)


def test_dry_run_says_what_would_happen(call, tmp_path):
    code, out, _ = call("learn", tmp_path / "model", draw(tmp_path / "first", "abc"), "--dry-run", *WORDS)
    assert code == 0
    assert "3 classes, 30 images" in out
    assert "about" in out
    assert not (tmp_path / "model").exists()


def test_loose_photos_are_named_in_the_plan(call, place):
    shutil.copy(place / "first/a/00.png", place / "second/loose.png")
    code, out, _ = call("learn", place / "model", place / "second", "--dry-run")
    assert code == 0
    assert "second/loose.png" in out
    assert "2 classes, 20 images" in out
    for name in "de":
        shutil.rmtree(place / "second" / name)
    code, out, err = call("learn", place / "model", place / "second")
    assert (code, out) == (3, "")
    assert "1 loose photo" in err


def test_a_model_in_use_is_refused_before_planning(call, place):
    with ModelFolder(place / "model").held():
        code, out, err = call("learn", place / "model", place / "nowhere")
        assert (code, out) == (7, "")
        assert "in use" in err
        assert call("learn", place / "model", place / "second", "--dry-run")[0] == 0
    assert call("learn", place / "model", place / "nowhere")[0] == 3


def test_learn_predict_evaluate_undo(call, place):
    model = place / "model"
    shutil.rmtree(place / "first")
    code, out, _ = call("learn", model, place / "second")
    assert code == 0
    assert "12 images of the model's memory" in out
    assert call("evaluate", model, place / "second")[0] == 0
    code, out, _ = call("history", model)
    assert code == 0
    assert "1 can be undone" in out
    code, out, _ = call("undo", model)
    assert "3 classes again" in out
    assert len(ccfa.load_model(model).class_names) == 3
    assert call("undo", model)[0] == 2


def test_more_photos_of_known_classes_alone(call, tmp_path):
    words = ["--method", "ranpac", "--image-size", SIZE, "--set", "backbone=small", "epochs=2", "projection=20"]
    assert call("learn", tmp_path / "model", draw(tmp_path / "first", "abc"), *words)[0] == 0
    code, out, _ = call("learn", tmp_path / "model", draw(tmp_path / "more", "ab", seed=2), "--more")
    assert code == 0
    assert "Learned more photos of a, b" in out
    assert call("learn", tmp_path / "model", tmp_path / "more", "--more")[0] == 2


def test_a_folder_without_photos_does_not_stop_the_rest(call, place):
    (place / "empty").mkdir()
    code, out, err = call("predict", place / "model", place / "empty", place / "first/a", "--format", "json")
    assert (code, len(out.splitlines())) == (3, 11)
    assert "1 file of 11" in err


def test_predictions_as_json_lines(call, place):
    code, out, _ = call("predict", place / "model", place / "first", "--format", "json", "--top", 2)
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, len(rows)) == (0, 30)
    assert rows[0]["file"].endswith("00.png")
    assert len(rows[0]["top"]) == 2


def test_predictions_as_csv_with_bad_files(call, place):
    bad = place / "=bad.jpg"
    bad.write_bytes(b"nothing")
    code, out, err = call("predict", place / "model", bad, place / "first/a/00.png", "--format", "csv", "--top", 2)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 3
    assert [bool(row["error"]) for row in rows] == [True, False]
    assert rows[1]["class"] in "abc"
    assert "1 file of 2" in err


def test_predictions_of_names_on_standard_input(call, place, monkeypatch):
    names = "\n".join(str(path) for path in sorted((place / "first/a").iterdir())) + "\n\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(names))
    code, out, _ = call("predict", place / "model", "-", "--format", "json")
    assert (code, len(out.splitlines())) == (0, 10)


@pytest.mark.parametrize("odd", ["x" * 300 + ".png", "a\0b.png", "locked/photo.png"], ids=["long", "NUL", "locked"])
def test_odd_paths_do_not_stop_the_rest(call, place, odd, monkeypatch):
    def stat(path, *args, real=os.stat, **options):  # root may enter every folder
        if "locked" in os.fsdecode(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "stat", stat)
    code, out, err = call("predict", place / "model", odd, place / "first/a/00.png", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [bool(row["error"]) for row in rows] == [True, False]
    assert code == 3
    assert "1 file of 2" in err


def test_names_on_standard_input_may_be_separated_by_nul(place):
    odd = place / "two\nlines.png"
    shutil.copy(place / "first/a/01.png", odd)
    names = b"\0".join([os.fsencode(place / "first/a/00.png"), os.fsencode(odd), b"\xff.png", b""])
    words = [*COMMAND, "predict", place / "model", "-", "--format", "json"]
    done = subprocess.run(words, input=names, env=environment(), capture_output=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 3
    assert [row["file"] for row in rows[:2]] == [str(place / "first/a/00.png"), str(odd)]
    assert ["error" in row for row in rows] == [False, False, True]


def test_names_are_shown_whole(call, place):
    path = place / ("x" * 120 + ".png")
    shutil.copy(place / "first/a/00.png", path)
    _, out, _ = call("predict", place / "model", path, place / "first/b", "--top", 3)
    assert [str(path) in line for line in out.splitlines()] == [False, True, *[False] * 10]
    assert all(" then " in line and ", " in line for line in out.splitlines()[1:])  # all three classes
    assert all(len(line.split()) >= 4 for line in out.splitlines()[1:])


def test_predictions_are_shown_as_they_come(place, monkeypatch):
    console = Console(file=io.StringIO())

    def names():
        for name in ("00", "01"):
            yield f"{place}/first/a/{name}.png\n"
            assert f"{name}.png" in console.file.getvalue()

    monkeypatch.setattr(deployed, "CHUNK", 1)
    predict_shown(place / "model", ("-",), 5, "table", "cpu", console, names())


def test_history_fits_a_narrow_terminal(call, place, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = ["photocopier", "thunderstorm"]
    for letter, name in zip("de", names, strict=True):
        (place / "second" / letter).rename(place / "second" / name)
    assert call("learn", place / "model", place / "second")[0] == 0
    _, out, _ = call("history", place / "model")
    dates = re.findall(r"\d{4}-\d\d-\d\d", out)
    assert len(dates) == 2
    assert all(name in out for name in names)
    assert "…" not in out
    assert "but the card" in out


def test_wrong_photos_are_written(call, place):
    shutil.copy(place / "first/a/00.png", place / "first/b/wrong.png")
    code, _, _ = call("evaluate", place / "model", place / "first", "--out", place / "wrong.csv")
    assert code == 0
    assert "wrong.png" in (place / "wrong.csv").read_text()


def test_evaluation_as_json(call, place):
    draw(place / "test", "ab", count=3, seed=5)
    draw(place / "test", "z", count=2)
    shutil.copy(place / "first/a/00.png", place / "test/b/wrong.png")
    (place / "test/a/bad.png").write_bytes(b"nothing")
    code, out, _ = call("evaluate", place / "model", place / "test", "--format", "json")
    found = json.loads(out)
    assert code == 0
    assert (found["photos"], found["seen_before"]) == (7, 1)
    assert found["confusion"]["b"]["a"] == 1
    assert sum(times for row in found["confusion"].values() for times in row.values()) == 7
    by_class = found["by_class"]
    assert (by_class["a"]["photos"], by_class["b"]["photos"]) == (3, 4)
    assert found["accuracy"] == sum(one["recognised"] for one in by_class.values()) / 7
    assert found["mean_over_classes"] == pytest.approx((by_class["a"]["accuracy"] + by_class["b"]["accuracy"]) / 2)
    assert [one["predicted"] for one in found["wrong"] if one["file"].endswith("wrong.png")] == ["a"]
    assert {one["class"] for one in found["unknown"]} == {"z"}
    assert [one["file"] for one in found["unreadable"]] == [str(place / "test/a/bad.png")]


def test_wrong_photos_are_written_as_csv_only(call, place):
    words = ("evaluate", place / "model", place / "first", "--out")
    assert "--format json" in call(*words, "wrong.json")[2]
    assert call(*words, "wrong.csv")[0] == 0
    assert not Path("wrong.json").exists()


def test_photos_that_were_learned_are_told(call, place):
    _, out, _ = call("evaluate", place / "model", place / "first")
    assert "held out 30 of these photos" in out
    _, out, _ = call("evaluate", place / "model", draw(place / "others", "abc", seed=5))
    assert "held out" not in out


def test_place_for_wrong_photos_is_checked_first(call, place):
    (place / "file").touch()
    for out, expected in (("file/wrong.csv", ResourceError), ("first", UsageError)):
        code, _, err = call("evaluate", place / "nowhere", place / "first", "--out", place / out)
        assert (code, str(place / out.partition("/")[0]) in err) == (expected.exit_code, True)
    assert call("evaluate", place / "model", place / "first", "--out", place / "new/wrong.csv")[0] == 0
    assert (place / "new/wrong.csv").exists()


def test_late_interrupt_tells_the_truth(call, place, monkeypatch):
    settle = ModelFolder._settle

    def interrupted(self, keep=None):
        if keep is not None:  # the new state has just become the model
            raise KeyboardInterrupt
        settle(self)

    monkeypatch.setattr(ModelFolder, "_settle", interrupted)
    code, out, _ = call("learn", place / "model", place / "second")
    assert (code, "unchanged" in out, "5 classes" in out) == (130, False, True)
    assert len(ccfa.load_model(place / "model").class_names) == 5


def test_early_interrupt_tells_the_truth(call, place, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelFolder, "_write_next", interrupted)
    code, out, _ = call("learn", place / "model", place / "second")
    assert (code, "unchanged" in out) == (130, True)
    code, out, _ = call("learn", place / "new", place / "second", *WORDS)
    assert (code, "No model" in out) == (130, True)


def test_several_processes_are_refused(call, place, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = call("learn", place / "model", place / "second")
    assert (code, "torchrun" in err) == (2, True)


def test_every_command_of_a_model_takes_plugins(call, place):
    (place / "mine.py").write_text("print('mine')")
    model = place / "model"
    commands = [
        ["learn", model, place / "second", "--dry-run"],
        ["predict", model, place / "first"],
        ["evaluate", model, place / "first"],
        ["history", model],
        ["export", model, "--format", "torch"],
        ["model", place / "nowhere", place / "new"],
        ["undo", model],
    ]
    for words in commands:
        plugins._loaded.clear()
        for name in [name for name in sys.modules if name.startswith("ccfa_plugin_mine")]:
            del sys.modules[name]
        assert call(*words, "--plugin", place / "mine.py")[1].count("mine\n") == 1, words


def test_model_of_a_run_takes_no_options_of_training(call, tmp_path):
    for words in (["--tensorboard"], ["--track", "trackio"], ["--minutes", 3]):
        code, _, err = call("model", tmp_path / "run", tmp_path / "model", *words)
        assert (code, words[0] in err) == (2, True)
    assert call("model", tmp_path / "run", tmp_path / "model", "--device", "cpu", "--data-dir", tmp_path)[0] == 4


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["predict", "nowhere", "x.png"], 4),
        (["predict", "{model}"], 2),
        (["predict", "{model}", "{empty}"], 3),
        (["predict", "{model}", "x.png"], 3),
        (["predict", "{model}", "x.png", "--top", 0], 2),
        (["evaluate", "{model}", "{empty}"], 3),
        (["history", "{empty}"], 4),
        (["undo", "{empty}"], 4),
        (["learn", "{model}", "{empty}"], 3),
        (["learn", "{first}", "{first}"], 2),
        (["learn", "{model}", "{second}", "--method", "podnet"], 2),
        (["learn", "{new}", "{first}", "--method", "podnett"], 2),
        (["learn", "{new}", "{first}", "--memory", 2, "--memory-mb", 1], 2),
        (["model", "{empty}", "{new}"], 4),
    ],
)
def test_mistakes_are_explained_and_change_nothing(call, place, words, code):
    (place / "empty").mkdir()
    named = {name: place / name for name in ("model", "empty", "first", "second", "new")}
    before = contents(place)
    found, _, err = call(*(str(word).format(**named) for word in words))
    assert (found, err.startswith("error: ")) == (code, True)
    assert contents(place) == before


def test_run_becomes_a_model(call, tmp_path):
    assert call("run", "finetune", "--set", "epochs=1", "--scenario", "9,1", "--out", tmp_path / "run")[0] == 0
    code, out, _ = call("model", tmp_path / "run", tmp_path / "model")
    assert code == 0
    assert "10 classes" in out
    assert call("model", tmp_path / "run", tmp_path / "model")[0] == 2


@pytest.mark.slow
def test_commands_of_the_readme(tmp_path):
    """From an empty folder to an exported model of ten classes, and back."""
    pytest.importorskip("onnxruntime")
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Your own photos")[2].partition("\n## ")[0]
    lines = [shlex.split(line, comments=True) for line in re.findall(r"^    (.+)$", section, flags=re.MULTILINE)]
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    told = {}
    for words in lines:
        if words[:2] == ["ccfa", "undo"]:
            photos = sorted(path.relative_to(tmp_path) for path in (tmp_path / "photos/test").rglob("*.jpg"))
            script = [sys.executable, "examples/use_exported_model.py", "shapes.onnx", *map(str, photos)]
            exported = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
            found = ccfa.load_model(tmp_path / "shapes").evaluate(tmp_path / "photos/test")
        first = {"python": [sys.executable], "ccfa": COMMAND}.get(words[0], words[:1])
        done = subprocess.run([*first, *words[1:]], cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        told[words[1]] = done.stdout
    shares = {name: right / images for name, (images, right) in found.by_class().items()}
    assert len(shares) == 10
    assert np.mean([*shares.values()][:5]) > 0.6  # of the classes whose photos were gone
    assert np.mean([*shares.values()][5:]) > 0.5
    assert min([*shares.values()]) > 0.1
    assert found.seen == 0
    assert f"{200 - len(found.wrong)} of 200 photos" in told["evaluate"]
    predicted = re.findall(r"^(\w+) +[\d.]+ %  (\S+\.jpg)", told["predict"], flags=re.MULTILINE)
    assert [path for _, path in predicted] == [str(path) for path in photos]
    assert re.findall(r"^(\S+): (\w+) [01]\.\d+$", exported, flags=re.MULTILINE) == [(b, a) for a, b in predicted]
    assert "On 200 photos" in told["export"]
    assert "5 classes" in told["undo"]
    assert len(ccfa.load_model(tmp_path / "shapes").class_names) == 5
