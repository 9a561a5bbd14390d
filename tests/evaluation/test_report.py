import dataclasses
import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccfa.errors import DataError, ModelError
from ccfa.evaluation.report import Report, matrix_rows, mean_and_spread, standard_error

REPORT = Report(
    name="podnet-ccfa",
    config={"method": "podnet", "seeds": [0, 1, 2], "lr": 0.1, "limit": None, "augmentation": {"count": 5}},
    num_seen=[5, 6, 7],
    overall=[0.1 + 0.2, 2 / 3, 0.5],
    accuracy_matrix=[[0.3, None, None], [0.7, 0.5, None], [1 / 3, 0.25, 1.0]],
    metrics={"average_incremental_accuracy": 0.1 + 0.2, "last_accuracy": 1e-17},
    metrics_by_nearest_mean=None,
    overall_by_nearest_mean=None,
    environment={"commit": "0123abc", "versions": {"numpy": "2.0"}, "device": "cpu"},
    seconds=12.345678901234567,
    finished=True,
)


def altered(**changes):
    return json.dumps(json.loads(REPORT.to_json()) | changes)


def test_round_trip_is_exact():
    assert Report.from_json(REPORT.to_json()) == REPORT
    both = dataclasses.replace(REPORT, metrics_by_nearest_mean={"last_accuracy": 0.7}, overall_by_nearest_mean=[0.7])
    assert Report.from_json(both.to_json()) == both


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)), st.floats(0, 1e9))
def test_every_finite_float_survives(overall, seconds):
    report = dataclasses.replace(REPORT, overall=overall, seconds=seconds)
    assert Report.from_json(report.to_json()) == report


def test_text_is_plain_json_with_one_line_per_field():
    text = REPORT.to_json()
    assert json.loads(text) == dataclasses.asdict(REPORT)
    assert len(text.splitlines()) == len(dataclasses.fields(Report)) + 2
    assert text.endswith("}\n")


def test_undefined_metrics_are_null_in_the_file_and_nan_in_memory():
    report = dataclasses.replace(
        REPORT,
        metrics={"forgetting_lee2019": math.nan, "last_accuracy": 0.5},
        metrics_by_nearest_mean={"forgetting_lee2019": float("nan")},
    )
    stored = json.loads(report.to_json())
    assert stored["metrics"] == {"forgetting_lee2019": None, "last_accuracy": 0.5}
    assert stored["metrics_by_nearest_mean"] == {"forgetting_lee2019": None}
    read = Report.from_json(report.to_json())
    assert math.isnan(read.metrics["forgetting_lee2019"])
    assert read.metrics["last_accuracy"] == 0.5
    assert math.isnan(read.metrics_by_nearest_mean["forgetting_lee2019"])
    assert read.config["limit"] is None


def test_whole_seconds_are_read_as_float():
    read = Report.from_json(altered(seconds=3))
    assert read.seconds == 3.0
    assert isinstance(read.seconds, float)


def test_missing_fields_are_named():
    fields = json.loads(REPORT.to_json())
    del fields["seconds"], fields["config"]
    with pytest.raises(ModelError, match="config, seconds"):
        Report.from_json(json.dumps(fields))


def test_fields_of_a_later_format_are_left_out():
    assert Report.from_json(altered(format=2, colour="blue")) == dataclasses.replace(REPORT, format=2)


def test_a_report_of_an_earlier_commit_is_still_read():
    stored = Path(__file__).parent / "golden" / "report-f908272.json"
    report = Report.from_json(stored.read_text())
    assert report.own_metrics["average_incremental_accuracy"] == pytest.approx(0.66467, abs=1e-5)
    assert report.config["experiment"]["order"] == "podnet-0"
    assert report.environment["device"] == "NVIDIA H200"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        (REPORT.to_json()[:-20], "cut off"),
        ("[1, 2]", "expected a JSON object, got a list"),
        ('{"seconds": NaN}', "NaN is not JSON"),
        (altered(finished=1), "'finished' is a int, expected bool"),
        (altered(seconds=True), "'seconds' is a bool, expected int or float"),
        (altered(overall=None), "'overall' is a NoneType, expected list"),
        (
            altered(metrics_by_nearest_mean=[]),
            "'metrics_by_nearest_mean' is a list, expected dict or NoneType",
        ),
    ],
)
def test_what_is_not_a_report_is_refused(text, message):
    with pytest.raises(ModelError, match=message):
        Report.from_json(text)


@pytest.mark.parametrize("value", [object(), math.inf, math.nan, np.float32(0.5)])
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises(ModelError, match="'podnet-ccfa' cannot be written as JSON"):
        dataclasses.replace(REPORT, config={"value": value}).to_json()


def test_report_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        REPORT.seconds = 0.0


def test_matrix_rows_and_back():
    matrix = np.array([[0.1 + 0.2, np.nan], [0.5, 1.0]])
    rows = matrix_rows(matrix)
    assert rows == [[0.1 + 0.2, None], [0.5, 1.0]]
    np.testing.assert_array_equal(np.array(rows, dtype=float), matrix)
    stored = dataclasses.replace(REPORT, accuracy_matrix=rows)
    assert Report.from_json(stored.to_json()).accuracy_matrix == rows


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_spread_is_the_sample_deviation(values):
    mean, spread = mean_and_spread(values)
    assert mean == pytest.approx(statistics.fmean(values))
    assert spread == pytest.approx(statistics.stdev(values), abs=1e-9)
    assert standard_error(values) == pytest.approx(statistics.stdev(values) / len(values) ** 0.5, abs=1e-9)


def test_one_value_has_no_spread_and_none_has_no_mean():
    mean, spread = mean_and_spread([0.7])
    assert mean == 0.7
    assert math.isnan(spread)
    assert math.isnan(standard_error([0.7]))
    with pytest.raises(DataError, match="at least one value"):
        mean_and_spread([])
