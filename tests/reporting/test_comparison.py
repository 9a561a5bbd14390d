"""Which runs are of one experiment, what they amount to, and what is refused."""

import dataclasses
import doctest
import math
import os
from pathlib import Path

import numpy as np
import pytest

from ccfa import errors, files
from ccfa.augmentation import CCFA, MIXES
from ccfa.data import parse_scenario
from ccfa.errors import ModelError, UsageError
from ccfa.evaluation import METRICS, Numbers, Report, metrics, report
from ccfa.experiments.building import experiment_method
from ccfa.experiments.options import describe, schema
from ccfa.methods import METHODS
from ccfa.reporting import comparison, paper_tables, values
from ccfa.reporting.comparison import AVERAGE, Entry, common_folder, compare, gather, scenario_name, without_ccfa
from ccfa.reporting.values import Value, counted, duration, percent
from ccfa.settings import Experiment
from comparisons import ALONE, PLUGGED, entry, podnets, store


def named(comparison):
    return {line.name: line for line in comparison.lines}


def text(values, sign=""):
    values = 100 * np.array(list(values))
    return f"{values.mean():{sign}.2f} ± {values.std(ddof=1):.2f}"


def test_runs_average_over_orders_and_seeds():
    lines = named(compare(podnets()))
    assert list(lines) == ["podnet", "podnet + CCFA"]
    assert str(lines["podnet"].value(AVERAGE)) == text(ALONE.values())
    assert str(lines["podnet + CCFA"].value(AVERAGE)) == text(PLUGGED.values())
    other = list(range(10))[::-1]
    runs = [entry("a", 0.5), entry("b", 0.7, order=other), entry("c", 0.6, seed=1, batch_seed=5)]
    (line,) = compare(runs).lines
    assert str(line.value(AVERAGE)) == text([0.5, 0.7, 0.6])


def test_the_curve_averages_each_stage():
    curve = named(compare(podnets()))["podnet"].curve
    values = 100 * np.array([*ALONE.values()])
    assert [value.mean for value in curve] == pytest.approx([values.mean() + 10, values.mean(), values.mean() - 10])
    assert [value.spread for value in curve] == pytest.approx([values.std(ddof=1)] * 3)


def test_the_gain_is_of_pairs():
    plugged = named(compare(podnets()))["podnet + CCFA"]
    differences = [PLUGGED[seed] - ALONE[seed] for seed in ALONE]
    assert (str(plugged.gain), len(plugged.gains)) == (text(differences, "+"), 3)
    assert str(compare([entry("a", 0.7), entry("b", 0.6, ccfa=True)]).lines[1].gain) == "-10.00"


def test_runs_without_a_partner_are_named():
    comparison = compare([run for run in podnets() if run.path.name not in ("c0", "p1")])
    gains = named(comparison)["podnet + CCFA"].gains
    assert gains == pytest.approx([100 * (PLUGGED[2] - ALONE[2])])
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
    assert [line.gain for line in compare(runs).lines] == [None] * len(runs)


def test_names_say_what_differs():
    runs = [
        entry("a", 0.5),
        entry("b", 0.6, options={"epochs": "5"}),
        entry("c", 0.7, options={"epochs": "5"}, ccfa=True),
        entry("d", 0.7, options={"epochs": "5", "ccfa.count": "3"}, ccfa=True),
    ]
    lines = named(compare(runs))
    assert list(lines) == [
        "podnet",
        "podnet, epochs=5",
        "podnet + CCFA, epochs=5",
        "podnet + CCFA, epochs=5, ccfa.count=3",
    ]
    assert [line.gain is not None for line in lines.values()] == [False, False, True, True], "both against epochs=5"
    shared = [entry("a", seed=seed, mix="cutmix", ccfa=True, options={"epochs": "5"}) for seed in (0, 1)]
    assert list(named(compare(shared))) == ["podnet + cutmix + CCFA"]


def test_resolved_differences_are_named():
    first, second = entry("a", memory=None), entry("b", seed=1, memory=None)
    second.report.config["resolved"]["method"]["phases"][0]["lr"] = 0.2
    names = [line.name for line in compare([first, second]).lines]
    assert names == ["podnet, method.phases.0.lr=0.1", "podnet, method.phases.0.lr=0.2"]


@pytest.mark.parametrize("asked", [{"options": {"epochs": "20"}}, {"skip_bad": False}])
def test_defaults_typed_out_change_nothing(asked):
    assert len(compare([entry("a", seed=0), entry("b", seed=1, **asked)]).lines) == 1


@pytest.mark.parametrize("asked", [{"image_size": 32}, {"a_field_of_tomorrow": 1}, {"skip_bad": True}])
def test_other_fields_part_experiments(asked):
    assert len(compare([entry("a", seed=0), entry("b", seed=1, **asked)]).lines) == 2


def described(method, ccfa=False, mix=None, **options):
    return describe(experiment_method(Experiment(method, ccfa=ccfa, mix=mix, data="cifar100", options=options)))


TEXTS = {int: ("3", "5"), float: ("0.375", "0.625"), bool: ("true", "false")}
# Options without effect unless another one is set.
NEEDED = {"margin": {"nca": "paper"}, "blend_lr": {"learn_blend": "true"}, "balanced_lr": {"balanced_epochs": "2"}}


@pytest.mark.parametrize("method", METHODS)
def test_every_option_shows_in_the_resolved_method(method):
    """Runs are told apart by the resolved method alone, so nothing that is asked for may be hidden there."""
    known = schema(METHODS[method])
    for name, texts in ((name, TEXTS[kind]) for name, kind in known.items() if kind in TEXTS):
        needed = {option: text for option, text in NEEDED.get(name, {}).items() if option in known}
        first, second = (described(method, **needed, **{name: text}) for text in texts)
        assert first != second, f"{method}.{name} is hidden"


@pytest.mark.parametrize(("prefix", "kind", "chosen"), [("ccfa", CCFA, {"ccfa": True}), ("mix", None, {})])
def test_every_option_of_plug_ins_shows(prefix, kind, chosen):
    kind, chosen = (kind, chosen) if kind else (MIXES["mixup"], {"mix": "mixup"})
    for name, sort in schema(kind).items():
        changed = [described("podnet", **chosen, **{f"{prefix}.{name}": text}) for text in TEXTS.get(sort, ())]
        assert not changed or changed[0] != changed[1], f"{prefix}.{name} is hidden"


def test_a_real_ccfa_unplugs():
    contents = [{"method": described("podnet", ccfa=plugged)} for plugged in (True, False)]
    assert contents[0] != contents[1]
    assert without_ccfa(contents[0]) == contents[1]


@pytest.mark.parametrize(
    ("change", "name"),
    [({"data": "cifar100"}, "data"), ({"sizes": (5, 5)}, "stage sizes"), ({"validation": 0.1}, "held")],
)
def test_other_data_or_stages_are_refused(change, name):
    runs = [*(entry(f"runs/{seed}", seed=seed) for seed in range(50)), entry("runs/x", **change)]
    with pytest.raises(UsageError, match=name) as refused:
        compare(runs)
    assert "runs/x" in str(refused.value)
    assert len(str(refused.value)) < 700


def test_the_same_run_twice_counts_once():
    comparison = compare([entry("a", 0.5), entry("b", 0.6), entry("c", 0.7, seed=1)])
    (line,) = comparison.lines
    assert [str(run.path) for run in line.entries] == ["a", "c"]
    (note,) = comparison.notes
    assert "b repeats a" in note


def test_unfinished_runs_are_not_averaged():
    comparison = compare([entry("a", 0.9, finished=False), entry("b", 0.5)])
    assert str(comparison.lines[0].value(AVERAGE)) == "50.00"
    assert [run.path.name for run in comparison.unfinished] == ["a"]
    assert len(comparison.notes) == 1
    assert compare([entry("a", finished=False)]).lines == ()


def test_other_devices_are_averaged_and_named():
    gpu = {"acceleration": {"precision": "bf16"}, "device": "a card", "ccfa": "1", "commit": "abc"}
    comparison = compare([entry("a"), entry("b", seed=1), entry("c", seed=2, environment=gpu)])
    assert len(comparison.lines[0].entries) == 3
    assert {note.split()[0] for note in comparison.notes} == {"precision", "device", "commit"}


def test_a_method_has_its_own_rule():
    comparison = compare([entry("a", 0.7, method="icarl"), entry("b", 0.5)])
    line = named(comparison)["icarl"]
    assert str(line.value(AVERAGE)) == "70.00"
    assert [value.mean for value in line.curve] == pytest.approx([80, 70, 60])
    (note,) = comparison.notes
    assert "icarl" in note
    assert "nearest mean" in note


def test_the_paper_s_values_stand_beside_ours():
    paper = {"data": "cifar100", "sizes": (50, 10, 10, 10, 10, 10)}
    methods = [{}, {"ccfa": True}, {"method": "finetune"}, {"options": {"epochs": "5"}}]
    comparison = compare([entry(f"{number}", **one, **paper) for number, one in enumerate(methods)])
    assert [line.published for line in comparison.lines] == [64.62, None, 67.24, None], "the paper has no 5 epochs"
    assert comparison.cited == {"Mnemonics": 63.34, "TPCIL": 65.34, "GeoDL": 65.34}
    assert comparison.title == "cifar100 · B50-inc10"
    assert compare([entry("a")]).cited == {}


def test_the_paper_s_values_are_by_memory():
    paper = {"data": "cifar100", "sizes": (50, *[1] * 50)}
    typed, fewer = (compare([entry("a", options={"memory": memory}, **paper)]) for memory in ("20", "5"))
    assert [typed.lines[0].published, fewer.lines[0].published] == [57.84, 35.59]
    assert (typed.cited, fewer.cited) == ({"GeoDL": 52.28}, {})


@pytest.mark.parametrize(
    "sizes", [(50, 10, 10, 10, 10, 10), (10, 10, 10), (5, 2, 2, 1), (5, 1, 2), (7, 3), (10,), (3, 3, 1), (1, 3, 3)]
)
def test_a_scenario_s_name_means_its_sizes(sizes):
    stages = parse_scenario(scenario_name(sizes), sum(sizes))
    assert tuple(stage.num_new for stage in stages) == sizes


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {}},
        {"config": {"experiment": 3, "resolved": []}},
        {"config": {**entry().report.config, "resolved": {**entry().report.config["resolved"], "stage_sizes": []}}},
        {"config": {**entry().report.config, "resolved": {**entry().report.config["resolved"], "stage_sizes": ["a"]}}},
        {"num_seen": [4, 7]},
        {"num_seen": [4, 7, 11]},
        {"rules": {"logits": Numbers([0.1], dict.fromkeys(METRICS, 0.5))}},
        {"rules": {"logits": Numbers([0.1] * 3, {})}},
    ],
)
def test_a_damaged_report_is_named(tmp_path, changes):
    damaged = dataclasses.replace(entry().report, **changes)
    (tmp_path / "x.json").write_text(damaged.to_json())
    with pytest.raises(ModelError, match=r"x\.json"):
        gather([tmp_path / "x.json"])


def test_metrics_that_are_not_shown_may_lack():
    older = entry("a", 0.5)
    del older.report.metrics["forgetting_inclearn"]
    again = Entry(older.path, Report.from_json(older.report.to_json()))
    assert len(compare([again, entry("b", 0.7, seed=1)]).lines[0].entries) == 2


def test_what_is_not_a_run_is_named(tmp_path):
    runs = [store(tmp_path / "a"), store(tmp_path / "b")]
    for name in (".first-stages", "comparison", "c"):
        (tmp_path / name).mkdir()
    (tmp_path / "c" / "config.json").write_text("{}")
    entries, (note,) = gather(sorted(tmp_path.iterdir()))
    assert [found.path for found in entries] == runs
    assert all(str(tmp_path / name) in note for name in (".first-stages", "comparison", "c"))


def test_a_folder_stands_for_its_runs(tmp_path):
    runs = [store(tmp_path / "sweep" / name) for name in ("a", "b")]
    store(tmp_path / "sweep" / ".first-stages")
    entries, notes = gather([tmp_path / "sweep"])
    assert ([found.path for found in entries], notes) == (runs, [])


def test_a_path_named_twice_counts_once(tmp_path, monkeypatch):
    store(tmp_path / "a")
    (tmp_path / "link").symlink_to("a")
    monkeypatch.chdir(tmp_path)
    entries, notes = gather([Path("a"), Path("./a/"), tmp_path / "a", Path("link")])
    assert ([found.path for found in entries], len(notes)) == ([Path("a")], 3)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"name": 3}'])
def test_an_unreadable_report_is_named(tmp_path, content):
    path = store(tmp_path / "a")
    (path / "report.json").write_text(content)
    for named_path in (path, path / "report.json"):
        with pytest.raises(ModelError, match=r"a/report\.json"):
            gather([named_path])


def test_a_huge_report_is_not_read(tmp_path):
    path = tmp_path / "x.json"
    path.touch()
    os.truncate(path, 2**31)  # without blocks on the disk
    with pytest.raises(ModelError, match=r"x\.json"):
        gather([path])


def test_nothing_to_compare_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="ccfa compare"):
        gather([])
    for name in ("nothing", "empty"):
        with pytest.raises(ModelError, match=name):
            gather([tmp_path / name])


@pytest.mark.parametrize(
    ("paths", "folder"),
    [
        (["runs/a"], "runs/comparison"),
        (["runs/x/a", "runs/y/b"], "runs/comparison"),
        (["a", "b"], "comparison"),
        (["/x/a", "/x/b"], "/x/comparison"),
    ],
)
def test_the_page_goes_beside_the_runs(paths, folder, tmp_path, monkeypatch):
    assert common_folder([entry(path) for path in paths]) == Path(folder)
    monkeypatch.chdir(tmp_path)
    assert common_folder([entry("runs/a"), entry(tmp_path / "runs" / "b")]) == tmp_path / "runs" / "comparison"


@pytest.mark.parametrize(
    ("values", "shown"),
    [([1.0], "1.00"), ([1.0, 3.0], "2.00 ± 1.41"), ([], "-"), ([math.nan] * 2, "-"), ([100.0] * 2, "100.00 ± 0.00")],
)
def test_values_have_one_spelling(values, shown):
    assert str(Value.of(values)) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0.12345, "12.35"), (1.0, "100.00"), (-0.5, "-50.00"), (math.nan, "-"), (None, "-")]
)
def test_percentages_have_one_spelling(value, shown):
    assert percent(value) == shown


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "0.0 s"), (59.4, "59.4 s"), (59.6, "1 min 00 s"), (3599, "59 min 59 s"), (3661, "1 h 01 min")],
)
def test_durations_and_counts_are_words(seconds, said):
    assert duration(seconds) == said
    assert duration(math.nan) == "unknown time"
    assert (counted(1, "image"), counted(3, "class", "es")) == ("1 image", "3 classes")


@pytest.mark.parametrize("module", [errors, metrics, report, files, comparison, values, paper_tables])
def test_examples_are_true(module):
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed
