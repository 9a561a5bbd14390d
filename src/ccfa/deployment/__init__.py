"""Models to use: a folder that predicts, learns more classes, is exported and served."""

from ccfa.deployment.export import Exported, export_model
from ccfa.deployment.folder import ModelFolder
from ccfa.deployment.model import Evaluation, Model, Prediction, load_model
from ccfa.deployment.updating import Plan, carry_out, estimated_seconds, learn, plan_update

__all__ = [
    "Evaluation",
    "Exported",
    "Model",
    "ModelFolder",
    "Plan",
    "Prediction",
    "carry_out",
    "estimated_seconds",
    "export_model",
    "learn",
    "load_model",
    "plan_update",
]
