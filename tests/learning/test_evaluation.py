"""Scores over a test set of more than one batch, and of none."""

import math

import pytest
import torch
from sklearn import metrics
from torch import Tensor

from fedgist import models
from fedgist.core.rng import Rng
from fedgist.core.work import Place
from fedgist.engines.scheduler import drive_one
from fedgist.learning.evaluation import BATCH, Tally, accuracy, scores, tally_shapes

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


def scored(classes: int, count: int) -> tuple[dict[str, float], Tensor, Tensor]:
    """All scores of a model with fresh weights, its logits, and labels that agree with it two times in three."""
    model = models.build("mlp", (1, 4, 4), classes, hidden=(5,))
    w, x = model.init(Rng(0)), Rng(1).normal(count, 1, 4, 4)
    logits = 4 * model(w, x).logits
    y = torch.where(torch.arange(count) % 3 == 0, Rng(2).integers(classes, count), logits.argmax(1))
    louder = {**w, **{name: 4 * w[name] for name in model.names_from(model.classifier)}}
    return drive_one(scores(model, louder, (x, y)), Place()), logits, y


@pytest.mark.parametrize("classes", [2, 5])
def test_scores_are_those_of_scikit_learn(classes: int) -> None:
    found, logits, y = scored(classes, 2 * BATCH["cpu"] + 57)
    said = logits.argmax(1)
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(y, said))
    assert found["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(y, said))
    recalls = metrics.recall_score(y, said, average=None, labels=range(classes))
    assert [found[f"recall_{c}"] for c in range(classes)] == pytest.approx(recalls.tolist())
    if classes == 2:  # margins that fall into one bin of 1,024 count half
        assert found["auroc"] == pytest.approx(metrics.roc_auc_score(y, logits[:, 1] - logits[:, 0]), abs=1e-3)
    else:
        assert "auroc" not in found


def test_the_calibration_error_is_the_mean_gap_between_confidence_and_hits() -> None:
    """Bin by bin, as Guo et al. 2017 define it in Eq. 3, over all images."""
    found, logits, y = scored(5, 300)
    confidence, said = logits.softmax(1).double().max(1)
    gap = 0.0
    for b in range(15):
        inside = (confidence * 15).long().clamp(max=14) == b
        gap += float(((said == y).double() - confidence)[inside].sum().abs())
    assert found["calibration_error"] == pytest.approx(gap / len(y))
    assert found["calibration_error"] > 0.05


def test_tallies_of_parts_add_up_and_have_the_shapes_that_messages_declare() -> None:
    for classes in (2, 3):
        model = models.build("mlp", (1, 4, 4), classes, hidden=(5,))
        w, x, y = model.init(Rng(0)), Rng(1).normal(90, 1, 4, 4), Rng(2).integers(classes, 90)
        whole, first, rest = (Tally(model)(w, x[at], y[at]) for at in (slice(90), slice(40), slice(40, 90)))
        assert {name: tuple(count.shape) for name, count in whole.items()} == tally_shapes(classes)
        assert all(torch.allclose(whole[name], first[name] + rest[name]) for name in whole)
        assert all(count.min() >= 0 and count.max() <= 90 for count in whole.values())


def test_a_class_that_is_not_tested_has_no_recall_and_a_model_of_nan_no_nan() -> None:
    y = torch.tensor([0, 0, 2])
    w = {name: torch.full_like(tensor, torch.nan) for name, tensor in MODEL.init(Rng(0)).items()}
    found = drive_one(scores(MODEL, w, (Rng(1).normal(3, 1, 4, 4), y)), Place())
    assert "recall_1" not in found and {"recall_0", "recall_2"} <= found.keys()
    assert all(map(math.isfinite, found.values()))
