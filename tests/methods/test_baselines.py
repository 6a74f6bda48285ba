"""The first baselines: identities between them, exact bytes, BatchNorm, the missing broadcast."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist import storage
from fedgist.core import tree
from fedgist.core.ledger import Ledger
from fedgist.core.rng import Rng
from fedgist.core.work import gradient
from fedgist.data.client_data import ClientData
from fedgist.engines.local import LocalEngine
from toys import CLASSES, SHAPE, clients, federation, play

SITES = clients(7, 20, 3, test=10)


def after(engine: LocalEngine, rounds: int) -> Any:
    return play(engine, rounds).state["w"]


def test_fedprox_without_its_term_is_fedavg() -> None:
    settings: dict[str, Any] = {"steps": 3, "lr": 0.1, "momentum": 0.9, "batch": 4}
    plain = after(federation("fedavg", SITES, **settings), 2)
    free = after(federation("fedprox", SITES, mu=0.0, **settings), 2)
    held = after(federation("fedprox", SITES, mu=1.0, **settings), 2)
    assert storage.digest(plain) == storage.digest(free)
    start = federation("fedavg", SITES).state["w"]
    assert tree.norm(tree.sub(held, start)) < tree.norm(tree.sub(plain, start))


def test_fedavg_with_one_full_batch_step_is_gradient_descent_on_the_pooled_data() -> None:
    """Σ_k (n_k/n) (w − lr ∇F_k) = w − lr ∇F with F = Σ_k (n_k/n) F_k, the loss of all samples together."""
    lr = 0.5
    engine = federation("fedavg", SITES, epochs=1, batch=32, lr=lr, dtype=torch.float64)
    w, model = engine.state["w"], engine.method.model
    x = torch.cat([data.x.double() for data in SITES.values()])
    y = torch.cat([data.y for data in SITES.values()])

    def loss(w: dict[str, Tensor]) -> tuple[Tensor, tuple[()]]:
        return torch.nn.functional.cross_entropy(model(w, x).logits, y), ()

    with torch.no_grad():
        expected = tree.sub(w, tree.scale(gradient(loss, w)[0], lr))
    moved = after(engine, 1)
    # float32 on the wire: the sum of three rounded weights
    assert tree.norm(tree.sub(moved, expected)) <= 3 * torch.finfo(torch.float32).eps * tree.norm(expected)
    assert tree.norm(tree.sub(expected, w)) > 1e-3


def test_uniform_weights_ignore_sample_counts_but_not_emptiness() -> None:
    """With no local steps possible, an empty client must not pull the average towards the old weights."""
    sites = clients(7, 0)
    alone = after(federation("fedavg", {"0": sites["0"]}, weighting="uniform", steps=2, batch=4), 1)
    both = after(federation("fedavg", sites, weighting="uniform", steps=2, batch=4), 1)
    torch.testing.assert_close(both, alone, rtol=1e-6, atol=1e-7)


def test_nobody_has_data() -> None:
    engine = federation("fedavg", clients(0, 0), steps=2)
    before = storage.digest(engine.state)
    assert engine.run_round().skipped is None
    assert storage.digest(engine.state) == before


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_an_upload_is_four_bytes_for_each_number_and_four_for_the_weight(model: str, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.csv")
    engine = federation("fedavg", SITES, model, steps=1, batch=4, ledger=ledger)
    engine.run_round()
    ledger.close()
    numbers = sum(torch.Size(shape).numel() for shape in engine.method.model.shapes.values())
    assert numbers == engine.method.model.size + sum(
        torch.Size(engine.method.model.shapes[name]).numel() for name in engine.method.model.buffers
    )
    with open(tmp_path / "ledger.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    up = [row for row in rows if row["direction"] == "up"]
    assert {row["payload_bytes"] for row in up} == {str(4 * numbers + 4)}
    assert {row["paper_bytes"] for row in up} == {str(4 * numbers)}
    assert {row["payload_bytes"] for row in rows if row["direction"] == "down"} == {str(4 * numbers)}


def test_local_batch_norm_stays_local() -> None:
    engine = federation("fedavg", SITES, "cnn", steps=2, batch=4, batch_norm="local")
    buffers = engine.method.model.buffers
    after(engine, 2)
    assert buffers.isdisjoint(engine.state["w"])
    kept = [state["home"] for state in engine.site_states.values()]
    assert all(found.keys() == buffers for found in kept)
    name = sorted(buffers)[0]
    assert not torch.equal(kept[0][name], kept[1][name])
    assert 0 <= engine.evaluate(SITES["0"].test)["accuracy"] <= 1
    assert engine.ledger.totals().evaluation > 0  # only the clients can test what only they have


def test_aggregated_batch_norm_is_averaged() -> None:
    sites = clients(8, 8)
    engine = federation("fedavg", sites, "cnn", steps=2, batch=4, weighting="uniform")
    averaged = after(engine, 1)
    alone = [after(federation("fedavg", {id: sites[id]}, "cnn", steps=2, batch=4), 1) for id in sites]
    for name in engine.method.model.buffers:
        torch.testing.assert_close(averaged[name], (alone[0][name] + alone[1][name]) / 2, rtol=1e-5, atol=1e-7)


def test_without_a_common_start_only_the_first_round_differs() -> None:
    engine = federation("fedavg", SITES, steps=1, batch=4, common_start=False, lr=1e-9)
    inits = [engine.method.model.init(Rng(0)("client", id, "init")) for id in engine.ids]
    sizes = [data.n for data in SITES.values()]
    first = after(engine, 1)
    expected = {name: sum(w[name] * n for w, n in zip(inits, sizes, strict=True)) / sum(sizes) for name in first}
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(after(engine, 1), first, rtol=1e-4, atol=1e-6)


def test_more_samples_than_the_reference_are_refused() -> None:
    with pytest.raises(ValueError, match="client 1 holds 20 samples: set n_ref"):
        federation("fedavg", SITES, n_ref=10, steps=1).run_round()


def test_independent_clients_never_meet() -> None:
    sites = SITES
    together = federation("independent", sites, steps=2, batch=4)
    after_two = [together.run_round() for _ in range(2)]
    alone = federation("independent", {"1": sites["1"]}, steps=2, batch=4)
    for _ in after_two:
        alone.run_round()
    assert storage.digest(together.site_states["1"]) == storage.digest(alone.site_states["1"])
    assert together.ledger.totals().paper_up == 0


def test_a_common_start_of_independent_clients() -> None:
    engine = federation("independent", SITES, steps=1, lr=1e-12, batch=4, common_start=True)
    engine.run_round()
    first, second = (engine.site_states[id]["w"] for id in ("0", "1"))
    torch.testing.assert_close(first, second)


def test_all_methods_learn_something() -> None:
    """Digits that are easy to tell apart: every baseline gets nearly all right."""
    rng = Rng(0)
    y = torch.arange(200) % CLASSES
    x = rng("noise").normal(200, *SHAPE) * 0.1
    x[torch.arange(200), 0, y, y] += 3
    data = ClientData(x, y, CLASSES, (x, y))
    sites = {str(i): replace(data, x=x[i::3], y=y[i::3]) for i in range(3)}
    for name in ("fedavg", "fedprox", "independent", "centralized"):
        engine = federation(name, sites, steps=40, lr=0.1, batch=16)
        for _ in range(3):
            engine.run_round()
        assert engine.evaluate((x, y))["accuracy"] > 0.95, name
