"""Random crops and mirror images, against borders of zeros, cuts and flips written out."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.rng import Rng
from fedgist.learning.moves import draw_moves, move

CROP = 2


def cut(image: Tensor, down: int, right: int, mirrored: int, border: int = CROP) -> Tensor:
    """Mirrored, framed by zeros, and cut out again; a mirror image is read from the other side, and so moves the other
    way."""
    height, width = image.shape[1:]
    framed = F.pad(image, (border,) * 4)[:, border + down : border + down + height]
    read = framed[:, :, border + right : border + right + width]
    return read.flip(2) if mirrored else read


@pytest.mark.parametrize("size", [(5, 5), (4, 7)])
def test_every_move_is_a_cut_out_of_a_framed_image(size: tuple[int, int]) -> None:
    steps = range(-CROP, CROP + 1)
    moves = torch.tensor([(down, right, mirrored) for down in steps for right in steps for mirrored in (0, 1)])
    x = Rng(0).normal(len(moves), 3, *size)
    expected = torch.stack([cut(image, *move) for image, move in zip(x, moves.tolist(), strict=True)])
    assert torch.equal(move(x, moves), expected)


def test_an_image_may_leave_the_frame() -> None:
    x = torch.ones(1, 1, 3, 3)
    assert not move(x, torch.tensor([[3, 0, 0]])).any()
    assert not move(x, torch.tensor([[0, -5, 1]])).any()


def test_what_is_drawn() -> None:
    moves = draw_moves((50, 40), CROP, True, Rng(1))
    assert moves.shape == (50, 40, 3)
    for part in (0, 1):
        counts = moves[..., part].flatten().add(CROP).bincount()
        assert counts.shape == (2 * CROP + 1,)  # none further
        # 2,000 draws over five shifts: 400 each, give or take 18
        assert ((counts - 400).abs() < 5 * 18).all()
    assert moves[..., 2].unique().tolist() == [0, 1]
    assert moves[..., 2].double().mean() == pytest.approx(0.5, abs=5 * 0.5 / 2000**0.5)
    assert torch.equal(moves, draw_moves((50, 40), CROP, True, Rng(1)))


def test_only_what_was_asked_for_is_drawn() -> None:
    assert not draw_moves((20,), 0, True, Rng(2))[:, :2].any()
    assert not draw_moves((20,), CROP, False, Rng(2))[:, 2].any()
    x = Rng(0).normal(20, 1, 3, 3)
    assert torch.equal(move(x, draw_moves((20,), 0, False, Rng(2))), x)
