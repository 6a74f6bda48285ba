"""The ring: sums of floats, whole numbers and bytes that come out as they went in, and refusals that say how much."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedgist.secure.ring import FIRST_RANGE, WIDEST_RANGE, Grid, OutOfRange, Ring


def added(ring: Ring, addends: list[np.ndarray]) -> np.ndarray:
    entered = [ring.enter("x", values) for values in addends]
    total = entered[0]
    for vector in entered[1:]:
        total = total + vector
    assert ring.holds(total)
    return ring.leave(total)


@settings(max_examples=60, deadline=None)
@given(
    range=st.integers(FIRST_RANGE, WIDEST_RANGE),
    addends=st.integers(1, 1000),
    values=arrays.arrays(np.float64, st.integers(0, 5), elements=st.floats(-1, 1)),
)
def test_floats_at_the_ends_of_their_range_never_wrap(range: int, addends: int, values: np.ndarray) -> None:
    """All sites may add what is just inside the range; each is off by half a step at most."""
    ring = Grid().floats(addends, range)
    largest = np.nextafter(ring.limit, 0) * np.sign(np.append(values, 1.0)) if addends < 20 else values
    total = added(ring, [largest] * addends)
    assert ring.limit >= 2.0**range
    bound = addends * 2.0 ** -(ring.exponent + 1) + np.abs(largest * addends) * 2.0**-52
    assert np.all(np.abs(total - largest * addends) <= bound)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from([np.float16, np.float32, np.float64, np.int64]),
    shape=st.integers(0, 7),
    addends=st.integers(1, 40),
    data=st.data(),
)
def test_every_dtype_adds_up(dtype: type, shape: int, addends: int, data: st.DataObject) -> None:
    whole = dtype is np.int64
    elements = st.integers(-(2**40), 2**40) if whole else st.floats(-60000, 60000, width=16)
    parts = [data.draw(arrays.arrays(dtype, shape, elements=elements)) for _ in range(addends)]
    ring = Grid.integers(addends) if whole else Grid().floats(addends, 17)
    total = added(ring, parts)
    exact = [math.fsum(float(part[i]) for part in parts) for i in range(shape)]
    assert total.dtype == (np.int64 if whole else np.float64)
    assert np.allclose(total, exact, rtol=0, atol=0 if whole else addends * 2.0**-ring.exponent)


@pytest.mark.parametrize("addends", [1, 257, 258, 1000])
def test_bytes_fit_whoever_adds_them(addends: int) -> None:
    ring = Grid.bytes(addends)
    assert ring.bits == (16 if addends <= 257 else 32)
    assert added(ring, [np.array([0, 255, 7], np.uint8)] * addends).tolist() == [0, 255 * addends, 7 * addends]


def test_257_is_the_most() -> None:
    """The planted fault: with one more in 16 bits the sum would be another."""
    assert added(Ring(16, 0, 258, "byte"), [np.array([255], np.uint8)] * 258).tolist() != [255 * 258]


def test_small_weights_keep_their_digits() -> None:
    """w·n_k/2^20 of a thousand clients with ten samples: a fixed step of 2^-40 would lose the 1e-6."""
    rng = np.random.default_rng(0)
    parts = [rng.normal(0, 1e-3, 500) * 10 / 2**20 for _ in range(1000)]
    exact = np.sum(parts, axis=0)
    off = {
        ring.exponent: np.linalg.norm(added(ring, parts) - exact) / np.linalg.norm(exact)
        for ring in (Grid().floats(1000), Ring(64, 40, 1000, "float"))
    }
    ours, fixed = off.values()
    assert ours < 1e-6 < fixed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(OutOfRange, match=r"fedavg.Local.pw holds a number that is not finite"):
        Grid().floats(3).enter("fedavg.Local.pw", np.array([0.0, bad]))


def test_a_refusal_names_the_field_and_says_by_how_much() -> None:
    ring = Grid().floats(10)
    with pytest.raises(OutOfRange, match=r"gist.First.features holds 1e\+04, 97.7 times the 102 that 10 sites") as told:
        ring.enter("gist.First.features", np.array([-1e4]))
    assert told.value.needed == 14 and Grid().floats(10, 14).limit > 1e4


def test_32_bits_have_a_stated_step() -> None:
    ring = Grid(32, 20).floats(10)
    assert added(ring, [np.array([1.5, -2.25])] * 10).tolist() == [15.0, -22.5]
    with pytest.raises(OutOfRange, match="times the 102 that 10 sites may add"):
        ring.enter("x", np.array([103.0]))
    for wrong in ({"bits": 32}, {"bits": 32, "step": 30}, {"bits": 64, "step": 20}, {"bits": 16}):
        with pytest.raises(ValueError, match="bits"):
            Grid(**wrong)


@pytest.mark.parametrize(
    "ring", [Grid().floats(7, 6), Grid(32, 20).floats(7), Grid.integers(7), Grid.bytes(7), Grid.bytes(300)]
)
def test_a_sum_from_which_a_mask_was_not_taken_shows(ring: Ring) -> None:
    """Of 64 numbers of noise hardly ever all lie where sums do; what lies next to the end of a range does not count."""
    noise = np.random.default_rng(0).integers(0, 2**ring.bits, 64, np.uint64).astype(f"u{ring.bits // 8}")
    assert not ring.holds(noise) and ring.holds(noise[:0])
    most = 255 * ring.addends if ring.kind == "byte" else 2 ** (ring.bits - 2) + 2 ** (ring.bits - 6)
    ends = [most, 0] if ring.kind == "byte" else [most, 2**ring.bits - most]
    assert ring.holds(np.array(ends, noise.dtype))
