"""Gossip: what mixing does to models, on which graphs, and what it is with a server."""

import math
from typing import Any

import pytest
import torch

from fedgist.core.errors import MixedModels
from fedgist.core.rng import Rng
from fedgist.data import topologies
from fedgist.engines.local import LocalEngine
from toys import apart, clients, federation, play, toy_federation

IDS = [str(i) for i in range(6)]


def still(topology: str | None, **more: Any) -> LocalEngine:
    """Clients that begin at weights of their own and hardly train, so that a round is nothing but mixing."""
    graph = None if topology is None else topologies.over_time(topology, IDS, Rng(0))
    sites = clients(*[8] * 6)
    options = {"common_start": False, "steps": 1, "lr": 1e-30, **more}
    return federation("dfedavg", sites, "mlp:hidden=6", topology=graph, dtype=torch.float64, **options)


def models(engine: LocalEngine) -> torch.Tensor:
    """One row a client."""
    flat = [torch.cat([w.flatten() for w in site.state["w"].values()]) for site in engine.clients()]
    return torch.stack(flat)


def test_a_ring_contracts_as_its_second_eigenvalue_says() -> None:
    """A round multiplies the models, a row a client, by W = (I + P + Pᵀ)/3, P the shift along the ring. Its eigenvalues
    are (1 + 2 cos 2πk/n)/3, so that the mean stays and all else shrinks, in the end by (1 + 2 cos 2π/n)/3."""
    engine = still("ring")
    before = models(engine)
    shift = torch.eye(6, dtype=torch.float64).roll(1, 0)
    mixing = (torch.eye(6, dtype=torch.float64) + shift + shift.T) / 3
    after = models(play(engine))
    # Float32 is what travels: each of three terms is rounded once.
    torch.testing.assert_close(after, mixing @ before, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(after.mean(0), before.mean(0), rtol=1e-6, atol=1e-7)
    spread = [(models(play(engine)) - before.mean(0)).norm().item() for _ in range(8)]
    factor = (1 + 2 * math.cos(2 * math.pi / 6)) / 3
    assert spread[-1] / spread[-2] == pytest.approx(factor, rel=0.01)


@pytest.mark.parametrize("topology", ["full", None])
def test_where_everybody_reaches_everybody_one_round_is_agreement(topology: str | None) -> None:
    engine = still(topology)
    mean = models(engine).mean(0)
    after = models(play(engine))
    torch.testing.assert_close(after, mean.expand_as(after), rtol=1e-6, atol=1e-7)


def test_gossip_in_pairs_brings_all_together() -> None:
    engine = still("gossip:1")
    before = models(engine)
    after = models(play(engine, 12))
    torch.testing.assert_close(after.mean(0), before.mean(0), rtol=1e-5, atol=1e-6)
    assert (after - after.mean(0)).norm() < 0.05 * (before - before.mean(0)).norm()


def test_with_a_server_it_is_fedavg_whose_clients_weigh_the_same() -> None:
    """The same batches from the same streams: only what is sent when differs, by rounding."""
    gossip = toy_federation("dfedavg", clients=5, momentum=0.0)
    average = toy_federation("fedavg", clients=5, weighting="uniform", active=0)
    start = next(gossip.clients()).state["w"]
    average.states = {"server": {"w": start}}
    play(gossip)
    play(average)
    assert apart(average.state["w"], next(gossip.clients()).state["w"]) < 1e-5 * apart(start, average.state["w"])


def test_one_architecture_for_all() -> None:
    with pytest.raises(MixedModels, match="averages weights"):
        federation("dfedavg", clients(8, 8), ["mlp:hidden=6", "mlp:hidden=7"])
