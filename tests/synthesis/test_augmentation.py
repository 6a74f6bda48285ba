"""Siamese augmentation: the same change for all, exact where it can be, nothing where it is off."""

import pytest
import torch

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.synthesis.augmentation import KINDS, Augmentation

X = Rng(0).normal(4, 3, 8, 8).double()
SEEDS = Rng(1).seeds(120)


def test_without_kinds_images_are_left_alone() -> None:
    assert Augmentation()(X, SEEDS[0]) is X


@pytest.mark.parametrize("kind", KINDS)
def test_equal_seeds_change_all_images_alike(kind: str) -> None:
    change = Augmentation((kind,))
    for seed in SEEDS[:5]:
        together = change(X, seed)
        apart = torch.cat([change(X[:1], seed), change(X[1:], seed)])
        torch.testing.assert_close(together, apart)
    assert any(not torch.allclose(change(X, seed), X) for seed in SEEDS[:5])


def test_each_image_may_have_a_change_of_its_own() -> None:
    same = X[:1].expand(30, -1, -1, -1)
    changed = Augmentation(("flip",)).each(same, SEEDS[0])
    mirrored = [torch.allclose(x, X[0].flip(2)) for x in changed]
    assert all(mirrored[i] or torch.allclose(changed[i], X[0]) for i in range(30))
    assert 5 < sum(mirrored) < 25
    assert torch.equal(changed, Augmentation(("flip",)).each(same, SEEDS[0]))
    assert Augmentation().each(X, SEEDS[0]) is X


def test_a_flip_mirrors_half_of_the_time() -> None:
    changed = [Augmentation(("flip",))(X, seed) for seed in SEEDS]
    flipped = [torch.allclose(x, X.flip(3)) for x in changed]
    same = [torch.allclose(x, X) for x in changed]
    assert all(a != b for a, b in zip(flipped, same, strict=True))
    assert abs(sum(flipped) - 60) < 28  # five deviations of √(120 / 4)


def test_a_crop_shifts_by_whole_pixels() -> None:
    """An eighth of 8 pixels is at most one in each direction; what comes in from outside is 0."""
    seen = set()
    padded = torch.nn.functional.pad(X, (1, 1, 1, 1))
    for seed in SEEDS:
        moved = Augmentation(("crop",))(X, seed)
        fits = [
            (down, right)
            for down in range(3)
            for right in range(3)
            if torch.allclose(moved, padded[:, :, down : down + 8, right : right + 8])
        ]
        assert len(fits) == 1
        seen.add(fits[0])
    assert len(seen) == 9


def test_a_cutout_blanks_a_square_of_half_the_side() -> None:
    ones = torch.ones(1, 1, 8, 8)
    holes = torch.stack([1 - Augmentation(("cutout",))(ones, seed)[0, 0] for seed in SEEDS])
    assert set(holes.unique().tolist()) == {0.0, 1.0}
    assert holes.sum((1, 2)).max() == 16  # 4 × 4, fewer where it leaves the image
    assert holes.sum((1, 2)).min() >= 4


def test_scaling_and_turning_keep_the_centre() -> None:
    x = torch.zeros(1, 1, 9, 9).double()
    x[0, 0, 4, 4] = 1.0
    for kind in ("scale", "rotate"):
        for seed in SEEDS[:20]:
            assert Augmentation((kind,))(x, seed)[0, 0, 4, 4] > 0.99


def test_turning_is_a_rotation_in_pixels_even_of_oblong_images() -> None:
    """The centroid of a spot r pixels right of the centre stays r pixels away from it."""
    x = torch.zeros(1, 1, 21, 41).double()
    x[0, 0, 9:12, 27:30] = 1.0  # its middle is 8 pixels right of the centre (10, 20)
    rows, columns = torch.meshgrid(torch.arange(21.0) - 10, torch.arange(41.0) - 20, indexing="ij")
    angles = []
    for seed in SEEDS[:20]:
        turned = Augmentation(("rotate",))(x, seed)[0, 0]
        down, right = ((turned * axis).sum() / turned.sum() for axis in (rows, columns))
        assert abs(torch.hypot(down, right) - 8) < 0.1
        angles.append(torch.rad2deg(torch.atan2(down, right)).item())
    assert min(angles) < -8 and max(angles) > 8 and max(map(abs, angles)) < 15.5


def test_color_keeps_what_it_is_relative_to() -> None:
    """Brightness moves the mean by at most a half; saturation and contrast leave the mean where it is."""
    shifts = [(Augmentation(("color",))(X, seed) - X).mean((1, 2, 3)) for seed in SEEDS[:20]]
    for shift in shifts:
        torch.testing.assert_close(shift, shift[:1].expand(4))
        assert shift.abs().max() < 0.5
    assert max(shift.abs().max().item() for shift in shifts) > 0.2


def test_every_kind_has_its_turn_and_only_one_at_a_time() -> None:
    """With two kinds, each call equals one of the two alone; both occur."""
    both = Augmentation(("crop", "cutout"))
    hits = {"crop": 0, "cutout": 0}
    for seed in SEEDS[:60]:
        changed = both(X, seed)
        for kind in hits:
            hits[kind] += torch.allclose(changed, Augmentation((kind,))(X, seed))
    assert sum(hits.values()) >= 60 and min(hits.values()) > 15


def test_it_vmaps_over_seeds_and_differentiates() -> None:
    change = Augmentation(KINDS)
    stacked = torch.vmap(lambda seed: change(X, seed))(SEEDS[:8])
    torch.testing.assert_close(stacked, torch.stack([change(X, seed) for seed in SEEDS[:8]]))
    small = X[:1, :2, :3, :3].clone().requires_grad_()
    for kind in KINDS:
        assert torch.autograd.gradcheck(lambda x, kind=kind: Augmentation((kind,))(x, SEEDS[0]), small)


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(FedgistError, match="did you mean 'rotate'"):
        Augmentation(("rotat",))
