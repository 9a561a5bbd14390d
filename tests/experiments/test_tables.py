import pytest

from ccfa.experiments.tables import CIFAR100, CITED_ONLY, PAPERS, REPRODUCED, published
from ccfa.methods import METHODS


@pytest.mark.parametrize(
    ("method", "ccfa", "scenario", "value"),
    [
        ("podnet", True, "B50-inc10", 67.24),
        ("podnet", False, "B50-inc10", 64.62),
        ("podnet", True, "B50-inc1", 60.69),
        ("ucir", False, "B50-inc1", 50.44),
        ("aanet", True, "B50-inc5", 66.16),
        ("afc", False, "B50-inc2", 63.78),
        ("il2a", True, "B50-inc5", 60.78),
        ("il2a", True, "B50-inc10", None),
        ("icarl", True, "B50-inc10", None),
        ("finetune", False, "B50-inc10", None),
        ("podnet", True, "B20-inc1", None),
        ("podnet", True, "B0-inc10", None),
        ("podnet", True, "50,10,40", None),
    ],
)
def test_published_values(method, ccfa, scenario, value):
    assert published(method, ccfa, "cifar100", scenario) == value


def test_other_data_have_no_published_values():
    assert published("podnet", True, "digits", "B50-inc10") is None


def test_methods_that_are_only_cited():
    assert CITED_ONLY["Mnemonics"].cell("B50-inc1") is None
    assert CITED_ONLY["Mnemonics"].cell("B50-inc10") == 63.34
    assert CITED_ONLY["TPCIL"].cell("B50-inc5") == 63.58
    assert CITED_ONLY["GeoDL"].cell("B50-inc1") == 52.28
    assert not {name.lower() for name in CITED_ONLY} & set(METHODS)


def test_in_the_paper_ccfa_improves_every_method_in_every_setting():
    for (method, ccfa), row in CIFAR100.items():
        if ccfa:
            for alone, plugged in zip(CIFAR100[method, False], row, strict=True):
                assert (alone is None) == (plugged is None)
                assert alone is None or alone < plugged


def test_rows_are_of_methods_that_exist():
    assert {method for method, _ in CIFAR100} | set(PAPERS) | set(REPRODUCED) <= set(METHODS)
