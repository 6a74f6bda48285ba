"""The layer of secure sums in one process: what travels, what the asker gets, and where noise comes in."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedgist import storage
from fedgist.core.codec import Codec, to_bytes
from fedgist.core.errors import FedgistError
from fedgist.core.message import message, schema_of, tag_of, wire
from fedgist.engines.layer import Exchange, Unfit
from fedgist.engines.schemes import Helped, Masks, Simulated, helped_here, masks_here
from fedgist.engines.secure_sum import SecureSum, masked
from fedgist.secure.graph import Group
from fedgist.secure.masks import mask
from fedgist.secure.ring import Grid, Ring, Vector
from toys import clients, federation, received, toy_federation


@message
class Said:
    """A reply with a field of each kind."""

    shown: int
    floats: Tensor = wire(torch.float32, torch.uint8, shape=("n",), additive=True)
    count: int = wire(torch.int64, additive=True)
    weight: float = wire(additive=True, low=0, high=1, per="count")


HERE = Exchange("run", "round", 1, 0)
IDS = ("a", "b", "c")


def summed(layer: SecureSum, replies: dict[str, Said]) -> dict[str, Tensor]:
    codec = Codec({"n": 5, **layer.form.bounds})
    invitation = layer.invite(HERE, Said, sorted(replies))
    sent = {id: layer.site(id).wrap(HERE, invitation, Said, codec.pack(reply)) for id, reply in replies.items()}
    read = {id: codec.read(masked(Said), to_bytes(masked(Said), leaves)) for id, leaves in sent.items()}
    return layer.total(HERE, Said, read, lambda messages, request, reply: {})


def said(scale: float) -> Said:
    return Said(7, torch.tensor([1.0, -2.5]) * scale, round(3 * scale), 0.5)


def test_a_masked_reply_has_its_visible_fields_and_ring_numbers() -> None:
    schema = schema_of(masked(Said))
    assert tag_of(masked(Said)) == "masked.Said" and masked(Said) is masked(Said)
    assert schema["shown"] == schema_of(Said)["shown"]
    for name in ("floats", "count", "weight"):
        declared = schema[name][1]
        assert declared.additive and declared.per is None and declared.high is None
        assert not any(dtype.is_floating_point for dtype in declared.dtypes)


def test_the_sum_is_that_of_floats() -> None:
    total = summed(SecureSum(IDS, Simulated()), {id: said(k) for k, id in enumerate(IDS, 1)})
    assert total["floats"].tolist() == [6.0, -15.0] and total["count"].item() == 18 and total["weight"].item() == 1.5
    assert "shown" not in total


def test_bytes_travel_in_sixteen_bits() -> None:
    layer = SecureSum(IDS, Simulated())
    reply = Said(0, torch.tensor([200, 255], dtype=torch.uint8), 1, 0.0)
    sent = layer.site("a").wrap(HERE, layer.invite(HERE, Said, IDS), Said, Codec({"n": 5}).pack(reply))
    assert sent["floats"].dtype == torch.int16
    assert summed(layer, dict.fromkeys(IDS, reply))["floats"].tolist() == [600, 765]


def test_a_field_that_does_not_fit_is_widened_for_all() -> None:
    layer = SecureSum(IDS, Simulated())
    with pytest.raises(Unfit, match=r"test_secure_sum.Said.floats holds 2.5e\+03") as told:
        summed(layer, {id: said(1000) for id in IDS})
    assert layer.mend(Said, [told.value]) and not layer.mend(Said, [told.value])
    assert summed(layer, {id: said(1000) for id in IDS})["floats"].tolist() == [3000.0, -7500.0]
    again = SecureSum(IDS, Simulated())
    again.restore(layer.snapshot())
    assert again.ranges == layer.ranges != {}


@pytest.mark.parametrize("field", ["unheard", "shown", "floats/w", ""])
def test_a_field_that_is_not_summed_is_not_widened(field: str) -> None:
    """Else a site that lies could make up one after the other, and all would be asked again for ever."""
    layer = SecureSum(IDS, Simulated())
    assert not layer.mend(Said, [Unfit("it does not fit", field, 7)]) and layer.ranges == {}


def test_noise_is_added_in_the_ring() -> None:
    drawn: list[tuple[str, int]] = []

    def steps(exchange: Exchange, name: str, count: int, ring: Ring) -> np.ndarray:
        drawn.append((name, count))
        return np.full(count, -(2**20), dtype=np.int64)

    layer, plain = (SecureSum(IDS, Simulated(), noise=noise) for noise in (steps, None))
    noisy, exact = (summed(one, {id: said(1) for id in IDS}) for one in (layer, plain))
    assert drawn[:3] == [("floats", 2), ("count", 1), ("weight", 1)]
    step = 2.0 ** (20 - Grid().floats(3).exponent)
    assert torch.equal(noisy["floats"] - exact["floats"], torch.full((2,), -3 * step, dtype=torch.float64))


def test_the_asker_gets_the_same_as_without() -> None:
    """FedAvg with weights of any size: where a field has to be widened all are asked again, which is counted."""
    sites = clients(30, 20, 10)
    layers = (None, SecureSum(list(sites), Simulated()))
    plain, ring = (federation("fedavg", sites, between=layer, weighting="uniform") for layer in layers)
    for engine in (plain, ring):
        engine.states["server"]["w"] = {name: 1000 + w for name, w in engine.states["server"]["w"].items()}
    got = [received(engine) for engine in (plain, ring)]
    for engine in (plain, ring):
        engine.run_round()
    (ours,), (theirs,) = got
    for name, total in theirs.sum.pw.items():
        assert torch.allclose(ours.sum.pw[name], total, rtol=1e-6)
    assert ring.layer.ranges == {"global_model.Local.pw": 14}
    assert ring.ledger.totals().bytes_up > 1.9 * plain.ledger.totals().bytes_up


def test_a_number_that_fits_nowhere_is_named() -> None:
    sites = clients(30, 20, 10)
    engine = federation("fedavg", sites, between=SecureSum(list(sites), Simulated()))
    engine.states["server"]["w"] = {name: w / 0 for name, w in engine.states["server"]["w"].items()}
    with pytest.raises(
        FedgistError, match=r"round 1, client 0: global_model.Local.pw/\S+ holds a number that is not f"
    ):
        engine.run_round()


def test_too_few_sites_are_no_sum() -> None:
    sites = clients(30, 20)
    report = federation("fedavg", sites, between=SecureSum(list(sites), Simulated())).run_round()
    assert report.skipped == "round 1: 2 of 2 answered Local, and a secure sum is over at least 3"


def test_with_a_helper_too_few_skip_the_round() -> None:
    sites = clients(*[10] * 5)
    layer = SecureSum(list(sites), helped_here(list(sites), 3))
    report = federation("fedavg", sites, between=layer, offline=lambda id, *_: id in "01").run_round()
    assert report.skipped and "3 of 5 sites answered, and 4 are needed" in report.skipped


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("scheme", [helped_here, masks_here])
def test_a_mask_that_stays_in_the_sum_does_not_reach_the_model(
    scheme: Callable[..., Masks | Helped], checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site hides its part by another stream than it seals, or commits to; without the check nobody would notice."""
    sites = clients(*[10] * 5)
    made = scheme(list(sites), 3)
    honest = made.parties["2"].mask

    def lie(group: Group, vectors: Mapping[str, Vector], scopes: Sequence[str]) -> Any:
        hidden, *beside = honest(group, vectors, scopes)
        mask(hidden, bytes(32), 1)
        return hidden, *beside

    monkeypatch.setattr(made.parties["2"], "mask", lie)
    if not checked:
        monkeypatch.setattr(Ring, "holds", lambda *_: True)
    engine = federation("fedavg", sites, between=SecureSum(list(sites), made))
    before = storage.digest(engine.state)
    reports = [engine.run_round() for _ in range(2)]
    for report in reports:
        assert (report.skipped is not None) == checked
        assert not checked or "more than sites can add. One of 0, 1, 2, 3, 4, or who helps them" in str(report.skipped)
    assert (storage.digest(engine.state) == before) == checked


@pytest.mark.parametrize("gone", ["9", "789"])
def test_a_batch_of_exchanges_keeps_its_set_or_loses_many(gone: str) -> None:
    """Co-Dream's second exchange misses one of ten, and the rest of the round is dropped; or three, and it goes on."""
    ids = [str(i) for i in range(10)]
    layer = SecureSum(ids, masks_here(ids, 3))

    def away(id: str, round: int, exchange: int) -> bool:
        return id in gone and (round, exchange) == (1, 1)

    engine = toy_federation("codream", clients=10, active=0, between=layer, offline=away)
    told, first = received(engine), engine.run_round()
    if gone == "9":
        why = "9 of 10 answered DreamUpdate, and the set of a round's sums changes by at least 3 sites, or not at all"
        assert first.skipped == f"round 1: {why}" and len(told) == 2
    else:
        assert first.skipped is None and {len(one.ids) for one in told[1:]} == {7}  # also when they are back
    assert engine.run_round().skipped is None
    assert len(told[-1].ids) == 10
