import json
import subprocess

import torch

import ccfa.experiments.environment as surroundings
from ccfa.experiments.environment import environment
from ccfa.learning.acceleration import Acceleration

CPU = torch.device("cpu")


def test_the_environment_is_json_and_names_the_device():
    found = environment(CPU, Acceleration())
    assert json.loads(json.dumps(found)) == found
    assert found["device"].startswith("cpu")
    assert found["acceleration"]["precision"] == "float32"
    names = ("ccfa", "commit", "python", "torch", "numpy", "threads", "platform")
    assert all(found[name] for name in names)


def test_the_commit_of_a_checkout_around_an_installed_package_is_not_ours(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    (tmp_path / "environment.py").write_text("")
    git("init")
    git("commit", "--allow-empty", "-m", "theirs")
    monkeypatch.setattr(surroundings, "__file__", str(tmp_path / "environment.py"))
    assert environment(CPU, Acceleration())["commit"] == "unknown"
    git("add", "environment.py")
    git("commit", "-m", "ours")
    assert len(environment(CPU, Acceleration())["commit"]) == 12
    (tmp_path / "environment.py").write_text("changed")
    assert environment(CPU, Acceleration())["commit"].endswith("+")


def test_a_given_commit_comes_first_and_without_git_it_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert environment(CPU, Acceleration())["commit"] == "unknown"
    monkeypatch.setenv("CCFA_COMMIT", "0123456789ab")
    assert environment(CPU, Acceleration())["commit"] == "0123456789ab"
