"""Clients that see the same data differently: what each kind changes, what it leaves, how kinds combine."""

import math

import pytest
import torch

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.data import datasets, discrepancies
from fedgist.experiments.config import resolve
from fedgist.experiments.inputs import from_dataset

CLIENTS, CLASSES = 6, 10


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    train, _ = datasets.load("digits", limit=50)
    return train.x, train.y


def views(*kinds: str, seed: int = 0) -> list[discrepancies.View]:
    return discrepancies.views(kinds, CLIENTS, CLASSES, Rng(seed))


@pytest.mark.parametrize("kind", ["rotation", "blur", "contrast"])
def test_a_feature_shift_is_the_clients_own_and_leaves_labels(
    digits: tuple[torch.Tensor, torch.Tensor], kind: str
) -> None:
    seen = [view(*digits) for view in views(kind)]
    for i, (x, y) in enumerate(seen):
        assert x.shape == digits[0].shape
        assert y is digits[1]
        assert all(not torch.allclose(x, other, atol=1e-3) for other, _ in seen[:i])
    again = views(kind)[2](*digits)[0]
    assert again.equal(seen[2][0])
    assert not views(kind, seed=1)[2](*digits)[0].equal(again)


def test_rotation_by_a_right_angle_is_exact(digits: tuple[torch.Tensor, torch.Tensor]) -> None:
    """A quarter turn takes the centres of pixels to centres, so it is `rot90`, one way or the other.

    The angle is drawn, so degrees is chosen to make client 0's a right angle.
    """
    drawn = 2 * Rng(0)("rotation").uniform(CLIENTS)[0].item() - 1
    turned = views(f"rotation:degrees={90 / drawn if drawn > 0 else -90 / drawn}")[0](*digits)[0]
    assert any(torch.allclose(turned, digits[0].rot90(k, (2, 3)), atol=1e-4) for k in (1, -1))


def test_blur_keeps_flat_images_and_the_mean_of_inner_spots() -> None:
    """Weights add up to 1: a flat image stays, and the total light of a spot far from the edges too."""
    flat, spot = torch.full((1, 3, 9, 9), 0.7), torch.zeros(1, 1, 21, 21)
    spot[0, 0, 10, 10] = 1.0
    y = torch.zeros(1, dtype=torch.int64)
    for view in views("blur:sigma=2"):
        assert torch.allclose(view(flat, y)[0], flat)
        seen = view(spot, y)[0]
        assert seen.sum().item() == pytest.approx(1.0, abs=1e-5)
        assert seen.equal(seen.mT)
        assert seen.argmax().item() == 10 * 21 + 10


def test_contrast_scales_around_each_images_mean(digits: tuple[torch.Tensor, torch.Tensor]) -> None:
    for view in views("contrast:least=0.4"):
        x = view(*digits)[0]
        factor = x.std((1, 2, 3)) / digits[0].std((1, 2, 3))
        assert torch.allclose(x.mean((1, 2, 3)), digits[0].mean((1, 2, 3)), atol=1e-5)
        assert factor.max() - factor.min() < 1e-4
        assert 0.4 <= factor[0] <= 1


def test_a_concept_shift_renames_every_class_of_some_clients(digits: tuple[torch.Tensor, torch.Tensor]) -> None:
    """p_u(x) stays, p_u(y|x) does not: at half of the six clients no class keeps its name, and no two get one name."""
    names = []
    for view in views("labels:share=0.5"):
        x, y = view(digits[0][:CLASSES], torch.arange(CLASSES))
        assert x.equal(digits[0][:CLASSES])
        names.append(tuple(y.tolist()))
    plain = tuple(range(CLASSES))
    odd = [name for name in names if name != plain]
    assert len(odd) == 3 == len(set(odd))
    for name in odd:
        assert sorted(name) == list(plain)
        assert all(a != b for a, b in zip(name, plain, strict=True))


def test_kinds_combine_and_each_is_what_it_is_alone(digits: tuple[torch.Tensor, torch.Tensor]) -> None:
    both = views("contrast", "labels")
    for view, first, second in zip(both, views("contrast"), views("labels"), strict=True):
        x, y = view(*digits)
        assert x.equal(first(*digits)[0])
        assert y.equal(second(*digits)[1])


@pytest.mark.parametrize(("kind", "said"), [
    ("rotate", "did you mean 'rotation'"),
    ("rotation:angle=3", "unknown option of discrepancy rotation 'angle'"),
    ("rotation:degrees=-1", "degrees of discrepancy rotation must be a number of at least 0, not '-1'"),
    ("blur:sigma=-1", "sigma of discrepancy blur must be a number between 0 and 100, not '-1'"),
    ("blur:sigma=1e30", "sigma of discrepancy blur must be a number between 0 and 100, not '1e30'"),
    ("labels:share=2", "between 0 and 1"),
    ("contrast:least=low", "not 'low'"),
    ("rotation:degrees=inf", "not 'inf'"),
])  # fmt: skip
def test_wrong_kinds_are_explained(kind: str, said: str) -> None:
    with pytest.raises(FedgistError, match=said):
        views(kind)


def test_a_run_tests_every_client_in_its_own_world() -> None:
    """Each client's part of the test set is seen as the client sees; the server's test set is all parts together."""
    layer = {"method": "fedavg", "limit": 200, "clients": CLIENTS, "device": "cpu"}
    plain = from_dataset(resolve(layer))
    shifted = from_dataset(resolve({**layer, "discrepancy": "rotation,labels:share=1"}))
    assert len(shifted.test[1]) == len(plain.test[1])
    parts = [site.test for site in shifted.sites.values()]
    assert torch.cat([x for x, _ in parts if x is not None]).equal(shifted.test[0])  # type: ignore[misc]
    view = discrepancies.views(("rotation", "labels:share=1"), CLIENTS, CLASSES, Rng(0)("discrepancy"))[1]
    x, y = view(plain.sites["1"].x, plain.sites["1"].y)
    assert shifted.sites["1"].x.equal(x)
    assert shifted.sites["1"].y.equal(y)
    x, y = view(plain.test[0][1::CLIENTS], plain.test[1][1::CLIENTS])
    assert parts[1] is not None
    assert parts[1][0].equal(x)
    assert parts[1][1].equal(y)
    assert math.isclose(sum(len(part[1]) for part in parts if part is not None), len(plain.test[1]))
