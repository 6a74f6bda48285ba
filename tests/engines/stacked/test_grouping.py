"""What the clients of a group share."""

import torch
from torch import Tensor

from fedgist.core.work import Place, Scan
from fedgist.engines.stacked.flat_work import flatten
from fedgist.engines.stacked.grouping import Group

HERE = Place()


def add(carry: Tensor, x: Tensor, *consts: Tensor) -> Tensor:
    return carry + x


def test_groups_know_what_they_share() -> None:
    w = torch.zeros(2)
    works = [Scan(add, w, torch.zeros(3, 2), (w, torch.ones(1) * n)) for n in range(2)]
    group = Group([flatten(work, HERE) for work in works])
    assert group.dims == (0, 0, None, 0)
    assert not group.identical
