"""Trees and files on disk: a reader sees the old one or the new one, also after a loss of power."""

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedgist.core.tree import Tree


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft beside `path`, in a folder that need not exist yet; what was written to it takes the place of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")  # others may write the same file at the same time
    try:
        yield draft
        sync(draft)
        draft.replace(path)
        sync(path.parent)
    except OSError as error:
        if error.errno and not error.filename:
            error.filename = str(path)  # a write says no more than that the disk is full
        raise
    finally:
        draft.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _describe(tree: Tree, tensors: dict[str, Tensor]) -> Any:
    """The tree as JSON, its tensors replaced by names and put into `tensors`."""
    if isinstance(tree, dict):
        if not all(isinstance(key, str) for key in tree):
            raise TypeError(f"only string keys can be saved, got {sorted(map(repr, tree))}")
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
        try:
            save_file(tensors, draft, metadata={"tree": described})
        except SafetensorError as error:  # its words for whatever the disk refused, as in "… (os error 28)"
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error


def load(path: str | os.PathLike[str]) -> Tree:
    """Read what `save` wrote; a file that is damaged or another's is a ValueError."""
    try:
        with safe_open(path, "pt") as file:
            described = json.loads(file.metadata()["tree"])
        # Copies lie where torch puts its own tensors, at multiples of 64 bytes; the last bit of products depends on it.
        return _restore(described, {name: tensor.clone() for name, tensor in load_file(path).items()})
    except (SafetensorError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, or no tree that fedgist saved ({error})") from error


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write named tensors as any reader of safetensors knows them."""
    alone = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with replacing(path) as draft:
        save_file(alone, draft, metadata={"format": "pt"})


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read named tensors; a file that is damaged is a ValueError."""
    try:
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def digest(tree: Tree) -> str:
    """A SHA-256 of structure and content: equal exactly when two trees are equal bit for bit, keys in any order."""
    tensors: dict[str, Tensor] = {}
    state = hashlib.sha256(json.dumps(_describe(_ordered(tree), tensors)).encode())
    for tensor in tensors.values():
        state.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _ordered(tree: Tree) -> Tree:
    """The same tree with its keys sorted: the order in which a set's names were put in differs between processes."""
    if isinstance(tree, dict):
        return {key: _ordered(tree[key]) for key in sorted(tree)}
    return type(tree)([_ordered(value) for value in tree]) if isinstance(tree, (list, tuple)) else tree
