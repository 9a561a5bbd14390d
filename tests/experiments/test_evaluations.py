"""A run is judged by the rule of prediction that its method has."""

from dataclasses import replace

import pytest
import torch

from toy_runs import Silent, toy_resolved, toy_run


def always_zero(learner, images):
    """A rule that no method of the package has."""
    return torch.zeros(len(images), dtype=torch.int64)


class Halting(Silent):
    """Stops the run after its first stage."""

    def on_stage(self, stage, result):
        raise KeyboardInterrupt


def test_a_rule_of_ones_own_is_evaluated(tmp_path):
    resolved = toy_resolved()
    resolved = resolved._replace(method=replace(resolved.method, predict=always_zero))
    with pytest.raises(KeyboardInterrupt):
        toy_run(tmp_path / "run", resolved, Halting())
    audience = Silent()
    report = toy_run(tmp_path / "run", resolved, audience)
    share = float((resolved.test.labels == 0).double().mean())
    assert (report.own, report.overall[-1]) == ("always_zero", pytest.approx(share))
    assert list(report.rules) == ["logits", "nearest_mean", "always_zero"]
    assert report.rules["logits"].overall != report.overall
