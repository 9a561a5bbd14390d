"""The page of a run: its numbers, its pictures, and what becomes of it where files are missing, damaged or edited."""

import base64
import csv
import io
import re
import shlex
import shutil

import numpy as np
import pytest
from PIL import Image

from ccfa.data import ImageSet
from ccfa.errors import ModelError
from ccfa.experiments import Run
from ccfa.reporting import page as module
from ccfa.reporting.page import Contents, read_pictures, strip, write_report
from synthetic_runs import synthetic_resolved, synthetic_run

NAMES = ["<script>alert(1)</script>", "{{ 7 * 7 }}", "{% include 'x' %}", "n" * 255, "🐟 \"'&", "caf\u00e9"]


@pytest.fixture(scope="module")
def resolved():
    return synthetic_resolved(NAMES, side=8)


@pytest.fixture
def run(tmp_path, resolved):
    return synthetic_run(tmp_path / "run", resolved)


@pytest.fixture(params=["podnet", "icarl"])
def contents(request, tmp_path):
    """A run of four stages of two classes, as the page reads it, and its predictions by the method's own rule."""
    resolved = synthetic_resolved([f"c{number}" for number in range(8)], side=8, method=request.param, ccfa=False)
    run = synthetic_run(tmp_path / "run", resolved)
    rule = "by_nearest_mean" if request.param == "icarl" else "by_logits"
    arrays = [run.read_predictions(stage) for stage in range(4)]
    return Contents(run), [(stage["labels"], stage[rule]) for stage in arrays]


def text(path):
    return path.read_text(encoding="utf-8")


def headline(page):
    return re.findall(r"<dd>([^<]+)(?:<small> %</small>)?</dd></div>", page)


def notes(page):
    return " ".join(re.findall(r'<p class="note">([^<]*)', page))


def numbers(figure, column):
    return [float(row[column]) for row in figure.table[1]]


def test_page_is_whole_self_contained_and_escaped(run, resolved):
    page = text(write_report(run, resolved))
    report = run.report()
    reached = [f"{100 * report.metrics[name]:.2f}" for name in module.HEADLINES]
    assert headline(page) == [*reached, "1.853", "0.250", "6.144", f"{report.minutes:.2f}"]
    assert "Finished" in page
    assert not notes(page)
    assert set(re.findall(r'(?:src|href|srcset|action)="([^:"]*:)', page)) == {"data:"}
    assert not re.search(r"https?://|url\(|@import|\bfetch\(|XMLHttpRequest", page)
    assert "default-src 'none'" in page
    assert page.count("<script>") == 1
    assert all(name in page for name in ("&lt;script&gt;alert(1)", "{{ 7 * 7 }}", "{% include"))


def test_same_bytes_without_the_data(run, resolved, tmp_path, call):
    first = write_report(run, resolved).read_bytes()
    copy = tmp_path / "elsewhere" / "run"
    shutil.copytree(run.path, copy)
    (copy / "report.html").unlink()
    code, output, _ = call("report", copy)
    assert code == 0
    assert str(copy / "report.html") in output
    assert (copy / "report.html").read_bytes() == first


def test_accuracy_matrix_and_forgetting(contents):
    run, predictions = contents
    figure = module.accuracy_figure(run)
    expected = [100 * np.mean(labels == predicted) for labels, predicted in predictions]
    np.testing.assert_allclose(numbers(figure, 1), expected, atol=0.051)
    assert "nearest mean" in figure.table[0][1 if run.run.experiment.method == "icarl" else 2]
    matrix = np.full((4, 4), np.nan)
    for after, (labels, predicted) in enumerate(predictions):
        for stage in range(after + 1):
            matrix[after, stage] = 100 * np.mean((predicted == labels)[labels // 2 == stage])
    shown = [[float(cell or "nan") for cell in row[1:]] for row in module.matrix_figure(run).table[1]]
    np.testing.assert_allclose(shown, matrix, atol=0.051)
    lost = [np.mean([matrix[j:k, j].max() - matrix[k, j] for j in range(k)]) for k in (1, 2, 3)]
    np.testing.assert_allclose(numbers(module.forgetting_figure(run), 1), lost, atol=0.051)


@pytest.mark.parametrize("which", ["old", "new"])
def test_old_and_new_shares(contents, which):
    run, predictions = contents
    figure = module.old_new_figure(run, which, "other")
    for stage, row in enumerate(figure.table[1], start=1):
        pairs = [(t, p) for t, p in zip(*predictions[stage], strict=True) if (t < 2 * stage) == (which == "old")]
        right = 100 * sum(t == p for t, p in pairs) / len(pairs)
        crossed = 100 * sum((t < 2 * stage) != (p < 2 * stage) for t, p in pairs) / len(pairs)
        assert [float(cell) for cell in row[1:]] == pytest.approx([right, 100 - right - crossed, crossed], abs=0.051)


def test_confusions_and_table_of_classes(contents):
    run, predictions = contents
    labels, predicted = predictions[-1]
    counts = np.zeros((8, 8), dtype=int)
    np.add.at(counts, (labels, predicted), 1)
    expected = [(t, p, counts[t, p]) for t in range(8) for p in range(8) if t != p and counts[t, p]]
    assert run.pairs == sorted(expected, key=lambda pair: -pair[2])
    for label, row in enumerate(module.class_table(run)[1]):
        then_labels, then = predictions[label // 2]
        learned, now = (100 * np.mean(p[t == label] == label) for t, p in ((then_labels, then), (labels, predicted)))
        assert row[:3] == [f"c{label}", str(label // 2), str(counts[label].sum())]
        assert [float(cell) for cell in row[3:6]] == pytest.approx([learned, now, learned - now], abs=0.051)
        others = counts[label] * (np.arange(8) != label)
        assert row[6].startswith(f"c{others.argmax()} (" if others.any() else "-")


def test_time_and_losses(contents):
    run, _ = contents
    assert numbers(module.time_figure(run), 1) == [10.0, 11.0, 12.0, 13.0]
    loss, parts = module.loss_figures(run)
    assert loss.table[0][1:] == ["main", "balanced"]
    assert loss.table[1][0][1:] == ["2.500", "-"]
    assert parts.table[0][1:] == ["classification", "pod_flat"]


def test_many_epochs_are_averaged(tmp_path):
    run = synthetic_run(tmp_path / "run", synthetic_resolved(["a", "b"], increment=1, side=8), epochs=800)
    loss, _ = module.loss_figures(Contents(run))
    assert len(loss.table[1]) == 400
    assert float(loss.table[1][0][1]) == pytest.approx(np.mean([2 / epoch + 0.5 for epoch in range(1, 6)]), abs=5e-4)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00 nonsense,,,\nx"])
@pytest.mark.parametrize(
    ("name", "noted"),
    [(name, name) for name in ("environment.json", "status.json", "report.json", "stages.csv", "metrics.jsonl")]
    + [("predictions/stage-001.safetensors", "predictions"), ("exemplars/stage-002.json", "exemplars")],
)
def test_damage_becomes_a_note(run, name, noted, content):
    expected = headline(text(write_report(run)))
    if content is None:
        (run.path / name).unlink()
    else:
        (run.path / name).write_bytes(content)
    page = text(write_report(run))
    assert noted in notes(page) or (name == "metrics.jsonl" and content), "a log may end in half a line"
    assert headline(page) == (["-"] * len(expected) if name == "report.json" else expected)


@pytest.mark.parametrize("content", [None, "{}", '{"experiment": {"method": 5}}'])
def test_directory_of_no_run_is_refused(tmp_path, call, content):
    if content:
        (tmp_path / "config.json").write_text(content)
    code, _, errors = call("report", tmp_path)
    assert code == ModelError.exit_code
    assert "config.json" in errors


def test_unfinished_and_resumed_runs_say_so(tmp_path, resolved):
    run = synthetic_run(tmp_path / "run", resolved, num_done=1, state="interrupted")
    record = {"checkpoint": 3, "differences": {"torch": ["2.12", "2.13"]}}
    run.write_json("environment.json", {**run.environment, "resumed": [record] * 2})
    arrays = run.read_predictions(0)
    run.write_predictions(0, {name: values[arrays["labels"] != 1] for name, values in arrays.items()})
    page = text(write_report(run))
    assert "Interrupted: 1 of 3 stages, resumed 2 times" in page
    assert re.findall(r"after ([^<]*)</(?:dt|h3)>", page) == ["1 of 3 stages", "each stage", "1 of 3 stages"]
    assert "-" in headline(page)  # forgetting of one stage
    assert module.class_table(Contents(run))[1][1][2:6] == ["0", "-", "-", "-"]  # a class without test images


def test_many_classes_have_a_page(tmp_path):
    many = synthetic_resolved([f"class {number}" for number in range(300)], increment=100, side=24)
    run = synthetic_run(tmp_path / "run", many)
    page = write_report(run, many)
    assert "true stage" in text(page)
    assert page.stat().st_size < 5_000_000
    assert (run.path / "pictures.npz").stat().st_size < 3_000_000


def test_pictures_are_the_images_meant(tmp_path, resolved):
    path = synthetic_run(tmp_path / "run", resolved, num_done=2).path
    write_report(path, resolved)
    run, pictures = Contents(Run(path)), read_pictures(path, 1)
    for label, rows in enumerate(run.exemplars):
        expected = resolved.train.images[rows[:10]].permute(0, 2, 3, 1).numpy()
        np.testing.assert_array_equal(pictures["exemplars"][pictures["exemplar_classes"] == label], expected)
    images = resolved.test.images[resolved.test.rows(0, run.num_seen[-1])].permute(0, 2, 3, 1).numpy()
    labels, predicted = run.labelled[-1]
    for true, other, _ in run.pairs[:10]:
        meant = images[(labels == true) & (predicted == other)][:5]
        shown = (pictures["mistake_pairs"] == [true, other]).all(axis=1)
        np.testing.assert_array_equal(pictures["mistakes"][shown], meant)
    assert read_pictures(path, 2) is None  # of another stage
    kind, content = strip(pictures["mistakes"]).split(",")
    assert kind == "data:image/png;base64"
    strip_of_all = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))
    np.testing.assert_array_equal(strip_of_all, np.hstack(pictures["mistakes"]))


def test_wrong_photos_are_named(tmp_path, monkeypatch):
    images = synthetic_resolved(NAMES, side=8)
    files = [f"class/<{row}>.jpg" for row in range(len(images.test))]
    resolved = images._replace(test=ImageSet(images.test.images, images.test.labels, NAMES, files))
    run = synthetic_run(tmp_path / "run", resolved)
    page = text(write_report(run, resolved))
    labels, predicted = Contents(run).labelled[-1]
    expected = [[files[row], NAMES[labels[row]], NAMES[predicted[row]]] for row in np.flatnonzero(labels != predicted)]
    assert module.wrong_table(Contents(run)).rows == expected
    assert all(file.replace("<", "&lt;").replace(">", "&gt;") in page for file, *_ in expected)
    monkeypatch.setattr(module, "MAX_WRONG_FILES", 2)
    assert f"the first 2 of {len(expected)}" in text(write_report(run, resolved))
    with (run.path / "wrong.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["file", "class", "predicted"], *expected], "all of them"


def test_one_forgetting_and_the_others_on_request(run):
    page = text(write_report(run))
    shown, _, rest = page.partition("Other definitions of forgetting")
    assert re.findall(r"<th scope=\"row\"[^>]*>(forgetting[^<]*)", shown) == ["forgetting"]
    assert "forgetting (Lee et al. 2019)" in rest


def test_command_names_device_and_speed(run):
    speed = {"precision": "tf32", "compile": True, "graph": False}
    run.write_json("environment.json", {**run.environment, "torch_device": "cuda:3", "acceleration": speed})
    assert " --ccfa --device cuda:3 --precision tf32 --no-graph --out " in text(write_report(run))


def test_command_shown_repeats_the_run(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    first = tmp_path / "first run"
    options = ["--scenario", "5,5", "--memory", "3", "--seed", "5", "--set", "epochs=0"]
    assert call("run", "replay", *options, "--out", first)[0] == 0
    command = re.findall(r"<pre>(.*?)</pre>", text(first / "report.html"), re.DOTALL)[0].replace("&#39;", "'")
    assert call(*shlex.split(command)[1:])[0] == 0
    again = Run(tmp_path / "runs" / "first run-again").report()
    assert (again.overall, again.config) == (Run(first).report().overall, Run(first).report().config)
