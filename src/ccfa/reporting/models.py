"""Models on the terminal: what `learn` found and does, predictions, accuracies, the history."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table

from ccfa.data import Stage
from ccfa.data.images import some
from ccfa.deployment import (
    Evaluation,
    Model,
    ModelFolder,
    Plan,
    Prediction,
    carry_out,
    estimated_seconds,
    load_model,
    plan_update,
)
from ccfa.deployment.model import expanded, undo_named
from ccfa.errors import DataError, ModelError, Stopped, UsageError
from ccfa.files import csv_text, make_folder, require_place, write_atomically
from ccfa.learning.processes import several
from ccfa.learning.progress import Work, duration, planned_work
from ccfa.reporting.tables import counted, number, percent
from ccfa.reporting.terminal import Shown, StatusLines
from ccfa.settings import Learning, Running

LISTED = 10
WIDEST = 24  # a longer class name moves the rest of its line
Format = Literal["table", "csv", "json"]


def learn_shown(
    path: Path, folder: Path, asked: Learning, running: Running, console: Console, dry_run: bool = False
) -> Model | None:
    """Say what was found and what will happen, learn it, and say what came of it."""
    if several():
        raise UsageError("`ccfa learn` works in one process. Start it without torchrun.")
    place = ModelFolder(path)
    with nullcontext() if dry_run else place.held():  # a second process is refused before it plans
        with undo_named(place):
            plan = plan_update(path, folder, asked, running)
        for line in told(plan):
            console.print(line, soft_wrap=True)
        seconds = estimated_seconds(plan, running)
        console.print(f"This will take about {duration(seconds) if seconds >= 1 else 'a second'}.", soft_wrap=True)
        if dry_run:
            console.print("Nothing was changed (--dry-run).")
            return None
        try:
            with StatusLines(console) as lines:
                model = carry_out(plan, running, Watching(plan, lines))
        except (KeyboardInterrupt, Stopped):
            console.print(_left(place, plan), soft_wrap=True)
            raise
    last = model.config["updates"][-1]
    what = counted(len(plan.new), "class", "es") if plan.new else f"more photos of {some(plan.more)}"
    console.print(f"Learned {what} in {duration(last['seconds'])}. {_measured(model)}", soft_wrap=True)
    console.print(f"The model is in {path}. Next: ccfa predict {path} PHOTOS", soft_wrap=True)
    return model


def _left(place: ModelFolder, plan: Plan) -> str:
    """What a stopped update has left: the new state may be in place already."""
    before = plan.before.config if plan.before else None
    if not place.holds_model():
        return "No model was written."
    now = place.read_config()
    if now == before:
        return f"{place.path} is unchanged."
    return f"The update was complete already: {place.path} knows {counted(len(now['classes']), 'class', 'es')}."


def told(plan: Plan) -> Iterator[str]:
    """What was found and what will happen, in sentences."""
    yield from plan.notes
    count = counted(len(plan.new), "new class", "es")
    if plan.before:
        learns = f" and will learn {count}" if plan.new else ""
        yield f"{plan.folder.path} knows {counted(plan.stage.num_old, 'class', 'es')}{learns}."
    else:
        yield f"{plan.folder.path} will be a new model with {counted(len(plan.new), 'class', 'es')}."
    if plan.more:
        yield f"Known already, and learned from more photos: {some(plan.more)}."
    if plan.left_out:
        yield f"Known already, and left out (--more uses their photos): {some(plan.left_out)}."
    from_memory = f" and {counted(plan.num_kept, 'image')} of the model's memory" if plan.num_kept else ""
    photos, held = len(plan.train) - plan.num_kept, counted(plan.num_measured, "held-out image")
    yield f"It learns from {counted(photos, 'photo')}{from_memory}, and is measured on {held}."


def _measured(model: Model) -> str:
    last = model.config["updates"][-1]
    if not last["held_out"]:
        return "No photos were held out, so its accuracy is unknown."
    classes = counted(last["measured_classes"], "class", "es")
    images = counted(last["held_out"], "held-out image")
    found = f"Its accuracy is {percent(last['accuracy'], 1)} %, the mean over {classes}, measured on {images}."
    if last["measured_classes"] < len(model.class_names):
        found += " Of the other classes it has kept none to measure with."
    return found


class Watching(Shown):
    """Shows how far learning has come."""

    def __init__(self, plan: Plan, lines: StatusLines) -> None:
        earlier: list[dict[str, Work]] = [{} for _ in range(plan.stage.index)]
        super().__init__([*earlier, planned_work(plan.method, plan.train, plan.stage)], lines)
        self.num_done = plan.stage.index

    def stage_words(self, stage: Stage) -> str:
        return ""


def predict_shown(
    path: Path, inputs: tuple[str, ...], top: int, form: Format, device: str, console: Console, stdin: IO[str]
) -> None:
    """Predict files and print them as they come. Files that cannot be read are an error, after all others."""
    model = load_model(path, device)
    if not inputs:
        raise UsageError("Name photos or folders to predict, or - to read their names from the standard input.")
    predictions = model.predict_files(expanded(_named(inputs, stdin)), top)
    width = min(max(map(cell_len, ("class", *model.class_names))), WIDEST)
    total, errors = 0, []
    for total, one in enumerate(predictions, start=1):
        if one.error:
            errors.append(f"{one.path}, which {one.error}")
        if form == "json":
            console.file.write(json.dumps(one.to_dict(), ensure_ascii=False) + "\n")
        elif form == "csv":
            if total == 1:
                console.file.write(csv_text([_csv_head(top)]))
            console.file.write(csv_text([_csv_row(one, top)]))
        else:
            if total == 1:
                console.print(f"{'class':{width}}  confidence  file", soft_wrap=True)
            console.print(_line(one, width), soft_wrap=True)
    if not total:
        raise DataError("There are no photos to predict.")
    if errors:
        raise DataError(f"{counted(len(errors), 'file')} of {total} could not be read, such as {errors[0]}.")


def _named(inputs: tuple[str, ...], stdin: IO[str]) -> Iterator[str]:
    """The names that were typed, with those of the standard input where a - stands."""
    for name in inputs:
        if name != "-":
            yield name
            continue
        for line in stdin:  # as they come
            is_list = "\0" in line  # of `find -print0`, where a line end belongs to a name, of any but the first
            names = (line + stdin.read()).split("\0") if is_list else [line.rstrip("\r\n")]
            yield from filter(None, names)


def _csv_head(top: int) -> list[str]:
    others = [f"{word}_{place}" for place in range(2, top + 1) for word in ("class", "confidence")]
    return ["file", "class", "confidence", "unfamiliar", "error", *others]


def _csv_row(one: Prediction, top: int) -> list[object]:
    others = [cell for name, share in one.top[1:top] for cell in (name, f"{share:.4f}")]
    others += [""] * (2 * (top - 1) - len(others))
    if one.error:
        return [str(one.path), "", "", "", one.error, *others]
    return [str(one.path), one.name, f"{one.confidence:.4f}", "yes" if one.unfamiliar else "no", "", *others]


def _line(one: Prediction, width: int) -> str:
    """The class, the confidence, the whole path, and the next classes."""
    name, share = ("-", "-") if one.error else (one.name, f"{percent(one.confidence, 1)} %")
    line = f"{name}{' ' * (width - cell_len(name))}  {share:>10}  {one.path}"
    if one.error or one.unfamiliar:
        line += f"  {one.error or 'unlike the learned images'}"
    others = ", ".join(f"{other} {percent(chance, 1)} %" for other, chance in one.top[1:])
    return line + (f"  then {others}" if others else "")


def evaluate_shown(
    path: Path, folder: Path, recursive: bool, form: str, device: str, console: Console, out: Path | None = None
) -> None:
    """Measure a model on a folder of photos and print what was found; write the wrong photos as CSV, if asked."""
    if out and out.is_dir():
        raise UsageError(f"{out} is a folder. Name a file.")
    if out:
        if out.suffix.lower() != ".csv":
            raise UsageError(f"--out is a CSV file: name it {out.with_suffix('.csv')}. --format json prints JSON.")
        require_place(out.parent)
    found = load_model(path, device).evaluate(folder, recursive)
    if out:
        rows = [_wrong_row(truth, one) for truth, one in (*found.wrong, *found.unknown)]
        make_folder(out.parent)
        write_atomically(out, csv_text([["file", "class", "predicted", "confidence", "unfamiliar"], *rows]))
    if form == "json":
        console.file.write(json.dumps(found.to_dict(), ensure_ascii=False, indent=2) + "\n")
    else:
        show_evaluation(found, console, out)


def _wrong_row(truth: str, one: Prediction) -> list[str]:
    return [str(one.path), truth, one.name, f"{one.confidence:.4f}", "yes" if one.unfamiliar else "no"]


def show_evaluation(found: Evaluation, console: Console, out: Path | None = None) -> None:
    """Print the accuracy by class, the confusions and the wrong photos, all of which are in `out`."""
    table = Table("class", "photos", "recognised", "accuracy", "mostly taken for")
    for name, (images, right) in found.by_class().items():
        others = Counter(one.name for truth, one in found.wrong if truth == name).most_common(2)
        taken = ", ".join(f"{other} ({times})" for other, times in others)
        table.add_row(name, str(images), str(right), f"{percent(right / images, 1)} %", taken)
    console.print(table)
    right = found.images - len(found.wrong)
    accuracy = f"{percent(found.accuracy, 1)} %"
    console.print(f"{right} of {counted(found.images, 'photo')} recognised: {accuracy}.", soft_wrap=True)
    if found.seen:
        console.print(
            f"The model has learned from or held out {found.seen} of these photos before, so the accuracy may be too "
            f"high. Measure it with others.",
            soft_wrap=True,
        )
    if found.unknown:
        flagged = sum(one.unfamiliar for _, one in found.unknown)
        names = some(sorted({truth for truth, _ in found.unknown}))
        console.print(
            f"{counted(len(found.unknown), 'photo')} of classes that the model does not know ({names}): "
            f"{flagged} were flagged as unlike the learned images.",
            soft_wrap=True,
        )
    for path, reason in found.unreadable[:LISTED]:
        console.print(f"{path} {reason}", soft_wrap=True)
    for truth, one in found.wrong[:LISTED]:
        console.print(
            f"wrong: {one.path} is {truth}, predicted {one.name} ({percent(one.confidence, 1)} %)", soft_wrap=True
        )
    if len(found.wrong) > LISTED:
        where = f"all are in {out}" if out else "--out FILE lists all of them"
        console.print(f"and {len(found.wrong) - LISTED} more wrong photos; {where}.", soft_wrap=True)


def show_history(path: Path, console: Console) -> None:
    """Print what the model has learned and when, and which earlier states can be gone back to; all are verified."""
    folder = ModelFolder(path)
    with undo_named(folder):
        config = folder.read().config
    earlier = folder.earlier()
    for one in earlier:
        folder.read_earlier(one)
    states = {folder.read_config(one)["state"]: len(folder.read_config(one)["updates"]) for one in earlier}
    short = [Column(name, no_wrap=True) for name in ("update", "date", "photos", "accuracy", "time", "", "classes")]
    table = Table(*short, "new classes", box=None, pad_edge=False)
    classes = 0
    for index, update in enumerate(config["updates"], start=1):
        classes += len(update["new_classes"])
        note = "now" if index == len(config["updates"]) else "kept" if index in states.values() else ""
        more = f" (and more of {some(update['more_of'])})" if update["more_of"] else ""
        accuracy = "-" if update["accuracy"] is None else f"{percent(update['accuracy'], 1)} %"
        table.add_row(
            str(index),
            update["date"][:10],
            str(update["photos"]),
            accuracy,
            duration(update["seconds"]),
            note,
            str(classes),
            (some(update["new_classes"]) or "none") + more,
        )
    console.print(table)
    size = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
    console.print(f"{number(size / 1e6)} MB with its history; every file but the card was verified.", soft_wrap=True)
    if plugins := config.get("plugins"):
        console.print(f"It was made with plug-ins: --plugin {' --plugin '.join(plugins)}", soft_wrap=True)
    if earlier:
        console.print(f"`ccfa undo {path}` goes back by one update; {len(earlier)} can be undone.", soft_wrap=True)


def undo_shown(path: Path, console: Console) -> None:
    """Go back to the state before the last update."""
    folder = ModelFolder(path)
    if not folder.holds_model():
        folder.read()
    with folder.held():
        gone = "the damaged state"
        with suppress(ModelError):
            gone = some(folder.read_config()["updates"][-1]["new_classes"]) or "more photos of known classes"
        folder.undo()
        after = folder.read_config()
    count = counted(len(after["classes"]), "class", "es")
    console.print(f"Undone: {gone}. {path} knows {count} again.", soft_wrap=True)


def run_to_model(run: Path, out: Path, running: Running, console: Console) -> Model:
    """Make a model folder of a finished run."""
    from ccfa.deployment.runs import model_of_run

    model = model_of_run(run, out, running)
    console.print(f"{out} has {counted(len(model.class_names), 'class', 'es')}. {_measured(model)}", soft_wrap=True)
    return model


def export_shown(path: Path, out: Path | None, form: str, images: Path | None, console: Console) -> None:
    """Export a model, and say on what the file was compared with it."""
    from ccfa.deployment.export import default_path, export_model

    out = out or default_path(path, form)
    had = "was replaced and has" if out.exists() else "has"
    made = export_model(load_model(path, "cpu"), out, form, images)
    kinds = " and ".join(counted(number, kind) for kind, number in made.compared.items())
    console.print(
        f"{out} {had} {made.size / 1e6:.1f} MB. On {kinds}, its probabilities differ from the model's by at most "
        f"{made.difference:.1g}.",
        soft_wrap=True,
    )
    if len(made.compared) == 1:
        console.print(
            "The model keeps no photos. Use --images FOLDER to compare on some of yours, too.", soft_wrap=True
        )
