"""Evaluation: how much of a test set a model gets right."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.task import Output, Samples
from fedgist.core.work import compute

BATCH = {"cpu": 200, "cuda": 1000}
"""Images at once: few enough for a CPU's caches, many enough to keep a GPU busy."""


@dataclass(frozen=True)
class Classifier:
    """Counts what a model gets right; a value, so that equal models of many clients are one computation."""

    model: Callable[[Params, Tensor], Output]

    def correct(self, w: Params, x: Tensor, y: Tensor) -> Tensor:
        """How many of the images are classified as their labels say."""
        size = BATCH[x.device.type]
        parts = zip(x.split(size), y.split(size), strict=True)
        return sum(((self.model(w, a).logits.argmax(1) == b).sum() for a, b in parts), torch.zeros((), device=y.device))


async def accuracy(model: Callable[[Params, Tensor], Output], w: Params, test: Samples) -> float:
    """The fraction of the test set that a model gets right."""
    correct = await compute(Classifier(model).correct, w, *test)
    return float(correct) / max(1, len(test[1]))
