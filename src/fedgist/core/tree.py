"""Trees: nested dicts, lists and tuples whose leaves are tensors, numbers, strings or None.

All state in fedgist is such a tree, so that arithmetic, saving, comparing and stacking are written once.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Tree = Any
"""A nested dict, list or tuple of tensors and scalars."""

T = TypeVar("T")


def map(fn: Callable[..., Any], tree: T, *rest: T) -> T:
    """Apply `fn` to the leaves of one tree, or to the corresponding leaves of several of the same structure."""
    if isinstance(tree, dict) and not rest:  # as in most calls
        return type(tree)({key: map(fn, value) for key, value in tree.items()})
    others: tuple[Any, ...] = rest
    if isinstance(tree, dict):
        return type(tree)({key: map(fn, value, *[other[key] for other in others]) for key, value in tree.items()})
    if isinstance(tree, (list, tuple)):
        return type(tree)([map(fn, *values) for values in zip(tree, *others, strict=True)])
    result: T = fn(tree, *rest)
    return result


def leaves(tree: Tree) -> list[Any]:
    """The leaves, in an order that depends on the keys only (not on the order in which they were inserted)."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, (list, tuple)):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]


def tensors(tree: Tree) -> list[Tensor]:
    """Those of the leaves that are tensors."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def structure(tree: Tree) -> Any:
    """A hashable description of everything but the leaves."""
    if isinstance(tree, dict):
        return (type(tree).__name__, tuple((key, structure(tree[key])) for key in sorted(tree)))
    if isinstance(tree, (list, tuple)):
        return (type(tree).__name__, tuple(structure(value) for value in tree))
    return None


def rebuild(tree: T, new_leaves: Sequence[Any]) -> T:
    """The same structure with other leaves, given in the order of `leaves`."""
    supply = iter(new_leaves)

    def fill(node: Tree) -> Any:
        if isinstance(node, dict):
            filled = {key: fill(node[key]) for key in sorted(node)}
            return type(node)((key, filled[key]) for key in node)
        if isinstance(node, (list, tuple)):
            return type(node)([fill(value) for value in node])
        return next(supply)

    filled: T = fill(tree)
    return filled


def copy(tree: T) -> T:
    """New containers around the same leaves."""
    if isinstance(tree, dict):
        return type(tree)({key: value if isinstance(value, Tensor) else copy(value) for key, value in tree.items()})
    return type(tree)([copy(value) for value in tree]) if isinstance(tree, (list, tuple)) else tree


def same(a: Tree, b: Tree) -> bool:
    """Whether two trees hold the very same objects in the same places."""
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(value is b[key] or same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return False


def to(tree: T, device: torch.device | str) -> T:
    return map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def add(a: T, b: T) -> T:
    return map(lambda x, y: x + y, a, b)


def sub(a: T, b: T) -> T:
    return map(lambda x, y: x - y, a, b)


def scale(tree: T, factor: float | Tensor) -> T:
    return map(lambda x: x * factor, tree)


def zeros_like(tree: T) -> T:
    return map(torch.zeros_like, tree)


def dot(a: Tree, b: Tree) -> Tensor:
    """The inner product over all leaves."""
    return torch.stack([(x * y).sum() for x, y in zip(leaves(a), leaves(b), strict=True)]).sum()


def norm(tree: Tree) -> Tensor:
    """The Euclidean norm over all leaves."""
    return dot(tree, tree).sqrt()


def finite(tree: Tree) -> bool:
    """Whether no tensor in it holds a NaN or an infinity."""
    floating = [leaf for leaf in tensors(tree) if leaf.is_floating_point()]
    return not floating or bool(torch.stack([leaf.isfinite().all() for leaf in floating]).all())


def stack(trees: Sequence[T]) -> T:
    return map(lambda *xs: torch.stack(xs), *trees)


def index(tree: T, i: Any) -> T:
    return map(lambda x: x[i], tree)
