"""The record of a run: what is written is read back, and what is not a report is refused."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccfa.errors import ModelError
from ccfa.evaluation import SIZES, Numbers, Report, rule_name

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
    parameters_mb=1.853,
    remembered_mb=0.0,
    exemplars_mb=6.144,
)


def altered(**changes):
    return json.dumps(json.loads(REPORT.to_json()) | changes)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)), st.floats(0, 1e9))
def test_every_finite_float_survives(overall, seconds):
    rules = {**REPORT.rules, "logits": dataclasses.replace(NUMBERS, overall=overall)}
    report = dataclasses.replace(REPORT, rules=rules, seconds=seconds)
    text = report.to_json()
    assert Report.from_json(text) == report
    assert json.loads(text) == dataclasses.asdict(report)
    assert len(text.splitlines()) == len(dataclasses.fields(Report)) + 2


def test_undefined_metrics_are_null():
    rules = {"logits": Numbers([0.5], {"forgetting_lee2019": math.nan, "last_accuracy": 0.5})}
    text = dataclasses.replace(REPORT, rules=rules).to_json()
    assert json.loads(text)["rules"]["logits"]["metrics"] == {"forgetting_lee2019": None, "last_accuracy": 0.5}
    assert math.isnan(Report.from_json(text).metrics["forgetting_lee2019"])


def test_rules_have_the_names_of_functions():
    def by_my_own(learner, images):
        return images

    rules = [by_my_own, functools.partial(by_my_own, 1), "by_my_own", {"part": "by_my_own", "arguments": []}]
    assert {rule_name(rule) for rule in rules} == {"my_own"}


def test_unknown_fields_are_ignored():
    assert Report.from_json(altered(format=3, colour="blue")) == dataclasses.replace(REPORT, format=3)


def test_costs_of_earlier_reports_are_unknown():
    assert REPORT.costs == {
        "parameters_mb": 1.853,
        "remembered_mb": 0.0,
        "exemplars_mb": 6.144,
        "minutes": REPORT.seconds / 60,
    }
    fields = {name: value for name, value in json.loads(REPORT.to_json()).items() if name not in SIZES}
    earlier = Report.from_json(json.dumps(fields))
    assert [name for name, value in earlier.costs.items() if math.isnan(value)] == SIZES


def test_stored_reports_are_read():
    stored = sorted((Path(__file__).parents[2] / "results").rglob("*.json"))
    assert stored
    for path in stored:
        report = Report.from_json(path.read_text())
        assert Report.from_json(report.to_json()) == report, path
        assert report.finished, path


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "report"),
        (REPORT.to_json()[:-20], "report"),
        ('{"seconds": NaN}', "NaN"),
        ('{"name": "a", "own": "logits"}', "'config'"),
        (altered(seconds=10**400), "report"),
        (altered(own="magic"), "'magic'"),
        (altered(exemplars_mb="many"), "many"),
        (altered(rules={"logits": {"overall": [], "metrics": {"last_accuracy": "high"}}}), "high"),
        (altered(rules={"logits": {"overall": []}}), "'metrics'"),
    ],
)
def test_what_is_not_a_report_is_refused(text, named):
    with pytest.raises(ModelError, match=named):
        Report.from_json(text)


def test_format_1_is_still_read():
    golden = Path(__file__).parent / "golden" / "report-f908272.json"
    report = Report.from_json(golden.read_text())
    assert (report.own, list(report.rules)) == ("logits", ["logits", "nearest_mean"])
    assert report.metrics["average_incremental_accuracy"] == pytest.approx(0.66467, abs=1e-5)
    assert report.config["experiment"]["order"] == "podnet-0"
    assert Report.from_json(report.to_json()) == report
    fields = json.loads(golden.read_text())
    fields["config"]["resolved"]["method"]["predict"] = "by_nearest_mean"
    assert Report.from_json(json.dumps(fields)).metrics == report.rules["nearest_mean"].metrics
