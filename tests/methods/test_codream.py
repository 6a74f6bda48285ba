"""Co-Dream: identities of collaborative dreaming, what goes up, what it costs, and its variants."""

import csv
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist import storage
from fedgist.core.errors import FedgistError
from fedgist.core.ledger import Ledger
from fedgist.core.message import schema_of
from fedgist.core.method import handler_for
from fedgist.core.rng import Rng
from fedgist.data.client_data import ClientData
from fedgist.engines.local import LocalEngine
from fedgist.methods.codream import CoDream, DreamAlone, ShowModel
from fedgist.synthesis.inversion import Objective
from toys import play, toy, toy_federation

NET = "mlp:hidden=16:norm=batch"


def build(sites: Mapping[str, ClientData] | None = None, **given: Any) -> LocalEngine:
    """A federation on 200 real 8×8 digits, evenly split over three clients, all of them active."""
    usual = {"limit": 200, "clients": 3, "partition": "stratified", "active": 0, "seed": 3}
    return toy_federation("codream", sites, **usual | given)


def dreams(engine: LocalEngine) -> Tensor:
    found: Tensor = engine.state["dreams"]
    return found


def start(engine: LocalEngine) -> Tensor:
    """The noise that the first batch starts from."""
    return Rng(3)("server", "round", 1, "dreams").normal(*dreams(engine).shape)


def dreamt_by_hand(engine: LocalEngine, id: str, steps: int, lr: float = 0.05) -> Tensor:
    """Plain model inversion with autograd and torch.optim.Adam, by the model that a client has after its warm-up."""
    model, w = engine.method.model, engine.site_states[id]["w"]
    x = start(engine).requires_grad_()
    adam = torch.optim.Adam([x], lr=lr)
    for _ in range(steps):
        adam.zero_grad()
        Objective(model)(w, x).backward()
        adam.step()
    return x.detach()


def test_with_one_client_distadam_is_plain_inversion() -> None:
    """To the last few bits: torch adds the step with one rounding less."""
    engine = play(build(clients=1, exchanges=25, learners="server"))
    expected = dreamt_by_hand(engine, "0", steps=25)
    assert float((expected - start(engine)).abs().mean()) > 0.1
    torch.testing.assert_close(dreams(engine), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("optimiser", ["distadam", "fedavg", "fedadam"])
def test_identical_clients_are_one(optimiser: str) -> None:
    """Four times the same data and model: all updates are equal, and four is a power of two, so sums are exact."""
    settings: dict[str, Any] = {"dream_optimiser": optimiser, "warm_up": 0, "common_start": True, "learners": "server"}
    data = build(clients=1).data["0"]
    one = play(build({"0": data}, clients=1, **settings))
    four = play(build({str(i): data for i in range(4)}, clients=4, **settings))
    assert torch.equal(dreams(one), dreams(four))
    assert torch.equal(one.state["buffer"]["logits"], four.state["buffer"]["logits"])


def test_fedavg_with_one_client_is_local_adam_in_pieces() -> None:
    """One exchange of M local steps from one client, at a server rate of 1, is M steps of plain inversion."""
    settings = {"clients": 1, "exchanges": 1, "local_steps": 7, "dream_optimiser": "fedavg", "learners": "server"}
    engine = play(build(**settings))
    torch.testing.assert_close(dreams(engine), dreamt_by_hand(engine, "0", steps=7), rtol=0, atol=1e-5)


def gradients(engine: LocalEngine) -> dict[str, Tensor]:
    """Each client's input gradient at the start of the first batch, by autograd."""
    found = {}
    for id, state in engine.site_states.items():
        x = start(engine).requires_grad_()
        Objective(engine.method.model)(state["w"], x).backward()
        found[id] = x.grad
    return found


@pytest.mark.parametrize("weighting", ["samples", "uniform", "inverse"])
def test_weights_of_clients(weighting: str) -> None:
    """One Adam step a client and a rate of 1 add Σ_k w_k Δ_k, where Δ_k = −lr g / (|g| + ε) by Adam's first step.

    w_k is n_k / n, 1 / K, or, as the paper prints it, 1 / n_k without any normalisation.
    """
    data = build(clients=1).data["0"]
    sizes = {"0": 20, "1": 50, "2": 130}
    sites = {id: replace(data, x=data.x[:n], y=data.y[:n]) for id, n in sizes.items()}
    settings = {"exchanges": 1, "local_steps": 1, "dream_optimiser": "fedavg", "learners": "server"}
    engine = play(build(sites, weighting=weighting, **settings))
    shares = {"samples": {id: n / 200 for id, n in sizes.items()}, "uniform": dict.fromkeys(sizes, 1 / 3)}
    shares["inverse"] = {id: 1 / n for id, n in sizes.items()}
    expected = start(engine) - 0.05 * sum(
        shares[weighting][id] * g / (g.abs() + 1e-8) for id, g in gradients(engine).items()
    )
    torch.testing.assert_close(dreams(engine), expected, rtol=0, atol=1e-5)


def test_soft_labels_are_the_weighted_mean_of_logits() -> None:
    engine = play(build(learners="server"))
    model, sizes = engine.method.model, {id: data.n for id, data in engine.data.items()}
    expected = sum(
        n / sum(sizes.values()) * model(engine.site_states[id]["w"], dreams(engine)).logits for id, n in sizes.items()
    )
    torch.testing.assert_close(engine.state["buffer"]["logits"], expected)
    engine = play(build(learners="server", labels="probabilities"))
    assert torch.allclose(engine.state["buffer"]["logits"].exp().sum(1), torch.ones(6))


def test_offloaded_dreams_are_the_same() -> None:
    """The server, shown the models, does what the clients would have done, to rounding."""
    for optimiser in ("distadam", "fedadam"):
        settings: dict[str, Any] = {"dream_optimiser": optimiser, "learners": "server"}
        together, offloaded = play(build(**settings)), play(build(offload=True, **settings))
        torch.testing.assert_close(dreams(together), dreams(offloaded), rtol=0, atol=1e-5)


# What goes up


def test_only_sums_go_up() -> None:
    """Every field that a client may send while dreaming together is additive, and it refuses to send anything else."""
    method = build().method
    replies = {handler.reply for handler in method.handlers.values()}
    assert all(declared.additive for reply in replies for _, declared in schema_of(reply).values())
    for request in (DreamAlone, ShowModel):
        with pytest.raises(FedgistError, match="no client handler answers"):
            handler_for(method, request)
    assert DreamAlone in build(collaborate=False).method.handlers
    assert ShowModel in build(offload=True).method.handlers


def rows(path: Path, ledger: Ledger) -> list[dict[str, str]]:
    ledger.close()
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_cohort_is_fixed_for_a_round(tmp_path: Path) -> None:
    path = tmp_path / "ledger.csv"
    ledger = Ledger(path)
    play(build(clients=5, active=2, exchanges=4, ledger=ledger), 3)
    asked: dict[str, set[frozenset[str]]] = {}
    for round in "123":
        here = [row for row in rows(path, ledger) if row["round"] == round and row["direction"] == "down"]
        each = {row["exchange"] for row in here}
        assert len(each) == 1 + 4 + 1 + 1  # training, dreams, labels, the lesson
        asked[round] = {frozenset(row["receiver"] for row in here if row["exchange"] == exchange) for exchange in each}
        assert len(asked[round]) == 1
    assert len(set().union(*asked.values())) > 1


SETTINGS: Sequence[dict[str, Any]] = (
    {},
    {"bits": 16, "dream_optimiser": "fedadam"},
    {"learners": "server"},
    {"generator": True, "noise": 4, "width": 2},
    {"layer": "classifier"},
    {"offload": True},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_estimate_of_traffic_is_what_the_ledger_counts(settings: dict[str, Any], tmp_path: Path) -> None:
    """But for the first update, which is sent whole, and what begins a round: 4 bytes of its weight."""
    path = tmp_path / "ledger.csv"
    ledger = Ledger(path)
    engine = play(build(exchanges=5, ledger=ledger, **settings))
    counted = sum(int(row["payload_bytes"]) for row in rows(path, ledger)) / len(engine.ids)
    method = engine.method
    assert isinstance(method, CoDream)
    first = 6 * 64 * 2 if settings.get("bits") else 0
    assert counted == method.traffic() + first + 4


def test_eight_bits_cost_an_eighth_up(tmp_path: Path) -> None:
    path = tmp_path / "ledger.csv"
    ledger = Ledger(path)
    play(build(clients=1, bits=8, exchanges=3, ledger=ledger))
    updates = [int(row["payload_bytes"]) for row in rows(path, ledger) if row["type"] == "codream.DreamUpdate"]
    assert updates == [6 * 64 * 4 + 4, 6 * 64 + 4, 6 * 64 + 4]


@pytest.mark.parametrize(("bits", "nearness"), [(16, 0.999), (8, 0.97)])
def test_rounded_updates_move_the_dreams_alike(bits: int, nearness: float) -> None:
    """The direction in which the dreams went is that of whole updates; 0 would be at random."""
    settings: dict[str, Any] = {"dream_optimiser": "fedavg", "exchanges": 10, "learners": "server", "dreams": 32}
    exact, rounded = play(build(**settings)), play(build(bits=bits, **settings))
    a, b = (dreams(engine) - start(engine) for engine in (exact, rounded))
    assert not torch.equal(a, b)
    assert float(torch.cosine_similarity(a.flatten(), b.flatten(), 0)) > nearness


def test_a_costly_run_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    build(exchanges=2000)
    assert "times what fedavg would" in caplog.text
    caplog.clear()
    build(exchanges=1, model="mlp:hidden=200:norm=batch")
    assert caplog.text == ""


def test_a_model_without_batch_norm_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedgist"):
        build(model=NET, architectures=f"{NET},mlp:hidden=16", exchanges=1, dreams=2)
        assert "no BatchNorm in mlp:hidden=16," in caplog.text
        assert f"no BatchNorm in {NET}," not in caplog.text
        caplog.clear()
        build(layer="classifier")
        assert "no BatchNorm" in caplog.text
        caplog.clear()
        build(model="mlp:hidden=16", statistics=0)
        assert "no BatchNorm" not in caplog.text


# Learning


def test_everybody_learns_across_architectures() -> None:
    """Clients with six labels each and three architectures: a student of a fourth learns more than any could know."""
    inputs = toy("codream", limit=900, clients=1)[1]
    data = inputs.sites["0"]
    labels = {"0": (0, 1, 2, 3, 4, 5), "1": (3, 4, 5, 6, 7, 8), "2": (6, 7, 8, 9, 0, 1)}
    held = {id: torch.isin(data.y, torch.tensor(some)) for id, some in labels.items()}
    sites = {id: replace(data, x=data.x[mine], y=data.y[mine]) for id, mine in held.items()}
    settings: dict[str, Any] = {"model": "mlp:hidden=32:norm=batch", "architectures": f"{NET},cnn,mlp:hidden=24x24"}
    settings |= {"limit": 900, "batch": 32, "warm_up": 8, "lr": 0.1, "dreams": 64, "exchanges": 30, "buffer": 128}
    settings |= {"distil_steps": 100, "distil_batch": 32, "distil_lr": 0.3, "steps": 5}
    alone = play(build(sites, **{**settings, "exchanges": 1}, learners="server")).evaluate(inputs.test)
    engine = play(build(sites, **settings), 2)
    found = engine.evaluate(inputs.test)
    assert found["accuracy"] > 0.65
    assert found["accuracy_clients"] > alone["accuracy_clients"] + 0.05
    assert engine.state["w"].keys() == engine.method.model.shapes.keys()


# Variants


def test_alone_each_client_shows_its_share() -> None:
    """The pool is one batch: equal shares of the clients' own inversions, with each client's own outputs."""
    engine = play(build(collaborate=False, learners="server", exchanges=5))
    x, logits = dreams(engine), engine.state["buffer"]["logits"]
    assert len(x) == 6
    model = engine.method.model
    for i, id in enumerate(engine.ids):
        mine = slice(2 * i, 2 * i + 2)
        torch.testing.assert_close(logits[mine], model(engine.site_states[id]["w"], x[mine]).logits)
    own = {"collaborate": False, "learners": "server", "exchanges": 1, "local_steps": 5, "dream_optimiser": "fedavg"}
    assert torch.equal(dreams(play(build(**own))), x)  # as many gradient steps, however they are counted


def test_activations_at_a_layer() -> None:
    inputs = toy("codream", limit=200)[1]
    engine = build(layer="norm1")
    untouched = storage.digest(engine.state["w"])
    play(engine, 2)
    assert dreams(engine).shape == (6, 16)
    assert storage.digest(engine.state["w"]) == untouched  # its lower layers could not learn: there is no student
    assert engine.method.weights(engine.state) is None
    found = engine.evaluate(inputs.test)
    assert found["accuracy"] == found["accuracy_clients"]


def test_the_generator_goes_on_from_round_to_round() -> None:
    engine = build(generator=True, noise=4, width=2)
    before = dict(engine.state["v"])
    play(engine)
    after = engine.state["v"]
    assert all(not torch.equal(after[name], before[name]) for name in ("z", "fc.weight", "conv1.weight"))
    low, high = engine.method.task.low[0], engine.method.task.high[0]
    assert low <= float(dreams(engine).min()) < float(dreams(engine).max()) <= high
    torch.testing.assert_close(dreams(engine), engine.method.space.render(after))


def test_the_adaptive_term_may_wait() -> None:
    """The released code begins after its tenth round: up to the round that is named, dreams are as without it."""
    usual, late = play(build(exchanges=10), 2), play(build(exchanges=10, adaptive=10.0, adaptive_from=3), 2)
    assert torch.equal(dreams(usual), dreams(late))
    assert not torch.equal(dreams(play(usual)), dreams(play(late)))


def test_the_adaptive_term_comes_with_the_student() -> None:
    """It changes nothing before the student has learned, and then seeks dreams that it is less sure of."""
    usual, adaptive = play(build(exchanges=10)), play(build(exchanges=10, adaptive=10.0))
    assert torch.equal(dreams(usual), dreams(adaptive))
    assert not torch.equal(dreams(play(usual)), dreams(play(adaptive)))


def test_conditional_and_robust_dreams() -> None:
    """With labels, the clients' mean output follows them; robust dreams are others."""
    settings: dict[str, Any] = {"limit": 200, "warm_up": 10, "batch": 16, "exchanges": 60, "dreams": 20}
    settings |= {"buffer": 20, "statistics": 1.0}
    engine = play(build(conditional=True, learners="server", **settings))
    said = engine.state["buffer"]["logits"].argmax(1)
    assert float((said == torch.arange(20) % 10).float().mean()) > 0.8
    robust = play(build(conditional=True, robust=0.3, learners="server", **settings))
    assert not torch.equal(dreams(engine), dreams(robust))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"adaptive": 1.0, "dream_optimiser": "fedadam"}, "adaptive needs"),
        ({"generator": True, "bits": 8}, "generator needs"),
        ({"generator": True, "layer": "norm1"}, "leave out layer"),
        ({"layer": "nrom1"}, "norm1"),
        ({"layer": "norm1", "architectures": f"{NET},mlp:hidden=17:norm=batch"}, "same model"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(FedgistError, match=words):
        build(**settings)


@pytest.mark.parametrize(("collaborate", "away"), [(True, (2, 3, 4, 5)), (False, (1,))])
def test_clients_with_data_that_leave_in_the_middle(collaborate: bool, away: tuple[int, ...]) -> None:
    """Those left without data cannot label, or have no dreams of their own: the round changes nothing."""
    data = build(clients=1).data["0"]
    sites = {"0": replace(data, x=data.x[:0], y=data.y[:0]), "1": data}
    engine = build(sites, clients=2, collaborate=collaborate, offline=lambda id, round, i: id == "1" and i in away)
    before = storage.digest(engine.state)
    play(engine)
    assert storage.digest(engine.state) == before
