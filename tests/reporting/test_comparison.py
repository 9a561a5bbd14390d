"""Which runs are of one experiment, their means and gains, and what is refused."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from ccfa.augmentation import CCFA, MIXES
from ccfa.data import parse_scenario
from ccfa.errors import ModelError, UsageError
from ccfa.experiments.experiment import describe, experiment_method, schema
from ccfa.methods import METHODS
from ccfa.reporting.comparison import (
    AVERAGE,
    common_folder,
    compare,
    compare_entries,
    gather,
    scenario_name,
    without_ccfa,
)
from ccfa.settings import Experiment
from comparisons import ALONE, PLUGGED, entry, podnets, store


def named(comparison):
    return {line.name: line for line in comparison.lines}


def text(values, sign=""):
    values = 100 * np.array(list(values))
    return f"{values.mean():{sign}.2f} ± {values.std(ddof=1):.2f}"


def test_runs_average_over_orders_and_seeds():
    lines = named(compare_entries(podnets()))
    assert list(lines) == ["podnet", "podnet + CCFA"]
    assert str(lines["podnet"].value(AVERAGE)) == text(ALONE.values())
    assert str(lines["podnet + CCFA"].value(AVERAGE)) == text(PLUGGED.values())
    values, curve = 100 * np.array([*ALONE.values()]), lines["podnet"].curve
    assert [value.mean for value in curve] == pytest.approx([values.mean() + 10, values.mean(), values.mean() - 10])
    assert [value.spread for value in curve] == pytest.approx([values.std(ddof=1)] * 3)
    runs = [entry("a", 0.5), entry("b", 0.7, order=list(range(10))[::-1]), entry("c", 0.6, seed=1, batch_seed=5)]
    (line,) = compare_entries(runs).lines
    assert str(line.value(AVERAGE)) == text([0.5, 0.7, 0.6])


def test_gain_is_of_pairs():
    plugged = named(compare_entries(podnets()))["podnet + CCFA"]
    differences = [PLUGGED[seed] - ALONE[seed] for seed in ALONE]
    assert (str(plugged.gain), len(plugged.gains)) == (text(differences, "+"), 3)


def test_runs_without_a_partner_are_named():
    comparison = compare_entries([run for run in podnets() if run.path.name not in ("c0", "p1")])
    assert named(comparison)["podnet + CCFA"].gains == pytest.approx([100 * (PLUGGED[2] - ALONE[2])])
    (note,) = comparison.notes
    assert "runs/p0, runs/c1" in note


@pytest.mark.parametrize(
    "runs",
    [
        [entry("a", 0.5, ccfa=True)],
        [entry("a", 0.5), entry("b", 0.6, ccfa=True, batch_seed=7)],
        [entry("a", 0.5, options={"epochs": "5"}), entry("b", 0.5, ccfa=True)],
    ],
)
def test_no_gain_without_the_same_experiment(runs):
    assert [line.gain for line in compare_entries(runs).lines] == [None] * len(runs)


def test_names_say_what_differs():
    runs = [
        entry("a", 0.5),
        entry("b", 0.6, options={"epochs": "5"}),
        entry("c", 0.7, options={"epochs": "5"}, ccfa=True),
        entry("d", 0.7, options={"epochs": "5", "ccfa.count": "3"}, ccfa=True),
    ]
    lines = named(compare_entries(runs))
    assert list(lines) == [
        "podnet",
        "podnet, epochs=5",
        "podnet + CCFA, epochs=5",
        "podnet + CCFA, epochs=5, ccfa.count=3",
    ]
    assert [line.gain is not None for line in lines.values()] == [False, False, True, True], "both against epochs=5"
    shared = [entry("a", seed=seed, mix="cutmix", ccfa=True, options={"epochs": "5"}) for seed in (0, 1)]
    assert list(named(compare_entries(shared))) == ["podnet + cutmix + CCFA"]
    first, second = entry("a", memory=None), entry("b", seed=1, memory=None)
    second.report.config["resolved"]["method"]["phases"][0]["lr"] = 0.2
    resolved = ["podnet, method.phases.0.lr=0.1", "podnet, method.phases.0.lr=0.2"]
    assert list(named(compare_entries([first, second]))) == resolved


@pytest.mark.parametrize(
    ("given", "num_lines"),
    [({"options": {"epochs": "20"}}, 1), ({"skip_bad": False}, 1), ({"image_size": 32}, 2), ({"skip_bad": True}, 2)],
)
def test_defaults_change_nothing_and_choices_do(given, num_lines):
    assert len(compare_entries([entry("a", seed=0), entry("b", seed=1, **given)]).lines) == num_lines


def described(method, ccfa=False, mix=None, **options):
    return describe(experiment_method(Experiment(method, ccfa=ccfa, mix=mix, data="cifar100", options=options)))


TEXTS = {int: ("3", "5"), float: ("0.375", "0.625"), bool: ("true", "false")}
# Options without effect unless another one is set.
NEEDED = {"margin": {"nca": "paper"}, "blend_lr": {"learn_blend": "true"}, "balanced_lr": {"balanced_epochs": "2"}}
PLUG_INS = {"ccfa": (CCFA, {"ccfa": True}), "mix": (MIXES["mixup"], {"mix": "mixup"})}


@pytest.mark.parametrize("name", [*METHODS, *PLUG_INS])
def test_every_option_shows_in_the_resolved_method(name):
    """Runs are told apart by the resolved method alone, so no option may be hidden there."""
    factory, chosen = PLUG_INS.get(name, (METHODS.get(name), {}))
    method, prefix = ("podnet", f"{name}.") if name in PLUG_INS else (name, "")
    known = schema(factory)
    for option, texts in ((option, TEXTS[kind]) for option, kind in known.items() if kind in TEXTS):
        needed = {other: text for other, text in NEEDED.get(option, {}).items() if other in known}
        first, second = (described(method, **chosen, **needed, **{prefix + option: text}) for text in texts)
        assert first != second, f"{name}.{option} is hidden"


def test_real_ccfa_unplugs():
    contents = [{"method": described("podnet", ccfa=plugged)} for plugged in (True, False)]
    assert contents[0] != contents[1]
    assert without_ccfa(contents[0]) == contents[1]


@pytest.mark.parametrize(
    ("change", "name"),
    [({"data": "cifar100"}, "data"), ({"sizes": (5, 5)}, "stage sizes"), ({"validation": 0.1}, "held")],
)
def test_other_data_or_stages_are_refused(change, name):
    with pytest.raises(UsageError, match=name) as refused:
        compare_entries([entry("runs/a"), entry("runs/x", **change)])
    assert "runs/x" in str(refused.value)


def test_repeated_and_unfinished_runs_are_named():
    comparison = compare_entries(
        [entry("a", 0.5), entry("b", 0.6), entry("c", 0.7, seed=1), entry("d", 0.9, seed=2, finished=False)]
    )
    (line,) = comparison.lines
    assert [str(run.path) for run in line.entries] == ["a", "c"]
    assert [str(run.path) for run in comparison.unfinished] == ["d"]
    assert [str(run.path) for run in comparison.entries] == ["a", "c", "d"]
    repeated, unfinished = comparison.notes
    assert "b repeats a" in repeated
    assert unfinished.startswith("d ")
    assert compare_entries([entry("a", finished=False)]).lines == ()


def test_other_devices_are_averaged_and_named():
    gpu = {"acceleration": {"precision": "bf16"}, "device": "a card", "ccfa": "1", "commit": "abc"}
    comparison = compare_entries([entry("a"), entry("b", seed=1), entry("c", seed=2, environment=gpu)])
    assert len(comparison.lines[0].entries) == 3
    assert {note.split()[0] for note in comparison.notes} == {"precision", "device", "commit"}


def test_a_method_has_its_own_rule():
    comparison = compare_entries([entry("a", 0.7, method="icarl"), entry("b", 0.5)])
    line = named(comparison)["icarl"]
    assert str(line.value(AVERAGE)) == "70.00"
    assert [value.mean for value in line.curve] == pytest.approx([80, 70, 60])
    assert "icarl: evaluated by nearest mean" in comparison.notes[0]


def test_published_values_are_of_the_same_setting():
    paper = {"data": "cifar100", "sizes": (50, 10, 10, 10, 10, 10)}
    methods = [{}, {"ccfa": True}, {"method": "finetune"}, {"options": {"epochs": "5"}}]
    comparison = compare_entries([entry(f"{number}", **one, **paper) for number, one in enumerate(methods)])
    assert [line.published for line in comparison.lines] == [64.62, None, 67.24, None], "the paper has no 5 epochs"
    assert comparison.cited == {"Mnemonics": 63.34, "TPCIL": 65.34, "GeoDL": 65.34}
    assert comparison.title == "cifar100 · B50-inc10"
    assert compare_entries([entry("a")]).cited == {}
    paper["sizes"] = (50, *[1] * 50)
    typed, fewer = (compare_entries([entry("a", options={"memory": memory}, **paper)]) for memory in ("20", "5"))
    assert [typed.lines[0].published, fewer.lines[0].published] == [57.84, 35.59]
    assert (typed.cited, fewer.cited) == ({"GeoDL": 52.28}, {})


@pytest.mark.parametrize(
    "sizes", [(50, 10, 10, 10, 10, 10), (10, 10, 10), (5, 2, 2, 1), (5, 1, 2), (7, 3), (10,), (3, 3, 1), (1, 3, 3)]
)
def test_scenario_name_means_its_sizes(sizes):
    stages = parse_scenario(scenario_name(sizes), sum(sizes))
    assert tuple(stage.num_new for stage in stages) == sizes


def test_runs_are_found_in_folders(tmp_path, monkeypatch):
    runs = [store(tmp_path / "sweep" / name) for name in ("a", "b")]
    for name in (".first-stages", "comparison", "c"):
        (tmp_path / "sweep" / name).mkdir()
    (tmp_path / "sweep" / "notes.txt").touch()
    entries, notes = gather([tmp_path / "sweep"])
    assert ([run.path for run in entries], notes) == (runs, [])
    entries, (note,) = gather(sorted((tmp_path / "sweep").iterdir()))
    assert [run.path for run in entries] == runs
    assert all(str(tmp_path / "sweep" / name) in note for name in (".first-stages", "comparison", "c", "notes.txt"))
    monkeypatch.chdir(tmp_path / "sweep")
    Path("link").symlink_to("a")
    entries, notes = gather([Path("a"), "./a/", runs[0], "link"])
    assert ([run.path for run in entries], notes) == ([Path("a")], []), "named four times, counted once"
    assert [str(line.value(AVERAGE)) for line in compare(["a", "b"]).lines] == ["50.00"]


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"name": 3}', None]
    + [
        dataclasses.replace(entry().report, **changes).to_json()
        for changes in (
            {"config": {}},
            {"config": {"experiment": {"method": "podnet"}, "resolved": {}}},
            {"num_seen": []},
            {"num_seen": [4, 7, 11]},
        )
    ],
)
def test_damaged_report_is_named(tmp_path, content):
    path = store(tmp_path / "a") / "report.json"
    if content is None:
        os.truncate(path, 2**31)  # without blocks on the disk
    else:
        path.write_text(content)
    for named_path in (path.parent, path):
        with pytest.raises(ModelError, match=f"{named_path}"):
            compare([named_path])


def test_nothing_to_compare_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="ccfa compare"):
        compare([])
    for name in ("nothing", "empty"):
        with pytest.raises(ModelError, match=name):
            compare([tmp_path / name])


@pytest.mark.parametrize(
    ("paths", "folder"),
    [
        (["runs/x/a", "runs/y/b"], "runs"),
        (["a", "b"], ""),
        (["/x/a", "/x/b"], "/x"),
        (["a", Path("b").resolve()], Path.cwd()),
    ],
)
def test_page_goes_beside_the_runs(paths, folder):
    assert common_folder([entry(path) for path in paths]) == Path(folder) / "comparison"
