"""Noise that suffices in a sum alone, under a secure sum: nothing of a site's own shows by how it enters the ring."""

import hashlib
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedgist.core.codec import to_bytes
from fedgist.core.message import float64, message, tag_of, wire
from fedgist.core.rng import Rng
from fedgist.dp import randomness
from fedgist.dp.budget import Book, Limit
from fedgist.dp.releases import Sum, Sums
from fedgist.engines.engine import SiteFailure
from fedgist.engines.layer import Exchange
from fedgist.engines.private import Private, PrivateSite, Promise, noised
from fedgist.engines.schemes import Simulated
from fedgist.engines.secure_sum import SecureSite, SecureSum
from fedgist.secure.graph import Group
from fedgist.secure.past import Forgetful, Past
from fedgist.secure.ring import Grid, Ring, Vector


@message
class Total:
    """A sum over records."""

    of: Tensor = wire(float64, shape=("n",), additive=True)


IDS = tuple("abcdefghij")
HERE = Exchange("run", "round", 1, 0)
PROMISE = Promise(1.0, 1e-5, "sum", threshold=7)
RELEASES = {Total: Sums({"of": Sum(1.0, 1.0)})}
OWN = PROMISE.mechanism.own(RELEASES[Total])["of"]


def noise(exchange: Exchange, tag: str) -> randomness.Noise:
    return randomness.rounded(Rng(0, tag))


def drawn(exchange: Exchange, tag: str) -> randomness.Noise:
    return randomness.rounded(Rng(0, tag, exchange.version))


def private(grid: Grid | None = None) -> tuple[Private, SecureSum]:
    limit, inner = Limit(1.0, 1e-5), SecureSum(IDS, Simulated(), grid or Grid())
    sites = {id: PrivateSite(inner.site(id), PROMISE, RELEASES, Book(), limit, noise) for id in IDS}
    return Private(inner, PROMISE, RELEASES, sites, limit), inner


@pytest.mark.parametrize("size", [0.0, 1e7])
def test_the_sum_is_of_what_was_noised_to_the_bit(size: float) -> None:
    """σ of a site is 1/(0.268 √7) = 1.41, in steps of 2^-22: steps of the ring too, with room for 2^36 of them."""
    layer, _ = private()
    invitation = layer.invite(HERE, Total, IDS)
    given = {id: {"of": size + Rng(1, id).normal(50).double()} for id in IDS}
    sent = {id: layer.site(id).wrap(HERE, invitation, Total, leaves) for id, leaves in given.items()}
    total = layer.total(HERE, Total, sent, lambda messages, request, reply: {})["of"]
    mechanism = PROMISE.mechanism
    each = [mechanism.noised(RELEASES[Total], leaves, noise(HERE, tag_of(Total)))["of"] for leaves in given.values()]
    assert torch.equal(total, torch.stack(each).sum(0))
    assert Grid().floats(10, Grid.range_of(10, OWN)).step == 2.0**-22


@pytest.mark.parametrize("range", [6, 20, 52 + 9])
def test_a_server_cannot_have_a_site_tell_how_large_its_numbers_are(range: int) -> None:
    """Whether they fit, and the R that they need, would tell of numbers that have but a part of the noise."""
    layer, inner = private()
    invitation = layer.invite(HERE, Total, IDS)
    told = []
    for size in (0.0, 1e9):
        asked = {**invitation, "ranges": torch.tensor([range], dtype=torch.uint8)}
        with pytest.raises(SiteFailure) as why:
            layer.site("a").wrap(HERE, asked, Total, {"of": torch.full((3,), size, dtype=torch.float64)})
        told.append(str(why.value))
    assert told[0] == told[1] and "each site's own would show" in told[0]
    assert layer.sites["a"].book.releases == () and inner.ranges == {}


def test_coarse_steps_would_show_a_sites_own_noise() -> None:
    """Steps of 1 and noise of 0.1 a site, 0.26 in the sum of seven: 0.35 and 0.65, which μ = 0.3/0.26 is to hide, are 0
    and 1 in the sum with the chance Φ(1.5) each, so that they are 3 deviations apart. Such rings are refused."""
    ring, own = Ring(64, 0, 7, "float"), 0.1
    promised = 0.3 / (own * 7**0.5)
    draws = Rng(2).normal(20_000).double() * own
    worlds = [ring.leave(ring.enter("of", (x + draws).numpy())).mean() for x in (0.35, 0.65)]
    found = NormalDist().inv_cdf(float(worlds[1])) - NormalDist().inv_cdf(float(worlds[0]))
    assert found == pytest.approx(3.0, abs=0.1) and found > 2.5 * promised
    layer, inner = private(Grid(32, 1))
    with pytest.raises(SiteFailure, match=r"would be added in steps of 0.5"):
        layer.site("a").wrap(HERE, layer.invite(HERE, Total, IDS), Total, {"of": torch.zeros(3, dtype=torch.float64)})
    assert inner.site("a").room(layer.invite(HERE, Total, IDS), noised(Total), "of")[0] == 0.5


@pytest.mark.parametrize("sites", [3, 10, 513, 100_000])
@pytest.mark.parametrize("own", [1e-8, 0.01, 1.0, 700.0, 1e5])
def test_there_is_room_for_noise_of_any_size(sites: int, own: float) -> None:
    ring = Grid().floats(sites, Grid.range_of(sites, own))
    assert 2**6 * ring.step <= own and ring.limit >= 2**30 * own


@pytest.mark.parametrize("records", [0, 3])
def test_a_site_opens_sums_whatever_is_under_its_noise(records: int) -> None:
    """It helps with no two sums of one answer that differ by few sites. Who has no records answers 0, and 0 again: a
    server that leaves one site out of the second sum would see by its refusal that it has none."""
    seen: list[Sequence[str]] = []

    def hide(group: Group, vectors: Mapping[str, Vector], scopes: Sequence[str]) -> Any:
        seen.append(scopes)
        return dict(vectors), np.zeros((9, 368), np.uint8), np.zeros((10, 32), np.uint8)

    _, inner = private()
    site = PrivateSite(SecureSite(IDS, bytes(32), Grid(), hide), PROMISE, RELEASES, Book(), Limit(1e3, 1e-5), drawn)
    past = Past(Forgetful(), 3)
    for number, alive in enumerate((IDS, IDS[:-1])):
        given = {"of": torch.full((3,), float(records * (number + 1)), dtype=torch.float64)}
        answer = hashlib.sha256(to_bytes(Total, given)).hexdigest()
        here = Exchange("run", "round", 1 + number, 0, scopes=(f"question {number}", answer))
        inner.expect(noised(Total), {"of": OWN})
        site.wrap(here, inner.invite(here, noised(Total), IDS), Total, given)
        past.open(here.version, alive, 7, seen[-1])
    assert [scopes[0] for scopes in seen] == ["question 0", "question 1"] and seen[0][1] != seen[1][1]
