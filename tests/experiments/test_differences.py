from ccfa.experiments.differences import differences, two_columns

STORED = {"experiment": {"seed": 0, "options": {"lr": "0.1"}}, "order": [0, 1], "gone": 3}
NOW = {"experiment": {"seed": 1, "options": {"lr": "0.1"}}, "order": [1, 0], "new": None}


def test_only_what_differs_is_named():
    assert differences(STORED, STORED) == {}
    assert differences(STORED, NOW) == {"experiment.seed": (0, 1), "gone": (3, None), "order": ([0, 1], [1, 0])}


def test_both_values_stand_side_by_side():
    lines = two_columns(differences(STORED, NOW)).splitlines()
    assert lines[0].split() == ["stored", "now"]
    assert lines[1].split() == ["experiment.seed", "0", "1"]
    assert lines[2].split() == ["gone", "3", "-"]
    assert len({line.find(value) for line, value in zip(lines[1:3], ("0", "3"), strict=True)}) == 1


def test_long_values_are_cut():
    assert max(map(len, two_columns({"x": (list(range(100)), "y" * 100)}).splitlines())) < 100
