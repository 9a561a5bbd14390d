"""Small real runs of the command line, killed at random moments and resumed until done, against undisturbed ones.

Each process is a fork of this one, which has imported everything already: a start costs milliseconds and not seconds,
so that hundreds of kills fit into minutes. Most kills come at a random time, some at a named place (`failing.py`) so
that short moments such as the writing of a checkpoint are hit too, and some are a SIGTERM instead. Prints what was
tried and what was lost, and exits with 1 if anything was.

    python tests/soak.py --kills 200 --minutes 15
"""

import argparse
import itertools
import os
import random
import shlex
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
from children import started, wait
from digests import run_digest
from dying import left_over
from failing import install

TINY = shlex.split(
    "--scenario 4,3,3 --validation 0.85 --checkpoint-minutes 0 --set backbone=small batch_size=32 epochs=2"
)
RUNS = {
    "podnet": ["--ccfa", *TINY, "balanced_epochs=2", "--memory", "2"],
    "aanet": ["--ccfa", *TINY, "balanced_epochs=1", "learn_blend=true", "blend_lr=0.01", "--memory", "2"],
    "afc": [*TINY, "balanced_epochs=1", "--memory", "2"],
    "bic": ["--ccfa", *TINY, "correction_epochs=2", "--memory", "2"],
    "icarl": [*TINY, "--memory", "2"],
    "gdumb": [*TINY, "memory_epochs=2", "--memory", "2"],
    "il2a": TINY,
}
PLACES = {"step": 8, "phase": 2, "select": 1, "evaluate": 1, "commit": 4, "after_commit": 4, "write": 20}
PLACES |= {"append": 4, "report": 1, "pause": 12}
TERMINATED = (128 + signal.SIGTERM, -signal.SIGTERM)


def start(words: list[str], log: Path, faults: str = "") -> int:
    """Start the command line in a child and return its process number."""

    def main() -> None:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        install(faults)
        sys.argv = ["ccfa", *words]
        ccfa.cli.main()

    return started(main)


def undisturbed(name: str, folder: Path) -> tuple[str, float]:
    """Return the digest of a run that nobody stops, and how long it takes."""
    path, began = folder / f"{name}-undisturbed", time.monotonic()
    code = wait(start(["run", name, *RUNS[name], "--out", str(path)], folder / f"{name}.log"), 600)
    if code != 0:
        sys.exit(f"The undisturbed run of {name} ended with {code}: see {folder / name}.log")
    return run_digest(path), time.monotonic() - began


def disturb(words: list[str], log: Path, seconds: float, source: random.Random) -> int:
    """Run the command, kill it at a random moment or place, and return how it ended."""
    place = source.choice(list(PLACES))
    faults = f"{place}:{source.randint(1, PLACES[place])}:kill" if source.random() < 0.4 else ""
    process = start(words, log, faults)
    ends = time.monotonic() + source.uniform(0, seconds)
    while time.monotonic() < ends:
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return wait(process)
        time.sleep(0.002)
    os.kill(process, signal.SIGTERM if source.random() < 0.15 else signal.SIGKILL)
    return wait(process, 60)


def main() -> None:
    """Soak until there were so many kills or so many minutes are over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", default=list(RUNS), choices=list(RUNS))
    given = parser.parse_args()
    limit, source = time.monotonic() + 60 * given.minutes, random.Random(given.seed)
    folder = Path(tempfile.mkdtemp(prefix="ccfa-soak-"))
    references = {name: undisturbed(name, folder) for name in given.methods}
    tried: Counter[str] = Counter()
    lost: list[str] = []
    for number, name in enumerate(itertools.cycle(given.methods)):
        if tried["kills"] >= given.kills or time.monotonic() >= limit:
            break
        path, log, (expected, seconds) = folder / f"{name}-{number}", folder / f"{name}.log", references[name]
        for times in itertools.count():
            resumes = (path / "config.json").exists()
            run = ["run", name, *RUNS[name], "--out", str(path), "--reuse"]
            words = ["resume", str(path)] if resumes else run
            if tried["kills"] < given.kills:  # later each time: a busy machine must come to an end too
                code = disturb(words, log, seconds * (0.6 + 0.1 * times), source)
            else:
                code = wait(start(words, log), 600)
            tried["kills"] += code == -signal.SIGKILL
            tried["while resuming"] += code == -signal.SIGKILL and resumes
            tried["SIGTERM"] += code in TERMINATED
            if code not in (-signal.SIGKILL, *TERMINATED):
                break
        tried["runs"] += 1
        if code != 0 or run_digest(path) != expected or left_over(path) or not (path / "report.html").exists():
            lost.append(f"{path}: ended with {code}, left {left_over(path)}")
        else:
            shutil.rmtree(path)
        print(f"{name}: {tried['kills']} kills so far, {len(lost)} lost", flush=True)
    print(f"seed {given.seed}; tried: {', '.join(f'{count} {what}' for what, count in tried.items())}")
    print(f"lost: {len(lost)}", *lost, sep="\n  ")
    if lost:
        sys.exit(f"The directories are kept in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
