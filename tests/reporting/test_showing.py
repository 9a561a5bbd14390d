"""What a person is shown of runs and sweeps: while they end early, when they were finished, or cannot begin."""

import io
import json
import shutil

import pytest

from ccfa.errors import LockedError, ResourceError
from ccfa.evaluation import METRICS, Numbers, Report
from ccfa.experiments import Experiment, Run
from ccfa.files import locked
from ccfa.reporting.showing import _run_shown, _show_page, show_finished, show_result
from ccfa.reporting.tables import metric_name, percent
from ccfa.reporting.terminal import Output
from ccfa.settings import Running
from toy_runs import toy_resolved, toy_run

SWEEP = ("sweep", "finetune", "replay", "--ccfa", "off", "--scenario", "6,2,2", "--seeds", "0", "--set", "epochs=0")
NAMES = [Experiment(name, scenario="6,2,2", options={"epochs": "0"}).name for name in ("finetune", "replay")]


@pytest.fixture
def console():
    return Output(file=io.StringIO(), width=200)


def shown(path, console):
    return _run_shown(toy_resolved(), Run(path), Running(device="cpu"), console)


@pytest.mark.parametrize(("fault", "kind"), [("raise", RuntimeError), ("sigterm", SystemExit)])
def test_a_run_that_ends_early_has_a_page(tmp_path, console, fail, fault, kind):
    page = tmp_path / "run" / "report.html"
    fail(f"step:2:{fault}")
    with pytest.raises(kind):
        shown(tmp_path / "run", console)
    assert not page.exists(), "before the first stage there is nothing to show"
    fail(f"step:6:{fault}")
    with pytest.raises(kind):
        shown(tmp_path / "run", console)
    assert str(page) in console.file.getvalue()
    assert "1 of 3 stages" in page.read_text()


def test_metrics_of_every_rule(tmp_path, console):
    values = {name: (index + 1) / 10 + 0.00123 for index, name in enumerate(METRICS)}
    rules = {"logits": Numbers([0.5], {"last_accuracy": 0.4321}), "nearest_mean": Numbers([0.5], values)}
    report = Report("a [bold] name", {}, [2], "nearest_mean", rules, {}, 12.4, finished=True, exemplars_mb=0.5)
    show_result(report, tmp_path, None, console)
    text = console.file.getvalue()
    assert report.name in text
    assert "parameters MB -, remembered MB -, exemplars MB 0.500, minutes 0.21" in text
    assert text.index("nearest mean (the method's rule)") < text.index("by logits")
    rows = {row[0]: row[1:] for row in ([cell.strip() for cell in line[1:-1].split("│")] for line in text.splitlines())}
    assert metric_name("forgetting_lee2019") in text, "the others are named"
    assert not any(name.startswith("forgetting ") for name in rows), "one forgetting"
    for name, value in ((name, value) for name, value in values.items() if METRICS[name].column):
        assert rows[metric_name(name)][:2] == [percent(value), "43.21" if name == "last_accuracy" else "-"]


def test_a_page_that_fails_hides_no_error(tmp_path, console, fail, monkeypatch):
    monkeypatch.setattr("ccfa.reporting.page.write_report", lambda *arguments: 1 / 0)
    fail("step:6:oom")
    with pytest.raises(ResourceError):
        shown(tmp_path / "run", console)
    assert "division by zero" in console.file.getvalue()
    assert f"ccfa report {tmp_path / 'run'}" in console.file.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy") / "run"
    toy_run(path)
    return path


def test_no_page_where_another_process_works(finished, tmp_path, console):
    shutil.copytree(finished, tmp_path / "run")
    with locked(tmp_path / "run"):
        _show_page(Run(tmp_path / "run"), toy_resolved(), console, None)
        with pytest.raises(LockedError):
            shown(tmp_path / "run", console)
    assert not (tmp_path / "run" / "report.html").exists()


def test_missing_pictures_are_made_again(call, tmp_path):
    call("run", "replay", "--scenario", "5,5", "--set", "epochs=0", "--out", "run")
    page = (tmp_path / "run" / "report.html").read_bytes()
    assert page.count(b"data:image/png") > 3
    (tmp_path / "run" / "pictures.npz").unlink()
    (tmp_path / "run" / "report.html").unlink()
    assert call("resume", "run")[0] == 0
    assert (tmp_path / "run" / "report.html").read_bytes() == page


@pytest.mark.parametrize("data", ["cifar100", "gone"])
def test_without_data_the_page_has_no_pictures(finished, tmp_path, console, monkeypatch, data):
    monkeypatch.setenv("CCFA_DATA", str(tmp_path))  # where it would be downloaded to
    shutil.copytree(finished, tmp_path / "run")
    directory = Run(tmp_path / "run")
    config = directory.read_json("config.json")
    config["experiment"]["data"] = data if data == "cifar100" else str(tmp_path / data)
    directory.write_json("config.json", config)
    show_finished(directory, None, console)
    assert "no pictures" in console.file.getvalue()
    assert (tmp_path / "run" / "report.html").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("option", ["--checkpoint-minutes", "--max-minutes"])
@pytest.mark.parametrize("minutes", ["nan", "inf", "-1e-9"])
def test_bad_minutes_are_refused(call, tmp_path, option, minutes):
    code, _, err = call("run", "finetune", f"{option}={minutes}")
    assert code == 2
    assert option in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["run", "sweep"])
def test_a_bad_folder_is_refused_at_once(call, tmp_path, verb):
    (tmp_path / "file").write_text("mine")
    code, out, err = call(verb, "finetune", "--first-stages", "file/below", "--out", "out")
    assert (code, out) == (5, "")
    assert "file/below" in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_failed_runs_are_named_and_others_compared(call, tmp_path, fail):
    fail("evaluate:2:raise")  # the second stage of the first run
    code, out, err = call(*SWEEP, "--out", "out")
    assert code == 1
    assert all(f"{NAMES[0]}: RuntimeError" in told for told in (out, err))
    assert "Traceback" not in err
    assert all(f"out/{name}/report.html" in out for name in NAMES)  # of one stage, and of all
    assert "out/comparison/index.html" in out
    assert json.loads((tmp_path / "out" / NAMES[1] / "status.json").read_text())["state"] == "finished"
    code, out, err = call(*SWEEP, "--out", "out")
    assert (code, err) == (0, "")


def test_the_first_failure_decides_the_code(call, fail):
    fail("evaluate:1:oom,evaluate:2:raise")
    code, out, err = call(*SWEEP, "--out", "out")
    assert code == 5
    assert all(name in out and name in err for name in NAMES)


def test_a_stopped_sweep_leaves_pages(call, tmp_path, fail):
    fail("evaluate:2:sigterm")
    assert call(*SWEEP, "--out", "out")[0] == 143
    assert (tmp_path / "out" / NAMES[0] / "report.html").exists()


def test_a_method_that_refuses_ccfa_is_noted(call):
    words = ("--scenario", "9,1", "--seeds", "0", "--set", "epochs=0", "--out", "out")
    code, out, err = call("sweep", "joint", "finetune", *words)
    assert (code, err) == (0, "")
    assert "note: joint + CCFA" in out
    code, _, err = call("sweep", "joint", "--ccfa", "on", *words)
    assert code == 2
    assert "joint" in err
