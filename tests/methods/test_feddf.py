"""FedDF: without distillation it is FedAvg, its teacher is the mean of all users, and its prototypes gain."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist import methods
from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.core.task import Task
from fedgist.data.client_data import ClientData
from fedgist.data.datasets import load
from fedgist.methods import feddf
from toys import CLASSES, SHAPE, apart, clients, federation, play

LOCAL: dict[str, Any] = {"steps": 3, "batch": 8, "lr": 0.1}


def users(*sizes: int) -> dict[str, ClientData]:
    return clients(*sizes, test=30, seed=5)


def test_feddf_without_distillation_is_fedavg() -> None:
    sites = users(20, 7, 3)
    settings = LOCAL | {"active": 2}
    engine = federation("feddf", sites, "cnn", **settings, distil_steps=0)
    plain = federation("fedavg", sites, "cnn", **settings)
    assert apart(play(plain, 2).state["w"], play(engine, 2).state["w"]["cnn"]) < 1e-5


def test_feddf_needs_a_proxy_set() -> None:
    method = methods.find("feddf")
    with pytest.raises(FedgistError, match="proxy=2000"):
        method(method.Config(), Task((1, 8, 8), 2, (0.0,), (1.0,), {}, "mlp"))


def test_feddf_teaches_the_mean_of_all_users_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three users of two architectures: a third of what each says, whatever its group; one user's prototype is its."""
    said: list[Tensor] = []

    async def listen(model: Any, w: Any, x: Tensor, teacher: Tensor, *rest: Any) -> Any:
        said.append(teacher)
        return w

    monkeypatch.setattr(feddf, "distil", listen)
    nets, proxy = ("mlp", "cnn:norm=none"), Rng(1).normal(20, *SHAPE)
    sites, settings = users(20, 9, 7), LOCAL | {"proxy": proxy}
    play(federation("feddf", sites, nets, **settings), 1)
    logits = []
    for away in ({"1", "2"}, {"0", "1"}, {"0", "2"}):  # one user at a time, the others without data
        alone = {id: ClientData(d.x[:0], d.y[:0], CLASSES) if id in away else d for id, d in sites.items()}
        engine = play(federation("feddf", alone, nets, **settings), 1)
        (name,) = {engine.info[id]["model"] for id in sites if id not in away}
        logits.append(engine.method.task.models[name](engine.state["w"][name], proxy).logits)
    torch.testing.assert_close(said[0], sum(logits) / 3, rtol=1e-5, atol=1e-6)


def test_feddf_with_two_prototypes_beats_fedavg_on_both() -> None:
    """Real digits, two labels a client, an MLP and a CNN: each prototype ends above the average of its own clients."""
    train, test = load("digits")
    labels = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (0, 5), (2, 7), (4, 9), (1, 6), (3, 8)]
    parts = [torch.isin(train.y, torch.tensor(pair)).nonzero().flatten()[:60] for pair in labels]
    sites = {str(i): ClientData(train.x[p], train.y[p], 10, (test.x, test.y)) for i, p in enumerate(parts)}
    found = {}
    for steps in (0, 40):
        engine = federation(
            "feddf",
            sites,
            ("mlp", "cnn:norm=none"),
            proxy=train.x[-300:],
            steps=10,
            batch=16,
            lr=0.1,
            distil_steps=steps,
        )
        found[steps] = play(engine, 4).evaluate((test.x, test.y))
    for name in ("accuracy_mlp", "accuracy_cnn:norm=none"):
        assert found[40][name] > found[0][name], found
    assert found[40]["accuracy"] == pytest.approx((found[40]["accuracy_mlp"] + found[40]["accuracy_cnn:norm=none"]) / 2)
