"""`ccfa learn`, `predict`, `evaluate`, `history`, `undo` and `model`, as they are typed."""

import csv
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ccfa
from ccfa.deployment import ModelFolder
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


def test_long_names_are_shown_whole(call, place):
    path = place / ("x" * 120 + ".png")
    shutil.copy(place / "first/a/00.png", path)
    _, out, _ = call("predict", place / "model", path)
    assert out.replace("\n", "").count("x") >= 120


def test_wrong_photos_are_written(call, place):
    shutil.copy(place / "first/a/00.png", place / "first/b/wrong.png")
    code, _, _ = call("evaluate", place / "model", place / "first", "--out", place / "wrong.csv")
    assert code == 0
    assert "wrong.png" in (place / "wrong.csv").read_text()


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
    photo = "photos/second/moon/000.jpg"
    told = []
    for words in lines:
        if words[:2] == ["ccfa", "undo"]:
            photos = sorted((tmp_path / "photos/second").rglob("*.jpg"))
            names = [one.name for one in ccfa.load_model(tmp_path / "shapes").predict(photos)]
            script = [sys.executable, "examples/use_exported_model.py", "shapes.onnx", *map(str, photos)]
            exported = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
            found = re.findall(r"^.*\.jpg: (\w+) 0\.\d+$|^.*\.jpg: (\w+) 1\.0", exported, flags=re.MULTILINE)
            assert [first or second for first, second in found] == names
        first = {"python": [sys.executable], "ccfa": COMMAND}.get(words[0], words[:1])
        done = subprocess.run([*first, *words[1:]], cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        told.append(done.stdout)
    assert "5 classes" in told[-1]
    assert photo in told[-2]
    accuracy = re.search(r"recognised: (\d+)", told[lines.index(["ccfa", "evaluate", "shapes", "photos/second"])])
    assert accuracy
    assert int(accuracy[1]) > 60
    assert len(ccfa.load_model(tmp_path / "shapes").class_names) == 5
