"""FedEnsemble: it trains as FedAvg does, and whose logits count how often."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist.core import tree
from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.data.client_data import ClientData
from toys import CLASSES, SHAPE, apart, clients, federation, play

LOCAL: dict[str, Any] = {"steps": 3, "batch": 8, "lr": 0.1}


def users(*sizes: int) -> dict[str, ClientData]:
    return clients(*sizes, test=30, seed=5)


def some_test() -> tuple[Tensor, Tensor]:
    return Rng(5)("test").normal(30, *SHAPE), Rng(5)("labels").integers(CLASSES, 30)


def test_fedensemble_trains_as_fedavg_does() -> None:
    """Its global model is FedAvg's, and it reports that model's accuracy too."""
    settings = LOCAL | {"active": 2, "published": True}
    plain, ensemble = (
        play(federation(name, users(9, 20, 5), "cnn", **settings), 2) for name in ("fedavg", "fedensemble")
    )
    assert apart(plain.state["w"], ensemble.state["w"]) < 1e-5
    alone, together = plain.evaluate(some_test()), ensemble.evaluate(some_test())
    assert together["accuracy_fedavg"] == alone["accuracy"]
    assert together["accuracy_fedavg_published"] == alone["accuracy_published"]


def test_absent_users_count_as_the_global_model() -> None:
    """The logits of the 2 users who trained, and 3 times those of the model that was sent to them."""
    engine = federation("fedensemble", users(9, 20, 5, 7, 8), "mlp", **LOCAL, active=2)
    sent = play(engine, 1).state["w"]
    play(engine, 1)
    assert engine.state["shares"].tolist() == [3, 1, 1]
    assert apart(tree.index(engine.state["members"], 0), sent) == 0
    x, y = some_test()
    said = 3 * engine.method.model(sent, x).logits
    for k in (1, 2):
        said = said + engine.method.model(tree.index(engine.state["members"], k), x).logits
    assert engine.evaluate((x, y))["accuracy"] == pytest.approx(float((said.argmax(1) == y).float().mean()))


def test_fedensemble_as_published_weighs_labels_by_their_holders() -> None:
    """A test image counts once for every user that holds its label."""
    sites = users(9, 9)
    sites = {id: ClientData(d.x, d.y % (1 + int(id)), CLASSES, d.test) for id, d in sites.items()}  # {0} and {0, 1}
    engine = play(federation("fedensemble", sites, "mlp", **LOCAL, published=True), 1)
    x, y = some_test()
    said = sum(engine.method.model(tree.index(engine.state["members"], k), x).logits for k in (1, 2))
    right = said.argmax(1) == y  # type: ignore[union-attr]
    weights = torch.tensor([2, 1, 0, 0])[y]
    expected = float((right * weights).sum() / weights.sum())
    assert engine.evaluate((x, y))["accuracy_published"] == pytest.approx(expected)


def test_fedensemble_needs_whole_models() -> None:
    with pytest.raises(FedgistError, match="batch_norm=aggregate"):
        federation("fedensemble", users(5), "cnn", batch_norm="local")
