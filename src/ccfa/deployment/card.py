"""The model card README.md: what the model is, for people and for the Hub. What its owner wrote is kept."""

import re
from collections.abc import Mapping
from typing import Any

_BEGIN, _END = "<!-- written by ccfa: changes between these lines are lost -->", "<!-- end of what ccfa writes -->"
_OURS = ("library_name", "pipeline_tag", "tags", "metrics")
_DEFAULT_HEAD = ["license: other  # choose one: the model is yours"]


def model_card(config: Mapping[str, Any], present: str = "") -> str:
    """Return the card of a model; of the present card, what the owner added or changed stays.

    Args:
        config: The content of config.json.
        present: The card as it is now.
    """
    head, body = _split(present)
    written = f"{_BEGIN}\n{_written(config)}\n{_END}"
    if _BEGIN in body and _END in body:
        body = body[: body.index(_BEGIN)] + written + body[body.index(_END) + len(_END) :]
    else:
        body = f"\n{written}\n\n## Intended use\n\nTo be written by the model's owner.\n{body}"
    lines = ["library_name: ccfa", "pipeline_tag: image-classification"]
    for key, item in (("tags", "- class-incremental-learning"), ("metrics", "- accuracy")):
        lines += [f"{key}:", *dict.fromkeys([item, *_items(head, key)])]
    lines += _foreign(head) if head else _DEFAULT_HEAD
    return "---\n" + "\n".join(lines) + "\n---\n" + body


def _split(card: str) -> tuple[list[str], str]:
    """The lines of the YAML head, and the rest."""
    card = card.replace("\r\n", "\n")
    found = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    return (found[1].splitlines(), card[found.end() :]) if found else ([], card)


def _items(head: list[str], key: str) -> list[str]:
    """The items of a list in the head, one per line."""
    found, inside = [], False
    for line in head:
        inside = line.startswith(f"{key}:") or (inside and line.lstrip().startswith("- "))
        if inside and not line.startswith(f"{key}:"):
            found.append(line.strip())
    return found


def _foreign(head: list[str]) -> list[str]:
    """The lines of the head that are the owner's: those of other keys than ours."""
    kept, ours = [], False
    for line in head:
        if re.match(r"[\w-]+:", line):
            ours = line.split(":")[0] in _OURS
        if not ours:
            kept.append(line)
    return kept


def _written(config: Mapping[str, Any]) -> str:
    classes, experiment, shown = config["classes"], config["experiment"], config["preprocessing"]
    calibration, last = config["calibration"], config["updates"][-1]
    method = experiment["method"] + (" + CCFA" if experiment["ccfa"] else "")
    accuracy = f"{_percent(last['accuracy'])} on {last['held_out']} images that were not trained on"
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


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _numbers(values: list[float]) -> str:
    return "(" + ", ".join(f"{value:g}" for value in values) + ")"


def _cell(text: str) -> str:
    """Text that cannot end a cell of a Markdown table or begin HTML."""
    escaped: str = re.sub(r"([\\|<>\[\]`*_#])", r"\\\1", text)
    return escaped
