"""Classifiers as pure functions of named weights: each gives (features, logits), norm layers explicit."""

from fedgist.models.layers import NORMS, NormStatistics, Weights
from fedgist.models.model import LayeredModel, Model, Output
from fedgist.models.registry import available, build
from fedgist.models.torch_module import ModuleModel, from_module

__all__ = [
    "NORMS",
    "LayeredModel",
    "Model",
    "ModuleModel",
    "NormStatistics",
    "Output",
    "Weights",
    "available",
    "build",
    "from_module",
]
