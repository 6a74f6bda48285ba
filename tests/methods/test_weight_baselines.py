"""FedNova, SCAFFOLD and the adaptive servers: against numpy, at their fixed points, on the wire.

Most tests run whole federations on quadratics, where everything is known in closed form. Client k holds n_k copies of
one sample that says (e_k, h_k), and its loss is F_k(w) = ½ Σ_j h_kj (w_j − e_kj)² + 1, so that with r = 1 − η h_k

    τ steps of gradient descent from w end at  e_k + r^τ (w − e_k).

Runs are in float64, but messages travel in float32: an exchange is exact to about 1e-7 of what is sent.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedgist import methods, storage
from fedgist.core.federation import Site
from fedgist.core.ledger import Ledger
from fedgist.core.rng import Rng
from fedgist.core.task import Model, Output
from fedgist.data.client_data import ClientData
from fedgist.engines.local import LocalEngine
from fedgist.learning.local_updates import effective_steps
from fedgist.learning.server_optimisers import ServerAdagrad
from toys import clients, federation, play

ADAPTIVE = ("fedadam", "fedyogi", "fedadagrad")
ALL = ("fednova", "scaffold", *ADAPTIVE)


@dataclass(frozen=True)
class Bowl(Model):
    """A "classifier" of one weight vector whose cross-entropy for label 0 is q = ½ Σ h (w − e)² + 1.

    The cross-entropy of logits (z, 0) and label 0 is log(1 + exp(−z)); z = −log(exp(q) − 1) makes it q.
    """

    size_: int
    name: str = "bowl"
    classes: int = 2

    @property
    def input_shape(self) -> tuple[int, int, int]:  # type: ignore[override]
        return (2, 1, self.size_)

    def init(self, rng: Rng) -> dict[str, Tensor]:
        return {"w": torch.zeros(self.size_)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"w": (self.size_,)}

    @property
    def buffers(self) -> frozenset[str]:
        return frozenset()

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"w": (1,)}

    def __call__(self, w: Any, x: Tensor, train: bool = False, start: Any = None, tap: Any = None) -> Output:
        e, h = x[:, 0, 0], x[:, 1, 0]
        q = 0.5 * (h * (w["w"] - e).square()).sum(1) + 1
        z = -torch.log(torch.expm1(q))
        return Output(q[:, None], torch.stack([z, torch.zeros_like(z)], 1), {})

    def head(self, w: Any, features: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Problem:
    """Clients with minima e [K, d], curvatures h [K, d] and n [K] samples."""

    e: np.ndarray
    h: np.ndarray
    n: np.ndarray

    @property
    def p(self) -> np.ndarray:
        return (self.n / self.n.sum())[:, None]

    def optimum(self, p: np.ndarray | None = None) -> np.ndarray:
        """∇ Σ p_k F_k = Σ p_k h_k (w − e_k) = 0."""
        p = self.p if p is None else p
        return (p * self.h * self.e).sum(0) / (p * self.h).sum(0)

    def descend(self, w: np.ndarray, steps: np.ndarray, lr: float) -> np.ndarray:
        """Where each client ends after its steps of gradient descent."""
        return self.e + (1 - lr * self.h) ** steps[:, None] * (w - self.e)

    def sites(self) -> dict[str, ClientData]:
        samples = torch.tensor(np.stack([self.e, self.h], 1)[:, :, None], dtype=torch.float32)
        return {
            str(k): ClientData(samples[k].expand(n, -1, -1, -1), torch.zeros(n, dtype=torch.int64), 2)
            for k, n in enumerate(self.n.tolist())
        }


def problem(
    clients: int = 4, size: int = 3, n: tuple[int, ...] = (2, 4, 6, 16), same_curvature: bool = False
) -> Problem:
    """Numbers that float32 holds exactly."""
    draw = Rng(7, "problem").numpy()
    h = draw.integers(4, 10, (clients, size)) / 4
    h = np.ones_like(h) if same_curvature else h
    return Problem(draw.integers(-8, 9, (clients, size)) / 8, h, np.array(n))


def bowls(name: str, given: Problem, **settings: Any) -> LocalEngine:
    return federation(name, given.sites(), Bowl(given.e.shape[1]), dtype=torch.float64, **settings)


def after(engine: LocalEngine, rounds: int) -> np.ndarray:
    found: np.ndarray = play(engine, rounds).state["w"]["w"].numpy()
    return found


# FedNova


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_with_equal_steps_is_fedavg(momentum: float) -> None:
    """w − (Σ p_i a) Σ p_i (w − w_i)/a = Σ p_i w_i where all clients have the same a."""
    settings: dict[str, Any] = {"steps": 3, "batch": 2, "lr": 0.1, "momentum": momentum}
    plain, normalised = (after(bowls(name, problem(), **settings), 3) for name in ("fedavg", "fednova"))
    assert normalised == pytest.approx(plain, rel=1e-6)
    assert np.abs(plain).min() > 1e-3


def test_fednova_one_round_against_numpy() -> None:
    """d_i = (w − w_i)/τ_i and w ← w − (Σ p_i τ_i) Σ p_i d_i, with τ_i = 1, 2, 3, 8 from epochs of n_i samples."""
    given, w = problem(), np.zeros(3)
    tau = given.n / 2
    d = (w - given.descend(w, tau, 0.1)) / tau[:, None]
    expected = w - (given.p[:, 0] @ tau) * (given.p * d).sum(0)
    assert after(bowls("fednova", given, epochs=1, batch=2, lr=0.1), 1) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_removes_the_objective_inconsistency(momentum: float) -> None:
    """With h = 1 a client's update from w is w − w_i = η a_i (w − e_i) (1 + O(η a_i)).

    At the minimum w* of Σ p_i F_i, where Σ p_i (w* − e_i) = 0, a round of FedAvg therefore still goes
    η Σ p_i a_i (e_i − w*), for its own minimum is that of Σ p_i a_i F_i; FedNova's goes O(η²).
    """
    given = problem(same_curvature=True)
    start, steps = given.optimum(), np.array([effective_steps(int(n), momentum) for n in given.n])[:, None]
    moved = {}
    for lr in (0.01 / steps.max(), 0.005 / steps.max()):
        for name in ("fedavg", "fednova"):
            engine = bowls(name, given, epochs=1, batch=1, lr=lr, momentum=momentum)
            engine.state["w"]["w"] = torch.tensor(start)
            moved[name, lr] = (after(engine, 1) - start) / lr
        inconsistency = (given.p * steps * (given.e - start)).sum(0)
        assert np.abs(inconsistency).max() > 0.5
        assert moved["fedavg", lr] == pytest.approx(inconsistency, rel=0.02)
        assert np.abs(moved["fednova", lr]).max() < 0.01 * np.abs(inconsistency).max()


# SCAFFOLD


def scaffold_in_numpy(given: Problem, rounds: list[list[int]], steps: int, lr: float, server_lr: float) -> Any:
    """Algorithm 1 with option II, line by line; `rounds` says who is asked. Returns x, c and all c_i."""
    clients = len(given.n)
    x, c, own = np.zeros(3), np.zeros(3), np.zeros((clients, 3))
    for chosen in rounds:
        moves, changes = [], []
        for i in chosen:
            y = x
            for _ in range(steps):
                y = y - lr * (given.h[i] * (y - given.e[i]) - own[i] + c)
            new = own[i] - c + (x - y) / (steps * lr)
            moves.append(y - x)
            changes.append(new - own[i])
            own[i] = new
        x = x + server_lr * np.mean(moves, 0)
        c = c + len(chosen) / clients * np.mean(changes, 0)
    return x, c, own


@pytest.mark.parametrize("active", [0, 2])
def test_scaffold_against_numpy(active: int) -> None:
    """Five rounds as in the paper: uniform weights, all clients or two of four, c += (|S|/N) mean Δc."""
    asked: list[list[int]] = [[] for _ in range(5)]

    def note(id: str, round: int, exchange: int) -> bool:
        asked[round - 1].append(int(id))
        return False

    given = problem()
    settings: dict[str, Any] = {"steps": 3, "batch": 2, "lr": 0.1, "server_lr": 0.5, "weighting": "uniform"}
    engine = bowls("scaffold", given, offline=note, active=active, **settings)
    x = after(engine, 5)
    assert {len(chosen) for chosen in asked} == {active or 4}
    expected, c, own = scaffold_in_numpy(given, asked, steps=3, lr=0.1, server_lr=0.5)
    assert x == pytest.approx(expected, abs=1e-6)
    assert engine.method.mean_control(engine.state, 4)["w"].numpy() == pytest.approx(c, abs=1e-5)  # type: ignore[attr-defined]
    for id, state in engine.site_states.items():
        assert state["c"]["w"].numpy() == pytest.approx(own[int(id)], abs=1e-5)


def test_control_variates_stay_where_the_rate_has_fallen_to_zero() -> None:
    """(x − y_i) / (K η) says nothing about the gradient when η = 0 and y_i = x."""
    engine = bowls("scaffold", problem(), steps=3, lr=0.1, schedule="cosine", horizon=2)
    after(engine, 2)
    before = storage.digest([engine.state["w"], {id: state["c"] for id, state in engine.site_states.items()}])
    after(engine, 2)
    assert storage.digest([engine.state["w"], {id: state["c"] for id, state in engine.site_states.items()}]) == before


def test_control_variates_start_at_zero() -> None:
    """So the first round is FedAvg's, and the first c that is sent is zero."""
    given, settings = problem(), {"steps": 3, "batch": 2, "lr": 0.1, "momentum": 0.5}
    engine = bowls("scaffold", given, **settings)
    assert not engine.method.mean_control(engine.state, 4)["w"].any()  # type: ignore[attr-defined]
    me = Site("0", 1, engine.data["0"], {}, engine.rng("client", "0"), engine.info["0"])
    assert not engine.method.client_init(me)["c"]["w"].any()
    assert after(engine, 1) == pytest.approx(after(bowls("fedavg", given, **settings), 1), rel=1e-6)
    assert engine.state["sum of pc"]["w"].any()


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize(
    ("momentum", "lr", "active", "rounds"), [(0.0, 0.1, 0, 25), (0.9, 0.04, 0, 25), (0.0, 0.1, 3, 60)]
)
def test_scaffold_reaches_the_optimum_where_fedavg_does_not(
    weighting: str, momentum: float, lr: float, active: float, rounds: int
) -> None:
    """SCAFFOLD rests where c_i = ∇F_i(x) and c = 0; c is Σ p_i c_i, so that x is the minimum of Σ p_i F_i.

    That c keeps to Σ p_i c_i when clients are sampled makes it exact then, too. FedAvg leaves that minimum again: it
    rests where Σ p_i (1 − (1 − η h_i)^τ)(w − e_i) = 0.
    """
    given = problem()
    p = given.p if weighting == "samples" else np.full((4, 1), 0.25)
    optimum = given.optimum(p)
    settings: dict[str, Any] = {"steps": 5, "batch": 2, "lr": lr, "weighting": weighting, "momentum": momentum}
    engine = bowls("scaffold", given, active=active, **settings)
    assert after(engine, rounds) == pytest.approx(optimum, abs=1e-4)
    for id, state in engine.site_states.items():
        assert state["c"]["w"].numpy() == pytest.approx((given.h * (optimum - given.e))[int(id)], abs=1e-3)
    averaging = bowls("fedavg", given, **settings)
    averaging.state["w"]["w"] = torch.tensor(optimum)
    moved = after(averaging, 1)
    assert np.abs(moved - optimum).max() > 1e-2
    if not momentum:
        assert moved == pytest.approx((p * given.descend(optimum, np.full(4, 5), lr)).sum(0), abs=1e-6)


def test_control_variates_are_gradients_with_momentum_too() -> None:
    """With a tiny η the gradient is the same in all K steps, and c_i must be it: h_i (x − e_i).

    Dividing by K η instead would give Σ_s a_s / K times as much: 6 times for K = 20 and ρ = 0.9.
    """
    given = problem()
    engine = bowls("scaffold", given, steps=20, batch=2, lr=1e-6, momentum=0.9)
    after(engine, 1)
    assert effective_steps(20, 0.9) / 20 == pytest.approx(6.047, abs=1e-3)
    for i in range(4):
        found = engine.site_states[str(i)]["c"]["w"].numpy()
        assert found == pytest.approx(-given.h[i] * given.e[i], rel=1e-3)


# Adaptive servers

SECOND_MOMENTS: dict[str, Callable[[Any, Any], Any]] = {
    "fedadagrad": lambda v, d: v + d**2,
    "fedyogi": lambda v, d: v - 0.01 * d**2 * np.sign(v - d**2),
    "fedadam": lambda v, d: 0.99 * v + 0.01 * d**2,
}


@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_servers_against_numpy(name: str) -> None:
    """Three rounds of: Δ = Σ p_i (w_i − x), m ← 0.9 m + 0.1 Δ, v, x ← x + η m/(√v + τ); at first m = 0, v = τ²."""
    given, x, m, v, tau = problem(), np.zeros(3), np.zeros(3), np.full(3, 1e-6), 1e-3
    engine = bowls(name, given, steps=3, batch=2, lr=0.1, server_lr=0.1)
    for _ in range(3):
        delta = (given.p * (given.descend(x, np.full(4, 3), 0.1) - x)).sum(0)
        m, v = 0.9 * m + 0.1 * delta, SECOND_MOMENTS[name](v, delta)
        x = x + 0.1 * m / (np.sqrt(v) + tau)
        assert after(engine, 1) == pytest.approx(x, rel=1e-5)
    assert engine.state["optimiser"]["v"]["w"].numpy() == pytest.approx(v, rel=1e-5)


def test_adagrad_as_in_the_papers_runs_is_that_of_torch() -> None:
    """What the profile says makes it Adagrad, without momentum: v begins at τ², and the gradient is −Δ."""
    beta1 = methods.find("fedadagrad").profiles["paper"].get("beta1", 0.9)
    ours, x, tau = ServerAdagrad(beta1), {"w": Rng(0).normal(5).double()}, 1e-3  # type: ignore[arg-type]
    theirs = torch.nn.Parameter(x["w"].clone())
    adagrad = torch.optim.Adagrad([theirs], lr=0.1, initial_accumulator_value=tau**2, eps=tau)
    state = ours.init(x)
    for step in range(4):
        delta = Rng(1)(step).normal(5).double()
        x, state = ours.step(x, {"w": delta}, state, 0.1)
        theirs.grad = -delta
        adagrad.step()
        assert torch.allclose(x["w"], theirs.detach(), rtol=1e-12)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_large_tau_is_fedavg(name: str) -> None:
    """With β₁ = 0 and τ² far above Δ², √v + τ is 2τ for all coordinates: η = 2τ adds Δ itself.

    Adam's v falls to β₂³ τ² in three rounds, so that with β₂ = 0.9999 it agrees to about 1e-4.
    """
    given, settings = problem(), {"steps": 3, "batch": 2, "lr": 0.1}
    adaptive = bowls(name, given, beta1=0.0, beta2=0.9999, tau=1e5, server_lr=2e5, **settings)
    expected = after(bowls("fedavg", given, **settings), 3)
    assert after(adaptive, 3) == pytest.approx(expected, rel=2e-4 if name == "fedadam" else 1e-6)


# All of them, on nets


SITES = clients(7, 20, 3)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_wire_sizes(name: str, model: str, tmp_path: Path) -> None:
    """P parameters and B BatchNorm statistics: FedNova sends P + B + 1 (a_i), SCAFFOLD 2 P + B, the others P + B.

    Not counted in the papers: p_i (4 bytes), and SCAFFOLD's `joined` (8) and `joined_p` (4).
    """
    with_ledger = Ledger(tmp_path / "ledger.csv")
    engine = federation(name, SITES, model, ledger=with_ledger, steps=1, batch=4)
    engine.run_round()
    with_ledger.close()
    net = engine.method.model
    everything = sum(torch.Size(shape).numel() for shape in net.shapes.values())
    assert (everything > net.size) == (model == "cnn")
    up = everything + {"fednova": 1, "scaffold": net.size}.get(name, 0)
    down = everything + (net.size if name == "scaffold" else 0)
    uncounted = 4 + (12 if name == "scaffold" else 0)
    with open(tmp_path / "ledger.csv", newline="") as file:
        rows = [(row["direction"], int(row["paper_bytes"]), int(row["payload_bytes"])) for row in csv.DictReader(file)]
    assert set(rows) == {("up", 4 * up, 4 * up + uncounted), ("down", 4 * down, 4 * down)}


@pytest.mark.parametrize("name", ALL)
def test_batch_norm_statistics_are_averaged_as_in_fedavg(name: str) -> None:
    """The local training of the first round is FedAvg's (SCAFFOLD's c are zero), so the mean statistics are too."""
    settings = {"steps": 2, "batch": 4, "lr": 0.05}
    plain, engine = (federation(which, SITES, "cnn", **settings) for which in ("fedavg", name))
    for federated in (plain, engine):
        federated.run_round()
    buffers = engine.method.model.buffers
    assert len(buffers) == 4
    for buffer in buffers:
        torch.testing.assert_close(engine.state["w"][buffer], plain.state["w"][buffer], rtol=1e-5, atol=1e-6)
    moments = {**engine.state.get("optimiser", {"m": {}})["m"], **engine.state.get("sum of pc", {})}
    assert buffers.isdisjoint(moments)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", *ALL])
@pytest.mark.parametrize("option", [{"share": "head"}, {"batch_norm": "local"}])
def test_parts_that_stay_at_home(name: str, option: dict[str, str]) -> None:
    engine = federation(name, SITES, "cnn", steps=2, batch=4, active=2, **option)
    before = set(engine.state["w"])
    for _ in range(3):
        engine.run_round()
    assert set(engine.state["w"]) == before < set(engine.method.model.shapes)


@pytest.mark.parametrize("name", ALL)
def test_clients_without_data_change_nothing(name: str) -> None:
    sites = clients(7, 0, 0)
    alone = federation(name, {"0": sites["0"]}, steps=2, batch=4)
    together, nobody = (federation(name, which, steps=2, batch=4) for which in (sites, {k: sites[k] for k in "12"}))
    before = {key: value.clone() for key, value in nobody.state["w"].items()}
    for _ in range(2):
        for engine in (alone, together, nobody):
            engine.run_round()
    torch.testing.assert_close(together.state["w"], alone.state["w"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(nobody.state["w"], before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("fednova", {"optimiser": "adam"}, "set optimiser to sgd"),
        ("scaffold", {"optimiser": "adam"}, "set optimiser to sgd"),
        ("fednova", {"keep_momentum": True}, "set keep_momentum to false"),
        ("scaffold", {"common_start": False}, "set common_start to true"),
        ("scaffold", {"clip": 1.0}, "set clip to 0"),
    ],
)
def test_what_would_be_wrong_is_refused(name: str, option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        federation(name, SITES, **option)
