"""The wheel has what the source has, templates and tables too, and extras come from where the package came from."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from ccfa import errors

ROOT = Path(__file__).parents[1]


def test_wheel_has_every_file_of_the_package(tmp_path):
    words = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("ccfa-*.whl")
    packed = {name for name in ZipFile(wheel).namelist() if name.startswith("ccfa/")}
    source = (path for path in (ROOT / "src/ccfa").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert packed == {path.relative_to(ROOT / "src").as_posix() for path in source}
    needed = "data/class_orders.json", "experiments/paper_tables.toml", "reporting/templates/report.html", "py.typed"
    assert {f"ccfa/{name}" for name in needed} <= packed


def test_extras_come_from_the_checkout_or_the_index(tmp_path, monkeypatch):
    assert errors.installing("onnx") == f"pip install -c {ROOT}/constraints.txt -e '{ROOT}[onnx]'"
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "site-packages" / "ccfa" / "errors.py"))
    assert errors.installing("onnx") == "pip install 'ccfa[onnx]'"
