"""The losses by which models teach models, against numpy oracles derived by hand."""

import numpy as np
import pytest
import torch

from fedgist.learning.distillation import (
    GuidedTrainer,
    averaged_logits_loss,
    divergence,
    label_weights,
    weighted_users_loss,
)
from fedgist.learning.optimisers import SGD
from fedgist.learning.training import Trainer
from linear_toy import BATCH, CLASSES, LINEAR, PIXELS, linear_step, normal, onehot, softmax

USERS = 3
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
