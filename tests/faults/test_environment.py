"""Terminals, locales, folders and names as they are elsewhere: output stays readable, files stay theirs."""

import ast
import csv
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import ccfa
from ccfa.experiments import Run
from commands import ASCII, COMMAND, command, environment
from zoo import write_noise

SOURCE = Path(ccfa.__file__).parent
HOSTILE = ("<script>alert(1)<script>", "=cmd('calc')", "{{7*7}}", "%2e%2e%2fx", "caf\u00e9 \U0001f41d")
SECRETS = {"API_TOKEN": "tok-3f1c9e55", "AWS_SECRET_ACCESS_KEY": "aws-77d0aa31", "DATABASE_URL": "pg://u:pw-91@h/d"}
TINY = ("--scenario", "3,2", "--image-size", "8", "--memory", "2", "--set", "backbone=small", "epochs=1")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A run whose class names are attacks, on a narrow ASCII terminal, without a home, with secrets around it."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for seed, name in enumerate(HOSTILE):
        write_noise(folder / "photos" / name, 6, seed, size=8)
    words = [*COMMAND, "run", "icarl", "--data", "photos", "--out", "run", *TINY]
    surroundings = environment(**ASCII, **SECRETS, COLUMNS="20", CI="1", TMPDIR=str(folder / "missing"))
    for name in ("HOME", "USER", "LOGNAME"):
        surroundings.pop(name, None)
    result = subprocess.run(words, cwd=folder, env=surroundings, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return folder, result


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_an_ascii_terminal_gets_ascii_and_files_are_utf_8(elsewhere):
    folder, result = elsewhere
    result.stdout.decode("ascii")
    result.stderr.decode("ascii")
    names = Run(folder / "run").read_json("config.json")["resolved"]["class_names"]
    assert sorted(names) == sorted(HOSTILE)
    for path in files(folder / "run"):
        if path.suffix in (".json", ".jsonl", ".csv", ".txt", ".html"):
            path.read_text(encoding="utf-8")


def test_a_narrow_pipe_gets_plain_lines(elsewhere):
    _, result = elsewhere
    assert not set(b"\x1b\r") & set(result.stdout + result.stderr)
    assert b"stage 2/2" in result.stdout


def test_neither_a_home_nor_a_temporary_folder_is_needed(elsewhere):
    folder, _ = elsewhere
    assert {path.name for path in folder.iterdir()} == {"photos", "run"}, "nothing is written beside the run"


@pytest.mark.parametrize("out", ["run", None])
def test_a_current_folder_that_was_deleted_is_a_named_error(tmp_path, out):
    gone = tmp_path / "gone"
    gone.mkdir()
    words = ["run", "finetune", "--scenario", "10", "--set", "epochs=0", "--out", out or tmp_path / "run"]
    script = f"import os, shutil, sys; os.chdir({str(gone)!r}); shutil.rmtree({str(gone)!r}); " + (
        f"sys.argv = {['ccfa', *map(str, words)]!r}; from ccfa.cli import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, timeout=120)
    assert b"Traceback" not in result.stderr
    assert result.returncode == 5
    assert result.stderr.startswith(b"error: The current folder cannot be used: No such file or directory.")


def test_a_run_needs_no_network(call, tmp_path, monkeypatch):
    asked = []

    def refuse(*arguments, **options):
        asked.append(arguments)
        raise OSError("no route to host")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    code, _, err = call("run", "finetune", "--scenario", "5,5", "--set", "epochs=0", "--out", "run")
    assert (code, asked) == (0, []), err
    assert call("report", "run")[0] == 0
    assert call("compare", "run")[0] == 0
    assert asked == []


@pytest.mark.soak
def test_no_socket_is_connected_according_to_the_kernel(tmp_path):
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    trace = tmp_path / "trace"
    words = ["run", "finetune", "--scenario", "10", "--set", "epochs=0", "--out", "run"]
    tracer = ["strace", "-f", "-e", "trace=connect,sendto", "-o", str(trace)]
    result = subprocess.run([*tracer, *COMMAND, *words], cwd=tmp_path, env=environment(), capture_output=True)
    if b"ptrace" in result.stderr:
        pytest.skip("processes may not be traced here")
    assert result.returncode == 0
    assert not re.findall(r"AF_INET", trace.read_text())


def test_strict_interpreters_are_no_obstacle(tmp_path):
    words = ["run", "finetune", "--scenario", "5,5", "--set", "epochs=1", "--out", "run"]
    script = f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r}); from ccfa.cli import main; main()"
    strict = ["-O", "-I", "-X", "dev", "-W", "error::Warning:ccfa"]
    result = subprocess.run(
        [sys.executable, *strict, "-c", script, *words], cwd=tmp_path, env=environment(), capture_output=True
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert Run(tmp_path / "run").report().finished


def test_no_assert_carries_logic():
    for path in SOURCE.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        assert not [node for node in nodes if isinstance(node, ast.Assert)], path


def test_names_are_escaped_in_the_page_and_never_paths(elsewhere):
    folder, _ = elsewhere
    page = (folder / "run" / "report.html").read_text(encoding="utf-8")
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "{{7*7}}" in page
    assert "49" not in re.findall(r"<h\d>(.*?)</h\d>", page)
    assert not [path for path in files(folder) if "photos" not in path.parts and any(n in path.name for n in HOSTILE)]


def test_no_cell_of_a_table_is_a_formula(elsewhere, call):
    folder, _ = elsewhere
    os.chdir(folder)
    assert call("compare", folder / "run", "--out", folder / "comparison")[0] == 0
    tables = [path for path in files(folder) if path.suffix == ".csv"]
    assert len(tables) > 2
    for path in tables:
        with open(path, newline="", encoding="utf-8") as table:
            for row in csv.reader(table):
                assert not [cell for cell in row if cell[:1] in tuple("=@") or cell[:2] == "+="], path


def test_no_secret_and_no_home_is_written_down(elsewhere):
    folder, result = elsewhere
    user_folder = os.path.expanduser("~")
    hidden = [*SECRETS.values(), str(folder)] + ([user_folder] if len(user_folder) > 3 else [])
    for path in files(folder / "run"):
        content = path.read_bytes()
        for text in hidden:
            assert text.encode() not in content, f"{text} in {path.name}"
    assert all(value.encode() not in result.stdout + result.stderr for value in SECRETS.values())


def test_the_environment_is_a_short_list(elsewhere):
    folder, _ = elsewhere
    stored = json.loads((folder / "run" / "environment.json").read_text())
    assert not set(stored) & set(os.environ)
    assert len(json.dumps(stored)) < 2000


def test_class_names_that_do_not_print_are_named_on_an_ascii_terminal(tmp_path):
    os.makedirs(os.fsencode(tmp_path / "photos") + b"/caf\xe9")
    result = command("run", "finetune", "--data", "photos", cwd=tmp_path, **ASCII)
    assert result.returncode == 3
    assert b"Traceback" not in result.stderr
