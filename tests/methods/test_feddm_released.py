"""FedDM by released class sums: no record moves them by more than declared; an audit agrees; images come to match."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from auditing import least_mu
from fedgist import methods
from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.data.client_data import ClientData
from fedgist.dp import gaussian
from fedgist.dp.randomness import exact, simulated
from fedgist.dp.releases import Mechanism, Sums
from fedgist.experiments.config import resolve
from fedgist.experiments.inputs import from_dataset
from fedgist.experiments.privacy import planned
from fedgist.methods.feddm_released import FedDMReleased, Released

SETTINGS = {"method": "feddm-released", "dataset": "digits", "limit": 40, "clients": 1, "device": "cpu"}
PRIVATE = {"model": "mlp:hidden=8", "rounds": 3, "nets": 3, "ipc": 2, "epsilon": 4.0, "clip": 0.3}
MU = gaussian.mu(4.0, 1e-5)
N = 20_000


@cache
def setting() -> tuple[FedDMReleased, ClientData]:
    config = planned(resolve({**SETTINGS, **PRIVATE}))
    inputs = from_dataset(config)
    (data,) = inputs.sites.values()
    return methods.find("feddm-released")(config.options, inputs.task), data  # type: ignore[return-value]


@cache
def public() -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Weights, seeds of nets, centres under them, and the images that those are of."""
    method, _ = setting()
    state, seeds = method.server_init(Rng(0)), Rng(1).seeds(3)
    return state["w"], seeds, method.sums.centres(state["x"], state["w"], seeds), state["x"]


def sums(data: ClientData) -> Tensor:
    """What a client would send, without noise."""
    w, seeds, centres, _ = public()
    return setting()[0].sums.sums(data.epochs(Rng(0), 1, 16), data.pool, w, seeds, centres)


@cache
def before() -> Tensor:
    return sums(setting()[1])


def with_record(record: Tensor, label: int) -> ClientData:
    data = setting()[1]
    return replace(data, x=torch.cat([data.x, record[None]]), y=torch.cat([data.y, torch.tensor([label])]))


PIXELS = st.floats(allow_nan=True, allow_infinity=True, width=32)


@settings(deadline=None, max_examples=25)
@given(st.lists(PIXELS, min_size=64, max_size=64), st.integers(0, 9), st.sampled_from([0.0, 1e30, 1e-30]))
def test_no_record_moves_the_sums_by_more_than_declared(pixels: list[float], label: int, scale: float) -> None:
    """Nor any row but those of its class; but others are in other batches with it, where they round differently."""
    method, _ = setting()
    record = torch.tensor(pixels).view(1, 8, 8) * (scale or 1.0)
    moved = sums(with_record(record, label)) - before()
    (declared,) = method.releases.values()
    assert isinstance(declared, Sums)
    assert torch.linalg.vector_norm(moved).item() <= declared.fields["total"].sensitivity * (1 + 1e-6)
    assert moved[:, torch.arange(10) != label].abs().max() < 1e-5


def audited(factor: float = 1.0, clip: float = 1.0) -> float:
    """The μ that one round's release has at least, by N of them with and without a record that is clipped."""
    (declared,) = setting()[0].releases.values()
    assert isinstance(declared, Sums)
    loud = torch.zeros(1, 8, 8).index_fill_(1, torch.tensor([0, 2, 4, 6]), 50.0)
    shift = clip * torch.linalg.vector_norm(sums(with_record(loud, 3)) - before()).item()
    worlds = []
    for there in (
        0,
        1,
    ):  # what is seen along the direction in which the record moves the sums: all that there is to see
        along = torch.full((N,), there * shift, dtype=torch.float64)
        noised = Mechanism(MU).noised(declared, {"total": along}, exact(simulated(Rng(there))))["total"]
        worlds.append(along + factor * (noised - along))
    return least_mu(*worlds)


def test_an_audit_finds_what_a_round_is_charged_and_no_more() -> None:
    """Three rounds of μ/√3 each are μ."""
    (declared,) = setting()[0].releases.values()
    charged = 1 / Mechanism(MU).release(declared).noise
    assert charged == pytest.approx(MU / math.sqrt(3))
    assert 0.9 * charged < audited() < charged
    assert all(audited(*fault) > charged for fault in [(0.9, 1.0), (0.5, 1.0), (1.0, 3.0)])


def test_sums_tell_means_and_counts() -> None:
    """Against rows made one by one."""
    method, data = setting()
    w, seeds, centres, _ = public()
    maths, total = method.sums, sums(data)
    counts = torch.bincount(data.y, minlength=10)
    assert torch.allclose(total[..., -1] / 0.1, counts.double().expand(3, 10))
    rows = maths.rows(maths.around(w, seeds[1]), data.x, centres[1])
    assert torch.linalg.vector_norm(rows, dim=1).max() <= 1 + 1e-6
    by_hand = torch.stack([rows[data.y == c].sum(0) / max(1, int(counts[c])) for c in range(10)])
    assert torch.allclose(maths.means(total)[1], by_hand.double(), atol=1e-6)


def test_images_come_to_match_what_was_released() -> None:
    """Matched to the means of known images, from noise, under all nets."""
    method, data = setting()
    w, seeds, centres, x = public()
    means = method.sums.means(sums(data)).float()
    turns = torch.arange(60) % 3

    def distance(images: Tensor) -> float:
        rows = [method.sums.rows(method.sums.around(w, s), images, a) for s, a in zip(seeds, centres, strict=True)]
        own = torch.stack(rows).unflatten(1, (10, 2)).mean(2)
        return (own - means).square().sum().item()

    carry, box = method.matcher.init(x), torch.tensor([-5.0, 5.0]).view(2, 1, 1, 1)
    for net in turns:
        carry = method.matcher.step(carry, {"net": net}, w, seeds, centres, means, box)
    assert distance(carry[0]["x"]) < 0.2 * distance(x)


def test_without_noise_it_declares_nothing_to_be_private() -> None:
    method, _ = setting()
    bare = FedDMReleased(replace(method.config, noise_multiplier=0.0), method.task)
    with pytest.raises(FedgistError, match="set noise_multiplier"):
        _ = bare.releases
    assert [*method.releases] == [Released]
