import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ccfa import cli
from ccfa.errors import ModelError
from ccfa.experiments import RunDirectory
from ccfa.reporting import page as page_module
from ccfa.reporting import rundata
from ccfa.reporting.page import report_line, write_report
from synthetic_runs import synthetic_resolved, synthetic_run

NAMES = ["<script>alert(1)</script>", "{{ 7 * 7 }}", "{% include 'x' %}", "n" * 255, "🐟 \"'&", "plain"]
EVERYTHING = ("environment.json", "status.json", "report.json", "stages.csv", "metrics.jsonl", "predictions",
              "exemplars", "pictures.npz")  # fmt: skip

DAMAGEABLE = (*EVERYTHING[:5], "predictions/stage-001.npz", "exemplars/stage-002.json", "pictures.npz")
HUGE = 10**400  # more than a float holds
CORRUPT_CONFIGS = (
    {"resolved": {"stage_sizes": "abc"}},
    {"resolved": {"stage_sizes": [5, "x"]}},
    {"resolved": {"stage_sizes": [5, 0]}},
    {"resolved": {"class_names": 5}},
    {"resolved": [1]},
    {"experiment": [1]},
    {"experiment": "podnet"},
)
OTHER_CONFIGS = ({}, {"experiment": None, "resolved": None}, {"experiment": {"method": "podnet", "x": 1}})


@pytest.fixture(scope="module")
def resolved():
    return synthetic_resolved(NAMES, side=8)


@pytest.fixture
def run(tmp_path, resolved):
    path = tmp_path / "run"
    synthetic_run(path, resolved)
    return path


def text(path):
    return path.read_text(encoding="utf-8")


def test_page_shows_the_metrics_of_the_report(run, resolved):
    page = text(write_report(run, resolved))
    metrics = RunDirectory(run).report().metrics
    for name in ("average_incremental_accuracy", "last_accuracy", "forgetting_max_minus_last", "new_class_accuracy"):
        assert f"<dd>{100 * metrics[name]:.2f}<small> %</small></dd>" in page
    assert "Finished" in page


def test_page_is_self_contained(run, resolved):
    page = text(write_report(run, resolved))
    assert set(re.findall(r'(?:src|href|srcset|action)="([^:"]*:)', page)) == {"data:"}
    assert not re.search(r"https?://|url\(|@import|\bfetch\(|XMLHttpRequest", page)
    assert "default-src 'none'" in page


def test_class_names_are_escaped_everywhere(run, resolved):
    page = text(write_report(run, resolved))
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "{{ 7 * 7 }}" in page  # as text: not computed
    assert page.count("<script>") == 1
    assert "{% include" in page


def test_page_is_made_again_byte_for_byte_without_the_data(run, resolved, tmp_path):
    first = write_report(run, resolved).read_bytes()
    assert write_report(run).read_bytes() == first
    copy = tmp_path / "elsewhere" / "run"
    shutil.copytree(run, copy)
    assert write_report(copy).read_bytes() == first


def test_every_figure_has_a_sentence_a_label_and_a_table(run, resolved):
    page = text(write_report(run, resolved))
    figures = re.findall(r"<figure.*?</figure>", page, re.DOTALL)
    assert len(figures) == 11
    for figure in figures:
        assert re.search(r"<figcaption><h3>[^<]+</h3><p>[^<]{20,}</p>", figure)
        assert re.search(r'<svg class="chart"[^>]* aria-label="[^"]{15,}"', figure)
        assert "<table" in figure


@pytest.mark.parametrize("missing", EVERYTHING)
def test_whatever_is_missing_becomes_a_note(run, resolved, missing):
    write_report(run, resolved)
    path = run / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = text(write_report(run))
    assert 'class="note"' in page or missing == "environment.json"
    assert "How to repeat it" in page


@pytest.mark.parametrize("damaged", DAMAGEABLE)
@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"[1, 2", b"\xff\xfe\x00 nonsense,,,\n1"])
def test_whatever_is_damaged_becomes_a_note(run, resolved, damaged, content):
    write_report(run, resolved)
    (run / damaged).write_bytes(content)
    assert "How to repeat it" in text(write_report(run))


def test_directory_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        write_report(tmp_path)


@pytest.mark.parametrize("config", OTHER_CONFIGS)
def test_configuration_of_another_version_gives_notes(run, resolved, config):
    (run / "config.json").write_text(json.dumps(config))
    assert 'class="note"' in text(write_report(run))


@pytest.mark.parametrize("change", CORRUPT_CONFIGS)
def test_configuration_that_cannot_be_is_refused_without_a_traceback(run, monkeypatch, capsys, change):
    (part, content), *_ = change.items()
    config = RunDirectory(run).read_json("config.json")
    whole = {**config[part], **content} if isinstance(content, dict) else content
    RunDirectory(run).write_json("config.json", {**config, part: whole})
    monkeypatch.setattr(sys, "argv", ["ccfa", "report", str(run)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == ModelError.exit_code
    assert "does not say what was run: expected" in capsys.readouterr().err


def test_method_that_is_no_text_is_said_on_the_page_and_ends_a_resume(run, monkeypatch, capsys):
    config = RunDirectory(run).read_json("config.json")
    config["experiment"]["method"] = 5
    RunDirectory(run).write_json("config.json", config)
    assert "holds the method 5, which cannot be" in text(write_report(run))
    RunDirectory(run).set_status("interrupted")
    monkeypatch.setattr(sys, "argv", ["ccfa", "resume", str(run), "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == ModelError.exit_code
    assert "holds the method 5, which cannot be" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["[" * 200_000, f'{{"stage": {HUGE}}}', '{"stage": -1}', f'{{"stage": 0, "loss": {HUGE}}}', "7"]
)
def test_strange_lines_of_metrics_are_passed_over(run, resolved, line):
    expected = text(write_report(run, resolved)).count("<svg")
    lines = text(run / "metrics.jsonl")
    (run / "metrics.jsonl").write_text(f"{line}\n{lines}")
    assert text(write_report(run)).count("<svg") == expected


@pytest.mark.parametrize("name", ["stages.csv", "metrics.jsonl"])
def test_tables_and_logs_have_a_bound(run, name, monkeypatch):
    size = (run / name).stat().st_size
    monkeypatch.setattr(rundata, "MAX_BYTES", size)
    assert f"{name} is missing" not in text(write_report(run))
    monkeypatch.setattr(rundata, "MAX_BYTES", size - 1)
    assert f"{name} is missing or damaged" in text(write_report(run))


@pytest.mark.parametrize("name", ["stages.csv", "metrics.jsonl", "report.json", "environment.json"])
def test_what_is_too_large_is_not_read(run, name):
    os.truncate(run / name, 2**31)  # without blocks on the disk
    assert f"{name} is missing or damaged" in text(write_report(run))


@pytest.mark.parametrize(
    "change",
    [{"num_seen": ["x"]}, {"num_seen": []}, {"overall": [0.5]}, {"overall": [None] * 3}, {"seconds": HUGE},
     {"metrics": {"last_accuracy": "x"}}, {"metrics": {"last_accuracy": [1]}}],
)  # fmt: skip
def test_report_of_anything_but_numbers_becomes_a_note(run, change):
    shutil.rmtree(run / "predictions")
    RunDirectory(run).write_json("report.json", {**RunDirectory(run).read_json("report.json"), **change})
    assert "report.json is missing or damaged" in text(write_report(run))


def test_unfinished_run_says_how_far_it_came(tmp_path, resolved):
    path = tmp_path / "run"
    synthetic_run(path, resolved, num_done=1, state="interrupted")
    page = text(write_report(path, resolved))
    assert "Interrupted: 1 of 3 stages" in page
    assert "at least two stages" in page


def test_resumed_run_says_so(run, resolved):
    directory = RunDirectory(run)
    begun = directory.read_json("environment.json")
    times = [{"checkpoint": 3, "differences": {"torch": ["2.12", "2.13"]}}] * 2
    directory.write_json("environment.json", {**begun, "resumed": times})
    assert "Finished, resumed 2 times in other surroundings" in text(write_report(run, resolved))
    for nothing in ([], [1, None], [{"checkpoint": 3}], 5, {}):
        directory.write_json("environment.json", {**begun, "resumed": nothing})
        assert "resumed" not in text(write_report(run, resolved))


def test_header_says_that_the_name_is_the_run_s(run, resolved):
    assert re.search(r'<p class="lead">[^<]+<br>run run</p>', text(write_report(run, resolved)))


def test_one_is_not_plural(run, resolved):
    for stage in resolved.stages:
        labels = RunDirectory(run).read_predictions(stage.index)["labels"]
        predicted = labels.copy()
        predicted[0] = 1 - labels[0]
        RunDirectory(run).write_predictions(stage.index, {"labels": labels, "by_logits": predicted})
        RunDirectory(run).write_exemplars(stage.index, [torch.tensor([0])])
    page = text(write_report(run, resolved))
    assert "The 1 pair of classes" in page
    assert '<div class="counts">1 image, 5.0 % of the class' in page
    assert 'alt="1 test image of' in page
    assert "<summary>1 image of 1 class</summary>" in page


def test_one_class_alone_has_a_page(tmp_path):
    alone = synthetic_resolved(["only"], increment=1)
    path = tmp_path / "run"
    synthetic_run(path, alone)
    assert "1 class in 1 stage " in text(write_report(path, alone))


def test_more_classes_than_cells_are_shown_by_stage(tmp_path):
    many = synthetic_resolved([f"class {number}" for number in range(300)], increment=100, side=8)
    path = tmp_path / "run"
    synthetic_run(path, many)
    page = write_report(path, many)
    assert "true stage, as learned" in text(page)
    assert page.stat().st_size < 5_000_000


def test_failure_to_write_the_page_is_a_note(run, resolved, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page_module, "write_atomically", full)
    line = report_line(run, resolved)
    assert line.startswith("note: the report page was not written")
    assert "No space left on device" in line
    assert f"ccfa report {run}" in line


def test_command_writes_pages_again(run, resolved, monkeypatch, capsys):
    first = write_report(run, resolved).read_bytes()
    (run / "report.html").unlink()
    monkeypatch.setattr(sys, "argv", ["ccfa", "report", str(run)])
    cli.main()
    assert capsys.readouterr().out.strip() == f"Report: {run / 'report.html'}"
    assert (run / "report.html").read_bytes() == first


@pytest.mark.slow
def test_commands_shown_repeat_the_run(tmp_path, monkeypatch, capsys):
    first = tmp_path / "runs" / "first run"
    monkeypatch.chdir(tmp_path)
    options = ["--scenario", "4,6", "--memory", "3", "--seed", "5", "--set", "epochs=1"]
    monkeypatch.setattr(sys, "argv", ["ccfa", "run", "icarl", *options, "--out", str(first)])
    cli.main()
    assert f"Report: {first / 'report.html'}" in capsys.readouterr().out.replace("\n", "")
    command, python = re.findall(r"<pre>(.*?)</pre>", text(first / "report.html"), re.DOTALL)[:2]
    unescaped = command.replace("&#39;", "'")
    source = {"PYTHONPATH": str(Path(cli.__file__).parents[1]), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    bash = f'ccfa() {{ "{sys.executable}" -m ccfa.cli "$@"; }}; {unescaped}'
    subprocess.run(["bash", "-c", bash], check=True, cwd=tmp_path, env=source, capture_output=True, timeout=100)
    again = RunDirectory(tmp_path / "runs" / "first run-again").report()
    expected = RunDirectory(first).report()
    assert again.overall == expected.overall
    assert again.config == expected.config
    script = python.replace("&#39;", "'").replace("&#34;", '"')
    shown = subprocess.run(
        [sys.executable, "-c", script], check=True, env=source, capture_output=True, timeout=100, text=True
    ).stdout
    printed = [float(line.split()[1]) for line in shown.splitlines()]
    np.testing.assert_allclose(printed, expected.overall, atol=1e-12)
