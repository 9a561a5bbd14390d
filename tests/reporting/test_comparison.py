import dataclasses
import math
import re

import numpy as np
import pytest

from ccfa.data import parse_scenario
from ccfa.errors import ModelError, UsageError
from ccfa.evaluation import Report
from ccfa.reporting.comparison import compare, scenario_name
from ccfa.reporting.sameness import Entry
from ccfa.reporting.values import Value
from comparisons import ALONE, PLUGGED, entry, podnets

AVERAGE = "average_incremental_accuracy"


def named(comparison):
    return {line.name: line for line in comparison.lines}


def text(values, sign=""):
    values = 100 * np.array(list(values))
    return f"{values.mean():{sign}.2f} ± {values.std(ddof=1):.2f}"


def test_runs_of_one_experiment_are_averaged_over_orders_and_seeds():
    lines = named(compare(podnets()))
    assert list(lines) == ["podnet", "podnet + CCFA"]
    assert str(lines["podnet"].value(AVERAGE)) == text(ALONE.values())
    assert str(lines["podnet + CCFA"].value(AVERAGE)) == text(PLUGGED.values())
    assert [len(line.entries) for line in lines.values()] == [3, 3]


def test_reports_without_a_metric_that_is_not_shown_compare():
    older = entry("a", 0.5)
    del older.report.metrics["forgetting_inclearn"]
    again = Entry(older.path, Report.from_json(older.report.to_json()))
    (line,) = compare([again, entry("b", 0.7, seed=1)]).lines
    assert str(line.value(AVERAGE)) == text([0.5, 0.7])


def test_class_orders_are_averaged_too():
    other = list(range(10))[::-1]
    runs = [entry("a", 0.5), entry("b", 0.7, order=other), entry("c", 0.6, seed=1, batch_seed=5)]
    (line,) = compare(runs).lines
    assert str(line.value(AVERAGE)) == text([0.5, 0.7, 0.6])


def test_the_gain_is_of_pairs():
    plugged = named(compare(podnets()))["podnet + CCFA"]
    differences = [PLUGGED[seed] - ALONE[seed] for seed in ALONE]
    assert (str(plugged.gain.value), plugged.gain.num_pairs) == (text(differences, "+"), 3)
    independent = np.std([*PLUGGED.values()], ddof=1)
    assert plugged.gain.value.spread != pytest.approx(100 * independent), "paired, not the spread of one side"


def test_a_loss_has_its_sign():
    runs = [entry("a", 0.7), entry("b", 0.6, ccfa=True)]
    assert str(compare(runs).lines[1].gain.value) == "-10.00"


def test_runs_without_a_partner_are_named_and_not_in_the_gain():
    runs = [run for run in podnets() if run.path.name not in ("c0", "p1")]
    comparison = compare(runs)
    gain = named(comparison)["podnet + CCFA"].gain
    assert (gain.num_pairs, str(gain.value)) == (1, f"{100 * (PLUGGED[2] - ALONE[2]):+.2f}")
    (note,) = comparison.notes
    assert "runs/p0, runs/c1" in note
    assert "not in the gain" in note


def test_the_seed_of_batches_parts_pairs_too():
    runs = [entry("a", 0.5), entry("b", 0.6, ccfa=True, batch_seed=7)]
    assert compare(runs).lines[1].gain is None


def test_no_gain_without_the_other_half():
    assert compare([entry("a", 0.5, ccfa=True)]).lines[0].gain is None
    runs = [entry("a", 0.5, options={"epochs": "5"}), entry("b", 0.5, ccfa=True)]
    assert [line.gain for line in compare(runs).lines] == [None, None], "other epochs are another experiment"


def test_different_options_are_different_lines_with_the_difference_in_their_names():
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
    assert [len(line.entries) for line in lines.values()] == [1] * 4
    assert [line.gain is not None for line in lines.values()] == [False, False, True, True], "both against epochs=5"


def test_what_all_share_is_in_no_name():
    runs = [entry("a", seed=0, options={"epochs": "5"}), entry("b", seed=1, options={"epochs": "5"})]
    assert list(named(compare(runs))) == ["podnet"]


def test_a_default_typed_out_is_the_same_experiment():
    (line,) = compare([entry("a", seed=0), entry("b", seed=1, options={"epochs": "20"})]).lines
    assert len(line.entries) == 2


@pytest.mark.parametrize("asked", [{"image_size": 32}, {"a_field_of_tomorrow": 1}, {"skip_bad": True}])
def test_whatever_else_was_asked_for_parts_experiments(asked):
    assert len(compare([entry("a", seed=0), entry("b", seed=1, **asked)]).lines) == 2


def test_a_field_that_older_runs_lack_counts_as_its_default():
    (line,) = compare([entry("a", seed=0), entry("b", seed=1, skip_bad=False)]).lines
    assert len(line.entries) == 2


def test_where_the_same_was_asked_for_the_resolved_difference_is_named():
    first, second = compare([entry("a", memory=None), entry("b", seed=1, memory=None)]).lines[0].entries
    second.report.config["resolved"]["method"]["phases"][0]["lr"] = 0.2
    names = [line.name for line in compare([first, second]).lines]
    assert names == ["podnet, method.phases.0.lr=0.1", "podnet, method.phases.0.lr=0.2"]


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({"data": "cifar100"}, 'data +"digits" +"cifar100"'),
        ({"sizes": (5, 5)}, r"stage sizes +\[4, 3, 3\] +\[5, 5\]"),
        ({"validation": 0.1}, "held out +0.0 +0.1"),
    ],
)
def test_other_data_or_stages_are_refused_with_what_differs_and_how_to_call(change, row):
    runs = [entry("runs/a"), entry("runs/b", **change), entry("runs/c", seed=1)]
    with pytest.raises(UsageError) as refused:
        compare(runs)
    message = str(refused.value)
    assert re.search(f"  {row}", message)
    assert message.splitlines()[1].split() == ["runs/a", "runs/b"]
    assert message.splitlines()[-2:] == ["  runs/a runs/c", "  runs/b"]


def test_many_runs_of_two_kinds_make_a_short_refusal():
    runs = [entry(f"runs/{seed}", seed=seed, sizes=sizes) for sizes in [(4, 6), (5, 5)] for seed in range(50)]
    with pytest.raises(UsageError) as refused:
        compare(runs)
    assert len(str(refused.value)) < 600
    assert "(50 runs)" in str(refused.value)


def test_the_same_run_twice_counts_once():
    comparison = compare([entry("a", 0.5), entry("b", 0.6), entry("c", 0.7, seed=1)])
    (line,) = comparison.lines
    assert [str(run.path) for run in line.entries] == ["a", "c"]
    (note,) = comparison.notes
    assert note.startswith("b repeats a (same experiment, order and seeds; averages 50.00 and 60.00)")


def test_unfinished_runs_are_shown_and_not_averaged():
    comparison = compare([entry("a", 0.5), entry("b", 0.9, seed=1, finished=False)])
    (line,) = comparison.lines
    assert str(line.value(AVERAGE)) == "50.00"
    assert [run.path.name for run in comparison.unfinished] == ["b"]
    assert comparison.notes == ("b is unfinished (2 of 3 stages, last accuracy 90.00): shown, not averaged.",)


def test_a_finished_run_is_not_hidden_by_an_unfinished_one_of_the_same_seeds():
    comparison = compare([entry("a", 0.9, finished=False), entry("b", 0.5)])
    assert [run.path.name for run in comparison.lines[0].entries] == ["b"]


def test_only_unfinished_runs_make_an_empty_table():
    comparison = compare([entry("a", finished=False)])
    assert (comparison.lines, len(comparison.unfinished)) == ((), 1)


def test_other_devices_and_versions_are_averaged_and_named():
    gpu = {"acceleration": {"precision": "bf16"}, "device": "a card", "ccfa": "1", "commit": "abc"}
    comparison = compare([entry("a"), entry("b", seed=1), entry("c", seed=2, environment=gpu)])
    assert len(comparison.lines[0].entries) == 3
    assert comparison.notes[0] == "precision differs: float32 (2 runs), bf16 (1 runs)."
    assert {note.split()[0] for note in comparison.notes} == {"precision", "device", "commit"}


def test_a_method_is_judged_by_its_own_rule():
    comparison = compare([entry("a", 0.7, method="icarl"), entry("b", 0.5)])
    lines = named(comparison)
    assert str(lines["icarl"].value(AVERAGE)) == "70.00"
    assert [value.mean for value in lines["icarl"].curve] == pytest.approx([80, 70, 60])
    assert comparison.notes == (
        "icarl: judged by the nearest mean of exemplars, its own rule; everything else by logits.",
    )


def test_the_curve_is_the_mean_of_each_stage():
    curve = named(compare(podnets()))["podnet"].curve
    values = 100 * np.array([*ALONE.values()])
    assert [value.mean for value in curve] == pytest.approx([values.mean() + 10, values.mean(), values.mean() - 10])
    assert [value.spread for value in curve] == pytest.approx([values.std(ddof=1)] * 3)


def test_the_paper_s_values_stand_beside_ours():
    sizes = (50, 10, 10, 10, 10, 10)
    paper = {"data": "cifar100", "sizes": sizes}
    runs = [
        entry("a", **paper),
        entry("b", ccfa=True, **paper),
        entry("c", method="finetune", **paper),
        entry("d", options={"epochs": "5"}, **paper),
    ]
    comparison = compare(runs)
    assert [line.published for line in comparison.lines] == [64.62, None, 67.24, None], "the paper has no 5 epochs"
    assert comparison.cited == {"Mnemonics": 63.34, "TPCIL": 65.34, "GeoDL": 65.34}
    assert comparison.title == "cifar100 · B50-inc10"
    assert compare([entry("a")]).cited == {}


def test_the_paper_s_values_are_those_of_the_memory():
    paper = {"data": "cifar100", "sizes": (50, *[1] * 50)}
    typed = compare([entry("a", options={"memory": "20"}, **paper)])
    fewer = compare([entry("a", options={"memory": "5"}, **paper)])
    assert [typed.lines[0].published, fewer.lines[0].published] == [57.84, 35.59]
    assert typed.cited == {"GeoDL": 52.28}
    assert fewer.cited == {}, "the paper has none of them with 5 exemplars"


@pytest.mark.parametrize(
    "sizes", [(50, 10, 10, 10, 10, 10), (10, 10, 10), (5, 2, 2, 1), (5, 1, 2), (7, 3), (10,), (3, 3, 1), (1, 3, 3)]
)
def test_the_scenario_s_name_means_these_sizes(sizes):
    stages = parse_scenario(scenario_name(sizes), sum(sizes))
    assert tuple(stage.num_new for stage in stages) == sizes


@pytest.mark.parametrize(
    ("sizes", "name"), [((50, 10, 10, 10, 10, 10), "B50-inc10"), ((10, 10), "B0-inc10"), ((5, 1, 2), "5,1,2")]
)
def test_scenarios_have_their_usual_names(sizes, name):
    assert scenario_name(sizes) == name


def broken(**changes):
    return Entry(entry().path, dataclasses.replace(entry().report, **changes))


@pytest.mark.parametrize(
    "damaged",
    [
        broken(config={}),
        broken(config={"experiment": 3, "resolved": []}),
        broken(config={**entry().report.config, "resolved": {**entry().report.config["resolved"], "stage_sizes": []}}),
        broken(num_seen=[4, 7]),
        broken(num_seen=[4, 7, 11]),
        broken(overall=[0.1]),
        broken(metrics={}),
    ],
)
def test_a_damaged_report_is_named(damaged):
    with pytest.raises(ModelError, match="runs/a"):
        compare([damaged])


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([1.0], "1.00"),
        ([1.0, 3.0], "2.00 ± 1.41"),
        ([], "-"),
        ([math.nan, math.nan], "-"),
        ([100.0, 100.0], "100.00 ± 0.00"),
    ],
)
def test_values_as_they_are_printed(values, shown):
    assert str(Value.of(values)) == shown
