"""Accuracy over a test set of more than one batch, and of none."""

import torch

from fedgist import models
from fedgist.core.rng import Rng
from fedgist.core.work import Place
from fedgist.engines.scheduler import drive_one
from fedgist.learning.evaluation import BATCH, accuracy

MODEL = models.build("mlp", (1, 4, 4), 3, hidden=(5,))


def test_every_image_counts_once() -> None:
    """The labels are the model's own answers, but for every third image, in two full batches and a part of one."""
    w, x = MODEL.init(Rng(0)), Rng(1).normal(2 * BATCH["cpu"] + 57, 1, 4, 4)
    y = MODEL(w, x).logits.argmax(1)
    wrong = torch.arange(len(x)) % 3 == 0
    found = drive_one(accuracy(MODEL, w, (x, torch.where(wrong, (y + 1) % 3, y))), Place())
    assert found == 1 - wrong.sum().item() / len(x)


def test_an_empty_test_set_has_nothing_right() -> None:
    nothing = torch.zeros(0, 1, 4, 4), torch.zeros(0, dtype=torch.int64)
    assert drive_one(accuracy(MODEL, MODEL.init(Rng(0)), nothing), Place()) == 0
