import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ccfa
from ccfa.data import ImageSet
from ccfa.errors import ModelError, Notice, ResourceError, Stopped
from ccfa.experiments import Experiment, resolve
from ccfa.experiments.first_stage import LAYERS, FirstStages, _code_digest, first_stage_key
from ccfa.experiments.stopping import Stop
from ccfa.learning import Learner
from ccfa.learning.acceleration import Acceleration
from digests import run_digest
from toy_runs import Silent, toy_run
from toys import STAGES, tiny, toy_images

CPU = torch.device("cpu")
PLAIN = Acceleration()
SHORT = {"epochs": "1", "balanced_epochs": "1"}
EXPERIMENT = Experiment("podnet", scenario="6,2,2", options=SHORT)


class Audience:
    """Keeps which stages had an epoch."""

    def __init__(self):
        self.trained = set()

    def on_batch(self, progress, losses):
        pass

    def on_epoch(self, progress, losses, lr, seconds):
        self.trained.add(progress.stage.index)

    def on_stage(self, stage, result):
        pass


def key(experiment=EXPERIMENT, acceleration=PLAIN):
    return first_stage_key(resolve(experiment), acceleration, CPU)


def with_options(**options):
    return replace(EXPERIMENT, options={**SHORT, **options})


def run_into(path, experiment, first_stages=None):
    resolved, audience = resolve(experiment), Audience()
    report = toy_run(path, resolved, audience, first_stages=first_stages)
    return report, audience.trained


def weights(path):
    return [file.read_bytes() for file in sorted((path / "networks").iterdir())]


@pytest.mark.parametrize(
    "experiment",
    [
        replace(EXPERIMENT, ccfa=True),
        Experiment("afc", scenario="6,2,2", options=SHORT),  # looks at all images once more after training
        Experiment("pass", scenario="6,2,2", options={"epochs": "1"}),  # drops outputs after training
        Experiment("bic", scenario="6,2,2", options={"epochs": "1", "correction_epochs": "1"}),  # holds images out
        Experiment("gdumb", scenario="6,2,2", options={"epochs": "1"}),  # starts from a new network at each stage
    ],
    ids=lambda experiment: experiment.method,
)
def test_a_first_stage_from_the_store_changes_nothing(tmp_path, experiment):
    store = FirstStages(tmp_path / "store")
    alone, trained = run_into(tmp_path / "alone", experiment)
    assert trained == {0, 1, 2}
    storing, trained = run_into(tmp_path / "storing", experiment, store)
    assert trained == {0, 1, 2}
    assert [file.name for file in store.folder.iterdir()] == [f"{key(experiment)}.safetensors"]
    taking, trained = run_into(tmp_path / "taking", experiment, store)
    assert trained == {1, 2}
    for report, name in ((storing, "storing"), (taking, "taking")):
        assert report.metrics == alone.metrics
        assert report.rules == alone.rules
        assert report.accuracy_matrix == alone.accuracy_matrix
        assert weights(tmp_path / name) == weights(tmp_path / "alone")


def test_another_method_takes_the_same_first_stage(tmp_path):
    store = FirstStages(tmp_path / "store")
    run_into(tmp_path / "podnet", EXPERIMENT, store)
    afc = replace(EXPERIMENT, method="afc", ccfa=True)
    taking, trained = run_into(tmp_path / "taking", afc, store)
    assert trained == {1, 2}
    alone, _ = run_into(tmp_path / "alone", afc)
    assert taking.metrics == alone.metrics
    assert weights(tmp_path / "taking") == weights(tmp_path / "alone")


CHANGES = {
    "seed": replace(EXPERIMENT, seed=1),
    "batch seed": replace(EXPERIMENT, batch_seed=1),
    "order": replace(EXPERIMENT, order="seed-7"),
    "initial size": replace(EXPERIMENT, scenario="5,3,2"),
    "rate": with_options(lr="0.05"),
    "epochs": with_options(epochs="2"),
    "batch size": with_options(batch_size="32"),
    "backbone": with_options(backbone="resnet32-podnet"),
    "proxies": with_options(num_proxies="3"),
    "formula": with_options(nca="paper"),
    "mixing": replace(EXPERIMENT, mix="mixup"),
    "another mixing": replace(EXPERIMENT, mix="cutmix"),
    "validation": replace(EXPERIMENT, validation=0.2),
    "method": Experiment("ucir", scenario="6,2,2", options={"epochs": "1"}),
}


def test_whatever_the_first_stage_reads_changes_its_key():
    keys = {name: key(experiment) for name, experiment in CHANGES.items()} | {"none": key()}
    keys |= {
        f"{acceleration}": key(acceleration=acceleration)
        for acceleration in (Acceleration("tf32"), Acceleration(compile=True), Acceleration(graph=True))
    }
    keys["device"] = first_stage_key(resolve(EXPERIMENT), PLAIN, torch.device("cuda"))
    assert len(set(keys.values())) == len(keys), keys


@pytest.mark.parametrize(
    "experiment",
    [
        EXPERIMENT,
        replace(EXPERIMENT, ccfa=True),
        replace(EXPERIMENT, memory=2),
        replace(EXPERIMENT, memory_total=30),
        replace(EXPERIMENT, scenario="6,1,1,2"),
        with_options(lambda_flat="3", balanced_epochs="7"),
        replace(EXPERIMENT, method="afc"),
    ],
    ids=["nothing", "ccfa", "memory", "total memory", "later stages", "later options", "afc"],
)
def test_what_only_later_stages_read_does_not_change_the_key(experiment):
    assert key(experiment) == key()


@pytest.mark.parametrize(
    ("method", "options", "is_read"),
    [("bic", {}, True), ("gdumb", {"pretrain": "false"}, True), ("gdumb", {"pretrain": "true"}, False)],
)
def test_a_memory_changes_the_key_where_the_first_stage_reads_it(method, options, is_read):
    experiment = Experiment(method, scenario="6,2,2", options=options)
    assert (key(experiment) != key(replace(experiment, memory=2))) == is_read


def test_a_key_needs_no_image_once_the_data_is_known(monkeypatch):
    resolved = resolve(EXPERIMENT)
    assert resolved.config["resolved"]["fingerprints"]["train"] == resolved.train.fingerprint
    monkeypatch.setattr(resolved.train, "images", None)
    assert first_stage_key(resolved, PLAIN, CPU) == key()


def test_other_pixels_are_another_key():
    resolved = resolve(EXPERIMENT)
    pixels = resolved.train.images.clone()
    pixels[0, 0, 0, 0] ^= 1
    changed = ImageSet(pixels, resolved.train.labels, resolved.train.class_names)
    assert first_stage_key(resolved._replace(train=changed), PLAIN, CPU) != key()


@pytest.mark.parametrize(
    ("file", "is_read"),
    [("learning/step.py", True), ("data/digits.py", True), ("cli.py", False), ("reporting/page.py", False)],
)
def test_only_code_that_trains_changes_the_key(tmp_path, file, is_read):
    digests = []
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        place = tmp_path / name / file
        place.parent.mkdir(parents=True)
        place.write_text(text)
        digests.append(_code_digest(tmp_path / name))
    assert digests[0] == digests[1]
    assert (digests[1] != digests[2]) == is_read


def test_all_layers_that_train_are_there():
    package = Path(ccfa.__file__).parent
    assert all((package / layer / "__init__.py").is_file() for layer in LAYERS)


@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:-9], lambda content: b"x" * 99])
def test_a_damaged_file_is_named(tmp_path, damage):
    store = FirstStages(tmp_path)
    learner = Learner(tiny("podnet", epochs=1), toy_images())
    store.store("abc", learner.network)
    assert store.load("abc").keys() == learner.network.state_dict().keys()
    store.path("abc").write_bytes(damage(store.path("abc").read_bytes()))
    with pytest.raises(ModelError, match=r"abc\.safetensors.*Remove it"):
        store.learn(learner, STAGES[0], "abc")


def test_of_two_threads_with_one_key_one_trains(tmp_path, monkeypatch):
    store, trained = FirstStages(tmp_path), []
    both_wait = threading.Barrier(2)
    optimise = Learner.optimise

    def counted(learner):
        trained.append(learner)
        optimise(learner)

    def learn(learner):
        both_wait.wait(timeout=60)
        store.learn(learner, STAGES[0], "shared")

    monkeypatch.setattr(Learner, "optimise", counted)
    learners = [Learner(tiny("podnet", epochs=1), toy_images()) for _ in range(2)]
    threads = [threading.Thread(target=learn, args=(learner,)) for learner in learners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(trained) == 1
    first, second = (learner.network.state_dict() for learner in learners)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [len(learner.memory) for learner in learners] == [6, 6]


class Sleeper(Silent):
    """Makes the training of the first stage take a second, and can then ask all to stop."""

    def __init__(self, stop=None):
        super().__init__()
        self.stop = stop
        self.at_work = threading.Event()

    def on_batch(self, progress, losses):
        super().on_batch(progress, losses)
        if self.num_batches == 1:
            self.at_work.set()
            time.sleep(1)
            if self.stop:
                self.stop.code = 130


def one_waits_for_the_other(tmp_path, stop=None):
    """Two runs that share a first stage, the second started while the first trains it; who watched them."""
    store, ended = FirstStages(tmp_path / "store"), []
    watching = Sleeper(stop), Silent()

    def go(name, audience):
        try:
            toy_run(tmp_path / name, audience=audience, first_stages=store, stop=stop)
        except Stopped as stopped:
            ended.append(stopped)

    threads = [threading.Thread(target=go, args=pair) for pair in zip(("first", "second"), watching, strict=True)]
    threads[0].start()
    assert watching[0].at_work.wait(timeout=20)
    threads[1].start()
    for thread in threads:
        thread.join(timeout=60)
    return watching, ended


def test_the_time_spent_waiting_for_another_run_is_not_the_stage_s(tmp_path):
    (first, second), ended = one_waits_for_the_other(tmp_path)
    assert ended == []
    assert second.num_batches < first.num_batches
    seconds = [
        float((tmp_path / name / "stages.csv").read_text().splitlines()[1].split(",")[-1])
        for name in ("first", "second")
    ]
    assert seconds[0] > 1
    assert seconds[1] < 0.8


def test_a_run_that_waited_does_not_begin_when_all_were_stopped(tmp_path):
    (first, second), ended = one_waits_for_the_other(tmp_path, Stop())
    assert [stopped.code for stopped in ended] == [130, 130]
    assert (first.num_batches, second.num_batches) == (1, 0)
    assert not list((tmp_path / "second" / "checkpoints").iterdir())
    audience, other = Silent(), Silent()
    toy_run(tmp_path / "first", audience=audience, first_stages=FirstStages(tmp_path / "store"))
    toy_run(tmp_path / "second", audience=other, first_stages=FirstStages(tmp_path / "store"))
    assert other.num_batches == audience.num_batches - 3  # of the first stage's four


def test_a_stored_first_stage_wins_over_one_that_was_interrupted(tmp_path):
    stop = Stop()
    with pytest.raises(Stopped):
        toy_run(tmp_path / "run", audience=Sleeper(stop), first_stages=FirstStages(tmp_path / "store"), stop=stop)
    whole, rest = Silent(), Silent()
    toy_run(tmp_path / "other", audience=whole, first_stages=FirstStages(tmp_path / "store"))
    toy_run(tmp_path / "run", audience=rest, first_stages=FirstStages(tmp_path / "store"))
    assert rest.num_batches == whole.num_batches - 4
    toy_run(tmp_path / "third", first_stages=FirstStages(tmp_path / "store"))
    assert run_digest(tmp_path / "run") == run_digest(tmp_path / "third")


def test_a_folder_that_cannot_be_is_refused_before_anything_is_trained(tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ResourceError, match=r"Could not create .*Not a directory"):
            FirstStages(place)
    FirstStages(tmp_path / "new" / "place")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_first_stage_that_cannot_be_stored_costs_a_notice_and_not_the_run(tmp_path, monkeypatch):
    def full(folder):
        raise ResourceError("The disk is full.")

    monkeypatch.setattr("ccfa.experiments.first_stage.make_folder", full)
    with pytest.warns(Notice, match="disk is full"):
        assert toy_run(tmp_path / "run", first_stages=tmp_path / "store").finished
