"""Experiments: what to run, with which published values, and the directory a run leaves behind."""

from ccfa.experiments.building import build_method
from ccfa.experiments.experiment import resolve
from ccfa.experiments.run_directory import Run
from ccfa.experiments.running import run
from ccfa.settings import Experiment

__all__ = ["Experiment", "Run", "build_method", "resolve", "run"]
