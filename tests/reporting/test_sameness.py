import pytest

from ccfa.augmentation import CCFA, MIXES
from ccfa.experiments.building import experiment_method
from ccfa.experiments.experiment import Experiment
from ccfa.experiments.options import describe, schema
from ccfa.methods import METHODS
from ccfa.reporting.sameness import hashed, identity, names, without_ccfa
from comparisons import entry


def described(method, ccfa=False, mix=None, **options):
    return describe(experiment_method(Experiment(method, ccfa=ccfa, mix=mix, data="cifar100", options=options)))


TEXTS = {int: ("3", "5"), float: ("0.375", "0.625"), bool: ("true", "false")}
# Options without effect unless another one is set.
NEEDED = {"margin": {"nca": "paper"}, "blend_lr": {"learn_blend": "true"}, "balanced_lr": {"balanced_epochs": "2"}}


@pytest.mark.parametrize("method", METHODS)
def test_every_number_that_can_be_set_shows_in_the_resolved_method(method):
    """Runs are told apart by the resolved method alone, so nothing that is asked for may be hidden there."""
    known = schema(METHODS[method])
    numbers = {name: TEXTS[kind] for name, kind in known.items() if kind in TEXTS}
    assert {"epochs", "lr"} <= numbers.keys()
    for name, texts in numbers.items():
        needed = {option: text for option, text in NEEDED.get(name, {}).items() if option in known}
        first, second = (described(method, **needed, **{name: text}) for text in texts)
        assert first != second, f"{method}.{name} is hidden"


@pytest.mark.parametrize(("plug_in", "kind"), [("ccfa", CCFA), *(("mix", MIXES[name]) for name in list(MIXES)[:1])])
def test_every_number_of_a_plug_in_shows_too(plug_in, kind):
    chosen = {"ccfa": True} if plug_in == "ccfa" else {"mix": next(iter(MIXES))}
    for name, sort in schema(kind).items():
        texts = TEXTS.get(sort, ())
        changed = [described("podnet", **chosen, **{f"{plug_in}.{name}": text}) for text in texts]
        assert not changed or changed[0] != changed[1], f"{plug_in}.{name} is hidden"


def test_order_and_seeds_are_no_part_of_an_experiment():
    other = entry("b", seed=4, batch_seed=5, order=list(range(10))[::-1])
    assert hashed(identity(entry("a"))) == hashed(identity(other))
    assert entry("a").key != other.key
    assert entry("a", seed=4).key == entry("a", seed=4, batch_seed=4).key, "the seed of batches is the seed by default"


def test_unplugging_leaves_the_method_alone():
    plugged, alone = entry("a", ccfa=True), entry("b")
    assert hashed(identity(plugged)) != hashed(identity(alone))
    assert hashed(without_ccfa(identity(plugged))) == hashed(identity(alone))


def test_a_real_ccfa_unplugs_too():
    contents = [{"method": described("podnet", ccfa=plugged)} for plugged in (True, False)]
    assert contents[0] != contents[1]
    assert without_ccfa(contents[0]) == contents[1]


def test_plug_ins_are_in_the_name():
    assert names([[entry("a", mix="cutmix", ccfa=True)]]) == ["podnet + cutmix + CCFA"]
