"""What must be the same of two runs of one experiment: everything but times."""

import csv
import hashlib
import json
from pathlib import Path

TIMES = {"seconds", "images_per_second"}


def run_digest(path: Path) -> str:
    """SHA-256 of a run's weights, exemplars, predictions, stages and metrics."""
    digest = hashlib.sha256()
    for folder in ("networks", "exemplars", "predictions"):
        for file in sorted((path / folder).iterdir()):
            digest.update(file.name.encode() + file.read_bytes())
    with open(path / "stages.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    rows += [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    timeless = [{name: value for name, value in row.items() if name not in TIMES} for row in rows]
    digest.update(json.dumps(timeless).encode())
    digest.update((path / "accuracy_matrix.csv").read_bytes())
    return digest.hexdigest()
