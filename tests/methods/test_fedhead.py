"""FedHead: its head is the ridge regression of the union of all data, clients train nothing but the body under it."""

from typing import Any

import numpy as np
import pytest
import torch

from fedgist.core.errors import FedgistError
from fedgist.data.client_data import ClientData
from fedgist.families.global_model import Global
from toys import apart, clients, federation, play, received, task_of, toy, toy_federation

LOCAL = {"steps": 3, "batch": 8, "lr": 0.1}
NET = "mlp:hidden=5"


@pytest.mark.parametrize("sizes", [(80,), (30, 49, 1, 0)])
def test_the_head_is_the_ridge_regression_of_the_union(sizes: tuple[int, ...]) -> None:
    """Minimising Σ‖y − b − zW‖² + λ‖W‖² over W and a free b, as numpy solves it with all data in one place."""
    sites = clients(*sizes)
    engine = play(federation("fedhead", sites, NET, dtype=torch.float64, ridge=0.3, length=0.7, **LOCAL), 2)
    w = engine.state["w"]
    x, y = (torch.cat([getattr(data, name) for data in sites.values()]) for name in "xy")
    z = task_of(NET).models[NET]({name: value.double() for name, value in w.items()}, x.double()).features.numpy()
    centred, onehot = z - z.mean(0), np.eye(4)[y]
    covariance = centred.T @ centred
    ridge = 0.3 * np.trace(covariance) / 5
    weight = np.linalg.solve(covariance + ridge * np.eye(5), centred.T @ onehot)
    bias = onehot.mean(0) - z.mean(0) @ weight
    factor = 0.7 * 2 / np.linalg.norm(weight)  # rows of four classes, of norm 0.7 in the root mean square
    np.testing.assert_allclose(w["classifier.weight"], factor * weight.T, atol=2e-6)  # sums travel in float32
    np.testing.assert_allclose(w["classifier.bias"], factor * bias, atol=2e-6)


@pytest.mark.parametrize(
    "given", [{}, {"weight_decay": 0.1, "momentum": 0.9}, {"optimiser": "adam", "weight_decay": 1e-4}]
)
def test_clients_give_the_head_back_as_it_came(given: dict[str, Any]) -> None:
    """Neither a gradient nor a penalty moves it; under Adam a penalty alone would, by the whole rate in each step."""
    engine = federation("fedhead", clients(40, 9), NET, dtype=torch.float64, **{**LOCAL, **given})
    asked, answered, collect = [], received(engine), engine.collect
    engine.collect = lambda ask: asked.append(next(iter(ask.to.values()))) or collect(ask)  # type: ignore
    play(engine, 2)
    for came, sent in zip(asked, answered, strict=True):
        if isinstance(came, Global):
            back = {name: pw / sent.sum.p for name, pw in sent.sum.pw.items()}
            for name in back:
                assert torch.allclose(back[name], came.w[name].to(back[name]), atol=1e-6) == ("classifier" in name)


def test_how_the_data_are_split_changes_no_head() -> None:
    """Before anything is trained: with a rate of nearly nothing only the sums are left, and these are of the union."""
    still = {**LOCAL, "lr": 1e-12}
    (whole,) = clients(60).values()
    apart_by_class = {str(c): ClientData(whole.x[whole.y == c], whole.y[whole.y == c], 4) for c in range(4)}
    one = play(federation("fedhead", {"0": whole}, NET, **still), 1).state["w"]
    many = play(federation("fedhead", apart_by_class, NET, **still), 1).state["w"]
    assert apart(one, many) < 1e-5


def test_one_class_at_each_client_does_it_less_harm_than_fedavg() -> None:
    skewed = {"clients": 10, "partition": "shards", "shards_per_client": 1, "limit": 600, "model": "mlp:hidden=32"}
    trained = {"steps": 10, "lr": 0.1}
    accuracy = {}
    for method in ("fedavg", "fedhead"):
        engine = play(toy_federation(method, active=0, **skewed, **trained), 4)
        accuracy[method] = engine.evaluate(toy(method, active=0, **skewed, **trained)[1].test)["accuracy"]
    assert accuracy["fedhead"] > accuracy["fedavg"] + 0.2


def test_it_needs_a_whole_model() -> None:
    with pytest.raises(FedgistError, match="one head for one body"):
        federation("fedhead", clients(5), "mlp:norm=batch", batch_norm="local")
