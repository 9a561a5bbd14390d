"""Small real runs of the command line, killed at random moments and resumed until done, against undisturbed ones.

Each process is a fork of this one, which has imported everything already: a start costs milliseconds and not seconds,
so that hundreds of kills fit into minutes. Most kills come at a random time; some at a named place (`failing.py`), so
that short moments such as the writing of a checkpoint are hit too; some are a polite SIGTERM instead. Prints what was
tried and what was lost, and exits with 1 if anything was.

    python tests/soak.py --kills 200 --minutes 15
"""

import argparse
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import ccfa.cli
import ccfa.reporting.showing  # torch and all the rest, before the first fork
from digests import run_digest
from failing import install

TINY = (
    "--validation",
    "0.85",
    "--memory",
    "2",
    "--checkpoint-minutes",
    "0",
    "--set",
    "backbone=small",
    "batch_size=32",
)
RUNS = {
    "podnet": ("podnet", "--ccfa", *TINY, "epochs=2", "balanced_epochs=2"),
    "aanet": ("aanet", "--ccfa", *TINY, "epochs=2", "balanced_epochs=1", "learn_blend=true", "blend_lr=0.01"),
    "afc": ("afc", *TINY, "epochs=2", "balanced_epochs=1"),
    "bic": ("bic", "--ccfa", *TINY, "epochs=2", "correction_epochs=2"),
    "icarl": ("icarl", *TINY, "epochs=2"),
    "gdumb": ("gdumb", *TINY, "epochs=2", "memory_epochs=2"),
    "il2a": ("il2a", *[word for word in TINY if word not in ("--memory", "2")], "epochs=2"),
}
PLACES = {"step": 8, "phase": 2, "select": 1, "evaluate": 1, "commit": 4, "after_commit": 4, "write": 20}
PLACES |= {"append": 4, "report": 1, "pause": 12}
SCENARIO = ("--scenario", "4,3,3")


def start(words: tuple[str, ...], log: Path, faults: str = "") -> int:
    """The process number of a child that runs the command line."""
    process = os.fork()
    if process:
        return process
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    install(faults)
    sys.argv = ["ccfa", *words]
    code = 0
    try:
        ccfa.cli.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
        code = 1
    os._exit(code)


def wait(process: int, seconds: float) -> int | None:
    """How a child ended, negative for the signal that killed it; None if it is still at work after so many seconds."""
    limit = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= limit:
            return None
        time.sleep(0.002)


class Soak:
    """The kills so far, and what became of the runs."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.tried: Counter[str] = Counter()
        self.lost: list[str] = []

    def undisturbed(self, name: str) -> tuple[str, float]:
        """The digest of a run that nobody stops, and how long it takes."""
        path = self.folder / f"{name}-undisturbed"
        began = time.monotonic()
        code = wait(start(("run", *RUNS[name], *SCENARIO, "--out", str(path)), self.log(name)), 600)
        if code != 0:
            sys.exit(f"The undisturbed run of {name} ended with {code}: see {self.log(name)}")
        return run_digest(path), time.monotonic() - began

    def log(self, name: str) -> Path:
        """Where the output of a method's runs goes."""
        return self.folder / f"{name}.log"

    def disturbed(self, name: str, number: int, expected: str, seconds: float, kills: int) -> None:
        """One run, killed and resumed until it is done, at most so many times."""
        path = self.folder / f"{name}-{number}"
        for times in itertools.count():
            begun = (path / "config.json").exists()
            words = ("resume", str(path)) if begun else ("run", *RUNS[name], *SCENARIO, "--out", str(path), "--reuse")
            window = seconds * (0.6 + 0.1 * times)  # a busy machine must come to an end too
            code = self.disturb(words, self.log(name), window, self.tried["kills"] < kills)
            if code == 0:
                break
            if code not in (-signal.SIGKILL, 128 + signal.SIGTERM, -signal.SIGTERM):
                self.lost.append(f"{path}: ended with {code}")
                return
        self.tried["runs"] += 1
        stray = [str(file) for file in path.rglob(".*") if file.name != ".lock"]
        if run_digest(path) != expected or stray or not (path / "report.html").exists():
            self.lost.append(f"{path}: not the same as undisturbed {stray}")
        else:
            shutil.rmtree(path)

    def disturb(self, words: tuple[str, ...], log: Path, seconds: float, kill: bool) -> int:
        """Run the command and, if asked to, kill it at a random moment or place; how it ended."""
        at_place = kill and self.random.random() < 0.4
        place = self.random.choice(list(PLACES))
        faults = f"{place}:{self.random.randint(1, PLACES[place])}:kill" if at_place else ""
        process = start(words, log, faults)
        code = wait(process, self.random.uniform(0, seconds) if kill else 600)
        if code is None:
            polite = self.random.random() < 0.15
            os.kill(process, signal.SIGTERM if polite else signal.SIGKILL)
            code = wait(process, 60)
        if code is None:
            self.lost.append(f"{' '.join(words)}: did not end within a minute of SIGTERM")
            os.kill(process, signal.SIGKILL)
            code = wait(process, 60) or 0
        self.tried["kills"] += code == -signal.SIGKILL
        self.tried["while resuming"] += code == -signal.SIGKILL and words[0] == "resume"
        self.tried["SIGTERM"] += code in (128 + signal.SIGTERM, -signal.SIGTERM)
        return code


def main() -> None:
    """Soak until there were so many kills or so many minutes are over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", default=list(RUNS), choices=list(RUNS))
    asked = parser.parse_args()
    limit = time.monotonic() + 60 * asked.minutes
    folder = Path(tempfile.mkdtemp(prefix="ccfa-soak-"))
    soak = Soak(folder, asked.seed)
    references = {name: soak.undisturbed(name) for name in asked.methods}
    for name, (_, seconds) in references.items():
        print(f"{name}: undisturbed in {seconds:.1f} s", flush=True)
    number = 0
    while soak.tried["kills"] < asked.kills and time.monotonic() < limit:
        name = asked.methods[number % len(asked.methods)]
        soak.disturbed(name, number, *references[name], kills=asked.kills)
        number += 1
        print(f"{name}: {soak.tried['kills']} kills so far, {len(soak.lost)} lost", flush=True)
    print(f"seed {asked.seed}; tried: {', '.join(f'{count} {what}' for what, count in soak.tried.items())}")
    print(f"lost: {len(soak.lost)}")
    for line in soak.lost:
        print(f"  {line}")
    if soak.lost:
        sys.exit(f"The directories are kept in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
