"""Trees and files on disk: a reader sees the old one or the new one, also after a loss of power."""

import errno
import hashlib
import itertools
import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file, save_file
from safetensors.torch import save as save_bytes
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
        if error.errno and str(error.filename or draft) == str(draft):  # nobody else knows of the draft; a write that
            error.filename = str(path)  # finds the disk full names no file at all
        raise
    finally:
        draft.unlink(missing_ok=True)


def write(path: Path, data: bytes) -> None:
    """A file with just these bytes, whole or not at all."""
    with replacing(path) as draft:
        draft.write_bytes(data)


def append(path: Path, line: bytes, synced: bool = True) -> None:
    """One more line, in a file that need not exist yet; it is on the disk when this returns, or, if it is not `synced`,
    on its way there. Half a line, which a full disk or a writer that was killed has left, gives way to it.
    """
    new = not path.is_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        while end and (file.seek(end - 1), file.read(1))[1] != b"\n":
            end -= 1
        file.truncate(end)
        file.write(line + b"\n")
        if synced:
            file.flush()
            os.fsync(file.fileno())
    if new and synced:
        sync(path.parent)


def lines(path: Path) -> Iterator[bytes]:
    """The whole lines of a file that `append` has written, one by one; none of one that there is not."""
    if path.is_file():
        with path.open("rb") as file:
            yield from (line[:-1] for line in file if line.endswith(b"\n"))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _describe(tree: Tree, named: Callable[[Tensor], str], order: Callable[[Any], Iterable[Any]] = iter) -> Any:
    """The tree as JSON, with what `named` calls its tensors in their place."""
    if isinstance(tree, Mapping):
        if not all(isinstance(key, str) for key in tree):
            raise TypeError(f"only string keys can be saved, got {sorted(map(repr, tree))}")
        return {"dict": [[key, _describe(tree[key], named, order)] for key in order(tree)]}
    if isinstance(tree, (list, tuple)):
        return {type(tree).__name__: [_describe(value, named, order) for value in tree]}
    if isinstance(tree, Tensor):
        return {"tensor": named(tree)}
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


def _taken_apart(tree: Tree) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a tree, and the metadata of a safetensors file that says where each was."""
    tensors: dict[str, Tensor] = {}

    def named(tensor: Tensor) -> str:
        name = str(len(tensors))
        tensors[name] = tensor.detach().cpu().contiguous().clone()  # a clone: safetensors refuses shared storage
        return name

    return tensors, {"tree": json.dumps(_describe(tree, named))}


def save(tree: Tree, path: str | os.PathLike[str]) -> None:
    """Write a tree to a safetensors file; the file appears whole or not at all."""
    tensors, metadata = _taken_apart(tree)
    with replacing(Path(path)) as draft:
        _write_tensors(tensors, draft, metadata)


def _write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # its words for whatever the disk refused, as in "… (os error 28)"
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code) if number else str(error), str(path)) from error


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
        _write_tensors(alone, draft, {"format": "pt"})


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read named tensors; a file that is damaged is a ValueError."""
    try:
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def digest(tree: Tree) -> str:
    """A SHA-256 of structure and content: equal exactly when two trees are equal bit for bit, keys in any order."""
    count = itertools.count()
    # Keys are sorted: the order in which a set's names were put in differs between processes.
    state = hashlib.sha256(json.dumps(_describe(tree, lambda _: str(next(count)), sorted)).encode())
    for tensor in _tensors(tree):
        state.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def _tensors(tree: Tree) -> Iterator[Tensor]:
    """The tensors of a tree by sorted keys, one at a time: a mapping may read its values from the disk."""
    if isinstance(tree, Mapping):
        for key in sorted(tree):
            yield from _tensors(tree[key])
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)
    elif isinstance(tree, Tensor):
        yield tree


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


_SIZES = struct.Struct("<IQ")  # before each tree of a log: of its name, and of what follows the name


class TreeLog:
    """Trees by name in one file that only grows: a tree that has changed is written once more, behind the others.

    The file's length at some time is all that one needs to know to go back to what was in it then.
    """

    def __init__(self, path: Path, length: int = 0):
        """A file that was `length` bytes long goes on from there; what was written later is forgotten."""
        self.path, self._at = path, dict[str, tuple[int, int]]()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "r+b" if length else "w+b")  # noqa: SIM115 - as long as the log
        self._file.truncate(length)
        self.length, self.live = 0, 0
        while self.length < length:
            self._file.seek(self.length)
            sizes = self._file.read(_SIZES.size)
            if len(sizes) < _SIZES.size:
                raise ValueError(f"{path} is shorter than it was")
            name, body = _SIZES.unpack(sizes)
            self._note(self._file.read(name).decode(), name, body)

    def _note(self, name: str, name_bytes: int, body: int) -> None:
        """The next tree is this one."""
        self.live += body - self._at.get(name, (0, 0))[1]
        self._at[name] = self.length + _SIZES.size + name_bytes, body
        self.length += _SIZES.size + name_bytes + body

    def names(self) -> Set[str]:
        return self._at.keys()

    def write(self, name: str, tree: Tree) -> None:
        self.write_bytes(name, save_bytes(*_taken_apart(tree)))

    def write_bytes(self, name: str, body: bytes) -> None:
        """What `read_bytes` of another log gave."""
        encoded = name.encode()
        self._file.seek(self.length)
        self._file.write(_SIZES.pack(len(encoded), len(body)) + encoded)
        self._file.write(body)
        self._note(name, len(encoded), len(body))

    def read_bytes(self, name: str) -> bytes:
        start, size = self._at[name]
        self._file.seek(start)
        return self._file.read(size)

    def read(self, name: str) -> Tree:
        body = self.read_bytes(name)
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        tensors = {key: tensor.clone() for key, tensor in load_bytes(body).items()}  # clones: as in `load`
        return _restore(json.loads(header["__metadata__"]["tree"]), tensors)

    def sync(self) -> None:
        """Wait until all of it is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
