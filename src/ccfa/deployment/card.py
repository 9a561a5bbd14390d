"""The model card README.md: what the model is, for people and for the Hub. What its owner wrote is kept."""

import re
from collections.abc import Mapping
from typing import Any

_BEGIN, _END = "written by ccfa: changes between these lines are lost", "end of what ccfa writes"
_IN_HEAD, _IN_BODY = "# {}", "<!-- {} -->"  # a remark in YAML and in Markdown
_HEAD = """\
license: other  # choose one: the model is yours
library_name: ccfa
pipeline_tag: image-classification
tags:
- class-incremental-learning"""
_BODY = "\n\n## Intended use\n\nTo be written by the model's owner.\n"


def model_card(config: Mapping[str, Any], present: str = "") -> str:
    """Return the card of a model: of the present card, only what ccfa has written between its marks is replaced.

    Args:
        config: The content of config.json.
        present: The card as it is now.
    """
    present = present.replace("\r\n", "\n")
    found = re.match(r"---\n(.*?)\n---\n", present, re.DOTALL)
    head, body = (found[1], present[found.end() :]) if found else ("", present)
    body = _with_written(body, _IN_BODY, _written(config)) or f"\n{_marked(_IN_BODY, _written(config))}{_BODY}{body}"
    # A head without our marks is its owner's.
    head = _with_written(head, _IN_HEAD, _results(config)) or head or f"{_HEAD}\n{_marked(_IN_HEAD, _results(config))}"
    return f"---\n{head}\n---\n{body}"


def _marked(remark: str, written: str) -> str:
    return f"{remark.format(_BEGIN)}\n{written}\n{remark.format(_END)}"


def _with_written(text: str, remark: str, written: str) -> str:
    """The text with what is between the marks replaced, or nothing if it has no marks."""
    before, begun, rest = text.partition(remark.format(_BEGIN))
    _, ended, after = rest.partition(remark.format(_END))
    return f"{before}{_marked(remark, written)}{after}" if begun and ended else ""


def _results(config: Mapping[str, Any]) -> str:
    """The accuracy as the Hub reads it."""
    last = config["updates"][-1]
    lines = ["metrics:", "- accuracy"]
    if last["accuracy"] is not None:
        lines += [
            "model-index:",
            f"- name: image classifier of {len(config['classes'])} classes",
            "  results:",
            "  - task: {type: image-classification}",
            "    dataset: {name: held-out photos, type: imagefolder}",
            f"    metrics: [{{type: accuracy, value: {last['accuracy']:.4f}}}]",
        ]
    return "\n".join(lines)


def _written(config: Mapping[str, Any]) -> str:
    classes, experiment, shown = config["classes"], config["experiment"], config["preprocessing"]
    calibration, last = config["calibration"], config["updates"][-1]
    method = experiment["method"] + (" + CCFA" if experiment["ccfa"] else "")
    accuracy = (
        f"{_percent(last['accuracy'])}, the mean over classes, on {last['held_out']} images that were not trained on"
    )
    if last["measured_classes"] < len(classes):
        accuracy += f", of {last['measured_classes']} classes only; the model has kept no images of the others"
    lines = [
        f"# An image classifier of {len(classes)} classes",
        "",
        "It was trained with ccfa and can learn more classes without the old photos: `ccfa learn MODEL FOLDER`.",
        "",
        f"- Accuracy: {accuracy if last['held_out'] else 'not measured'}.",
        f"- Method: {method}, backbone {config['backbone']}, head {config['head']}, prediction by "
        f"{config['rule'].replace('_', ' ')}.",
        f"- Images: {shown['channels']} channels, the centre square ({shown['crop']:.0%} of the shorter side), "
        f"{shown['size']} x {shown['size']} pixels, {shown['interpolation']}; divided by 255, normalised with mean "
        f"{_numbers(shown['mean'])} and standard deviation {_numbers(shown['std'])}.",
    ]
    lines.append(f"- Training: {_training(config)}.")
    if plugins := config.get("plugins"):
        names = ", ".join(map(_cell, plugins))
        lines.append(f"- Plug-ins: {names}. The model does not contain them; give them to ccfa with `--plugin`.")
    if kept := sum(one["memory"] for one in classes):
        lines.append(
            f"- Memory: {kept} images, in `exemplars/`. Leave that folder out to share the model without photos: "
            f"it can then predict, but not learn."
        )
    if calibration["error"] is not None:
        lines.append(
            f"- Confidence: temperature {calibration['temperature']:.3g}, fitted on {calibration['images']} of these "
            f"images; expected calibration error {calibration['error']:.3f} (without it "
            f"{calibration['error_before']:.3f})."
        )
    lines += ["", "## Classes", "", "| class | learned in update | photos | kept | held out | accuracy |"]
    lines += ["|---|---|---|---|---|---|"]
    for one in classes:
        cells = [_cell(one["name"]), one["stage"] + 1, one["images"], one["memory"], one["held_out"]]
        lines.append(f"| {' | '.join(map(str, cells))} | {_percent(one['accuracy'])} |")
    lines += ["", "## Updates", "", "| | date | new classes | photos | accuracy |", "|---|---|---|---|---|"]
    for number, update in enumerate(config["updates"], start=1):
        names = ", ".join(_cell(name) for name in update["new_classes"]) or "none"
        lines.append(
            f"| {number} | {update['date'][:10]} | {names} | {update['photos']} | {_percent(update['accuracy'])} |"
        )
    return "\n".join(lines)


def _training(config: Mapping[str, Any]) -> str:
    """What the backbone started from, and how it was trained."""
    start, first = config["weights"], config["updates"][0]["phases"]
    began = {"none": "random weights", "pretrained": "timm's pretrained weights"}.get(
        start, f"the weights with {start}"
    )
    phases = [
        f"{one['name']} {one['epochs']} epochs, batches of {one['batch_size']}, rate {one['lr']:g}" for one in first
    ]
    return f"the backbone began with {began}; " + ("; ".join(phases) or "it was not trained")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _numbers(values: list[float]) -> str:
    return "(" + ", ".join(f"{value:g}" for value in values) + ")"


def _cell(text: str) -> str:
    """Text that cannot end a cell of a Markdown table or begin HTML."""
    escaped: str = re.sub(r"([\\|<>\[\]`*_#])", r"\\\1", text)
    return escaped
