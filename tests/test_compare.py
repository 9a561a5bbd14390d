import re

from ccfa.reporting import tensorboard
from comparisons import ALONE, PLUGGED, store

FILES = {"index.html", "table.csv", "table.md", "table.tex", "runs.csv"}


def stored(folder):
    """Runs of podnet with and without CCFA, and what else lies in such a folder."""
    for seed, value in ALONE.items():
        store(folder / f"p{seed}", value, seed=seed)
        store(folder / f"c{seed}", PLUGGED[seed], seed=seed, ccfa=True)
    (folder / ".first-stages").mkdir()
    return folder


def test_a_comparison_is_printed_and_lies_beside_the_runs(call, tmp_path):
    runs = stored(tmp_path / "runs")
    for _ in range(2):  # the second time its own page is among what the glob catches
        code, out, err = call("compare", *sorted(runs.iterdir()))
        assert (code, err) == (0, "")
        assert "60.39 ± 1.83" in out
        assert "+1.52 ± 1.32" in out
        assert str(runs / ".first-stages") in out
        assert f"Comparison: {runs / 'comparison' / 'index.html'}" in out
    assert str(runs / "comparison") in out
    assert {path.name for path in (runs / "comparison").iterdir()} == FILES
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_the_folder_can_be_chosen(call, tmp_path):
    runs = stored(tmp_path / "runs")
    code, out, _ = call("compare", runs / "p0", "--out", "here")
    assert code == 0
    assert "Comparison: here/index.html" in out
    assert {path.name for path in (tmp_path / "here").iterdir()} == FILES
    assert not (runs / "comparison").exists()


def test_runs_of_two_scenarios_are_refused_and_nothing_is_written(call, tmp_path):
    store(tmp_path / "a")
    store(tmp_path / "b", sizes=(5, 5))
    code, out, err = call("compare", "a", "b")
    assert (code, out) == (2, "")
    assert re.search(r"stage sizes  \[4, 3, 3\]  \[5, 5\]", err)
    assert err.endswith("Name the runs of one kind alone:\n  a\n  b\n")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_a_table_that_cannot_be_written_is_printed_still(call, tmp_path):
    store(tmp_path / "a")
    (tmp_path / "file").write_text("mine")
    code, out, err = call("compare", "a", "--out", "file/page")
    assert code == 5
    assert "50.00" in out
    assert "--out" in err


def test_tensorboard_that_is_missing_is_told_before_anything_is_done(call, tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    for verb in (["run", "podnet"], ["sweep", "podnet"], ["resume", "run"]):
        code, _, err = call(*verb, "--tensorboard")
        assert code == 2
        assert "pip install 'ccfa[tensorboard]'" in err
    assert list(tmp_path.iterdir()) == []
