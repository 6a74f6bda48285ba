"""Images as bytes: the round trip's error, clamping, and exactness where the data were bytes."""

import torch

from fedgist.core.rng import Rng
from fedgist.synthesis.pixels import dequantise, quantise

LOW, HIGH = (-2.0, 0.0, 1.0), (2.0, 1.0, 3.5)
RANGE = (torch.tensor(HIGH) - torch.tensor(LOW)).view(3, 1, 1)
BOTTOM = torch.tensor(LOW).view(3, 1, 1)


def test_the_round_trip_errs_by_half_a_level() -> None:
    x = Rng(0).uniform(50, 3, 8, 8) * RANGE + BOTTOM
    q = quantise(x, LOW, HIGH)
    back = dequantise(q, LOW, HIGH)
    error = (back - x).abs() / (RANGE / 255)
    assert q.dtype == torch.uint8 and back.dtype == torch.float32
    assert 0.49 < error.max() <= 0.5 + 1e-4
    assert torch.equal(quantise(back, LOW, HIGH), q)


def test_bytes_come_back_exactly() -> None:
    """Data that were bytes, normalised as the data sets are, lose nothing."""
    raw = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    mean, deviation = 0.1307, 0.3081
    x = (raw.float() / 255 - mean) / deviation
    assert torch.equal(quantise(x, (-mean / deviation,), ((1 - mean) / deviation,)), raw)


def test_what_lies_outside_is_clamped() -> None:
    x = torch.stack([BOTTOM - RANGE, BOTTOM + 3 * RANGE]).expand(2, 3, 2, 2)
    assert torch.equal(quantise(x, LOW, HIGH)[:, 0, 0, 0], torch.tensor([0, 255], dtype=torch.uint8))
    back = dequantise(quantise(x, LOW, HIGH), LOW, HIGH, torch.float64)
    torch.testing.assert_close(back[0], BOTTOM.double().expand(3, 2, 2))
    torch.testing.assert_close(back[1], (BOTTOM + RANGE).double().expand(3, 2, 2))


def test_a_constant_channel_stays_constant() -> None:
    x = torch.full((1, 1, 2, 2), 0.25)
    assert torch.equal(dequantise(quantise(x, (0.25,), (0.25,)), (0.25,), (0.25,)), x)
