"""Which runs are of one experiment, their means and gains, what is refused, and one table in five formats."""

import csv
import dataclasses
import io
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest

from ccfa.augmentation import CCFA, MIXES
from ccfa.data import parse_scenario
from ccfa.errors import ModelError, UsageError
from ccfa.experiments.experiment import describe, experiment_method
from ccfa.methods import METHODS
from ccfa.options import schema
from ccfa.reporting.comparison import (
    AVERAGE,
    common_folder,
    compare,
    compare_entries,
    comparison_page,
    definitions,
    gather,
    print_comparison,
    runs_table,
    scenario_name,
    summary_table,
    without_ccfa,
    write_comparison,
)
from ccfa.reporting.tables import Table, Value, to_csv, to_latex, to_markdown
from ccfa.reporting.terminal import Output
from ccfa.settings import Experiment
from commands import contents
from comparisons import ALONE, PLUGGED, entry, podnets, store

FILES = {"index.html", "table.csv", "table.md", "table.tex", "runs.csv"}
NUMBER = r"[+-]?\d+(?:\.\d+)?"
HOSTILE = r"""<script>alert(1)</script> | & % $ # _ { } ~ ^ \ " ` * [x](y)"""


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
    runs = [entry("a", 0.5), entry("b", 0.7, order=list(range(10))[::-1]), entry("c", 0.6, seed=1, batch_seed=5)]
    (line,) = compare_entries(runs).lines
    assert str(line.value(AVERAGE)) == text([0.5, 0.7, 0.6])


def test_gain_is_of_pairs():
    plugged = named(compare_entries(podnets()))["podnet + CCFA"]
    differences = [PLUGGED[seed] - ALONE[seed] for seed in ALONE]
    assert (str(plugged.gain), len(plugged.gains)) == (text(differences, "+"), 3)
    comparison = compare_entries([run for run in podnets() if run.path.name not in ("c0", "p1")])
    assert named(comparison)["podnet + CCFA"].gains == pytest.approx([100 * (PLUGGED[2] - ALONE[2])])
    (note,) = comparison.notes
    assert "runs/p0, runs/c1" in note, "runs without a partner are named"


@pytest.mark.parametrize("change", [{"batch_seed": 7}, {"options": {"epochs": "5"}}])
def test_no_gain_without_the_same_experiment(change):
    lines = compare_entries([entry("a", 0.5), entry("b", 0.6, ccfa=True, **change)]).lines
    assert [line.gain for line in lines] == [None, None]


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


def test_options_that_differ_between_methods_are_named(tmp_path):
    runs = [
        entry("a", 0.5),
        entry("b", 0.6, method="afc", options={"epochs": "6"}),
        entry("c", 0.6, method="icarl", options={"epochs": "20"}),
        entry("d", 0.6, method="ranpac"),
    ]
    comparison = compare_entries(runs)
    assert list(named(comparison)) == ["podnet", "afc, epochs=6", "icarl", "ranpac"], "20 epochs are podnet's default"
    (note,) = comparison.settings
    assert note.startswith("between methods epochs differs: 20 (podnet, icarl, ranpac), 6 (afc)")
    assert note in printed(comparison)
    write_comparison(comparison, tmp_path / "page")
    for name in ("table.csv", "table.md", "table.tex", "index.html"):
        assert re.search(r"afc, epochs=6\W", (tmp_path / "page" / name).read_text())
    for name in ("table.md", "table.tex", "index.html"):
        assert "methods epochs differs: 20" in (tmp_path / "page" / name).read_text()


def test_options_of_all_runs_are_said_once():
    runs = [
        entry("a", options={"epochs": "5", "balanced_epochs": "2"}),
        entry("b", method="icarl", options={"epochs": "5"}),
    ]
    comparison = compare_entries(runs)
    assert list(named(comparison)) == ["podnet", "icarl"]
    assert comparison.settings == ("set for all runs that have the option: epochs=5, balanced_epochs=2.",)
    plugged = [entry("a", ccfa=True, options={"ccfa.count": "3"}), entry("b", method="icarl", ccfa=True)]
    assert list(named(compare_entries(plugged))) == ["podnet + CCFA, ccfa.count=3", "icarl + CCFA"]
    fewer = [entry("a", memory=5), entry("b", method="icarl")]
    assert compare_entries(fewer).settings == ("between methods memory differs: 5 (podnet), 20 (icarl).",)


def test_common_options_are_no_name_of_a_plug_in():
    given = {"epochs": "5", "lr": "1", "balanced_epochs": "2", "lambda_flat": "3"}
    runs = [entry("a", method="mine", options=given | {"weight": "2"}), entry("b", options=given)]
    comparison = compare_entries(runs)
    assert list(named(comparison)) == ["mine", "podnet"]
    (note,) = comparison.settings
    assert [note.count(f"{name}=") for name in ("epochs", "lr", "lambda_flat", "weight")] == [2, 1, 1, 1]
    longer = compare_entries([entry("a", method="mine", options=given), entry("b", options=given | {"epochs": "6"})])
    assert list(named(longer)) == ["mine, epochs=5", "podnet, epochs=6"]


def test_a_default_is_not_set_for_all():
    given = [entry("a", options={"epochs": "20"}), entry("b", method="aanet")]
    (note,) = compare_entries(given).settings
    assert "20 (podnet), 12 (aanet)" in note


def test_values_are_shown_as_they_are_typed():
    given = [entry("a", options={"policy": '"trivial"'}), entry("b", method="icarl")]
    assert compare_entries(given).settings[0].endswith("none (icarl).")
    assert compare_entries([entry("a", method="fetril", options={"translate": "false"})]).settings == (
        "set for all runs that have the option: translate=false.",
    )


RECIPE = {"epochs": "7", "batch_size": "8", "lr": "0.375", "weight_decay": "0.25", "cutout": "3"}


@pytest.mark.parametrize("name", METHODS)
def test_plug_ins_are_named_with_their_defaults(name):
    warmed = {"warmup_first": "true"} if name == "der" else {}
    mine = entry("a", method="mine")
    mine.report.config["resolved"]["method"] = described(name, backbone="resnet18-ucir", **RECIPE, **warmed)
    others = [entry("b", method="replay", options=dict.fromkeys(RECIPE, "5")), entry("c")]
    notes = compare_entries([mine, *others]).settings
    for option, value in RECIPE.items():
        (note,) = [note for note in notes if f" {option} " in note]
        assert all(part in note for part in (f"{value} (mine)", "(replay)", "(podnet)"))
    assert any("resnet18-ucir (mine), small (replay, podnet)" in note for note in notes)


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
    if name == "ccfa":
        assert without_ccfa({"method": described(method, **chosen)}) == {"method": described(method)}


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
    assert comparison.title == "cifar100 · B50-inc10"
    headings, rows = summary_table(comparison)
    shown = [row[headings.index("published")] for row in rows]
    assert shown == ["64.62", "", "67.24", "", "63.34", "65.34"]
    assert compare_entries([entry("a")]).cited == {}
    paper["sizes"] = (50, *[2] * 25)
    typed, fewer = (compare_entries([entry("a", options={"memory": memory}, **paper)]) for memory in ("20", "5"))
    assert [typed.lines[0].published, fewer.lines[0].published] == [60.5, None]
    assert (typed.cited, fewer.cited) == ({"Mnemonics": 60.96}, {})


@pytest.mark.parametrize("sizes", [(50, 10, 10), (10, 10, 10), (5, 2, 2, 1), (5, 1, 2), (10,), (3, 3, 1)])
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
    for paths in (["a", "b"], "a", Path("a")):
        assert [str(line.value(AVERAGE)) for line in compare(paths).lines] == ["50.00"]


@pytest.mark.parametrize(
    "content",
    ["", None]
    + [
        dataclasses.replace(entry().report, **changes).to_json()
        for changes in ({"config": {}}, {"num_seen": []}, {"num_seen": [4, 7, 11]})
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


@pytest.mark.parametrize(
    ("paths", "folder"),
    [
        (["runs/x/a", "runs/y/b"], "runs"),
        (["a", "b"], ""),
        (["a", Path("b").resolve()], Path.cwd()),
        (["results/x/a.json", "b"], "runs"),
    ],
)
def test_page_goes_beside_the_runs(paths, folder):
    assert common_folder([entry(path) for path in paths]) == Path(folder) / "comparison"


def printed(comparison, width=400):
    console = Output(file=io.StringIO(), width=width)
    print_comparison(comparison, console)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "runs",
    [
        [*podnets(), entry("runs/u", 0.4, method="ucir")],
        podnets(data="cifar100", sizes=(50, 10, 10, 10, 10, 10)),
        [entry("runs/a", math.nan, sizes=(10,))],
    ],
)
def test_every_format_has_the_same_numbers(runs):
    comparison = compare_entries(runs)
    table = summary_table(comparison)
    rows = {
        "csv": to_csv(table).partition("\n")[2],
        "markdown": to_markdown(table, comparison.title, "note").rpartition("---: |")[2],
        "latex": to_latex(table, comparison.title, "note").partition(r"\midrule")[2],
        "html": re.sub("<[^>]*>", " ", re.search("(?s)<tbody>.*?</tbody>", comparison_page(comparison)).group()),
        "terminal": "\n".join(printed(comparison).splitlines()[3 : 3 + len(table.rows)]),
    }
    expected = re.findall(NUMBER, " ".join(str(cell) for row in table.rows for cell in row))
    for form, text in rows.items():
        assert re.findall(NUMBER, text) == expected, form
        assert all(row[0] in text for row in table.rows), form
    columns = set(table.headings) - {"method", "runs", "pairs"}
    assert {line.split(":")[0].strip() for line in definitions(table)} == columns | {"±"}


def test_single_runs_remain_visible():
    headings, rows = runs_table(compare_entries([*podnets(), entry("runs/x", seed=9, finished=False)]))
    shown = {row[0]: dict(zip(headings, row, strict=True)) for row in rows}
    assert [shown[f"runs/p{seed}"]["average"] for seed in ALONE] == [f"{100 * value:.2f}" for value in ALONE.values()]
    assert (shown["runs/x"]["seed"], shown["runs/x"]["stages"]) == (9, "2 of 3")


def test_costs_stand_beside_the_accuracy():
    runs = [
        *(entry(f"runs/{seed}", seed=seed, seconds=60.0 + 60 * seed, sizes_mb=(2.0, 0.5, 6.0)) for seed in (0, 1)),
        entry("runs/earlier", method="ucir"),
        entry("runs/c", method="ranpac", sizes_mb=(3.0, 32.0, 0.0)),
    ]
    comparison = compare_entries(runs)
    headings, rows = summary_table(comparison)
    assert list(headings[-4:]) == ["parameters MB", "remembered MB", "exemplars MB", "minutes"]
    assert [[str(cell) for cell in row[-4:]] for row in rows] == [
        ["2.000", "0.500", "6.000", "1.50 ± 0.71"],
        ["", "", "", "0.17"],
        ["3.000", "32.000", "0.000", "0.17"],
    ]
    (figure,) = re.findall(r"(?s)<h2>Accuracy and memory.*?</figure>", comparison_page(comparison))
    places = dict(re.findall(r'cx="([\d.]+)".*?<title>(\w+)', figure))
    assert list(places.values()) == ["podnet", "ranpac"]
    assert re.search(r"<h3>2 of 3 .*no sizes stored: ucir\.", figure)
    assert re.findall(r"<t[dh][^>]*>([^<]+)</t[dh]>", figure.split("<tbody>")[1])[:3] == ["podnet", "8.500", "50.00"]
    assert "Accuracy and memory" not in comparison_page(compare_entries(runs[2:3]))
    first = dict(zip(runs_table(comparison).headings, runs_table(comparison).rows[0], strict=True))
    assert [first[name] for name in headings[-4:]] == ["2.000", "0.500", "6.000", "1.00"]


def test_minutes_of_shared_devices_are_divided():
    runs = [
        entry("runs/a", seconds=60.0, environment={"at_once": 8}),
        entry("runs/b", seconds=120.0, seed=1, environment={"at_once": 8}),
        entry("runs/c", seconds=60.0, method="ucir"),
    ]
    comparison = compare_entries(runs)
    table = summary_table(comparison)
    assert table.headings[-1] == "GPU minutes"
    assert [str(row[-1]) for row in table.rows] == ["0.19 ± 0.09", "1.00"]
    assert "minutes" not in table.headings
    assert any("8 (2 runs), 1 (1 run)" in note for note in comparison.notes)
    assert summary_table(compare_entries(runs[:2])).headings[-1] == "minutes"


def test_csv_keeps_mean_and_spread_apart():
    rows = [["x, y", Value(1.0, 0.5), Value(2.0, math.nan)], ["z", "", Value(-3.0, math.nan)]]
    text = to_csv(Table(["method", "a", "b"], rows))
    assert text == 'method,a,a spread,b\r\n"x, y",1.00,0.50,2.00\r\nz,,,-3.00\r\n'


def test_hostile_names_mean_themselves():
    comparison = compare_entries([entry("=2+2", method=HOSTILE, data=HOSTILE + "\n\\input{x}")])
    table = summary_table(comparison)
    for one, name in ((table, HOSTILE), (runs_table(comparison), "'=2+2")):  # no formula
        _, row = csv.reader(io.StringIO(to_csv(one)))
        assert row[0] == name
    for line in (line for line in to_markdown(table, comparison.title, "note").splitlines() if line.startswith("|")):
        assert len(re.findall(r"(?<!\\)\|", line)) == len(table.headings) + 1
        assert not re.search(r"(?<!\\)[<`*]", line.replace("---", ""))
    latex = to_latex(table, comparison.title, "note").splitlines()
    assert all(line.startswith("%") for line in latex[:2]), "a line break does not end the comment"
    (row,) = (line for line in latex if line.startswith(r"\textless{}script"))
    assert len(re.findall(r"(?<!\\)&", row)) == len(table.headings) - 1
    assert not re.search(r"(?<!\\)[%#_]", row)
    assert "<script>alert" not in comparison_page(comparison)


@pytest.mark.parametrize("width", [40, 120])
def test_no_number_is_cut(width):
    comparison = compare_entries([*podnets(), entry("runs/x", 0.25, options={"epochs": "5", "a_long_option": "1.5"})])
    text = printed(comparison, width)
    table = text[: text.index("± :")]
    assert max(map(len, text.splitlines())) <= width
    for name, *cells in summary_table(comparison).rows:
        assert all(str(cell) in table for cell in cells)
        assert all(part in re.sub(r"\s+", "", table) for part in re.findall(r"\w+", name))


@pytest.mark.parametrize(
    ("runs", "titles"),
    [
        (podnets(), ["All methods"]),
        ([entry(f"runs/{at}", method=f"method-{at}") for at in range(6)], [f"method-{at}" for at in range(6)]),
        ([entry("runs/a", finished=False)], []),
    ],
)
def test_figures_have_their_numbers(runs, titles):
    comparison = compare_entries(runs)
    text = comparison_page(comparison).replace("\u00a0", " ")
    labels = re.findall(r'<svg[^>]*aria-label="([^"]*)"', text)
    assert [label.split(" over ")[0] for label in labels if " points: " in label] == titles
    assert text.count("<figure") == text.count('<details class="data">') == len(labels)
    assert all(str(value) in text for line in comparison.lines for value in line.curve)
    assert all(str(run.path) in text for run in comparison.entries)
    assert set(re.findall(r'(?:src|href)="([^":]*)"', text)) == FILES - {"index.html"}


def test_figures_of_many_methods_share_a_scale():
    runs = [entry(f"runs/{at}", 0.2 + at / 10, method=f"method-{at}") for at in range(6)]
    text = comparison_page(compare_entries(runs))
    charts = re.findall(r"(?s)<svg.*?</svg>", text.partition("Accuracy and memory")[0])
    scales = {tuple(re.findall(r'text-anchor="end">([^<]+)<', chart)) for chart in charts}
    assert len(charts) == 6
    assert len(scales) == 1


def test_command_prints_and_writes_beside_the_runs(call, tmp_path):
    runs = tmp_path / "runs"
    for seed, value in ALONE.items():
        store(runs / f"p{seed}", value, seed=seed)
        store(runs / f"c{seed}", PLUGGED[seed], seed=seed, ccfa=True)
    for _ in range(2):  # the second time its own page is among what the glob catches
        code, out, err = call("compare", *sorted(runs.iterdir()))
        assert (code, err) == (0, "")
        assert all(text in out for text in ("60.39 ± 1.83", "+1.52 ± 1.32", str(runs / "comparison" / "index.html")))
    assert {path.name for path in (runs / "comparison").iterdir()} == FILES
    assert call("compare", runs / "p0", "--out", "here")[0] == 0
    assert {path.name for path in (tmp_path / "here").iterdir()} == FILES


def test_page_leads_to_the_runs(tmp_path):
    runs = [store(tmp_path / "runs" / name, seed=seed) for seed, name in enumerate(["a b", "c#1"])]
    (runs[1] / "report.html").touch()
    page = write_comparison(compare(runs), tmp_path / "page").read_text()
    assert re.findall(r'href="([^"]*report.html)"', page) == ["../runs/c%231/report.html"]
    assert str(runs[0]) in page


def test_replaced_page_is_told_and_no_page_is_empty(call, tmp_path):
    first, unfinished = store(tmp_path / "a"), store(tmp_path / "b", seed=1, finished=False)
    assert "(replaced, " not in call("compare", first)[1]
    assert "(replaced, " in call("compare", first)[1]
    before = contents(tmp_path)
    code, out, err = call("compare", unfinished)
    assert (code, contents(tmp_path)) == (ModelError.exit_code, before)
    assert str(unfinished) in out
    assert "ccfa resume" in err


@pytest.mark.parametrize(("place", "expected"), [("file/page", 5), ("a", 2)])
def test_table_is_printed_if_it_cannot_be_written(call, tmp_path, place, expected):
    run = store(tmp_path / "a")
    (tmp_path / "file").write_text("mine")
    before = contents(tmp_path)
    code, out, err = call("compare", run, "--out", place)
    assert code == expected
    assert "50.00" in out
    assert place in err
    assert contents(tmp_path) == before, "a run directory is no place"
