"""Encoded updates at both ends: when they are worth sending, which are remembered, how they are applied."""

import logging
from typing import Any

import pytest
import torch

from fedgist import models, storage
from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.core.work import Place
from fedgist.engines.scheduler import drive_one
from fedgist.options import build
from fedgist.synthesis.encoded_updates import (
    EncoderOptions,
    apply_update,
    encode,
    remember,
    statistics,
    worth_sending,
)
from fedgist.synthesis.encoding import Encoder

LENET = models.build("lenet5", (1, 28, 28), 10)
NET = models.build("cnn", (1, 8, 8), 4)


@pytest.mark.parametrize(
    ("images", "together", "said"),
    [
        (64, 1, ""),
        (10, 7, ""),  # 10 · 795 + 5 = 7,955 numbers: seven times that is 55,685, eight times 63,640
        (96, 1, "an encoded update has 305300 bytes, the weights only 246824; 77 images would be smaller"),
    ],
)
def test_how_many_updates_are_worth_sending(
    images: int, together: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """LeNet5 on MNIST has 61,706 weights; N images have N · (784 + 10 + 1) numbers, and its five layers a norm each."""
    with caplog.at_level(logging.WARNING):
        assert worth_sending(Encoder(LENET), images) == together
    assert [record.getMessage() for record in caplog.records] == ([f"tofu: {said}"] if said else [])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (models.build("mlp", (1, 28, 28), 10, hidden=1), "; 1 image would be smaller"),  # 797 numbers, 805 weights
        (models.build("resnet9", (3, 32, 32), 10, width=1, feature_size=2), "; not even one image would be smaller"),
    ],
)
def test_it_is_said_how_many_images_would_be_smaller(
    model: models.Model, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Found among any number of images, without counting them up."""
    assert worth_sending(Encoder(model), 2**40) == 1
    assert said in caplog.text


def test_the_last_ones_are_remembered() -> None:
    past: Any = {"images": torch.zeros(0, 2), "scales": torch.zeros(0, 1)}
    for number in range(4):
        past = remember(
            past, {"images": torch.full((2,), float(number)), "scales": torch.full((1,), -float(number))}, 3
        )
    assert past["images"].tolist() == [[1, 1], [2, 2], [3, 3]]
    assert past["scales"].tolist() == [[-1], [-2], [-3]]
    bytes = remember({"images": torch.zeros(0, 2)}, {"images": torch.tensor([3, 4], dtype=torch.uint8)}, 3)["images"]
    assert (bytes.dtype, bytes.tolist()) == (torch.uint8, [[3, 4]])


def test_weights_go_down_the_update_and_statistics_are_replaced() -> None:
    w, update = NET.init(Rng(0)), NET.init(Rng(1))
    new = {name: Rng(2)(name).uniform(*w[name].shape) for name in NET.buffers}
    flat = statistics(NET, {**w, **new})
    assert len(flat) == Encoder(NET).statistics == sum(w[name].numel() for name in NET.buffers) > 0
    after = apply_update(NET, w, update, flat)
    assert list(after) == list(w)
    for name in w:
        assert torch.equal(after[name], new[name] if name in new else w[name] - update[name])


def test_a_model_without_batch_norm_has_no_statistics() -> None:
    w = tree.map(lambda leaf: leaf.double(), LENET.init(Rng(0)))
    assert statistics(LENET, w).shape == (0,) and statistics(LENET, w).dtype == torch.float64
    assert storage.digest(apply_update(LENET, w, tree.zeros_like(w), statistics(LENET, w))) == storage.digest(w)


def test_more_iterations_encode_better() -> None:
    """The cosine is that of what a receiver decodes, after each layer got its norm."""
    model = models.build("mlp", (1, 8, 8), 4, hidden=(6,))
    w, update = model.init(Rng(0)), model.init(Rng(1))
    cosines = []
    for iterations in (0, 30):
        options = build(EncoderOptions, {"images": 3, "iterations": iterations, "pixels": "uint8"})
        encoder = options.encoder(model)
        sent, cosine = drive_one(encode(encoder, options, update, w, Rng(2), False), Place())
        assert sent["images"].dtype == torch.uint8 and sent["images"].shape == (3, 1, 8, 8)
        with torch.no_grad():
            decoded = encoder.decode(sent, w)
        expected = tree.dot(decoded, update) / (tree.norm(decoded) * tree.norm(update))
        torch.testing.assert_close(cosine, expected, rtol=1e-4, atol=1e-5)
        cosines.append(cosine.item())
    assert cosines[1] > cosines[0] + 0.2
