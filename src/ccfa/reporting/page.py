"""report.html: a run as one self-contained page."""

import json
import math
from pathlib import Path
from typing import Any

from ccfa.errors import CcfaError
from ccfa.evaluation import DEFINITIONS, summary
from ccfa.experiments.experiment import Resolved
from ccfa.experiments.files import write_atomically
from ccfa.experiments.lock import left_alone
from ccfa.reporting import costs, repeating, sections
from ccfa.reporting.classes import class_table, confusions, exemplars
from ccfa.reporting.confusions import confused_pairs
from ccfa.reporting.pictures import read_pictures, write_pictures
from ccfa.reporting.rendering import percent, render
from ccfa.reporting.rundata import RunData, read_run
from ccfa.reporting.values import counted, duration

HEADLINES = {
    "average_incremental_accuracy": "average incremental accuracy",
    "last_accuracy": "accuracy after the last stage",
    "forgetting_max_minus_last": "forgetting",
    "new_class_accuracy": "new-class accuracy",
}


def write_report(directory: Path, resolved: Resolved | None = None) -> Path:
    """Write report.html of a run; with the data at hand, store first the pictures that it shows."""
    directory = Path(directory)
    run = read_run(directory)
    pairs = confused_pairs(run)
    if resolved and run.predictions:
        write_pictures(directory, run, pairs, resolved)
    # The page is made of the directory's files alone, so that making it again gives the same bytes.
    pictures = read_pictures(directory, len(run.predictions) - 1)
    page = render(
        "report.html",
        **_heading(run),
        accuracy=sections.accuracy_figure(run),
        matrix=sections.matrix_figure(run),
        metrics=sections.metrics(run),
        definitions=[(name.replace("_", " "), text) for name, text in DEFINITIONS.items()],
        forgetting=[sections.forgetting_figure(run), sections.new_and_old_figure(run)],
        old_new=sections.old_new_figures(run),
        confusion=sections.confusion_figure(run),
        pairs=confusions(run, pairs, pictures),
        exemplars=exemplars(run, pictures),
        has_pictures=pictures is not None,
        cost=[costs.time_figure(run), costs.throughput_figure(run), *costs.loss_figures(run)],
        classes=class_table(run),
        **_repeating(run),
    )
    write_atomically(directory / "report.html", page)
    return directory / "report.html"


def report_line(directory: Path, resolved: Resolved | None = None) -> str:
    """Write the page and say where it is; or why it could not be written: the run's result stands without it."""
    try:
        with left_alone(directory):
            return f"Report: {write_report(directory, resolved)}"
    except Exception as error:  # whatever it is, a page is not worth a run
        return f"note: the report page was not written ({error}). Try again: ccfa report {directory}"


def _heading(run: RunData) -> dict[str, Any]:
    experiment = run.experiment
    plugged = [str(experiment.get("mix"))] * bool(experiment.get("mix")) + ["CCFA"] * bool(experiment.get("ccfa"))
    done, planned = len(run.predictions), len(run.stage_sizes)
    facts = [
        f"{counted(sum(run.stage_sizes), 'class', 'es')} in {counted(planned, 'stage')}",
        str(run.environment.get("device", "unknown device")),
        duration(sum(row.get("seconds", math.nan) for row in run.stages)),
        f"seed {experiment.get('seed', 0)}",
    ]
    state = str(run.status.get("state", "unknown"))
    finished = state == "finished" and done == planned
    method = " + ".join([str(experiment.get("method", "a run")), *plugged])
    return {
        "name": run.name,
        "title": f"{method} on {experiment.get('data', 'data')}",
        "facts": facts,
        "finished": finished,
        "state": _state(run, state, done, planned),
        "verdict": _verdict(run),
        "rule": sections.rule_text(run.own_rule),
        "notes": run.notes,
    }


def _state(run: RunData, state: str, done: int, planned: int) -> str:
    told = "Finished" if state == "finished" else f"{state.capitalize()}: {done} of {counted(planned, 'stage')}"
    if times := len(run.resumed):
        told += f", resumed {counted(times, 'time')} in other surroundings"
    return told + (f" ({run.status['error']})" if run.status.get("error") else "")


def _verdict(run: RunData) -> list[tuple[str, str, str]]:
    """The four numbers: name, value in percent, definition."""
    metrics: dict[str, float] = {}
    if run.predictions:
        metrics = summary(run.predicted(run.own_rule), run.labels, run.num_seen)
    elif run.report:
        metrics = run.report.metrics
    values = {name: metrics.get(name, math.nan) for name in HEADLINES}
    return [(title, percent(values[name], 2), DEFINITIONS[name]) for name, title in HEADLINES.items()]


def _repeating(run: RunData) -> dict[str, Any]:
    try:
        how = {"command": repeating.command(run), "python": repeating.python(run)}
    except CcfaError as error:
        how = {"command": "", "python": "", "why_not": str(error)}
    resolved = run.resolved
    settings = [(name.replace("_", " "), value) for name, value in run.experiment.items()]
    settings += [(f"number of {kind} images", resolved.get(f"num_{kind}_images")) for kind in ("training", "test")]
    return {
        "why_not": "",
        **how,
        "settings": [
            (name, _plain(value))
            for name, value in settings
            if value is not None and value is not False and value != {}
        ],
        "environment": [(name, _plain(value)) for name, value in run.environment.items() if name != "resumed"],
        "config": json.dumps(run.config, indent=1, ensure_ascii=False),
    }


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={part}" for name, part in value.items())
    return str(value)
