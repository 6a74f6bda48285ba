"""Average pooling by tiles is torch's."""

import pytest
import torch
import torch.nn.functional as F

from fedgist.core.rng import Rng
from fedgist.models.gpu.pooling import by_tiles


@pytest.mark.parametrize("size", [2, 3])
def test_tiles(size: int) -> None:
    x = Rng(1).normal(2, 3, 6, 12).double()
    torch.testing.assert_close(by_tiles(x, size), F.avg_pool2d(x, size))
