"""Distillation from soft labels: the loss, what a step does, and whose BatchNorm statistics are kept."""

import numpy as np
import pytest
import torch

from fedgist import models, storage
from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.core.work import Place, Scan, execute
from fedgist.learning.distillation import Distiller
from fedgist.learning.moves import draw_moves, move
from fedgist.learning.optimisers import SGD
from fedgist.learning.training import Trainer

SHAPE, CLASSES, N = (1, 4, 4), 3, 6
MODEL = models.build("mlp", SHAPE, CLASSES, hidden=(5,), norm="batch")
LEARNER = Distiller(Trainer(MODEL, SGD()), temperature=4.0)
BATCH = {"index": torch.arange(N), "mask": torch.ones(N)}


def pool(seed: int, teacher: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    x = Rng(seed)("x").normal(N, *SHAPE).double()
    w = teacher or tree.map(lambda t: t.double(), MODEL.init(Rng(7)))
    return {"x": x, "logits": 5 * MODEL(w, x, train=True).logits, "y": Rng(seed)("y").integers(CLASSES, N)}


def test_loss_is_the_scaled_divergence() -> None:
    """T² Σ_c q_c log(q_c / p_c) with q, p the softmax of logits / T, the mean over the batch, in numpy."""
    teacher, student = Rng(0).normal(N, CLASSES).double(), Rng(1).normal(N, CLASSES).double()

    def soft(z: torch.Tensor) -> np.ndarray:
        e = np.exp(z.numpy() / 4)
        return e / e.sum(1, keepdims=True)

    q, p = soft(teacher), soft(student)
    expected = 16 * (q * np.log(q / p)).sum(1).mean()
    assert float(LEARNER.loss(student, teacher, torch.ones(N))) == pytest.approx(expected)
    assert float(LEARNER.loss(teacher + 3.0, teacher, torch.ones(N))) == pytest.approx(0, abs=1e-12)


def test_at_high_temperature_logits_are_matched() -> None:
    """As T → ∞ the loss becomes ‖z_s − z_t‖² / 2C for centred logits (Hinton et al. 2015)."""
    teacher, student = (Rng(i).normal(N, CLASSES).double() for i in (0, 1))
    teacher, student = (z - z.mean(1, keepdim=True) for z in (teacher, student))
    hot = Distiller(LEARNER.trainer, temperature=1e4)
    expected = (teacher - student).square().sum(1).mean() / (2 * CLASSES)
    assert float(hot.loss(student, teacher, torch.ones(N))) == pytest.approx(float(expected), rel=1e-3)


def test_a_step_goes_down_the_loss() -> None:
    w, taught = tree.map(lambda t: t.double(), MODEL.init(Rng(1))), pool(2)
    plan = tree.map(lambda t: t.expand(30, *t.shape), BATCH)
    scan = Scan(LEARNER.step, (w, LEARNER.init(w)), plan, (taught, torch.tensor(0.05)))
    after, _ = execute(scan, Place(dtype=torch.float64))
    before, now = (
        float(LEARNER.loss(MODEL(at, taught["x"], train=True).logits, taught["logits"], torch.ones(N)))
        for at in (w, after)
    )
    assert now < 0.5 * before


def test_own_images_are_moved_and_shared_inputs_are_not() -> None:
    w, taught, own = tree.map(lambda t: t.double(), MODEL.init(Rng(1))), pool(2), pool(3)
    moves = draw_moves((N,), 1, True, Rng(4))
    batches = {"own": {**BATCH, "moves": moves}, "taught": BATCH}, {"own": BATCH, "taught": BATCH}
    pools = own, own | {"x": move(own["x"], moves)}
    with torch.no_grad():
        first, second = (
            LEARNER.step_with_own((w, LEARNER.init(w)), batch, taught, torch.tensor(0.05), mine)
            for batch, mine in zip(batches, pools, strict=True)
        )
    assert storage.digest(first) == storage.digest(second)


def test_own_data_gives_the_statistics_and_both_give_the_gradient() -> None:
    """One step from w: −lr (∇CE + ∇KL), with the running statistics of a forward pass on the own samples alone."""
    w, taught, own = tree.map(lambda t: t.double(), MODEL.init(Rng(1))), pool(2), pool(3)
    batch = {"own": BATCH, "taught": BATCH}
    with torch.no_grad():
        after, _ = LEARNER.step_with_own((w, LEARNER.init(w)), batch, taught, torch.tensor(0.05), own)
    expected = MODEL(w, own["x"], train=True).buffers
    assert expected.keys() == MODEL.buffers
    for name in MODEL.buffers:
        torch.testing.assert_close(after[name], expected[name])
    trained = {name: w[name].clone().requires_grad_() for name in w if name not in MODEL.buffers}
    full = {**w, **trained}
    loss = torch.nn.functional.cross_entropy(MODEL(full, own["x"], train=True).logits, own["y"])
    loss = loss + LEARNER.loss(MODEL(full, taught["x"], train=True).logits, taught["logits"], torch.ones(N))
    loss.backward()
    for name, before in trained.items():
        assert before.grad is not None
        torch.testing.assert_close(after[name], before.detach() - 0.05 * before.grad)
