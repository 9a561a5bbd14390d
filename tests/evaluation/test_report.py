"""The record of a run: what is written is read back, earlier formats included."""

import dataclasses
import functools
import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccfa.errors import ModelError
from ccfa.evaluation import Numbers, Report, mean_and_spread, rule_name

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden" / "report-f908272.json"
NUMBERS = Numbers(
    overall=[0.1 + 0.2, 2 / 3, 0.5],
    metrics={"average_incremental_accuracy": 0.1 + 0.2, "last_accuracy": 1e-17},
    accuracy_matrix=[[0.3, None, None], [0.7, 0.5, None], [1 / 3, 0.25, 1.0]],
)
REPORT = Report(
    name="podnet-ccfa",
    config={"method": "podnet", "seeds": [0, 1, 2], "lr": 0.1, "limit": None, "augmentation": {"count": 5}},
    num_seen=[5, 6, 7],
    own="logits",
    rules={"logits": NUMBERS, "nearest_mean": Numbers([0.7], {"last_accuracy": 0.7})},
    environment={"commit": "0123abc", "versions": {"numpy": "2.0"}, "device": "cpu"},
    seconds=12.345678901234567,
    finished=True,
)


def altered(**changes):
    return json.dumps(json.loads(REPORT.to_json()) | changes)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)), st.floats(0, 1e9))
def test_every_finite_float_survives(overall, seconds):
    rules = {**REPORT.rules, "logits": dataclasses.replace(NUMBERS, overall=overall)}
    report = dataclasses.replace(REPORT, rules=rules, seconds=seconds)
    assert Report.from_json(report.to_json()) == report


def test_the_text_has_one_line_a_field():
    text = REPORT.to_json()
    assert json.loads(text) == dataclasses.asdict(REPORT)
    assert len(text.splitlines()) == len(dataclasses.fields(Report)) + 2


def test_undefined_metrics_are_null():
    rules = {"logits": Numbers([0.5], {"forgetting_lee2019": math.nan, "last_accuracy": 0.5})}
    text = dataclasses.replace(REPORT, rules=rules).to_json()
    assert json.loads(text)["rules"]["logits"]["metrics"] == {"forgetting_lee2019": None, "last_accuracy": 0.5}
    read = Report.from_json(text)
    assert math.isnan(read.metrics["forgetting_lee2019"])
    assert read.config["limit"] is None


def test_numbers_follow_from_predictions():
    labels = [np.array([0, 1]), np.array([0, 1, 2])]
    numbers = Numbers.of([np.array([0, 0]), np.array([0, 1, 2])], labels, [2, 3])
    assert (numbers.overall, numbers.accuracy_matrix) == ([0.5, 1.0], [[0.5, None], [1.0, 1.0]])
    assert numbers.metrics["average_incremental_accuracy"] == 0.75


def test_the_own_rule_comes_first():
    report = dataclasses.replace(REPORT, own="nearest_mean")
    assert (REPORT.overall, REPORT.metrics, REPORT.accuracy_matrix) == dataclasses.astuple(NUMBERS)
    assert (report.overall, report.metrics) == ([0.7], {"last_accuracy": 0.7})


def test_rules_have_the_names_of_functions():
    def by_my_own(learner, images):
        return images

    rules = [by_my_own, functools.partial(by_my_own, 1), "by_my_own", {"part": "by_my_own", "arguments": []}]
    assert {rule_name(rule) for rule in rules} == {"my_own"}


def test_unknown_fields_are_ignored():
    assert Report.from_json(altered(format=3, colour="blue")) == dataclasses.replace(REPORT, format=3)


def test_format_1_is_still_read():
    report = Report.from_json(GOLDEN.read_text())
    assert (report.own, list(report.rules)) == ("logits", ["logits", "nearest_mean"])
    assert report.metrics["average_incremental_accuracy"] == pytest.approx(0.66467, abs=1e-5)
    assert report.config["experiment"]["order"] == "podnet-0"
    assert Report.from_json(report.to_json()) == report
    fields = json.loads(GOLDEN.read_text())
    fields["config"]["resolved"]["method"]["predict"] = "by_nearest_mean"
    assert Report.from_json(json.dumps(fields)).metrics == report.rules["nearest_mean"].metrics


@pytest.mark.parametrize("path", sorted((ROOT / "results").rglob("*.json")), ids=lambda path: path.stem)
def test_every_stored_report_is_read(path):
    stored = json.loads(path.read_text())
    report = Report.from_json(path.read_text())
    numbers = stored["rules"][stored["own"]] if "rules" in stored else stored
    assert (report.overall, report.metrics) == (numbers["overall"], numbers["metrics"])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "JSON"),
        (REPORT.to_json()[:-20], "JSON"),
        ("[1, 2]", "Report"),
        ('{"seconds": NaN}', "NaN"),
        ('{"name": "a", "own": "logits"}', "config, environment, finished"),
        (altered(finished=1), "'finished'"),
        (altered(seconds=True), "'seconds'"),
        (altered(seconds=10**400), "'seconds'"),
        (altered(num_seen=[1.5]), "'num_seen'"),
        (altered(own="magic"), "'magic'"),
        (altered(rules=[]), "'rules'"),
        (altered(rules={"logits": {"overall": None, "metrics": {}}}), "'overall'"),
        (altered(rules={"logits": {"overall": [], "metrics": {"last_accuracy": "high"}}}), "'metrics'"),
        (altered(rules={"logits": {"overall": []}}), "metrics"),
    ],
)
def test_what_is_not_a_report_is_refused(text, named):
    with pytest.raises(ModelError, match=named):
        Report.from_json(text)


@pytest.mark.parametrize("value", [object(), math.inf, math.nan, np.float32(0.5)])
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises(ModelError, match="podnet-ccfa"):
        dataclasses.replace(REPORT, config={"value": value}).to_json()


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_spread_is_the_sample_deviation(values):
    mean, spread = mean_and_spread(values)
    assert mean == pytest.approx(statistics.fmean(values))
    assert spread == pytest.approx(statistics.stdev(values), abs=1e-9)
    assert math.isnan(mean_and_spread(values[:1])[1])
    assert math.isnan(mean_and_spread([])[0])
