"""Models to use: a folder that predicts, learns more classes, is exported and served."""

from ccfa.deployment.folder import ModelFolder
from ccfa.deployment.model import Evaluation, Model, Prediction, load_model
from ccfa.deployment.updating import Plan, carry_out, estimated_seconds, learn, plan_update

__all__ = [
    "Evaluation",
    "Model",
    "ModelFolder",
    "Plan",
    "Prediction",
    "carry_out",
    "estimated_seconds",
    "learn",
    "load_model",
    "plan_update",
]
