import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
from contextlib import suppress
from dataclasses import asdict, replace
from typing import get_args

import pytest
import torch
import tyro

import ccfa
from ccfa import cli
from ccfa.experiments import Run
from ccfa.experiments.sweep import experiments_of
from ccfa.methods import METHODS
from ccfa.options import schema
from commands import ASCII, COMMAND, command, contents, environment
from zoo import good_files, write_class, write_noise

SHORT = ("--set", "epochs=1", "balanced_epochs=1")
PODNET = ("run", "podnet", "--scenario", "5,5")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run directory and what the command printed while making it."""
    folder = tmp_path_factory.mktemp("finished")
    return folder / "run", command(*PODNET, *SHORT, "--ccfa", "--out", "run", cwd=folder)


def test_a_run_prints_plain_lines_and_where_its_directory_is(finished):
    path, result = finished
    assert (result.returncode, result.stderr) == (0, b"")
    assert not set(b"\x1b\r") & set(result.stdout)
    lines = result.stdout.decode().splitlines()
    assert lines[0].startswith("podnet + CCFA · digits · 10 classes in 2 stages (5 + 5) on ")
    phases = {tuple(line.split(" · ")[:2]) for line in lines if " · epoch 1/1 · " in line}  # a slow one has more lines
    assert phases == {("stage 1/2", "main"), ("stage 2/2", "main"), ("stage 2/2", "balanced")}
    assert [line[:9] for line in lines if " classes  accuracy " in line] == ["stage 1/2", "stage 2/2"]
    assert lines[-2:] == ["Run directory: run", "Report: run/report.html"]
    assert Run(path).report().finished


USAGE = [  # what the experiment itself refuses is in test_experiment.py
    (["run", "pdnet"], "Did you mean 'podnet'"),
    (["run", "podnet", "--set", "epochs"], "NAME=VALUE"),
    (["run", "podnet", "--set", "epochs=1", "--set", "epochs=2"], "epochs is given twice"),
    (["run", "podnet", "--set", "epochs=x", "lr=-1"], "a whole number.*\n.*at least 0"),
    (["run", "podnet", "--epochs", "1", "--set", "epochs=2"], "epochs is given twice: by itself .--epochs"),
    (["sweep", "podnet", "--batch-size", "1", "--set", "batch_size=2"], "by itself .--batch-size"),
    (["sweep", "podnet", "--lr", "1", "--axis", "lr=1,2"], "lr is given twice"),
    (["run", "podnet", "--epochs", "three"], "three"),
    (["run", "podnet", "--epochs", "-1"], "at least 0"),
    (["run", "podnet", "--head-epochs", "3"], "--set head_epochs=3"),
    (["run", "podnet", "--milestones", "0.5", "0.7", "--seed", "1"], "--set milestones=0.5,0.7[. ]"),
    (["run", "podnet", "--ccfa", "--ccfa.count=3", "--step-size", "1"], "--set ccfa.count=3 ccfa.step_size=1"),
    (["sweep", "wa", "--no-align", "--nonnegative"], "--set align=false nonnegative=true"),
    (["learn", "model", "photos", "--projection", "9"], "--set projection=9"),
    (["run", "podnet", "--wandb"], "does not take --wandb. Did you mean --track wandb"),
    (["run", "podnet", "--learning-rate", "1"], "Did you mean --lr"),
    (["run", "podnet", "--buffer_size=9"], "Did you mean --memory"),
    (["run", "podnet", "--gpu"], "Did you mean --device cuda"),
    (["run", "podnet", "--model", "resnet18"], "Did you mean --backbone"),
    (["run", "podnet", "--optimizer", "adam"], "does not take --optimizer. See"),
    (["run", "podnet", "--threads", "2"], "does not take --threads. See"),
    (["run", "podnet", "--seed", "x"], "ccfa run --help"),
    (["train", "podnet"], "Did you mean 'run'"),
    (["test", "model", "photos"], "Did you mean 'evaluate'"),
    (["run", "PDNet"], "Did you mean 'podnet'"),
    (["run", "podnet", "--data", "CIFAR10"], "Did you mean 'cifar100'"),
    (["run", "podnet", "--order", "order.txt"], "order.txt"),
    (["run", "podnet", "--mix", "cutmx"], "cutmix"),
    (["run", "podnet", "--device", "gpu"], "auto, cpu, cuda"),
    (["run", "podnet", "--memry", "3"], "Did you mean --memory"),
    (["run", "podnet", "--epoch=3"], "Did you mean --epochs"),
    (["run", "podnet", "--no_compil"], "Did you mean --no-compile"),
    (["learn", "--dryrun", "model", "photos"], "Did you mean --dry-run"),
    (["export", "model", "--formt", "torch"], "Did you mean --format"),
    (["model", "run", "model", "--out", "x"], "does not take --out. See"),
    (["undo", "model", "extra"], "does not take extra"),
    (["run", "mine"], "--plugin"),
    (["runn", "podnet"], "Did you mean 'run'"),
    (["run", "podnet", "--memory", "many"], "many"),
    (["run", "podnet", "--plugin", "none.py"], "none.py"),
    (["run"], "(?i)required"),
    (["runn"], "run, "),
    ([], "subcommand"),
    (["list", "method"], "Did you mean 'methods'"),
    (["compare"], "at least one run directory"),
    (["sweep", "podnet", "--axis", "memory=1,,2"], "empty value"),
    (["sweep", "podnet", "--axis", "memory=1", "--axis", "memory=2"], "memory is given twice"),
    (["sweep", "podnet", "--axis", "memry=1"], "Did you mean 'memory'"),
    (["sweep", "podnet", "--axis", "memory=1,500"], "--memory 130 or less"),
    (["sweep", "podnet", "--memory", "4", "--memory-total", "40"], "not both"),
    (["run", "podnet", "--mix=cutmi"], "'cutmix'"),
    (["run", "podnet", "--precision", "bf17"], "'bf16'"),
]


@pytest.mark.parametrize(("arguments", "said"), USAGE, ids=[" ".join(arguments)[:50] for arguments, _ in USAGE])
def test_mistakes_are_explained_and_leave_nothing_behind(call, tmp_path, arguments, said):
    code, _, err = call(*arguments)
    assert code == 2
    assert re.search(said, err)
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_words_after_two_dashes_and_help_are_left_alone(call):
    assert "m is not a model" in call("predict", "m", "--", "--format", "x.jpg")[2]
    assert "usage" in call("predict", "--help", "--format", "x")[1]


@pytest.mark.parametrize("verb", get_args(cli.Verb))
@pytest.mark.filterwarnings("ignore:get_parser")
def test_flags_are_those_of_the_parser(verb):
    """A flag that is parsed but not known here would be refused."""
    parser = tyro.extras.get_parser(verb, config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes))
    known = {flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")}
    assert {"--help", *dict(cli._flags(verb))} == known


def test_missing_data_is_code_3(call, tmp_path):
    code, _, err = call("run", "podnet", "--data", tmp_path / "photos")
    assert code == 3
    assert "does not exist" in err
    code, _, err = call("run", "podnet", "--data", "cifar100")
    assert code == 3
    assert "CCFA_DATA" in err


def test_what_is_no_run_is_code_4(call, tmp_path, finished):
    (tmp_path / "other").mkdir()
    for words in (["other"], ["nothing"], [finished[0], "nothing"]):
        code, _, err = call("compare", *words)
        assert code == 4
        assert words[-1] in err
    assert call("compare", finished[0], "other", "--out", "page")[0] == 0, "a glob may catch other folders"


def test_a_finished_run_is_reused_or_refused_and_never_touched(call, finished):
    path, result = finished
    before = contents(path)
    same = (*PODNET, *SHORT, "--ccfa", "--out", path)
    code, out, _ = call(*same, "--reuse")
    assert code == 0
    metrics = [line for line in result.stdout.decode().splitlines() if line.startswith("│")]
    assert [line for line in out.splitlines() if line.startswith("│")] == metrics
    for words, named in [(same, "exists already"), ((*PODNET, "--out", path, "--reuse"), "another experiment")]:
        code, _, err = call(*words)
        assert code == 2
        assert named in err
    assert contents(path) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there_is_code_5(call, tmp_path):
    code, _, err = call("run", "podnet", "--device", "cuda")
    assert code == 5
    assert "--device cpu" in err
    assert list(tmp_path.iterdir()) == []


def test_a_diverging_run_is_code_6_keeps_what_it_has_and_is_not_reused(call, tmp_path):
    arguments = [*PODNET, "--set", "epochs=1", "balanced_epochs=3", "balanced_lr=1e30", "--out", "run"]
    code, _, err = call(*arguments)
    assert code == 6
    assert "stage 2, phase balanced, epoch " in err
    assert "Traceback" not in err
    assert Run(tmp_path / "run").status["state"] == "failed"
    code, out, _ = call("compare", "run")
    assert code == 4
    assert "run is unfinished (1 of 2 stages" in out
    assert call(*arguments, "--reuse")[0] == 6, "continued, and it diverges again"


def test_a_stopped_run_says_so(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, *PODNET, "--set", "epochs=100000", "--out", "run"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell ignores it
    )
    try:
        limit = time.monotonic() + 60
        while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < limit:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    place = rb"Stopped at stage 1, phase main, epoch \d+ of \d+; saved\. Continue with: ccfa resume run\n"
    assert re.fullmatch(place, err)
    assert Run(tmp_path / "run").status["state"] == "interrupted"


def test_a_terminal_shows_a_live_line_and_gets_its_cursor_back(tmp_path):
    words = ("run", "finetune", "--scenario", "5,5", "--set", "epochs=4", "--out", "run")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    terminal = {"stdin": slave, "stdout": slave, "stderr": slave}
    process = subprocess.Popen([*COMMAND, *words], cwd=tmp_path, env=environment(NO_COLOR="1"), **terminal)
    os.close(slave)
    content = b""
    with suppress(OSError):  # how Linux says that the other end has closed
        while chunk := os.read(master, 65536):
            content += chunk
    os.close(master)
    assert process.wait(timeout=30) == 0
    written = content.decode()
    assert re.search(r"stage \d/2 · main · epoch \d/4 · batch \d+/\d+ · loss", written)
    assert re.search(r"stage \d/2 · evaluating", written)
    live = [line for line in re.split(r"\x1b\[\??\w+|[\r\n]", written) if " · batch" in line]
    assert max(map(len, live)) <= 60
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1
    assert "\x1b[2K" in written
    codes = {code for codes in re.findall(r"\x1b\[([\d;]*)m", written) for code in codes.split(";")}
    assert not codes & {str(code) for code in (*range(30, 50), *range(90, 108))}


@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        (["run", "--help"], 0, b"METHOD"),
        (["runn"], 2, b"run"),
        ([*PODNET, "--max-minutes", "0"], 75, b"podnet ? digits ? 10 classes"),
    ],
)
def test_an_ascii_terminal_gets_question_marks(tmp_path, arguments, code, shown):
    result = command(*arguments, cwd=tmp_path, **ASCII)
    assert result.returncode == code
    assert shown in result.stdout + result.stderr
    assert b"Traceback" not in result.stderr


def test_a_reader_that_has_gone_is_no_reason_for_a_traceback(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [*COMMAND, "list", "methods"], cwd=tmp_path, env=environment(), stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert result.returncode == 141
    assert b"Traceback" not in result.stderr


def test_out_may_not_be_a_file_or_below_one(call, tmp_path):
    (tmp_path / "file").write_text("mine")
    for out, expected in (("file", 2), ("file/run", 5)):
        code, _, err = call(*PODNET, *SHORT, "--out", out)
        assert code == expected
        assert out in err
    code, _, err = call(*PODNET, *SHORT, "--out", "file", "--reuse")
    assert code == 5
    assert contents(tmp_path) == {"file": b"mine"}


def test_without_out_the_directory_is_named_after_the_experiment(call, tmp_path):
    code, out, _ = call(*PODNET, *SHORT, "--seed", 3)
    assert code == 0
    name = "digits-5_5-podnet-seed3-balanced_epochs=1-epochs=1"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [name]
    assert out.endswith(f"Run directory: runs/{name}\nReport: runs/{name}/report.html\n")


def test_a_folder_of_photos_is_learned_end_to_end(call, tmp_path):
    photos, names = tmp_path / "photos", ["<b>fly", "ant", "bee", "côté"]
    for name in names:
        write_class(photos / name, {file: content for file, (content, *_) in good_files().items()})
    before = contents(photos)
    words = ("--scenario", "2,2", "--memory", "2", "--image-size", "16", *SHORT, "backbone=small")
    code, out, _ = call("run", "podnet", "--ccfa", "--data", photos, "--out", "run", *words)
    assert code == 0
    assert "4 classes in 2 stages (2 + 2)" in out
    config = Run(tmp_path / "run").read_json("config.json")["resolved"]
    assert config["class_names"] == names
    assert config["num_training_images"] + config["num_test_images"] == len(before)
    assert contents(photos) == before
    (photos / "bee" / "grey.png").write_bytes(before["bee/grey.png"][:60])
    code, _, err = call("run", "podnet", "--data", photos, "--out", "again", *words)
    assert code == 3
    assert str(photos / "bee" / "grey.png") in err
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_on_digits(call, method):
    wanted = {"epochs", "balanced_epochs", "correction_epochs", "boosting_epochs", "compression_epochs"}
    changes = [f"{name}=1" for name in schema(METHODS[method]) if name in wanted]
    code, out, _ = call("run", method, "--scenario", "5,5", "--set", *changes, "--out", "run")
    assert code == 0
    assert "stage 2/2  10 classes" in out


def test_the_version_is_told(call):
    assert call("--version")[:2] == (0, f"ccfa {ccfa.__version__}\n")


def test_settings_may_be_repeated_and_stand_anywhere(call, tmp_path):
    words = ["run", "--set", "epochs=0", "finetune", "--set", "batch_size=8", "--scenario", "10", "--out", "run"]
    assert call(*words)[0] == 0
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["experiment"]["options"] == {"epochs": "0", "batch_size": "8"}


def test_flags_are_the_same_as_settings():
    flags = {"epochs": 3, "batch_size": 8, "lr": 0.25, "backbone": "small"}
    experiment = ccfa.Experiment("podnet", **flags)
    assert experiment == ccfa.Experiment("podnet", options=flags)
    assert experiment.options == {"epochs": "3", "batch_size": "8", "lr": "0.25", "backbone": "small"}
    assert not flags.keys() & asdict(experiment).keys()
    assert replace(experiment, seed=1).options == experiment.options
    grid = ccfa.Grid(("podnet", "ucir"), **flags)
    assert {tuple(one.options.items()) for one in experiments_of(grid)} == {tuple(experiment.options.items())}
    del flags["backbone"]
    assert ccfa.Learning(**flags) == ccfa.Learning(options=flags)


def test_flags_are_stored_as_options(call, tmp_path):
    words = ["run", "FineTune", "--epochs", 0, "--batch-size", 8, "--lr", "0.5", "--data", "Digits", "--scenario", "10"]
    assert call(*words, "--order", "Natural")[0] == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name == "digits-10-natural-finetune-seed0-batch_size=8-epochs=0-lr=0.5"
    stored = json.loads((run / "config.json").read_text())["experiment"]
    assert stored["options"] == {"epochs": "0", "batch_size": "8", "lr": "0.5"}
    assert (stored["method"], stored["data"], stored["order"]) == ("finetune", "digits", "natural")
    same = ["--set", "epochs=0", "batch_size=8", "lr=0.5", "--order", "natural", "--reuse"]
    assert call("run", "finetune", "--scenario", "10", *same)[0] == 0
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_an_order_from_a_file_is_stored_with_the_run(call, tmp_path):
    for seed, name in enumerate(("ant", "bee", "cat, wild")):
        write_noise(tmp_path / "photos" / name, 3, seed)
    (tmp_path / "order.txt").write_text("cat, wild\n\nANT\nbee\n")
    words = ["--data", "photos", "--epochs", 0, "--image-size", 8, "--backbone", "small"]
    assert call("run", "finetune", *words, "--order", "order.txt", "--out", "run")[0] == 0
    (tmp_path / "order.txt").unlink()
    run = Run(tmp_path / "run")
    assert run.experiment.order == "cat, wild;ANT;bee"
    assert run.config["resolved"]["class_names"] == ["cat, wild", "ant", "bee"]
    assert call("run", *run.experiment.arguments(), "--out", "again")[0] == 0
    assert Run(tmp_path / "again").config == run.config
    code, _, err = call("run", "finetune", *words, "--order", "ant,bee,cow")
    assert code == 2
    assert "'cow'" in err


def test_a_sweep_has_canonical_names(call, tmp_path):
    (tmp_path / "order.txt").write_text("\n".join("9876543210"))
    words = ["sweep", "FineTune", "--ccfa", "off", "--epochs", 0, "--scenario", "10", "--seeds", 0, "--out", "out"]
    assert call(*words, "--orders", "NATURAL", "order.txt")[0] == 0
    orders = {json.loads(path.read_text())["experiment"]["order"] for path in (tmp_path / "out").glob("*/config.json")}
    assert orders == {"natural", "9,8,7,6,5,4,3,2,1,0"}


def test_python_runs_the_package(tmp_path):
    words = [COMMAND[0], "-m", "ccfa", "--version"]
    result = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, timeout=60)
    assert result.stdout.decode() == f"ccfa {ccfa.__version__}\n"


def test_every_value_of_an_axis_is_a_line(call, tmp_path):
    words = ["sweep", "replay", "--ccfa", "on", "--axis", "ccfa.count=1,2", "--axis", "scenario=6,4;5,5"]
    words += ["--set", "epochs=1", "--mix", "cutmix", "--memory-total", "20", "--batch-seed", "3"]
    code, _, err = call(*words, "--seeds", "0", "--out", "out")
    assert (code, err) == (0, "")
    for scenario in ("B6-inc4", "B0-inc5"):
        lines = (tmp_path / "out" / "comparison" / scenario / "table.md").read_text().splitlines()
        rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in lines if line.startswith("| replay")]
        assert rows == [[f"replay + cutmix + CCFA, ccfa.count={count}", "1"] for count in (1, 2)]
    configs = [json.loads(path.read_text())["experiment"] for path in (tmp_path / "out").glob("*/config.json")]
    assert len(configs) == 4
    assert {(config["mix"], config["memory_total"], config["batch_seed"]) for config in configs} == {("cutmix", 20, 3)}


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (MemoryError(), 5, "Out of memory"),
        (OSError(36, "File name too long", "x"), 5, "x: File name too long"),
        (ZeroDivisionError("a bug"), 1, "ZeroDivisionError: a bug"),
    ],
)
def test_what_nobody_foresaw_is_one_message(call, monkeypatch, error, code, told, tmp_path):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(cli.List, "__call__", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found, _, err = call("list", "methods")
    assert (found, "Traceback" in err) == (code, False)
    assert told in err
    if code == 1:
        (kept,) = tmp_path.glob("ccfa-error-*.txt")
        assert "ZeroDivisionError" in kept.read_text()
        assert str(kept) in err
