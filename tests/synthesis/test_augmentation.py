"""Siamese augmentation: the same change for all, exact where it can be, nothing where it is off."""

import pytest
import torch
from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng, uniform
from fedgist.synthesis.augmentation import KINDS, Augmentation, Change

X = Rng(0).normal(4, 3, 8, 8).double()
SEEDS = Rng(1).seeds(120)


def changed(x: Tensor, seed: Tensor, *kinds: str) -> Tensor:
    """Images by one change, or, with as many seeds, each by its own."""
    height, width = x.shape[2:]
    return Change(Augmentation(kinds, (height, width)).draw(seed), x)(x)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_seeds_change_all_images_alike(kind: str) -> None:
    for seed in SEEDS[:5]:
        together = changed(X, seed, kind)
        apart = torch.cat([changed(X[:1], seed, kind), changed(X[1:], seed, kind)])
        torch.testing.assert_close(together, apart)
    assert any(not torch.allclose(changed(X, seed, kind), X) for seed in SEEDS[:5])


def test_each_image_may_have_a_change_of_its_own() -> None:
    images = X[:1].expand(30, -1, -1, -1)
    together = changed(images, SEEDS[:30], *KINDS)
    apart = torch.cat([changed(X[:1], seed, *KINDS) for seed in SEEDS[:30]])
    torch.testing.assert_close(together, apart)
    assert len(together.flatten(1).unique(dim=0)) > 20


def test_a_row_of_changes_may_be_of_one_kind() -> None:
    """As Zhao and Bilen's code augments a batch: one operation, with numbers of its own for every image."""
    seeds = SEEDS.reshape(12, 10)
    row = Augmentation(("crop", "rotate"), (8, 8)).draw(seeds, one_kind=True)
    turned, shifted = row[..., 5] != 0, (row[..., 6] != 0) | (row[..., 9] != 0)
    assert (turned == turned[:, :1]).all()  # a row turns, or does not
    assert not (turned & shifted).any()
    assert 0 < turned[:, 0].sum() < len(turned)
    assert len(row[turned[:, 0]][0].unique(dim=0)) == 10
    free = Augmentation(("crop", "rotate"), (8, 8)).draw(seeds)
    assert not (free[..., 5] != 0).all(1).any()


def test_a_flip_mirrors_half_of_the_time() -> None:
    images = [changed(X, seed, "flip") for seed in SEEDS]
    flipped = [torch.allclose(x, X.flip(3)) for x in images]
    same = [torch.allclose(x, X) for x in images]
    assert all(a != b for a, b in zip(flipped, same, strict=True))
    assert abs(sum(flipped) - 60) < 28  # five deviations of √(120 / 4)


def test_a_crop_shifts_by_whole_pixels() -> None:
    """An eighth of 8 pixels is at most one in each direction; what comes in from outside is 0."""
    seen = set()
    padded = torch.nn.functional.pad(X, (1, 1, 1, 1))
    for seed in SEEDS:
        moved = changed(X, seed, "crop")
        fits = [
            (down, right)
            for down in range(3)
            for right in range(3)
            if torch.allclose(moved, padded[:, :, down : down + 8, right : right + 8])
        ]
        assert len(fits) == 1
        seen.add(fits[0])
    assert len(seen) == 9


@pytest.mark.parametrize(("side", "cut"), [(8, range(-2, 2)), (9, range(-2, 3)), (10, range(-2, 3))])
def test_a_cutout_blanks_a_square_of_half_the_side(side: int, cut: range) -> None:
    """Pixels from −side/4 up to side/4 around a drawn one, where they are in the image: everywhere in turn."""
    ones = torch.ones(1, 1, side, side)
    found = {tuple((1 - changed(ones, seed, "cutout")[0, 0]).round().flatten().tolist()) for seed in Rng(2).seeds(60)}
    expected = set()
    for row in range(side):
        for column in range(side):
            hole = torch.zeros(side, side)
            hole[max(0, row + cut[0]) : row + cut[-1] + 1, max(0, column + cut[0]) : column + cut[-1] + 1] = 1.0
            expected.add(tuple(hole.flatten().tolist()))
    assert found <= expected and len(found) > 20


def test_scaling_and_turning_keep_the_centre() -> None:
    x = torch.zeros(1, 1, 9, 9).double()
    x[0, 0, 4, 4] = 1.0
    for kind in ("scale", "rotate"):
        for seed in SEEDS[:20]:
            assert changed(x, seed, kind)[0, 0, 4, 4] > 0.99


def test_turning_is_a_rotation_in_pixels_even_of_oblong_images() -> None:
    """The centroid of a spot r pixels right of the centre stays r pixels away from it."""
    x = torch.zeros(1, 1, 21, 41).double()
    x[0, 0, 9:12, 27:30] = 1.0  # its middle is 8 pixels right of the centre (10, 20)
    rows, columns = torch.meshgrid(torch.arange(21.0) - 10, torch.arange(41.0) - 20, indexing="ij")
    angles = []
    for seed in SEEDS[:20]:
        turned = changed(x, seed, "rotate")[0, 0]
        down, right = ((turned * axis).sum() / turned.sum() for axis in (rows, columns))
        assert abs(torch.hypot(down, right) - 8) < 0.1
        angles.append(torch.rad2deg(torch.atan2(down, right)).item())
    assert min(angles) < -8 and max(angles) > 8 and max(map(abs, angles)) < 15.5


def test_color_is_brightness_then_saturation_then_contrast() -> None:
    """As it is said: add, go away from the grey image, go away from the mean."""
    for seed in SEEDS[:20]:
        u = uniform(seed, (4,), torch.float64)[1:]
        x = X + (u[0] - 0.5)
        x = torch.lerp(x.mean(1, keepdim=True), x, 2 * u[1])
        x = torch.lerp(x.mean((1, 2, 3), keepdim=True), x, u[2] + 0.5)
        torch.testing.assert_close(changed(X, seed, "color"), x, rtol=1e-5, atol=1e-6)


def test_a_grey_image_has_no_saturation() -> None:
    for seed in SEEDS[:20]:
        u = uniform(seed, (4,), torch.float64)[1:]
        x = X[:, :1] + (u[0] - 0.5)
        x = torch.lerp(x.mean((1, 2, 3), keepdim=True), x, u[2] + 0.5)
        torch.testing.assert_close(changed(X[:, :1], seed, "color"), x, rtol=1e-5, atol=1e-6)


def test_every_kind_has_its_turn_and_only_one_at_a_time() -> None:
    """With two kinds, each call equals one of the two alone; both occur."""
    hits = {"crop": 0, "cutout": 0}
    for seed in SEEDS[:60]:
        for kind in hits:
            hits[kind] += torch.allclose(changed(X, seed, *hits), changed(X, seed, kind))
    assert sum(hits.values()) >= 60 and min(hits.values()) > 15


def test_it_vmaps_over_seeds_and_differentiates() -> None:
    numbers = Augmentation(KINDS, (8, 8)).draw(SEEDS[:8])
    stacked = torch.vmap(lambda one: Change(one, X)(X))(numbers)
    torch.testing.assert_close(stacked, torch.stack([changed(X, seed, *KINDS) for seed in SEEDS[:8]]))
    small = X[:1, :2, :3, :3].clone().requires_grad_()
    for kind in KINDS:
        assert torch.autograd.gradcheck(lambda x, kind=kind: changed(x, SEEDS[0], kind), small)


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(FedgistError, match="did you mean 'rotate'"):
        Augmentation(("rotat",), (8, 8))
