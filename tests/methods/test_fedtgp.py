"""FedTGP: the server's loss and margin against plain loops, what is sent, and classes that nobody has."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.engines.local import LocalEngine
from fedgist.methods.fedtgp import adaptive_margin, contrastive
from toys import CLASSES, apart, by_label, clients, federation, play, received

LOCAL: dict[str, Any] = {"steps": 3, "batch": 8, "lr": 0.1}
FEW: dict[str, Any] = LOCAL | {"server_epochs": 5}


def normal(*shape: int, name: str) -> Tensor:
    return Rng(7)(name).normal(*shape).double()


def euclid(a: Tensor, b: Tensor) -> float:
    return math.sqrt(sum((float(x) - float(y)) ** 2 for x, y in zip(a, b, strict=True)))


def test_the_contrastive_loss_is_the_papers_and_leaves_out_the_unknown() -> None:
    """−log of the share of class y, sample after sample and class after class; class 2 is known to nobody."""
    found, prototypes, y = normal(5, 6, name="found"), normal(4, 6, name="prototypes"), torch.tensor([0, 1, 3, 1, 0])
    known, mask = torch.tensor([1.0, 1, 0, 1]).double(), torch.tensor([1.0, 1, 1, 1, 0]).double()
    margin, losses = torch.tensor(0.7, dtype=torch.float64), []
    for sample, label in zip(found[:4], y.tolist(), strict=False):
        powers = {c: math.exp(-euclid(sample, prototypes[c]) - 0.7 * (c == label)) for c in (0, 1, 3)}
        losses.append(-math.log(powers[label] / sum(powers.values())))
    value = contrastive(found, y, mask, prototypes, known, margin)
    assert float(value) == pytest.approx(sum(losses) / 4, rel=1e-12)
    wanted = prototypes.clone().requires_grad_()

    def loss(prototypes: Tensor) -> Tensor:
        return contrastive(found, y, mask, prototypes, known, margin)

    assert torch.autograd.gradcheck(loss, wanted)
    loss(wanted).backward()  # type: ignore[no-untyped-call]
    assert wanted.grad is not None and not wanted.grad[2].any() and wanted.grad[[0, 1, 3]].any(1).all()
    assert math.isfinite(float(contrastive(prototypes[y], y, mask, prototypes, known, margin)))
    on_top = torch.autograd.grad(contrastive(prototypes[y], y, mask, wanted, known, margin), wanted)[0]
    assert on_top.isfinite().all()  # a distance of 0 has a gradient, too


def test_the_margin_is_the_largest_gap_up_to_the_threshold() -> None:
    """Centres at 0, 1, 3 and 7 of a line: the nearest are 1, 1, 2 and 4 away, the farthest two 7."""
    line = torch.tensor([[0.0, 0], [1, 0], [3, 0], [7, 0]])
    assert adaptive_margin(line, 100.0, "nearest") == 4
    assert adaptive_margin(line, 100.0, "pairs") == 7
    assert adaptive_margin(line, 2.5, "nearest") == adaptive_margin(line, 2.5, "pairs") == 2.5
    assert adaptive_margin(line[:1], 100.0, "nearest") == 0


def means(engine: LocalEngine, id: str) -> dict[int, Tensor]:
    """A client's mean features, class after class, by its model as it is."""
    data, model = engine.data[id], engine.method.task.models[engine.info[id]["model"]]
    features = model(engine.site_states[id]["w"], data.x).features
    return {c: features[data.y == c].mean(0) for c in data.y.unique().tolist()}


def test_clients_of_any_architecture_send_mean_features_of_the_classes_they_hold() -> None:
    sites = by_label({"a": [5, 9, 0, 0], "b": [0, 3, 1, 0], "c": [0, 0, 0, 0]})
    engine = federation("fedtgp", sites, ["mlp:hidden=16", "mlp:hidden=7x16"], **FEW)
    kept = received(play(engine, 1))
    play(engine, 1)
    for id, held in (("a", [1, 1, 0, 0]), ("b", [0, 1, 1, 0]), ("c", [0, 0, 0, 0])):
        assert kept[0][id].held.tolist() == held
        for c, mean in means(engine, id).items():
            assert torch.allclose(kept[0][id].prototypes[c], mean, atol=1e-5)
    assert engine.state["known"].tolist() == [1, 1, 1, 0]
    assert not engine.state["prototypes"][3].any() and engine.state["prototypes"][:3].any(1).all()


def test_the_server_tells_classes_apart() -> None:
    """After enough passes every received prototype is nearest to the global one of its class; before, not all are."""
    sites = by_label({"a": [6, 6, 6, 6], "b": [6, 6, 6, 6]})

    def hits(epochs: int) -> bool:
        about = {**LOCAL, "common_start": True, "server_epochs": epochs, "server_lr": 0.3}
        engine = federation("fedtgp", sites, "mlp:hidden=16", **about)
        kept = received(engine)
        play(engine, 1)
        for sent in (kept[0][id] for id in sites):
            nearest = torch.cdist(sent.prototypes, engine.state["prototypes"]).argmin(1)
            if (nearest != torch.arange(CLASSES))[sent.held > 0].any():
                return False
        return True

    assert not hits(0)
    assert hits(200)


def test_without_a_pull_clients_learn_alone() -> None:
    """In float64. With one, the second round is another: in the first nothing is known yet."""
    sites, settings = clients(20, 30), LOCAL | {"dtype": torch.float64}
    alone, same, drawn = (
        federation(name, sites, "mlp", **settings, **given)
        for name, given in (
            ("independent", {}),
            ("fedtgp", {"pull": 0.0, "server_epochs": 5}),
            ("fedtgp", {"pull": 1.0, "server_epochs": 5}),
        )
    )
    for engine in (alone, same, drawn):
        play(engine, 1)
    assert apart(alone.site_states["0"]["w"], drawn.site_states["0"]["w"]) < 1e-14
    for engine in (alone, same, drawn):
        play(engine, 1)
    assert apart(alone.site_states["0"]["w"], same.site_states["0"]["w"]) < 1e-14
    assert apart(alone.site_states["0"]["w"], drawn.site_states["0"]["w"]) > 1e-4


def test_features_come_nearer_to_their_prototype() -> None:
    """A strong pull brings a client's mean features nearer to what it was drawn to than a weak one."""
    sites = by_label({"a": [6, 6, 6, 6], "b": [6, 6, 6, 6]})
    settings = FEW | {"steps": 30, "lr": 0.05}

    def gap(pull: float) -> float:
        engine = play(federation("fedtgp", sites, "mlp:hidden=16", **settings, pull=pull), 1)
        target = engine.state["prototypes"]
        play(engine, 1)
        return sum(float((mean - target[c]).norm()) for c, mean in means(engine, "a").items())

    assert gap(10.0) < 0.7 * gap(0.0)


def test_features_of_different_sizes_are_refused() -> None:
    with pytest.raises(FedgistError, match="fedtgp needs models with one number of features, but mlp:hidden=8 has 8"):
        federation("fedtgp", clients(5, 5), ["mlp:hidden=8", "mlp:hidden=9"])
