"""One argument of all clients of a group: shared ones are not copied, pools are stacked once."""

import gc

import torch

from fedgist.core.work import Place
from fedgist.engines.stacked.columns import Column, PoolCache, collect_columns

HERE = Place()


def test_shared_arguments_are_not_copied() -> None:
    weights, own = torch.zeros(1000), [torch.zeros(1), torch.ones(1)]
    shared, apart = collect_columns([[weights, mine] for mine in own])
    assert shared.dim is None
    assert shared.stacked(HERE).data_ptr() == weights.data_ptr()
    assert (apart.dim, apart.stacked(HERE).tolist()) == (0, [[0.0], [1.0]])


def test_pools_stay_while_their_clients_live() -> None:
    resident = PoolCache()
    tensors = [torch.ones(n, 2) for n in (3, 1, 2)]
    pool = resident.get(Column(tensors, pooled=True), HERE)
    assert pool.shape == (3, 3, 2)
    assert pool[1].tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    assert resident.get(Column(tensors, pooled=True), HERE) is pool
    assert resident.get(Column(tensors[:2], pooled=True), HERE) is not pool, "other clients, another stack"
    again = resident.get(Column(tensors, pooled=True), HERE)
    assert again is not pool, "a tensor is in one stack only"
    assert len({id(stack) for stack in resident._stacks.values()}) == 1
    tensors[0].zero_()
    assert resident.get(Column(tensors, pooled=True), HERE)[0].sum() == 0, "stacked anew after a change"
    del tensors
    gc.collect()
    assert not [*resident._stacks.values()]
