"""A linear classifier and one batch, for steps of training whose gradients are known in closed form."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgist import models
from fedgist.core.rng import Rng

BATCH, CLASSES, PIXELS = 5, 4, 6
LINEAR = models.build("mlp", (1, 2, 3), CLASSES, hidden=())
"""Logits W x + b."""


def normal(*shape: int, name: str) -> Tensor:
    return Rng(0)(name).normal(*shape).double()


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def onehot(y: Tensor) -> np.ndarray:
    return np.eye(CLASSES)[y.numpy()]


def linear_step() -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any], np.ndarray, np.ndarray]:
    """Weights of a linear model, a batch, a pool, and the batch's images and logits in numpy."""
    w = {name: normal(*shape, name=name) for name, shape in LINEAR.shapes.items()}
    pool = {"x": normal(9, 1, 2, 3, name="x"), "y": torch.tensor([2, 0, 1, 3, 3, 1, 0, 2, 1])}
    batch = {"index": torch.tensor([4, 0, 7, 2, 5]), "mask": torch.ones(BATCH, dtype=torch.float64)}
    x = pool["x"][batch["index"]].flatten(1).numpy()
    logits = x @ w["classifier.weight"].numpy().T + w["classifier.bias"].numpy()
    return w, batch, pool, x, logits
