"""What a group of clients runs as one call."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist.core.work import Chunks, Compute, Place, Pool, Scan, execute
from fedgist.engines.stacked import programs
from fedgist.engines.stacked.columns import PoolCache
from fedgist.engines.stacked.flat_work import flatten
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
    groups = [Group([flatten(work, HERE)]) for work in works]
    call = programs.Vectorised(groups[0])
    quick = programs.trace(call, groups[0], HERE, PoolCache())
    for work, group in zip(works, groups, strict=True):
        for run in (call, quick):
            (found,) = call.split(programs.run_scan(run, group, HERE, PoolCache()), 1)
            assert torch.equal(found["w"], execute(work, HERE)["w"])


@pytest.mark.parametrize("traceable", [False, True])
def test_a_single_call_of_one_client(traceable: bool) -> None:
    """It has nothing that vmap could map over, which to compile it a large net's call once failed by."""
    x = torch.arange(6.0).reshape(2, 3)
    group = Group([flatten(Compute(torch.square, (x,)), HERE)])
    call = programs.Vectorised(group, traceable)
    (found,) = call.split(programs.run_compute(call, group, HERE, PoolCache()), 1)
    assert torch.equal(found, x.square())


def descend(carry: Any, x: Tensor) -> Any:
    w, v = carry
    v = torch.add(x * w, v, alpha=0.9)
    return torch.addcmul(w, v, -x), v


STEPS = {
    "an optimiser": descend,
    "the old one is handed on": lambda carry, x: (carry[1], carry[0] + carry[1] * x),
    "the old one is read later": lambda carry, x: (carry[0] + x, carry[1] + carry[0]),
    "a view of it is read later": lambda carry, x: (carry[0] + x, carry[1] + carry[0].t()),
    "twice the same": lambda carry, x: ((both := carry[0] + carry[1] * x), both),
    "one is a view of the other": lambda carry, x: ((both := carry[0] + carry[1] * x), both.t()),
    "another dtype inside": lambda carry, x: ((carry[0].double() + 1).float(), carry[1] + x),
    "a sum of two shapes": lambda carry, x: (carry[0].sum(0) + carry[1], carry[1] + carry[0]),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_traced_step_writes_over_what_it_carries_where_nobody_reads_it(step: Any) -> None:
    works = [
        Scan(
            step, (torch.randn(3, 3, generator=rng), torch.randn(3, 3, generator=rng)), torch.rand(9, generator=rng), ()
        )
        for rng in (torch.Generator().manual_seed(seed) for seed in range(3))
    ]
    group = Group([flatten(work, HERE) for work in works])
    starts = [[x.clone() for x in work.carry] for work in works]
    call = programs.Vectorised(group)
    traced = programs.trace(call, group, HERE, PoolCache())
    plain, quick = (programs.run_scan(run, group, HERE, PoolCache()) for run in (call, traced))
    for one, other in zip(plain, quick, strict=True):
        assert torch.equal(one, other)
    for work, start in zip(works, starts, strict=True):
        assert all(torch.equal(*pair) for pair in zip(work.carry, start, strict=True)), "what was given is as it was"


def test_an_optimiser_is_written_in_place() -> None:
    work = Scan(descend, (torch.ones(2), torch.zeros(2)), torch.rand(4, generator=torch.Generator().manual_seed(0)), ())
    group = Group([flatten(work, HERE)] * 2)
    call = programs.trace(programs.Vectorised(group), group, HERE, PoolCache())
    assert isinstance(call, programs.Traced)
    carry = [torch.ones(2, 2), torch.zeros(2, 2)]
    assert all(new is old for new, old in zip(call.onwards(*carry, torch.tensor(0.1)), carry, strict=True))
