"""Evaluation: how much of a test set a model gets right, class by class, and whether it knows when it does.

All scores come from a tally, a few counts that may be added up over parts of a test set and over clients:

    right, images      of each class                  accuracy, recall, balanced accuracy (the mean recall)
    confidence, hits   by confidence, in 15 bins      calibration error Σ_b |confidence_b − hits_b| / n
    margins            of two classes, in 1,024 bins  AUROC, the chance that one of class 1 has the larger margin

The calibration error is that of Guo et al. 2017, Eq. 3.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.task import Output, Samples
from fedgist.core.work import InRuns, compute

BATCH = {"cpu": 200, "cuda": 1000}
"""Images at once: few enough for a CPU's caches, many enough to keep a GPU busy."""
BINS = 15
MARGINS = 1024
"""Bins of the margins of two classes; within a bin, half of the pairs are taken to be in order."""

Predictor = Callable[[Params, Tensor], Output]


@dataclass(frozen=True)
class Correct(InRuns):
    """How many images a model classifies as their labels say."""

    model: Predictor
    rows_on = BATCH

    def part(self, w: Params, x: Tensor, y: Tensor) -> Tensor:
        return (self.model(w, x).logits.argmax(1) == y).sum()


@dataclass(frozen=True)
class Tally(InRuns):
    """The counts from which all scores follow."""

    model: Predictor
    rows_on = BATCH

    def part(self, w: Params, x: Tensor, y: Tensor) -> Params:
        logits = self.model(w, x).logits
        classes = _one_of(y, logits.shape[1])
        hit = (logits.argmax(1) == y).double()
        confidence = logits.softmax(1).amax(1).double().nan_to_num(0.0)
        sure = _one_of((confidence * BINS).long().clamp(0, BINS - 1), BINS)
        counts = {"right": hit @ classes, "images": classes.sum(0), "confidence": confidence @ sure, "hits": hit @ sure}
        if logits.shape[1] == 2:
            apart = torch.atan((logits[:, 1] - logits[:, 0]).double()).nan_to_num(0.0) / math.pi + 0.5
            counts["margins"] = classes.T @ _one_of((apart * MARGINS).long().clamp(0, MARGINS - 1), MARGINS)
        return counts


def _one_of(index: Tensor, count: int) -> Tensor:
    """A row for each index, with a 1 at its place; unlike `one_hot`, it can be stacked."""
    return (index[:, None] == torch.arange(count, device=index.device)).double()


def tally_shapes(classes: int) -> dict[str, tuple[int, ...]]:
    """The shape of each count in a tally."""
    two = {"margins": (2, MARGINS)} if classes == 2 else {}
    return {"right": (classes,), "images": (classes,), "confidence": (BINS,), "hits": (BINS,), **two}


def scores_of(tally: Params) -> dict[str, float]:
    """What the counts say; `recall_C` of each class C that was tested, `auroc` of two classes where both were."""
    right, images = tally["right"].double(), tally["images"].double()
    n, tested = max(1.0, float(images.sum())), images > 0
    recall = {c: float(right[c] / images[c]) for c in tested.nonzero().flatten().tolist()}
    found = {
        "accuracy": float(right.sum()) / n,
        "balanced_accuracy": sum(recall.values()) / max(1, len(recall)),
        "calibration_error": float((tally["confidence"].double() - tally["hits"].double()).abs().sum()) / n,
    }
    if "margins" in tally and len(recall) == 2:
        zeros, ones = tally["margins"].double()
        below = zeros.cumsum(0) - zeros / 2  # of equals, one half
        found["auroc"] = float((ones * below).sum() / (zeros.sum() * ones.sum()))
    return found | {f"recall_{c}": value for c, value in recall.items()}


async def scores(model: Predictor, w: Params, test: Samples) -> dict[str, float]:
    """All scores of a model on a test set."""
    return scores_of(await compute(Tally(model), w, *test))


async def accuracy(model: Predictor, w: Params, test: Samples) -> float:
    """The fraction of the test set that a model gets right."""
    correct = await compute(Correct(model), w, *test)
    return float(correct) / max(1, len(test[1]))
