"""The page of a run: its numbers, its pictures, and what becomes of it where files are missing, damaged or edited."""

import base64
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ccfa import cli
from ccfa.errors import ModelError
from ccfa.experiments import Run
from ccfa.files import read_arrays
from ccfa.reporting import page as module
from ccfa.reporting.page import report_line, write_report
from ccfa.reporting.pictures import strip
from ccfa.reporting.rundata import read_pictures, read_run
from synthetic_runs import synthetic_resolved, synthetic_run

NAMES = ["<script>alert(1)</script>", "{{ 7 * 7 }}", "{% include 'x' %}", "n" * 255, "🐟 \"'&", "caf\u00e9"]
DAMAGEABLE = ("environment.json", "status.json", "report.json", "stages.csv", "metrics.jsonl",
              "predictions/stage-001.safetensors", "exemplars/stage-002.json")  # fmt: skip
SHOWN = {"predictions/stage-001.safetensors": "predictions", "exemplars/stage-002.json": "exemplars"}
HUGE = 10**400  # more than a float holds


@pytest.fixture(scope="module")
def resolved():
    return synthetic_resolved(NAMES, side=8)


@pytest.fixture
def run(tmp_path, resolved):
    synthetic_run(tmp_path / "run", resolved)
    return tmp_path / "run"


@pytest.fixture(params=["podnet", "icarl"])
def data(request, tmp_path):
    """A run of four stages of two classes, as the page reads it, and its own rule."""
    resolved = synthetic_resolved([f"c{number}" for number in range(8)], side=8, method=request.param, ccfa=False)
    directory = synthetic_run(tmp_path / "run", resolved)
    rule = "by_nearest_mean" if request.param == "icarl" else "by_logits"
    arrays = [directory.read_predictions(stage) for stage in range(4)]
    return read_run(directory.path), [(stage["labels"], stage[rule]) for stage in arrays]


def text(path):
    return path.read_text(encoding="utf-8")


def headline(page):
    return re.findall(r"<dd>([^<]+)(?:<small> %</small>)?</dd></div>", page)


def notes(page):
    return " ".join(re.findall(r'<p class="note">([^<]*)', page))


def numbers(figure, column):
    return [float(row[column]) for row in figure.table[1]]


def edited(run, name, **changes):
    Run(run).write_json(name, {**Run(run).read_json(name), **changes})


def test_headline_is_the_report_s(run, resolved):
    page = text(write_report(run, resolved))
    report = Run(run).report()
    assert headline(page) == [f"{100 * report.metrics[name]:.2f}" for name in module.HEADLINES]
    assert "Finished" in page
    assert 'class="note"' not in page


def test_page_is_self_contained(run, resolved):
    page = text(write_report(run, resolved))
    assert set(re.findall(r'(?:src|href|srcset|action)="([^:"]*:)', page)) == {"data:"}
    assert not re.search(r"https?://|url\(|@import|\bfetch\(|XMLHttpRequest", page)
    assert "default-src 'none'" in page


def test_class_names_are_escaped(run, resolved):
    page = text(write_report(run, resolved))
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "{{ 7 * 7 }}" in page  # as text: not computed
    assert "{% include" in page
    assert page.count("<script>") == 1


def test_same_bytes_without_the_data(run, resolved, tmp_path, call):
    first = write_report(run, resolved).read_bytes()
    copy = tmp_path / "elsewhere" / "run"
    shutil.copytree(run, copy)
    (copy / "report.html").unlink()
    code, output, _ = call("report", copy)
    assert code == 0
    assert str(copy / "report.html") in output
    assert (copy / "report.html").read_bytes() == first


def test_accuracy_after_each_stage(data):
    run, predictions = data
    figure = module.accuracy_figure(run)
    expected = [100 * np.mean(labels == predicted) for labels, predicted in predictions]
    np.testing.assert_allclose(numbers(figure, 1), expected, atol=0.051)
    assert len(figure.table[0]) == 3  # classes seen, the method's own rule, the other
    assert "nearest mean" in figure.table[0][1 if "icarl" in run.config["experiment"]["method"] else 2]


def test_accuracy_matrix_and_forgetting(data):
    run, predictions = data
    matrix = np.full((4, 4), np.nan)
    for after, (labels, predicted) in enumerate(predictions):
        for stage in range(after + 1):
            matrix[after, stage] = 100 * np.mean((predicted == labels)[labels // 2 == stage])
    figure = module.matrix_figure(run)
    shown = [[float(cell or "nan") for cell in row[1:]] for row in figure.table[1]]
    np.testing.assert_allclose(shown, matrix, atol=0.051)
    in_chart = re.search(r'data-values="([^"]*)"', figure.chart).group(1)
    assert [[float(cell or "nan") for cell in row.split(",")] for row in in_chart.split(";")] == pytest.approx(
        np.array(shown), nan_ok=True
    )
    lost = [np.mean([matrix[j:k, j].max() - matrix[k, j] for j in range(k)]) for k in (1, 2, 3)]
    np.testing.assert_allclose(numbers(module.forgetting_figure(run), 1), lost, atol=0.051)


@pytest.mark.parametrize("which", ["old", "new"])
def test_old_and_new_shares(data, which):
    run, predictions = data
    for stage, shares in enumerate(module.old_new_shares(run, which), start=1):
        pairs = [(t, p) for t, p in zip(*predictions[stage], strict=True) if (t < 2 * stage) == (which == "old")]
        right = sum(t == p for t, p in pairs) / len(pairs)
        crossed = sum((t < 2 * stage) != (p < 2 * stage) for t, p in pairs) / len(pairs)
        assert shares == pytest.approx((right, 1 - right - crossed, crossed))


def test_confusions_and_table_of_classes(data):
    run, predictions = data
    labels, predicted = predictions[-1]
    counts = np.zeros((8, 8), dtype=int)
    np.add.at(counts, (labels, predicted), 1)
    pairs = module.confused_pairs(run)
    expected = [(t, p, counts[t, p]) for t in range(8) for p in range(8) if t != p and counts[t, p]]
    assert pairs == sorted(expected, key=lambda pair: -pair[2])
    for label, row in enumerate(module.class_table(run, pairs)[1]):
        then_labels, then = predictions[label // 2]
        learned, now = (100 * np.mean(p[t == label] == label) for t, p in ((then_labels, then), (labels, predicted)))
        assert row[:3] == [f"c{label}", str(label // 2), str(counts[label].sum())]
        assert [float(cell) for cell in row[3:6]] == pytest.approx([learned, now, learned - now], abs=0.051)
        others = counts[label] * (np.arange(8) != label)
        assert row[6].startswith(f"c{others.argmax()} (" if others.any() else "-")


def test_time_and_losses(data):
    run, _ = data
    assert numbers(module.time_figure(run), 1) == [10.0, 11.0, 12.0, 13.0]
    loss, parts = module.loss_figures(run)
    assert loss.table[0][1:] == ["main", "balanced"]
    assert loss.table[1][0][1:] == ["2.500", "-"]
    assert parts.table[0][1:] == ["classification", "pod_flat"]


def test_many_epochs_are_averaged(tmp_path):
    synthetic_run(tmp_path / "run", synthetic_resolved(["a", "b"], increment=1, side=8), epochs=800)
    loss, _ = module.loss_figures(read_run(tmp_path / "run"))
    assert len(loss.table[1]) == 400
    assert float(loss.table[1][0][1]) == pytest.approx(np.mean([2 / epoch + 0.5 for epoch in range(1, 6)]), abs=5e-4)


def test_strange_metrics_are_drawn(run, resolved):
    lines = ["[" * 200_000, f'{{"stage": {HUGE}}}', f'{{"stage": 0, "loss": {HUGE}}}', "7", '{"stage": 0, "loss": [1]}']
    lines += [json.dumps({"stage": stage, "phase": "main", "loss": 1e308}) for stage in range(20_000)]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    assert "Training loss" in text(write_report(run))


@pytest.mark.parametrize("name", DAMAGEABLE)
@pytest.mark.parametrize("content", [None, b"", b"\x80\x04K\x01.", b"[1, 2", b"\xff\xfe\x00 nonsense,,,\n1"])
def test_damage_becomes_a_note(run, name, content):
    expected = headline(text(write_report(run)))
    if content is None:
        (run / name).unlink()
    else:
        (run / name).write_bytes(content)
    page = text(write_report(run))
    readable_as_log = name in ("stages.csv", "metrics.jsonl") and content is not None
    no_exemplars_kept = name.startswith("exemplars") and content is None
    assert SHOWN.get(name, name) in notes(page) or readable_as_log or no_exemplars_kept
    assert headline(page) == (["-"] * 4 if name == "report.json" else expected)


@pytest.mark.parametrize("rule", ["by_logits", "by_nearest_mean"])
def test_lost_rule_never_changes_headline(tmp_path, rule):
    resolved = synthetic_resolved(["a", "b", "c", "d"], side=8, method="icarl", ccfa=False)
    directory = synthetic_run(tmp_path / "run", resolved)
    expected = headline(text(write_report(directory.path)))
    arrays = directory.read_predictions(1)
    directory.write_predictions(1, {name: values for name, values in arrays.items() if name != rule})
    page = text(write_report(directory.path))
    assert headline(page) == expected
    assert ("predictions" in notes(page)) == (rule == "by_nearest_mean")
    assert "Predicted by nearest mean" in page


def test_predictions_of_others_are_noted(run, resolved):
    arrays = Run(run).read_predictions(1)
    Run(run).write_predictions(1, {**arrays, "by_logits": arrays["labels"]})
    assert "predictions" in notes(text(write_report(run)))


def test_every_flipped_bit_gives_a_page(run):
    path = run / "predictions" / "stage-001.safetensors"
    whole, expected = path.read_bytes(), headline(text(write_report(run)))
    for place in np.random.default_rng(0).integers(0, 8 * len(whole), 25).tolist():
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert headline(text(write_report(run))) == expected


@pytest.mark.parametrize(
    "change",
    [{"num_seen": ["x"]}, {"num_seen": []}, {"num_seen": [2, 4, 7]}, {"rules": {}},
     {"rules": {"logits": {"overall": [0.5], "metrics": {}}}},
     {"rules": {"logits": {"overall": [None] * 3, "metrics": {}}}},
     {"seconds": HUGE}, {"rules": {"logits": {"overall": [0.5] * 3, "metrics": {"last_accuracy": [1]}}}}],
)  # fmt: skip
def test_report_of_no_numbers_is_noted(run, change):
    edited(run, "report.json", **change)
    page = text(write_report(run))
    assert "report.json" in notes(page)
    assert headline(page) == ["-"] * 4


@pytest.mark.parametrize(
    ("part", "content"),
    [("resolved", {"stage_sizes": "abc"}), ("resolved", {"stage_sizes": [5, 0]}), ("resolved", {"class_names": 5}),
     ("resolved", [1]), ("experiment", "podnet")],
)  # fmt: skip
def test_impossible_configuration_is_refused(run, call, part, content):
    config = Run(run).read_json("config.json")
    edited(run, "config.json", **{part: {**config[part], **content} if isinstance(content, dict) else content})
    code, _, errors = call("report", run)
    assert code == ModelError.exit_code
    assert "config.json" in errors


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"experiment": None, "resolved": None},
        {"experiment": {"method": 5}},
        {"experiment": {"method": "m", "x": 1}},
    ],
)
def test_configuration_of_another_version(run, config):
    (run / "config.json").write_text(json.dumps(config))
    page = text(write_report(run))
    assert notes(page)
    assert "-" not in headline(page)


def test_directory_without_configuration_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        write_report(tmp_path)


def test_unfinished_run_says_how_far(tmp_path, resolved):
    synthetic_run(tmp_path / "run", resolved, num_done=1, state="interrupted")
    page = text(write_report(tmp_path / "run", resolved))
    assert "Interrupted: 1 of 3 stages" in page
    assert "-" in headline(page)  # forgetting of one stage


def test_resumed_run_says_so(run):
    times = [{"checkpoint": 3, "differences": {"torch": ["2.12", "2.13"]}}] * 2
    edited(run, "environment.json", resumed=times)
    assert "resumed 2 times" in text(write_report(run))
    for nothing in ([], [1, None], [{"checkpoint": 3}], 5, {}):
        edited(run, "environment.json", resumed=nothing)
        assert "resumed" not in text(write_report(run))


def test_one_class_has_a_page(tmp_path):
    alone = synthetic_resolved(["only"], increment=1)
    synthetic_run(tmp_path / "run", alone)
    assert "1 class in 1 stage " in text(write_report(tmp_path / "run", alone))


def test_many_classes_are_shown_by_stage(tmp_path):
    many = synthetic_resolved([f"class {number}" for number in range(300)], increment=100, side=8)
    synthetic_run(tmp_path / "run", many)
    page = write_report(tmp_path / "run", many)
    assert "true stage" in text(page)
    assert page.stat().st_size < 5_000_000
    assert (tmp_path / "run" / "pictures.npz").stat().st_size < 3_000_000


@pytest.mark.parametrize("num_done", [2, 3])
def test_pictures_are_the_images_meant(tmp_path, resolved, num_done):
    path = synthetic_run(tmp_path / "run", resolved, num_done=num_done).path
    write_report(path, resolved)
    run, pictures = read_run(path), read_pictures(path, num_done - 1)
    for label, rows in enumerate(run.exemplars):
        expected = resolved.train.images[rows[:10]].permute(0, 2, 3, 1).numpy()
        np.testing.assert_array_equal(pictures["exemplars"][pictures["exemplar_classes"] == label], expected)
    images = resolved.test.images[resolved.test.rows(0, run.num_seen[-1])].permute(0, 2, 3, 1).numpy()
    for true, other, _ in module.confused_pairs(run)[:10]:
        meant = images[(run.labels[-1] == true) & (run.predicted[-1] == other)][:5]
        shown = (pictures["mistake_pairs"] == [true, other]).all(axis=1)
        np.testing.assert_array_equal(pictures["mistakes"][shown], meant)
    assert read_pictures(path, num_done) is None  # of another stage
    kind, content = strip(pictures["mistakes"]).split(",")
    assert kind == "data:image/png;base64"
    strip_of_all = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))
    np.testing.assert_array_equal(strip_of_all, np.hstack(pictures["mistakes"]))


def test_pickles_and_bombs_are_refused(tmp_path):
    np.savez(tmp_path / "pickle.npz", labels=np.array([{"a": 1}], dtype=object))
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("labels.npy", bytes(300 * 2**20))
    for name in ("pickle.npz", "bomb.npz"):
        with pytest.raises(ModelError, match=name):
            read_arrays(tmp_path / name)


def test_page_that_fails_is_a_note(run, resolved, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_atomically", full)
    line = report_line(run, resolved)
    assert line.startswith("note:")
    assert "No space left on device" in line
    assert f"ccfa report {run}" in line


@pytest.mark.parametrize(
    ("speed", "expected"),
    [
        ({"torch_device": "cuda:3", "acceleration": {"precision": "tf32", "compile": True, "graph": False}},
         ["--device", "cuda:3", "--precision", "tf32", "--no-graph"]),
        ({"torch_device": "cpu", "acceleration": {"precision": "float32", "compile": False, "graph": False}},
         ["--device", "cpu"]),
        ({"torch_device": ["x"], "acceleration": 5}, []),
    ],
)  # fmt: skip
def test_command_names_device_and_speed(run, speed, expected):
    edited(run, "environment.json", **speed)
    command = module.page(read_run(run)).split("<pre>")[1].split("</pre>")[0]
    assert shlex.split(command) == (
        ["ccfa", "run", "podnet", "--data", "digits", "--seed", "0", "--ccfa", *expected, "--out", "runs/run-again"]
    )


@pytest.mark.slow
def test_command_shown_repeats_the_run(tmp_path, monkeypatch, call):
    first = tmp_path / "runs" / "first run"
    options = ["--scenario", "4,6", "--memory", "3", "--seed", "5", "--set", "epochs=1"]
    assert call("run", "icarl", *options, "--out", first)[0] == 0
    command = re.findall(r"<pre>(.*?)</pre>", text(first / "report.html"), re.DOTALL)[0].replace("&#39;", "'")
    source = {"PYTHONPATH": str(Path(cli.__file__).parents[1]), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    bash = f'ccfa() {{ "{sys.executable}" -m ccfa.cli "$@"; }}; {command}'
    subprocess.run(["bash", "-c", bash], check=True, cwd=tmp_path, env=source, capture_output=True, timeout=300)
    again = Run(tmp_path / "runs" / "first run-again").report()
    assert again.overall == Run(first).report().overall
    assert again.config == Run(first).report().config
