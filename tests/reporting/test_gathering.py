import os
from pathlib import Path

import pytest

from ccfa.errors import ModelError, UsageError
from ccfa.reporting.figures import write_figure
from ccfa.reporting.gathering import common_folder, gather
from comparisons import entry, store


def test_what_a_glob_catches_beside_runs_is_named(tmp_path):
    runs = [store(tmp_path / "a"), store(tmp_path / "b")]
    (tmp_path / ".first-stages").mkdir()
    (tmp_path / "comparison").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text("{}")
    entries, notes = gather(sorted(tmp_path.iterdir()))
    assert [found.path for found in entries] == runs
    assert notes == [
        f"left out, since they are no runs: {tmp_path / '.first-stages'}, {tmp_path / 'comparison'}, "
        f"{tmp_path / 'notes.txt'}.",
        f"left out, since no stage of them is finished: {tmp_path / 'c'}.",
    ]


def test_a_folder_of_runs_stands_for_its_runs(tmp_path):
    runs = [store(tmp_path / "sweep" / name) for name in ("a", "b")]
    store(tmp_path / "sweep" / ".first-stages")
    alone = store(tmp_path / "c")
    entries, notes = gather([tmp_path / "sweep", alone])
    assert [found.path for found in entries] == [*runs, alone]
    assert notes == []


def test_a_path_named_twice_counts_once(tmp_path, monkeypatch):
    store(tmp_path / "a")
    (tmp_path / "link").symlink_to("a")
    monkeypatch.chdir(tmp_path)
    entries, notes = gather([Path("a"), Path("./a/"), tmp_path / "a", Path("link")])
    assert [found.path for found in entries] == [Path("a")]
    assert len(notes) == 3
    assert all("named twice and counted once" in note for note in notes)


def test_a_report_file_will_do(tmp_path):
    (tmp_path / "x.json").write_text(entry("x", 0.75).report.to_json())
    entries, notes = gather([tmp_path / "x.json"])
    assert (entries[0].report.overall[1], notes) == (0.75, [])


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"name": 3}'])
def test_a_damaged_report_is_an_error_not_a_run_less(tmp_path, content):
    path = store(tmp_path / "a")
    (path / "report.json").write_text(content)
    with pytest.raises(ModelError, match="report"):
        gather([path])
    with pytest.raises(ModelError, match=r"a/report\.json"):
        gather([path / "report.json"])


def test_nothing_to_compare(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="at least one run directory"):
        gather([])
    with pytest.raises(ModelError, match="does not exist"):
        gather([tmp_path / "nothing"])
    with pytest.raises(ModelError, match="nothing to show"):
        gather([tmp_path / "empty"])


def test_messages_name_the_command_that_was_typed(tmp_path):
    with pytest.raises(UsageError, match=r"e\.g\. ccfa compare runs"):
        gather([])
    for kind in ("cka", "accuracy"):
        with pytest.raises(ModelError, match=rf"e\.g\. ccfa figure {kind} runs"):
            write_figure(kind, [tmp_path / "nothing"])
        with pytest.raises(UsageError, match=rf"e\.g\. ccfa figure {kind} runs"):
            write_figure(kind, [])


def test_a_report_that_is_too_large_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "x.json"
    path.touch()
    os.truncate(path, 2**31)  # without blocks on the disk
    with pytest.raises(ModelError, match="more than the"):
        gather([path])


@pytest.mark.parametrize(
    ("paths", "folder"),
    [
        (["runs/a"], "runs/comparison"),
        (["runs/a", "runs/b"], "runs/comparison"),
        (["runs/x/a", "runs/y/b"], "runs/comparison"),
        (["a", "b"], "comparison"),
        (["/x/a", "/x/b"], "/x/comparison"),
    ],
)
def test_the_page_goes_beside_the_runs(paths, folder):
    assert common_folder([entry(path) for path in paths]) == Path(folder)


def test_relative_and_absolute_paths_have_a_common_folder_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert common_folder([entry("runs/a"), entry(tmp_path / "runs" / "b")]) == tmp_path / "runs" / "comparison"
