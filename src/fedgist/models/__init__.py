"""Classifiers as pure functions of named weights: each gives (features, logits), norm layers explicit."""

from fedgist.core.task import Model, Output
from fedgist.models.layers import NORMS
from fedgist.models.model import LayeredModel
from fedgist.models.registry import available, build
from fedgist.models.torch_module import ModuleModel, from_module

__all__ = [
    "NORMS",
    "LayeredModel",
    "Model",
    "ModuleModel",
    "Output",
    "available",
    "build",
    "from_module",
]
