"""Classifiers as pure functions of named weights: each gives (features, logits), norm layers explicit."""

from fedgist.core.task import Model, Output
from fedgist.models.as_module import Normalised, as_module
from fedgist.models.layers import NORMS
from fedgist.models.model import LayeredModel, checked_shape
from fedgist.models.registry import build, spell_out
from fedgist.models.torch_module import ModuleModel, from_module, is_dense

__all__ = [
    "NORMS",
    "LayeredModel",
    "Model",
    "ModuleModel",
    "Normalised",
    "Output",
    "as_module",
    "build",
    "checked_shape",
    "from_module",
    "is_dense",
    "spell_out",
]
