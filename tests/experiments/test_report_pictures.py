"""What the report shows of images and features: grids, soft labels, PNG files, planes."""

import numpy as np
import pytest
import torch

from fedgist.experiments import artifacts
from fedgist.experiments.report import embedding, pictures


def test_a_grid_has_a_row_for_each_class(tmp_path):
    """Three images of class 4 and one of class 7: a row of three, and a row of one with two empty places."""
    pixels = torch.arange(4, dtype=torch.uint8)[:, None, None, None].expand(4, 1, 2, 2) * 50
    shown = artifacts.Shown(1, "images", pixels, torch.tensor([4, 4, 7, 4]), [""] * 4)
    (gallery,) = pictures.galleries("run", [shown])
    (grid,) = gallery.grids
    assert grid.rows == ["4", "7"]
    assert (grid.width, grid.height) == (9, 6)  # 3 × 2 images of 2 × 2 pixels, and a pixel after each


def test_soft_labels_say_how_sure_they_are():
    soft = torch.tensor([[0.2, 0.8], [0.4, 0.6]])
    shown = artifacts.Shown(1, "dreams", torch.zeros(2, 3, 4, 4, dtype=torch.uint8), soft, [""] * 2)
    (gallery,) = pictures.galleries("run", [shown])
    assert gallery.soft
    assert gallery.grids[0].rows == ["1 · 70 %"]


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_is_one(channels):
    image = pytest.importorskip("PIL.Image")
    import io

    pixels = np.arange(5 * 7 * (channels + 1), dtype=np.uint8).reshape(5, 7, channels + 1)
    with image.open(io.BytesIO(pictures.png(pixels))) as read:
        assert read.mode == {1: "LA", 3: "RGBA"}[channels]
        assert (np.asarray(read) == pixels).all()


def test_spread_has_both_ends():
    assert pictures.spread(range(10), 4) == [0, 3, 6, 9]
    assert pictures.spread("ab", 4) == ["a", "b"]


def test_planes_keep_clusters_together_and_repeat():
    """Three clusters far apart in 20 dimensions are three clusters in the plane; the same features give the same."""
    generator = torch.Generator().manual_seed(0)
    centres = 20 * torch.randn(3, 20, generator=generator)
    labels = torch.arange(3).repeat(10)
    rounds = [
        artifacts.Shown(
            r, "means", (centres[labels] + torch.randn(30, 20, generator=generator)).half(), labels, ["a"] * 30
        )
        for r in (1, 2)
    ]
    planes = embedding.planes(rounds)["means"]
    assert [plane.round for plane in planes] == [1, 2]
    for plane in planes:
        middle = np.stack([plane.points[labels == c].mean(0) for c in range(3)])
        nearest = ((plane.points[:, None] - middle[None]) ** 2).sum(2).argmin(1)
        assert nearest.tolist() == labels.tolist()
    assert (embedding.planes(rounds)["means"][1].points == planes[1].points).all()


def test_features_of_a_run_that_diverged_are_in_one_place():
    shown = artifacts.Shown(1, "means", torch.full((9, 4), float("nan")).half(), torch.zeros(9).long(), ["a"] * 9)
    assert (embedding.planes([shown])["means"][0].points == 0).all()
