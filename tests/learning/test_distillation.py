"""The losses by which models teach models, against numpy oracles derived by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedgist import models
from fedgist.core.rng import Rng
from fedgist.learning.distillation import (
    GuidedTrainer,
    averaged_logits_loss,
    divergence,
    label_weights,
    weighted_users_loss,
)
from fedgist.learning.label_logits import LogitTrainer, mean_logits
from fedgist.learning.optimisers import SGD
from fedgist.learning.training import Trainer

USERS, BATCH, CLASSES, PIXELS = 3, 5, 4, 6
LINEAR = models.build("mlp", (1, 2, 3), CLASSES, hidden=())
"""Logits W x + b: its gradients are known in closed form."""


def normal(*shape: int, name: str) -> Tensor:
    return Rng(0)(name).normal(*shape).double()


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def onehot(y: Tensor) -> np.ndarray:
    return np.eye(CLASSES)[y.numpy()]


Y = torch.tensor([0, 3, 1, 1, 2])


def test_loss_of_averaged_logits() -> None:
    """Eq. 4: −mean_i log softmax(1/K Σ_k g_k(z_i))[y_i]."""
    logits = normal(USERS, BATCH, CLASSES, name="logits")
    p = softmax(logits.numpy().mean(0))
    expected = -np.log(p[np.arange(BATCH), Y.numpy()]).mean()
    assert averaged_logits_loss(logits, Y).item() == pytest.approx(expected, rel=1e-12)


def test_loss_of_weighted_users() -> None:
    """Σ_k mean_i ω_{k,y_i} · (−log softmax(g_k(z_i))[y_i]), written as loops."""
    logits, weights = normal(USERS, BATCH, CLASSES, name="logits"), normal(USERS, CLASSES, name="weights").abs()
    expected = 0.0
    for k in range(USERS):
        p = softmax(logits[k].numpy())
        expected += np.mean([-weights[k, y].item() * np.log(p[i, y]) for i, y in enumerate(Y.tolist())])
    assert weighted_users_loss(logits, Y, weights).item() == pytest.approx(expected, rel=1e-12)


def test_both_losses_of_one_user_are_its_cross_entropy() -> None:
    logits = normal(1, BATCH, CLASSES, name="logits")
    one = torch.ones(1, CLASSES, dtype=torch.float64)
    assert torch.allclose(averaged_logits_loss(logits, Y), weighted_users_loss(logits, Y, one))


def test_label_weights() -> None:
    """ω_{k,y} = (1 + c_{k,y}) / Σ_j (1 + c_{j,y}); of a label that nobody has, all users have an equal say."""
    weights = label_weights(torch.tensor([[3.0, 0.0], [0.0, 0.0], [0.0, 0.0]]))
    assert torch.allclose(weights, torch.tensor([[4 / 6, 1 / 3], [1 / 6, 1 / 3], [1 / 6, 1 / 3]]))


def test_divergence() -> None:
    """Σ_c p_c (log p_c − log q_c), the mean over the samples whose mask is 1; nil for equal distributions only."""
    teacher, student = normal(BATCH, CLASSES, name="teacher"), normal(BATCH, CLASSES, name="student")
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0])
    p, q = softmax(teacher.numpy()), softmax(student.numpy())
    each = (p * (np.log(p) - np.log(q))).sum(1)
    assert divergence(teacher, student, mask).item() == pytest.approx(each[mask.numpy() == 1].mean(), rel=1e-12)
    assert divergence(teacher, teacher + 7, mask).abs() < 1e-12


@pytest.mark.parametrize("loss", ["averaged", "weighted", "divergence"])
def test_gradients_by_finite_differences(loss: str) -> None:
    logits = normal(USERS, BATCH, CLASSES, name="logits").requires_grad_()
    weights = normal(USERS, CLASSES, name="weights")
    functions = {
        "averaged": lambda t: averaged_logits_loss(t, Y),
        "weighted": lambda t: weighted_users_loss(t, Y, weights),
        "divergence": lambda t: divergence(t[0], t[1], torch.ones(BATCH, dtype=torch.float64)),
    }
    assert torch.autograd.gradcheck(functions[loss], (logits,))


def linear_step() -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any], np.ndarray, np.ndarray]:
    """Weights of a linear model, a batch, a pool, and the batch's images and logits in numpy."""
    w = {name: normal(*shape, name=name) for name, shape in LINEAR.shapes.items()}
    pool = {"x": normal(9, 1, 2, 3, name="x"), "y": torch.tensor([2, 0, 1, 3, 3, 1, 0, 2, 1])}
    batch = {"index": torch.tensor([4, 0, 7, 2, 5]), "mask": torch.ones(BATCH, dtype=torch.float64)}
    x = pool["x"][batch["index"]].flatten(1).numpy()
    logits = x @ w["classifier.weight"].numpy().T + w["classifier.bias"].numpy()
    return w, batch, pool, x, logits


@pytest.mark.parametrize("on", [0.0, 1.0])
def test_a_guided_step(on: float) -> None:
    """One step of gradient descent on CE(x, y) + α CE(z, ŷ) + β KL(p ‖ softmax(Wx + b)); p = softmax(Wz' + b) is fixed.

    With l = Wx + b, ∂CE/∂l_i = (softmax(l_i) − onehot(y_i))/B and ∂KL/∂l_i = (softmax(l_i) − p_i)/B; the middle term is
    the first with z in the place of x and its own B_G. Then ∂/∂W = Σ_i (∂/∂l_i) x_iᵀ and ∂/∂b = Σ_i ∂/∂l_i.
    """
    w, batch, pool, x, logits = linear_step()
    lr, alpha, beta, generated = 0.3, 2.0, 0.7, 7
    z, label = normal(generated, PIXELS, name="z"), torch.tensor([0, 1, 2, 3, 0, 0, 1])
    echo = normal(BATCH, PIXELS, name="echo")
    batch |= {"z": z, "label": label, "echo": echo, "on": torch.tensor(on)}
    learner = GuidedTrainer(Trainer(LINEAR, SGD()), "classifier")
    scalars = [torch.tensor(value, dtype=torch.float64) for value in (lr, alpha, beta)]
    with torch.no_grad():
        new, _ = learner.step((w, learner.init(w)), batch, pool, *scalars)

    weight, bias = w["classifier.weight"].numpy(), w["classifier.bias"].numpy()
    y = pool["y"][batch["index"]]
    real = (softmax(logits) - onehot(y)) / BATCH
    made = on * alpha * (softmax(z.numpy() @ weight.T + bias) - onehot(label)) / generated
    held = on * beta * (softmax(logits) - softmax(echo.numpy() @ weight.T + bias)) / BATCH
    np.testing.assert_allclose(
        new["classifier.weight"], weight - lr * ((real + held).T @ x + made.T @ z.numpy()), rtol=1e-10
    )
    np.testing.assert_allclose(new["classifier.bias"], bias - lr * ((real + held).sum(0) + made.sum(0)), rtol=1e-10)


@pytest.mark.parametrize("form", ["kl", "mse"])
def test_a_step_towards_mean_logits(form: str) -> None:
    """One step on CE(x, y) + λ · pull, where the pull of a sample of unknown label is nil.

    KL: ∂/∂l_i = known · (softmax(l_i) − softmax(t_{y_i}))/B; squares, the mean over B·C numbers:
    known · 2 (l_i − t_{y_i})/(B C). The sums gather the logits of the step by label, before its update.
    """
    w, batch, pool, x, logits = linear_step()
    lr, pull = 0.2, 1.7
    table, known = normal(CLASSES, CLASSES, name="table"), torch.tensor([1.0, 0.0, 1.0, 1.0]).double()
    learner = LogitTrainer(Trainer(LINEAR, SGD()), form)
    carry = ((w, {}), torch.zeros_like(table), torch.zeros_like(known))
    scalars = [torch.tensor(value, dtype=torch.float64) for value in (lr, pull)]
    with torch.no_grad():
        (new, _), sums, counts = learner.step(carry, batch, pool, scalars[0], table, known, scalars[1])

    weight, bias = w["classifier.weight"].numpy(), w["classifier.bias"].numpy()
    y = pool["y"][batch["index"]]
    target, there = table.numpy()[y], known.numpy()[y][:, None]
    towards = softmax(logits) - softmax(target) if form == "kl" else 2 / CLASSES * (logits - target)
    slope = (softmax(logits) - onehot(y) + pull * there * towards) / BATCH
    np.testing.assert_allclose(new["classifier.weight"], weight - lr * slope.T @ x, rtol=1e-10)
    np.testing.assert_allclose(new["classifier.bias"], bias - lr * slope.sum(0), rtol=1e-10)
    np.testing.assert_allclose(sums, onehot(y).T @ logits, rtol=1e-10)
    np.testing.assert_array_equal(counts, onehot(y).sum(0))


def test_mean_logits_of_absent_labels_stay() -> None:
    """Rows are divided by how many clients hold the label; a row that nobody holds keeps its old value."""
    table = mean_logits(torch.tensor([[6.0], [0.0]]), torch.tensor([3.0, 0.0]), otherwise=torch.tensor([[9.0], [5.0]]))
    assert table.tolist() == [[2.0], [5.0]]
