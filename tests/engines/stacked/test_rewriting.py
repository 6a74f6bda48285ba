"""Traced steps do less than vmap's operations, and give the same bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedgist.engines.stacked.rewriting import simplify, take_rows


def rewritten(fn: Callable[..., Any], *tensors: Tensor) -> tuple[Callable[..., Any], list[Any]]:
    """The function after its rewriting, and which operations it has."""
    traced = make_fx(fn)(*tensors)
    simplify(traced.graph)
    traced.recompile()
    return traced, [node.target for node in traced.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_rows_of_pools_are_taken_as_a_whole(shape: tuple[int, ...]) -> None:
    rng = torch.Generator().manual_seed(0)
    pools, index = torch.randn(3, 5, *shape, generator=rng), torch.randint(5, (3, 4), generator=rng)
    take = torch.func.vmap(lambda pool, own: pool[own])
    made, operations = rewritten(take, pools, index)
    assert operations == [take_rows]
    longer = torch.cat([pools, pools.flip(1)], 1)
    for each, rows in ((pools, index), (longer, index + 5)):
        assert torch.equal(made(each, rows), take(each, rows))


OTHER_INDICES = {
    "one pool for all": (lambda pools, index: pools[0][index]),
    "a row for each client": (lambda pools, index: pools[torch.arange(3), index[:, 0]]),
    "other clients' pools": (lambda pools, index: pools[torch.arange(2)[:, None], index[:2]]),
    "pools in turn": (lambda pools, index: pools[torch.arange(3).flip(0)[:, None], index]),
}


@pytest.mark.parametrize("fn", OTHER_INDICES.values(), ids=OTHER_INDICES)
def test_other_indices_stay(fn: Callable[..., Tensor]) -> None:
    rng = torch.Generator().manual_seed(0)
    tensors = torch.randn(3, 5, 2, generator=rng), torch.randint(5, (3, 4), generator=rng)
    made, operations = rewritten(fn, *tensors)
    assert take_rows not in operations
    assert torch.equal(made(*tensors), fn(*tensors))


def test_views_that_change_nothing_are_left_out() -> None:
    aten = torch.ops.aten
    x = torch.arange(24.0).view(2, 3, 4)

    def look(x: Tensor) -> Tensor:
        same = x.view(2, 3, 4).expand(2, 3, 4).transpose(1, 2).transpose(1, 2)
        return same.transpose(0, 1).transpose(1, 2) + 1  # these two are of other dimensions

    made, operations = rewritten(look, x)
    assert operations == [aten.transpose.int, aten.transpose.int, aten.add.Tensor]
    assert torch.equal(made(x), look(x))
