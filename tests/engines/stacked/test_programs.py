"""What a group of clients runs as one call."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist.core.work import Chunks, Place, Pool, Scan, execute
from fedgist.engines.stacked import programs
from fedgist.engines.stacked.columns import PoolCache
from fedgist.engines.stacked.flat_work import Forms
from fedgist.engines.stacked.grouping import Group

HERE = Place()


@pytest.mark.parametrize("made", [False, True])
def test_a_stack_of_one_client(made: bool) -> None:
    """What a GPU does with a single client, so that its steps can be recorded; and traced, to compile them."""

    def step(carry: Any, x: Any, pool: Any, scale: Tensor) -> Any:
        return {"w": carry["w"] * scale + pool["x"][x["index"]].sum()}

    def plan(seed: int, first: int, count: int) -> Any:
        return {"index": (torch.arange(first, first + count) % 5)[:, None]}

    xs = Chunks(plan, 0, 40) if made else plan(0, 0, 40)
    works = [Scan(step, {"w": torch.ones(3)}, xs, (Pool(x=torch.arange(n)), torch.tensor(0.9))) for n in (5, 8)]
    groups = [Group([Forms(HERE).flatten(work)]) for work in works]
    call = programs.Vectorised(groups[0])
    quick = programs.trace(call, groups[0], HERE, PoolCache())
    for work, group in zip(works, groups, strict=True):
        for run in (call, quick):
            (found,) = call.split(programs.run_scan(run, group, HERE, PoolCache()), 1)
            assert torch.equal(found["w"], execute(work, HERE)["w"])
