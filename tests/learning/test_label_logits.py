"""Mean logits by label: one step towards them against numpy, and what becomes of labels that nobody holds."""

import numpy as np
import pytest
import torch

from fedgist.learning.label_logits import LogitTrainer, mean_logits
from fedgist.learning.optimisers import SGD
from fedgist.learning.training import Trainer
from linear_toy import BATCH, CLASSES, LINEAR, linear_step, normal, onehot, softmax


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
