"""Experiments: what to run, with which published values, and the directory a run leaves behind."""

from ccfa.experiments.building import build_method
from ccfa.experiments.experiment import Experiment, resolve
from ccfa.experiments.rundir import RunDirectory
from ccfa.experiments.running import run

__all__ = ["Experiment", "RunDirectory", "build_method", "resolve", "run"]
