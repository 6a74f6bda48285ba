"""Ensembles and the student that learns from them."""

import pytest
import torch
from torch import Tensor

from fedgist import models, storage
from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.core.work import Place
from fedgist.engines.scheduler import drive_one
from fedgist.learning.ensembles import Ensemble, distil
from fedgist.learning.evaluation import scores

MODEL = models.build("mlp", (1, 2, 3), 4, hidden=(8,))
RNG = Rng(0)


def members(count: int) -> list[dict[str, Tensor]]:
    return [MODEL.init(RNG("member", k)) for k in range(count)]


def test_an_ensemble_says_what_its_members_say_together() -> None:
    """Σ_k s_k f(x; w_k), also where the images come in several batches; hits are counted by label."""
    users, x, y = members(3), RNG("x").normal(2500, 1, 2, 3), RNG("y").integers(4, 2500)
    shares = torch.tensor([2.0, 0.0, 0.5])
    expected = 2.0 * MODEL(users[0], x).logits + 0.5 * MODEL(users[2], x).logits
    ensemble = Ensemble(MODEL)
    assert torch.allclose(ensemble.logits(tree.stack(users), shares, x), expected, atol=1e-5)
    hits = ensemble.hits(tree.stack(users), shares, x, y)
    assert hits.tolist() == [int(((expected.argmax(1) == y) & (y == label)).sum()) for label in range(4)]


def test_an_ensemble_of_equals_is_as_sure_as_each_of_them() -> None:
    """All scores are those of one model, however many stand in it and with which shares."""
    (w,), x, y = members(1), RNG("x").normal(300, 1, 2, 3) * 4, RNG("y").integers(4, 300)
    said = {"members": tree.stack([w, w, w]), "shares": torch.tensor([17.0, 1.0, 1.0])}
    together = drive_one(scores(Ensemble(MODEL), said, (x, y)), Place())
    assert together == pytest.approx(drive_one(scores(MODEL, w, (x, y)), Place()), abs=1e-6)


def test_a_student_learns_what_the_teacher_says() -> None:
    """With the teacher in its reach (the same architecture), the student's predictions become the teacher's."""
    teacher, student = members(2)
    x = RNG("images").normal(400, 1, 2, 3)
    said = MODEL(teacher, x).logits * 3  # confident, so that the labels are clear
    learned = drive_one(distil(MODEL, student, x, said, 300, 64, 0.02, RNG("steps")), Place())

    def agreement(w: dict[str, Tensor]) -> float:
        return float((MODEL(w, x).logits.argmax(1) == said.argmax(1)).float().mean())

    assert agreement(student) < 0.6
    assert agreement(learned) > 0.9


def test_the_rate_falls_along_a_cosine_to_zero() -> None:
    (w,) = members(1)
    role = distil(MODEL, w, RNG("images").normal(10, 1, 2, 3), torch.zeros(10, 4), 4, 8, 0.02, RNG)
    asked = role.send(None)
    role.close()
    assert asked.xs["lr"].tolist() == pytest.approx([0.02, 0.02 * (2 + 2**0.5) / 4, 0.01, 0.02 * (2 - 2**0.5) / 4])


def test_no_steps_change_nothing() -> None:
    (w,) = members(1)
    x = RNG("images").normal(10, 1, 2, 3)
    same = drive_one(distil(MODEL, w, x, torch.zeros(10, 4), 0, 8, 0.01, RNG), Place())
    assert storage.digest(same) == storage.digest(w)
