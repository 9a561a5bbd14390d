"""Experiments: what to run, with which published values, and the directory a run leaves behind."""

from ccfa.experiments.experiment import build_method, resolve
from ccfa.experiments.run_directory import Run
from ccfa.experiments.running import run
from ccfa.settings import Experiment

__all__ = ["Experiment", "Run", "build_method", "resolve", "run"]
