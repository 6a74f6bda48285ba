"""CCVR: the Gaussians are those of all data, and nothing but the last layer is calibrated."""

import numpy as np
import pytest
import torch

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.learning.class_statistics import ClassSums, Gaussian
from toys import apart, clients, federation, play, task_of, toy, toy_federation

LOCAL = {"steps": 3, "batch": 8, "lr": 0.1}


def test_the_gaussians_are_those_of_the_union() -> None:
    """Mean and covariance (n − 1) of each class over all clients, as numpy finds them from the samples."""
    sites = clients(30, 50, 1, 0)
    model = task_of("mlp:hidden=5").models["mlp:hidden=5"]
    w, total = model.init(Rng(1)), None
    for data in sites.values():
        plan = data.epochs(Rng(2), 1, 16)
        part = ClassSums(model, 4).of(plan, data.pool, w)
        total = part if total is None else tuple(a + b for a, b in zip(total, part, strict=True))
    assert total is not None
    x, y = (torch.cat([getattr(data, name) for data in sites.values()]) for name in "xy")
    z = model(w, x).features.double().numpy()
    for c in range(4):
        found = Gaussian.of(float(total[0][c]), total[1][c], total[2][c])
        own = z[y.numpy() == c]
        np.testing.assert_allclose(found.mean, own.mean(0), atol=1e-6)
        np.testing.assert_allclose(found.root @ found.root.T, np.cov(own.T), atol=1e-6)
        drawn = found.draw(Rng(3), 20_000).numpy()
        np.testing.assert_allclose(np.cov(drawn.T), np.cov(own.T), atol=0.03 * np.trace(np.cov(own.T)))


def test_it_is_fedavg_and_then_a_calibrated_head() -> None:
    settings = {**LOCAL, "after": 2, "head_epochs": 10, "virtual": 50}
    plain = play(federation("fedavg", clients(20, 30, 9), "mlp", **LOCAL), 2)
    engine = play(federation("ccvr", clients(20, 30, 9), "mlp", **settings), 2)
    assert apart(plain.state["w"], engine.state["w"]) < 1e-6
    before = engine.state["w"]
    after = play(engine, 1).state["w"]
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"classifier.weight", "classifier.bias"}
    sent = engine.ledger.totals().messages
    assert torch.equal(play(engine, 1).state["w"]["classifier.weight"], after["classifier.weight"])
    assert engine.ledger.totals().messages == sent


def test_a_head_under_label_skew_is_mended() -> None:
    """Clients of one class each: FedAvg's head names few classes after two rounds, a calibrated one most of them."""
    skewed = {"clients": 10, "partition": "shards", "shards_per_client": 1, "limit": 600, "model": "mlp:hidden=32"}
    trained = {"steps": 20, "lr": 0.1, "after": 2, "virtual": 100, "head_epochs": 20, "head_lr": 0.05}
    engine = play(toy_federation("ccvr", **skewed, **trained), 2)
    test = toy("ccvr", **skewed, **trained)[1].test
    before = engine.evaluate(test)["accuracy"]
    play(engine, 1)
    assert engine.evaluate(test)["accuracy"] > before + 0.2


def test_features_that_are_not_finite_are_refused() -> None:
    engine = federation("ccvr", clients(9, 12), "mlp", **{**LOCAL, "lr": 1e38}, after=1)
    engine.run_round()
    with pytest.raises(FedgistError, match="not finite: a smaller lr helps"):
        engine.run_round()


def test_it_needs_a_whole_model() -> None:
    with pytest.raises(FedgistError, match="features of one whole model"):
        federation("ccvr", clients(5), "mlp:norm=batch", batch_norm="local")
