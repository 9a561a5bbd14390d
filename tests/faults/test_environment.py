"""Terminals, locales, folders and names as they are elsewhere: output stays readable, files stay theirs."""

import errno
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
from ccfa import cli
from ccfa.experiments import Run
from children import started, wait
from commands import ASCII, COMMAND, environment
from zoo import write_noise

HOSTILE = ("<script>alert(1)<script>", "=cmd('calc')", "{{7*7}}", "%2e%2e%2fx", "caf\u00e9 \U0001f41d")
SECRETS = {"API_TOKEN": "tok-3f1c9e55", "AWS_SECRET_ACCESS_KEY": "aws-77d0aa31", "DATABASE_URL": "pg://u:pw-91@h/d"}
TINY = ("--scenario", "3,2", "--image-size", "8", "--memory", "2", "--set", "backbone=small", "epochs=1")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A run whose class names are attacks, on a narrow ASCII terminal, without a home, with secrets around it."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for seed, name in enumerate(HOSTILE):
        write_noise(folder / "photos" / name, 6, seed, size=8)
    strict = [COMMAND[0], "-O", "-W", "always::ResourceWarning", *COMMAND[1:]]
    words = ["run", "icarl", "--data", "photos", "--out", "run", *TINY]
    variables = environment(**ASCII, **SECRETS, COLUMNS="20", CI="1", TMPDIR=str(folder / "missing"))
    for name in ("HOME", "USER", "LOGNAME"):
        variables.pop(name, None)
    result = subprocess.run([*strict, *words], cwd=folder, env=variables, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return folder, result


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_an_ascii_terminal_gets_plain_ascii_lines_and_files_are_utf_8(elsewhere):
    folder, result = elsewhere
    output = (result.stdout + result.stderr).decode("ascii")
    assert not set("\x1b\r") & set(output)
    assert "stage 2/2" in output
    assert "ResourceWarning" not in output
    assert sorted(Run(folder / "run").config["resolved"]["class_names"]) == sorted(HOSTILE)
    for path in files(folder / "run"):
        if path.suffix in (".json", ".jsonl", ".csv", ".txt", ".html"):
            path.read_text(encoding="utf-8")


def test_nothing_is_written_beside_the_run(elsewhere):
    folder, _ = elsewhere
    assert {path.name for path in folder.iterdir()} == {"photos", "run"}
    assert not [path for path in files(folder / "run") if any(name in path.name for name in HOSTILE)]


def test_a_current_folder_that_was_deleted_is_a_named_error(tmp_path, capfd):
    def deleted():
        os.chdir(tmp_path)
        shutil.rmtree(tmp_path)
        sys.stderr = open(2, "w", encoding="utf-8")  # noqa: SIM115
        sys.argv = ["ccfa", "run", "finetune", "--out", "run"]
        cli.main()

    assert wait(started(deleted)) == 5
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert os.strerror(errno.ENOENT) in err


def test_a_run_needs_no_network(call, tmp_path, monkeypatch):
    connected = []

    def refuse(*arguments, **options):
        connected.append(arguments)
        raise OSError("no route to host")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    words = ("--validation", "0.85", "--scenario", "5,5", "--set", "epochs=0", "backbone=small")
    assert call("run", "finetune", *words, "--out", "run")[0] == 0
    assert call("compare", "run")[0] == 0
    assert connected == []


def test_no_duration_depends_on_the_clock():
    for path in Path(ccfa.__file__).parent.rglob("*.py"):
        assert not re.search(r"\btime\.time\(|datetime\.now|perf_counter\(\) \+", path.read_text(encoding="utf-8")), (
            path
        )


def test_no_secret_and_no_home_is_written_down(elsewhere):
    folder, result = elsewhere
    home = os.path.expanduser("~")
    hidden = [*SECRETS.values(), str(folder)] + ([home] if len(home) > 3 else [])
    for path in files(folder / "run"):
        content = path.read_bytes()
        for text in hidden:
            assert text.encode() not in content, f"{text} in {path.name}"
    assert all(value.encode() not in result.stdout + result.stderr for value in SECRETS.values())
    stored = json.loads((folder / "run" / "environment.json").read_text())
    assert not set(stored) & set(os.environ)
