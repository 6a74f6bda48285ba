"""Trees: nested dicts, lists and tuples whose leaves are tensors, numbers, strings or None.

All state in fedgist is such a tree, so that arithmetic, saving, comparing and stacking are written once.
"""

import builtins
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedgist.core.files import replacing

Tree = Any
"""A nested dict, list or tuple of tensors and scalars."""


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply `fn` to the leaves of one tree, or to the corresponding leaves of several of the same structure."""
    if isinstance(tree, dict) and not rest:  # as in most calls
        return type(tree)({key: map(fn, value) for key, value in tree.items()})
    if isinstance(tree, dict):
        return type(tree)({key: map(fn, value, *[other[key] for other in rest]) for key, value in tree.items()})
    if isinstance(tree, (list, tuple)):
        return type(tree)([map(fn, *values) for values in zip(tree, *rest, strict=True)])
    return fn(tree, *rest)


def leaves(tree: Tree) -> list[Any]:
    """The leaves, in an order that depends on the keys only (not on the order in which they were inserted)."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, (list, tuple)):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]


def structure(tree: Tree) -> Any:
    """A hashable description of everything but the leaves."""
    if isinstance(tree, dict):
        return (type(tree).__name__, tuple((key, structure(tree[key])) for key in sorted(tree)))
    if isinstance(tree, (list, tuple)):
        return (type(tree).__name__, tuple(structure(value) for value in tree))
    return None


def rebuild(tree: Tree, new_leaves: Sequence[Any]) -> Tree:
    """The same structure with other leaves, given in the order of `leaves`."""
    supply = iter(new_leaves)

    def fill(node: Tree) -> Tree:
        if isinstance(node, dict):
            filled = {key: fill(node[key]) for key in sorted(node)}
            return type(node)((key, filled[key]) for key in node)
        if isinstance(node, (list, tuple)):
            return type(node)([fill(value) for value in node])
        return next(supply)

    return fill(tree)


def copy(tree: Tree) -> Tree:
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


def to(tree: Tree, device: torch.device | str) -> Tree:
    return map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def add(a: Tree, b: Tree) -> Tree:
    return map(lambda x, y: x + y, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    return map(lambda x, y: x - y, a, b)


def scale(tree: Tree, factor: float | Tensor) -> Tree:
    return map(lambda x: x * factor, tree)


def zeros_like(tree: Tree) -> Tree:
    return map(torch.zeros_like, tree)


def dot(a: Tree, b: Tree) -> Tensor:
    """The inner product over all leaves."""
    return torch.stack([(x * y).sum() for x, y in zip(leaves(a), leaves(b), strict=True)]).sum()


def norm(tree: Tree) -> Tensor:
    """The Euclidean norm over all leaves."""
    return dot(tree, tree).sqrt()


def finite(tree: Tree) -> bool:
    """Whether no tensor in it holds a NaN or an infinity."""
    floating = [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return not floating or bool(torch.stack([leaf.isfinite().all() for leaf in floating]).all())


def stack(trees: Sequence[Tree]) -> Tree:
    return map(lambda *xs: torch.stack(xs), *trees)


def index(tree: Tree, i: Any) -> Tree:
    return map(lambda x: x[i], tree)


def _describe(tree: Tree, tensors: dict[str, Tensor]) -> Any:
    """The tree as JSON, its tensors replaced by names and put into `tensors`."""
    if isinstance(tree, dict):
        if not all(isinstance(key, str) for key in tree):
            raise TypeError(f"only string keys can be saved, got {sorted(builtins.map(repr, tree))}")
        return {"dict": [[key, _describe(value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, (list, tuple)):
        return {type(tree).__name__: [_describe(value, tensors) for value in tree]}
    if isinstance(tree, Tensor):
        name = str(len(tensors))
        tensors[name] = tree.detach().cpu().contiguous().clone()  # a clone: safetensors refuses shared storage
        return {"tensor": name}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return {"value": tree}
    raise TypeError(f"a state may hold tensors, numbers, strings and None, not {type(tree).__name__}")


def _restore(node: Any, tensors: dict[str, Tensor]) -> Tree:
    ((kind, content),) = node.items()
    if kind == "dict":
        return {key: _restore(value, tensors) for key, value in content}
    if kind == "list":
        return [_restore(value, tensors) for value in content]
    if kind == "tuple":
        return tuple(_restore(value, tensors) for value in content)
    return tensors[content] if kind == "tensor" else content


def save(tree: Tree, path: str | os.PathLike[str]) -> None:
    """Write a tree to a safetensors file; the file appears whole or not at all."""
    tensors: dict[str, Tensor] = {}
    described = json.dumps(_describe(tree, tensors))
    with replacing(Path(path)) as draft:
        save_file(tensors, draft, metadata={"tree": described})


def load(path: str | os.PathLike[str]) -> Tree:
    """Read what `save` wrote; a file that is damaged or another's is a ValueError."""
    try:
        with safe_open(path, "pt") as file:
            described = json.loads(file.metadata()["tree"])
        # Copies lie where torch puts its own tensors, at multiples of 64 bytes; the last bit of products depends on it.
        return _restore(described, {name: tensor.clone() for name, tensor in load_file(path).items()})
    except (SafetensorError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, or no tree that fedgist saved ({error})") from error


def digest(tree: Tree) -> str:
    """A SHA-256 of structure and content: equal exactly when two trees are equal bit for bit, keys in any order."""
    tensors: dict[str, Tensor] = {}
    state = hashlib.sha256(json.dumps(_describe(_ordered(tree), tensors)).encode())
    for tensor in tensors.values():
        state.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def _ordered(tree: Tree) -> Tree:
    """The same tree with its keys sorted: the order in which a set's names were put in differs between processes."""
    if isinstance(tree, dict):
        return {key: _ordered(tree[key]) for key in sorted(tree)}
    return type(tree)([_ordered(value) for value in tree]) if isinstance(tree, (list, tuple)) else tree
