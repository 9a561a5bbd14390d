"""The model card README.md: what the model is, for people and for the Hub. What its owner wrote is kept."""

import re
from collections.abc import Mapping
from typing import Any

_BEGIN, _END = "<!-- written by ccfa: changes between these lines are lost -->", "<!-- end of what ccfa writes -->"
_MEASURED_ON = "held-out photos"  # the data set by which our results in the head are told from the owner's
_HEAD = """\
license: other  # choose one: the model is yours
library_name: ccfa
pipeline_tag: image-classification
tags:
- class-incremental-learning
metrics:
- accuracy"""
_BODY = "\n\n## Intended use\n\nTo be written by the model's owner.\n"


def model_card(config: Mapping[str, Any], present: str = "") -> str:
    """Return the card of a model: of the present card, only the results in its head and our part of the text change.

    Args:
        config: The content of config.json.
        present: The card as it is now.
    """
    present = present.replace("\r\n", "\n")
    found = re.match(r"---\n(.*?)\n---(?:\n|$)", present, re.DOTALL)
    results, body = _results(config), present[found.end() :] if found else present
    head = _with_results(found[1], results) if found else "\n".join([_HEAD, *results])
    return f"---\n{head}\n---\n{_with_text(body, _written(config))}"


def _with_text(body: str, written: str) -> str:
    """The text with what is between the marks replaced, or with all of it before what the owner has written."""
    before, begun, rest = body.partition(_BEGIN)
    _, ended, after = rest.partition(_END)
    if not (begun and ended):
        before, after = "\n", _BODY + body
    return f"{before}{_BEGIN}\n{written}\n{_END}{after}"


def _with_results(head: str, results: list[str]) -> str:
    """The YAML head with our results, if it has them, as they are now. Other programs may have written it anew."""
    keys = re.split(r"\n(?=[\w-]+:|#)", head)
    return "\n".join(
        "\n".join(results) if one.startswith("model-index:") and _MEASURED_ON in one else one for one in keys
    )


def _results(config: Mapping[str, Any]) -> list[str]:
    """The accuracy as the Hub reads it."""
    if (accuracy := config["updates"][-1]["accuracy"]) is None:
        return []
    return [
        "model-index:",
        f"- name: image classifier of {len(config['classes'])} classes",
        "  results:",
        "  - task: {type: image-classification}",
        f"    dataset: {{name: {_MEASURED_ON}, type: imagefolder}}",
        f"    metrics: [{{type: accuracy, value: {accuracy:.4f}}}]",
    ]


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
    began = {"none": "random weights", "pretrained": "timm's pretrained weights"}.get(start, f"the weights of {start}")
    phases = [
        f"epochs of the phase {one['name']}: {one['epochs']}, batches of {one['batch_size']}, rate {one['lr']:g}"
        for one in first
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
