"""Batch plans: every sample once a pass, masks that count each sample once, and clients with few or no samples."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.data.client_data import ClientData

sizes = st.integers(1, 40)
batches = st.integers(1, 50)


def client(n: int, classes: int = 3) -> ClientData:
    return ClientData(torch.arange(float(n)).view(n, 1, 1, 1), torch.arange(n) % classes, classes)


@given(n=sizes, count=st.integers(0, 12), batch=batches, seed=st.integers(0, 1000))
def test_steps_are_full_batches_from_reshuffled_passes(n: int, count: int, batch: int, seed: int) -> None:
    plan = client(n).steps(Rng(seed), count, batch)
    assert plan["index"].shape == plan["mask"].shape == (count, batch)
    assert plan["index"].dtype == torch.int64
    assert plan["mask"].dtype == torch.float32
    assert (plan["mask"] == 1).all()
    *passes, rest = torch.split(plan["index"].flatten(), n) if count else [torch.empty(0)]
    assert all(one.sort().values.tolist() == list(range(n)) for one in passes)
    assert len(rest.unique()) == len(rest)


@given(n=sizes, count=st.integers(0, 4), batch=batches, seed=st.integers(0, 1000))
def test_epochs_count_each_sample_once_a_pass(n: int, count: int, batch: int, seed: int) -> None:
    plan = client(n).epochs(Rng(seed), count, batch)
    a_pass = math.ceil(n / batch)
    assert plan["index"].shape == plan["mask"].shape == (count * a_pass, batch)
    assert plan["mask"].dtype == torch.float32
    for index, mask in zip(plan["index"].split(a_pass), plan["mask"].split(a_pass), strict=True) if count else ():
        counted = index[mask == 1]
        assert len(counted.unique()) == len(counted) == n
        assert set(index[mask == 0].tolist()) <= set(counted.tolist())  # filled up with real samples of that pass
        assert (mask[:-1] == 1).all()


def test_a_batch_is_filled_up_with_other_samples_than_its_own() -> None:
    last = client(10).epochs(Rng(0), 1, 4)["index"][-1]
    assert len(last.unique()) == 4


@pytest.mark.parametrize("plan", ["steps", "epochs"])
def test_plans_are_named_by_their_rng_and_reshuffle(plan: str) -> None:
    def draw(seed: int) -> list[int]:
        return getattr(client(30), plan)(Rng(seed), 6, 10)["index"].flatten().tolist()

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    assert draw(0)[:30] != draw(0)[30:60]


@pytest.mark.parametrize("plan", ["steps", "epochs"])
def test_a_client_without_samples_gets_no_batches(plan: str) -> None:
    empty = client(0)
    batches = getattr(empty, plan)(Rng(0), 5, 8)
    assert batches["index"].shape == batches["mask"].shape == (0, 8)
    assert batches["index"].dtype == torch.int64
    assert empty.n == 0
    assert empty.counts().tolist() == [0, 0, 0]


def test_every_order_is_equally_likely() -> None:
    """6,000 passes over 3 samples: chi-square over the 6 orders has 5 degrees of freedom, so P(> 25) = 1.4e-4."""
    index = client(3).epochs(Rng(3), 6000, 3)["index"]
    expected = 6000 / 6
    observed = [(index == torch.tensor(order)).all(dim=1).sum().item() for order in itertools.permutations(range(3))]
    assert sum(observed) == 6000
    assert sum((number - expected) ** 2 / expected for number in observed) < 25


def test_the_masked_mean_of_a_pass_is_the_mean_of_the_data() -> None:
    data = client(11)
    plan = data.epochs(Rng(0), 1, 4)
    values = data.pool["x"][plan["index"]].flatten(1)
    assert (values * plan["mask"]).sum() / plan["mask"].sum() == data.x.mean()


@pytest.mark.parametrize(("count", "batch"), [(-1, 4), (1, 0)])
def test_impossible_plans_are_refused(count: int, batch: int) -> None:
    for plan in (client(3).steps, client(3).epochs, client(0).steps):
        with pytest.raises(FedgistError, match="batch plan needs"):
            plan(Rng(0), count, batch)


def test_counts_pool_and_device() -> None:
    data = ClientData(torch.zeros(4, 1, 2, 2), torch.tensor([2, 0, 2, 2]), 5, test=(torch.zeros(1), torch.ones(1)))
    assert data.n == 4
    assert data.counts().tolist() == [1, 0, 3, 0, 0]
    assert data.counts().dtype == torch.int64
    assert data.pool["x"] is data.x
    assert data.pool["y"] is data.y
    moved = data.to("meta")
    assert {t.device.type for t in (moved.x, moved.y, *moved.test)} == {"meta"}
    assert moved.classes == 5
    assert ClientData(data.x, data.y, 5).to("cpu").test is None
    assert moved.steps(Rng(0), 2, 2)["index"].device.type == "cpu"  # from where those of all clients travel in one go


def test_a_huge_batch_is_all_that_a_client_has_and_a_sensible_one_is_filled_up_as_ever():
    data = ClientData(torch.zeros(5, 1, 2, 2), torch.arange(5), 5)
    for plan in (data.steps(Rng(0), 3, 10**15), data.epochs(Rng(0), 3, 10**15)):
        assert plan["mask"].tolist() == [[1.0] * 5] * 3
        assert [sorted(row) for row in plan["index"].tolist()] == [list(range(5))] * 3
    assert data.steps(Rng(0), 3, 8)["index"].shape == data.epochs(Rng(0), 3, 8)["index"].shape == (3, 8)
    none = ClientData(torch.zeros(0, 1, 2, 2), torch.zeros(0, dtype=torch.int64), 5)
    assert len(none.steps(Rng(0), 3, 10**15)["index"]) == len(none.epochs(Rng(0), 3, 10**15)["index"]) == 0
