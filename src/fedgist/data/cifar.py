"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) as published: the python archives and the binary ones.

The python archives are pickles, and a pickle may name any function for its reader to call. This reader calls none: what
a batch may contain is numbers, text, lists, dicts and arrays of bytes or integers, and where a pickle asks numpy for an
array it gets a stand-in that only keeps shape, type and bytes until they have been checked. Before anything is read,
lengths and numbers of remembered objects are checked against the file, so that none can ask for more memory than that,
and tuples are counted: Python crashes when it looks up a key of tuples within tuples, some hundred thousand deep. What
holds other objects is in one place of a batch.
"""

import math
import pickle
import pickletools
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fedgist.core.errors import FedgistError
from fedgist.data.files import Images, Reader, checked, naming_file

SIDE = 32
PIXELS = 3 * SIDE * SIDE
TRAIN_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
PUT = ("PUT", "BINPUT", "LONG_BINPUT")
GET = ("GET", "BINGET", "LONG_BINGET")
TUPLE = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
MOST_TUPLES = 100
"""In a batch; an array takes six."""
HOLDERS = (pickletools.pylist, pickletools.pydict, pickletools.pytuple, pickletools.pyset, pickletools.markobject)
SINGLE = {one.name for one in pickletools.opcodes if not one.stack_before and {*one.stack_after} - {*HOLDERS}}
SINGLE |= {"STACK_GLOBAL", "REDUCE"}
"""What puts a number, a text or an array down, and nothing that holds others."""

Batch = tuple[np.ndarray, np.ndarray]


def find(folder: Path) -> Reader | None:
    """Reads an archive, if its files lie here or in the folder that it unpacks to."""
    for name, (train, test, read_batch) in ARCHIVES.items():
        for place in (folder / name, folder):
            if all((place / file).is_file() for file in (*train, test)):
                return partial(_read, place, train, test, read_batch)
    return None


def _read(place: Path, train: tuple[str, ...], test: str, read_batch: Callable[[Path], Batch]) -> tuple[Images, Images]:
    splits = []
    for names in (train, (test,)):
        batches = [read_batch(place / name) for name in names]
        pixels = np.concatenate([batch for batch, _ in batches]).reshape(-1, 3, SIDE, SIDE)
        labels = np.concatenate([labels for _, labels in batches])
        splits.append(checked(str(place / names[0]), np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)), labels))
    return splits[0], splits[1]


def _binary_batch(before: int, path: Path) -> Batch:
    """Records of so many bytes, the last of them the label, and 3 × 32 × 32 pixels, and nothing else."""
    with naming_file(path):
        data = np.frombuffer(path.read_bytes(), np.uint8)
    if len(data) == 0 or len(data) % (before + PIXELS):
        raise FedgistError(
            f"{path}: {len(data):,} bytes are no multiple of a record's {before + PIXELS:,}; fetch it again"
        )
    records = data.reshape(-1, before + PIXELS)
    return records[:, before:], records[:, before - 1].astype(np.int64)


def _python_batch(labels_name: str, path: Path) -> Batch:
    with naming_file(path):
        batch = load_batch(path.read_bytes(), str(path))
    if "data" not in batch or labels_name not in batch:
        raise FedgistError(f"{path} must hold 'data' and {labels_name!r}; it holds {sorted(map(str, batch))}")
    pixels, labels = batch["data"], batch[labels_name]
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (PIXELS,):
        raise FedgistError(f"{path}: 'data' must be uint8 of shape (N, {PIXELS})")
    if not isinstance(labels, np.ndarray):
        if not (isinstance(labels, list) and all(type(label) is int for label in labels)):
            raise FedgistError(f"{path}: {labels_name!r} must be a list of whole numbers")
        labels = np.array(labels, np.int64)
    if labels.shape != (len(pixels),):
        raise FedgistError(f"{path}: {len(pixels)} images but {labels.size} labels")
    return pixels, labels


ARCHIVES: dict[str, tuple[tuple[str, ...], str, Callable[[Path], Batch]]] = {
    "cifar-10-batches-py": (TRAIN_BATCHES, "test_batch", partial(_python_batch, "labels")),
    "cifar-100-python": (("train",), "test", partial(_python_batch, "fine_labels")),
    "cifar-10-batches-bin": (
        tuple(f"{name}.bin" for name in TRAIN_BATCHES),
        "test_batch.bin",
        partial(_binary_batch, 1),
    ),
    "cifar-100-binary": (("train.bin",), "test.bin", partial(_binary_batch, 2)),
}
"""The folder that each unpacks to -> files of the train set, file of the test set, and how one is read."""


def load_batch(data: bytes, where: str) -> dict[str, Any]:
    """The dict in a pickled batch, its arrays made; whatever else the pickle asks for is refused."""
    _check_form(data, where)
    content = _Reader(data, where).load()
    if not isinstance(content, dict):
        raise FedgistError(f"{where}: a batch is a dict, not {type(content).__name__}")
    named = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in content.items()}
    return {key: value.array(where) if isinstance(value, _Array) else value for key, value in named.items()}


def _check_form(data: bytes, where: str) -> None:
    """Lengths are within the data (which `genops` sees to), objects remembered in order, tuples few, and what holds
    others is in one place alone: of twenty tuples, each twice in the next, a hash or a text has a million parts."""
    tuples, remembered, last = 0, dict[int, bool](), ""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name, place = opcode.name, int(argument or 0) if opcode.name in PUT + GET else len(remembered)
        tuples += name in TUPLE
        again = name == "DUP" or (name in GET and not remembered.get(place))
        if tuples > MOST_TUPLES or again or (name in PUT and place > count):
            raise FedgistError(f"{where} is put together as no CIFAR batch is; it may be malicious: do not use it")
        if name in (*PUT, "MEMOIZE"):
            remembered[place] = last in SINGLE
        else:
            last = name


class _Reader(pickle.Unpickler):
    """Knows three names; what it gives for them is made anew each time, so that a pickle changes nothing that lasts."""

    def __init__(self, data: bytes, where: str):
        super().__init__(BytesIO(data), encoding="bytes")  # Python 2 wrote them
        self.where = where

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return lambda *arguments: _Array()
        if (module, name) == ("numpy", "dtype"):
            return lambda code, *rest: _Type(code)
        if (module, name) == ("numpy", "ndarray"):
            return None  # the first argument of _reconstruct, which the stand-in does not look at
        raise FedgistError(
            f"{self.where} asks for {module}.{name}, which no CIFAR batch contains; it may be malicious: do not use it"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise FedgistError(f"{self.where} asks for an outside object, which no CIFAR batch does: do not use it")


class _Type:
    """Stands for numpy.dtype: bytes or 64-bit integers, in the order of this machine's kind."""

    __slots__ = ("code",)

    def __init__(self, code: Any):
        text = code.decode("latin1") if isinstance(code, bytes) else code
        if text not in ("u1", "i8"):
            raise FedgistError(f"a pickled batch holds arrays of bytes or 64-bit integers, not of {text!r}")
        self.code = text

    def __setstate__(self, state: Any) -> None:
        if not (isinstance(state, tuple) and len(state) > 1 and state[1] in (b"|", "|", b"<", "<")):
            raise FedgistError("a pickled batch holds little-endian arrays only")


class _Array:
    """Stands for numpy.ndarray until its bytes have been counted."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self, where: str) -> np.ndarray:
        """The array, if shape, type and bytes fit each other."""
        if not (isinstance(self.state, tuple) and len(self.state) == 5):
            raise FedgistError(f"{where}: malformed array")
        _, shape, kind, by_columns, raw = self.state
        good = isinstance(shape, tuple) and len(shape) <= 2 and all(type(side) is int and side >= 0 for side in shape)
        if not (good and isinstance(kind, _Type) and isinstance(raw, bytes) and by_columns is False):
            raise FedgistError(f"{where}: malformed array")
        if len(raw) != math.prod(shape) * int(kind.code[1]):
            raise FedgistError(f"{where}: {len(raw):,} bytes for an array of shape {shape}")
        return np.frombuffer(raw, f"<{kind.code}").reshape(shape)
