"""First stages that runs share: nothing changes but the time, and the key changes with everything that is read."""

import functools
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ccfa
from ccfa.data import ImageSet
from ccfa.errors import ModelError, Notice, Stopped
from ccfa.experiments import Experiment, build_method, first_stage, resolve
from ccfa.experiments.experiment import describe
from ccfa.experiments.first_stage import LAYERS, _code_digest, first_stage_key, learn_first_stage
from ccfa.experiments.running import Stop
from ccfa.files import read_tensors, write_tensors
from ccfa.kernels import kernels_left_out
from ccfa.learning import Learner
from ccfa.learning.acceleration import Acceleration
from ccfa.learning.progress import WAITING
from ccfa.losses import cross_entropy
from ccfa.methods import METHODS, Method, register_method
from commands import contents
from toy_runs import CPU, Silent, toy_resolved, toy_run
from toys import STAGES, tiny, toy_images

PLAIN = Acceleration()
OPTIONS = {"epochs": "1", "balanced_epochs": "1"}
EXPERIMENT = Experiment("podnet", scenario="6,2,2", options=OPTIONS)


def key(experiment=EXPERIMENT, acceleration=PLAIN):
    return first_stage_key(resolve(experiment), acceleration, CPU)


def with_options(**options):
    return replace(EXPERIMENT, options={**OPTIONS, **options})


def results(path):
    return contents(path / "networks"), contents(path / "predictions"), contents(path / "exemplars")


# podnet trains by the paper; afc looks at all images again afterwards; pass drops outputs; bic holds images out; gdumb
# starts from a new network at each stage; acil replaces its head.
@pytest.mark.parametrize("name", ["podnet", "afc", "pass", "bic", "gdumb", "acil"])
def test_a_stored_first_stage_changes_nothing(tmp_path, name):
    resolved, store = toy_resolved(name, epochs=1), tmp_path / "store"
    audiences = {"alone": Silent(), "storing": Silent(), "taking": Silent()}
    for run, audience in audiences.items():
        toy_run(tmp_path / run, resolved, audience, first_stages=None if run == "alone" else store)
        assert results(tmp_path / run) == results(tmp_path / "alone")
    assert [file.stem for file in store.iterdir()] == [first_stage_key(resolved, PLAIN, CPU)]
    assert audiences["storing"].num_batches == audiences["alone"].num_batches > audiences["taking"].num_batches


CHANGES = {
    "seed": replace(EXPERIMENT, seed=1),
    "batch seed": replace(EXPERIMENT, batch_seed=1),
    "order": replace(EXPERIMENT, order="seed-7"),
    "initial size": replace(EXPERIMENT, scenario="5,3,2"),
    "epochs": with_options(epochs="2"),
    "backbone": with_options(backbone="resnet32-podnet"),
    "head": with_options(num_proxies="3"),
    "formula": with_options(nca="paper"),
    "mixing": replace(EXPERIMENT, mix="mixup"),
    "validation": replace(EXPERIMENT, validation=0.2),
    "method": Experiment("ucir", scenario="6,2,2", options={"epochs": "1"}),
}


def test_whatever_the_first_stage_reads_changes_its_key():
    keys = {name: key(experiment) for name, experiment in CHANGES.items()} | {"none": key()}
    for acceleration in (Acceleration("tf32"), Acceleration(compile=True), Acceleration(graph=True)):
        keys[str(acceleration)] = key(acceleration=acceleration)
    resolved = resolve(EXPERIMENT)
    keys["device"] = first_stage_key(resolved, PLAIN, torch.device("cuda"))
    with kernels_left_out():
        keys["kernels"] = key()
    pixels = resolved.train.images.clone()
    pixels[0, 0, 0, 0] ^= 1
    changed = ImageSet(pixels, resolved.train.labels, resolved.train.class_names)
    keys["pixel"] = first_stage_key(resolved._replace(train=changed), PLAIN, CPU)
    assert len(set(keys.values())) == len(keys), keys


LATER = {
    "ccfa": replace(EXPERIMENT, ccfa=True),
    "memory": replace(EXPERIMENT, memory=2),
    "later stages": replace(EXPERIMENT, scenario="6,1,1,2"),
    "later options": with_options(lambda_flat="3", balanced_epochs="7"),
    "method": replace(EXPERIMENT, method="afc"),
}


@pytest.fixture
def smoothed():
    """A method whose criterion is an inner function, which holds an option."""

    def method(method: Method, *, smoothing: float = 0.0) -> Method:
        def criterion(logits, labels):
            return cross_entropy(logits / (1 + smoothing), labels)

        return replace(method, criterion=criterion)

    register_method("smoothed", METHODS["finetune"])(method)
    yield Experiment("smoothed", scenario="6,2,2")
    del METHODS._added["smoothed"]


def test_options_of_parts_that_only_have_a_name_change_the_key(smoothed):
    keys = [key(replace(smoothed, options=options)) for options in ({}, {"smoothing": "1"}, {"smoothing": "2"})]
    assert len(set(keys)) == 3
    with_ccfa = replace(smoothed, ccfa=True, options={"ccfa.count": "3"})
    assert key(with_ccfa) == keys[0]


@dataclass
class Hidden:
    factor: float = field(default=1.0, repr=False)


@pytest.mark.parametrize(
    "part", [lambda: 0, functools.wraps(cross_entropy)(lambda: 0), Hidden(), Hidden().__eq__, object()]
)
def test_parts_that_hold_more_than_is_described(part):
    known_by_name = []
    describe(partial(print, [part]), known_by_name)
    assert known_by_name == [part]


@pytest.mark.parametrize("name", METHODS)
def test_our_own_parts_are_described_in_full(name):
    resolved = resolve(Experiment(name, scenario="6,2,2"))
    other = resolved._replace(experiment=replace(resolved.experiment, options={"another": "1"}))
    assert first_stage_key(resolved, PLAIN, CPU) == first_stage_key(other, PLAIN, CPU)


def test_what_only_later_stages_read_does_not_change_the_key():
    assert {name: key(experiment) for name, experiment in LATER.items()} == dict.fromkeys(LATER, key())


@pytest.mark.parametrize("names", [("podnet", "ranpac"), ("acil", "podnet")])
def test_a_read_out_and_podnet_share_a_first_stage(tmp_path, names):
    alone, audience, store = Silent(), Silent(), tmp_path / "store"
    runs = [toy_resolved(name, epochs=1, **({} if name == "podnet" else {"first": "podnet"})) for name in names]
    toy_run(tmp_path / "first", runs[0], Silent(), first_stages=store)
    toy_run(tmp_path / "second", runs[1], audience, first_stages=store)
    toy_run(tmp_path / "alone", runs[1], alone)
    assert len(list(store.iterdir())) == 1
    assert audience.num_batches == alone.num_batches - 2  # 24 images, 16 in a batch
    assert results(tmp_path / "second") == results(tmp_path / "alone")
    first, second = (
        read_tensors(tmp_path / run / "networks" / "stage-000.safetensors")[0] for run in ("first", "second")
    )
    backbone = [name for name in first if name.startswith("backbone.")]
    assert all(torch.equal(first[name], second[name]) for name in backbone)


READ_OUTS = {
    "podnet's": (Experiment("ranpac", options={"first": "podnet"}), Experiment("podnet")),
    "linear": (Experiment("ranpac"), Experiment("acil", options={"ridge": "5", "projection": "20"})),
    "mixed": (Experiment("ranpac", mix="mixup", options={"first": "podnet"}), Experiment("podnet", mix="mixup")),
}


@pytest.mark.parametrize("pair", READ_OUTS.values(), ids=READ_OUTS)
def test_methods_with_one_first_stage_have_one_key(pair):
    assert key(pair[0]) == key(pair[1])
    assert len({key(one) for pair in READ_OUTS.values() for one in pair}) == len(READ_OUTS)


def test_podnet_s_first_stage_has_podnet_s_values(tmp_path):
    for data in ("imagenet100", "digits", str(tmp_path)):
        own, podnets = build_method("ranpac", data, first="podnet"), build_method("podnet", data)
        assert own.phases(STAGES[0]) == podnets.phases(STAGES[0])
    assert build_method("ranpac", "imagenet100", first="podnet", lr=0.3).phases(STAGES[0])[0].lr == 0.3


@pytest.mark.parametrize(
    ("method", "options", "is_read"),
    [("bic", {}, True), ("gdumb", {"pretrain": "false"}, True), ("gdumb", {"pretrain": "true"}, False)],
)
def test_a_memory_changes_the_key_where_the_first_stage_reads_it(method, options, is_read):
    experiment = Experiment(method, scenario="6,2,2", options=options)
    assert (key(experiment) != key(replace(experiment, memory=2))) == is_read


@pytest.mark.parametrize(
    ("file", "is_read"), [("learning/step.py", True), ("kernels/resnet.cu", True), ("reporting/page.py", False)]
)
def test_only_code_that_trains_changes_the_key(tmp_path, file, is_read):
    package = Path(ccfa.__file__).parent
    assert all((package / f"{layer}.py").is_file() != (package / layer / "__init__.py").is_file() for layer in LAYERS)
    for name in ("one", "two"):
        (tmp_path / name / file).parent.mkdir(parents=True)
        (tmp_path / name / file).write_text(name)
    assert (_code_digest(tmp_path / "one") != _code_digest(tmp_path / "two")) == is_read


@pytest.mark.parametrize("facts", [{"first_stage": "other"}, None])
def test_a_file_that_is_damaged_or_of_another_stage_is_named(tmp_path, facts):
    path, learner = tmp_path / "abc.safetensors", Learner(tiny("podnet", epochs=1), toy_images())
    write_tensors(path, learner.network.state_dict(), facts) if facts else path.write_bytes(b"x" * 99)
    with pytest.raises(ModelError, match=r"abc\.safetensors.*Remove it"):
        learn_first_stage(learner, STAGES[0], path)


class Sleeper(Silent):
    """Makes the training of the first stage take half a second, and can then stop all runs."""

    def __init__(self, stop=None):
        super().__init__()
        self.stop = stop
        self.training = threading.Event()

    def on_batch(self, progress, losses):
        super().on_batch(progress, losses)
        if self.num_batches == 1:
            self.training.set()
            time.sleep(0.5)
            if self.stop:
                self.stop.code = 130


def one_waits_for_the_other(tmp_path, stop=None):
    """Run two experiments with one first stage, the second started while the first trains it."""
    ended, audiences = [], (Sleeper(stop), Silent())

    def go(name, audience):
        try:
            toy_run(tmp_path / name, audience=audience, first_stages=tmp_path / "store", stop=stop)
        except Stopped as stopped:
            ended.append(stopped.code)

    threads = [threading.Thread(target=go, args=pair) for pair in zip(("first", "second"), audiences, strict=True)]
    threads[0].start()
    assert audiences[0].training.wait(timeout=20)
    threads[1].start()
    for thread in threads:
        thread.join(timeout=60)
    return *audiences, ended


def test_of_two_threads_one_trains_and_both_count_its_time(tmp_path):
    first, second, ended = one_waits_for_the_other(tmp_path)
    assert ended == []
    assert (WAITING in first.activities, WAITING in second.activities) == (False, True)
    assert second.num_batches == first.num_batches - 4
    assert results(tmp_path / "first") == results(tmp_path / "second")
    seconds = [
        float((tmp_path / name / "stages.csv").read_text().splitlines()[1].split(",")[-1])
        for name in ("first", "second")
    ]
    trained = read_tensors(next((tmp_path / "store").iterdir()))[1]["seconds"]
    assert 0.5 <= trained <= min(seconds)


def test_training_counts_wherever_it_is_used_and_waiting_nowhere(tmp_path, monkeypatch):
    path, clock, left_out = tmp_path / "abc.safetensors", iter(range(0, 1000, 5)), []
    monkeypatch.setattr(first_stage, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    for spent in (42.0, 7.0):  # the second run had trained a part of it before it was stopped
        learner = Learner(tiny("podnet", epochs=1), toy_images())
        learn_first_stage(learner, STAGES[0], path, spent=lambda own=spent: own, leave_out=left_out.append)
    assert left_out == [5, 5, 7 - 42]  # waited, waited, and what remains counted is 42


def test_a_run_that_waited_does_not_begin_when_all_were_stopped(tmp_path):
    first, second, ended = one_waits_for_the_other(tmp_path, Stop())
    assert ended == [130, 130]
    assert (first.num_batches, second.num_batches) == (1, 0)
    assert not list((tmp_path / "second" / "checkpoints").iterdir())


def test_a_stored_first_stage_wins_over_one_that_was_interrupted(tmp_path):
    stop, store = Stop(), tmp_path / "store"
    with pytest.raises(Stopped):
        toy_run(tmp_path / "run", audience=Sleeper(stop), first_stages=store, stop=stop)
    whole, rest = Silent(), Silent()
    toy_run(tmp_path / "other", audience=whole, first_stages=store)
    toy_run(tmp_path / "run", audience=rest, first_stages=store)
    assert rest.num_batches == whole.num_batches - 4
    assert results(tmp_path / "run") == results(tmp_path / "other")


def test_a_first_stage_that_cannot_be_stored_is_noted(tmp_path):
    (tmp_path / "store").write_text("in the way")
    learner = Learner(tiny("podnet", epochs=1), toy_images())
    with pytest.warns(Notice, match="store"):
        learn_first_stage(learner, STAGES[0], tmp_path / "store" / "abc.safetensors")
    assert len(learner.memory) == 6
