"""Traced steps on a CPU with less to do and fewer passes over memory, to the same bits: a run that goes on after a stop
traces later than it would have.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

Node = Any
"""A torch.fx.Node, whose arguments may be anything."""

aten = torch.ops.aten
IN_PLACE = {
    aten.add.Tensor: aten.add.out,
    aten.addcmul.default: aten.addcmul.out,
    aten.lerp.Scalar: aten.lerp.Scalar_out,
}
"""What optimisers end with, number by number, and how it is written into a tensor that is there."""
SHAPES = {aten.expand.default, aten.view.default, aten._unsafe_view.default}
"""What gives a tensor a shape, which it may have already."""


def simplify(graph: Graph) -> None:
    """Leave out views that change nothing, and copy rows of pools as a whole."""
    for node in graph.nodes:
        if (same := _unchanged(node)) is not None:
            node.replace_all_uses_with(same)
        elif node.target is aten.index.Tensor and _takes_rows(*node.args):
            node.target, node.args = take_rows, (node.args[0], node.args[1][1])
    graph.eliminate_dead_code()


def _unchanged(node: Node) -> Node | None:
    """The tensor that a view shows as it is."""
    if node.target in SHAPES and _form(node) == _form(node.args[0]):
        return node.args[0]
    if node.target is aten.transpose.int and node.args[0].target is aten.transpose.int:
        (before, *first), second = node.args[0].args, node.args[1:]
        return before if first == [*second] else None
    return None


def _takes_rows(pools: Node, indices: list[Node]) -> bool:
    """Whether each client takes rows of its own pool, as vmap writes it: pools[arange(clients)[:, None], index]."""
    if [one.target for one in indices[:-1]] != [aten.unsqueeze.default] or indices[1].meta["val"].dim() != 2:
        return False
    clients, dim = indices[0].args
    return clients.target is aten.arange.default and (clients.args, dim) == ((len(pools.meta["val"]),), -1)


def take_rows(pools: Tensor, index: Tensor) -> Tensor:
    """The rows [client, i, …] of pools [client, row, …]; torch's own indexing would copy them number by number."""
    first = torch.arange(0, len(pools) * pools.shape[1], pools.shape[1])[:, None]
    return pools.flatten(0, 1).index_select(0, (index + first).flatten()).view(*index.shape, *pools.shape[2:])


def reuse_carry(graph: Graph, count: int) -> None:
    """Have operations that make the carry anew (the first `count` arguments) write into the old one, which nobody reads
    after them."""
    nodes = list(graph.nodes)
    place, results = {node: i for i, node in enumerate(nodes)}, nodes[-1].args[0]
    for old, new in zip(nodes[:count], results[:count], strict=True):
        fits = new.target in IN_PLACE and _form(new) == _form(old)
        given_twice = results.count(new) > 1 or _views(new) & set(results)
        if fits and not given_twice and all(place[reader] <= place[new] for reader in _readers(old)):
            new.target, new.kwargs = IN_PLACE[new.target], {**new.kwargs, "out": old}


def _form(node: Node) -> tuple[torch.Size, torch.dtype]:
    return node.meta["val"].shape, node.meta["val"].dtype


def _views(node: Node) -> set[Node]:
    """Other names for a tensor's memory."""
    views = {user for user in node.users if getattr(user.target, "is_view", True) or "view" in str(user.target)}
    return views.union(*map(_views, views))


def _readers(node: Node) -> set[Node]:
    return {user for alias in (node, *_views(node)) for user in alias.users}
