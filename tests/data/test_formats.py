"""Published forms of data sets, as small files made here: they are read, not trusted, and what is wrong is said."""

import gzip
import json
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.data import datasets, formats, partitions
from fedgist.data.cifar import load_batch
from fedgist.data.datasets import load
from fedgist.data.files import Images


def pixels(*shape: int) -> np.ndarray:
    return Rng(0, "pixels", *shape).numpy().integers(0, 256, shape, dtype=np.uint8)


def read(folder: Path) -> tuple[Images, Images]:
    found = formats.find(folder)
    assert found is not None
    return found()


# CIFAR

BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def text(value: bytes) -> bytes:
    """A Python 2 string, as protocol 2 wrote it."""
    return b"T" + struct.pack("<i", len(value)) + value


def array(value: np.ndarray) -> bytes:
    """An array as numpy 1 pickled it under Python 2: _reconstruct, then BUILD with (1, shape, dtype, False, bytes)."""
    code = {np.dtype(np.uint8): (b"u1", b"|"), np.dtype(np.int64): (b"i8", b"<")}[value.dtype]
    shape = b"(" + b"".join(b"J" + struct.pack("<i", side) for side in value.shape) + b"t"
    kind = (
        b"cnumpy\ndtype\n"
        + text(code[0])
        + b"K\x00K\x01\x87R"
        + b"(K\x03"
        + text(code[1])
        + b"NNN"
        + b"J\xff\xff\xff\xff" * 2
        + b"K\x00tb"
    )
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    return empty + b"(K\x01" + shape + kind + b"\x89" + text(value.tobytes()) + b"tb"


def batch(**content: Any) -> bytes:
    """A pickled dict of strings, lists of numbers and arrays."""
    made = b""
    for key, value in content.items():
        if isinstance(value, np.ndarray):
            item = array(value)
        elif isinstance(value, list):
            item = b"](" + b"".join(b"K" + bytes([number]) for number in value) + b"e"
        else:
            item = text(value)
        made += text(key.encode()) + item
    return b"\x80\x02}(" + made + b"u."


def write_cifar10(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Six batches of equal size; the last is the test set."""
    folder.mkdir(parents=True)
    flat = images.transpose(0, 3, 1, 2).reshape(6, -1, 3072)
    for name, x, y in zip(BATCHES, flat, labels.reshape(6, -1), strict=True):
        (folder / name).write_bytes(batch(batch_label=b"some", labels=y.tolist(), data=x, filenames=b"names"))


def test_cifar10_as_python_wrote_it(tmp_path: Path) -> None:
    images, labels = pixels(24, 32, 32, 3), np.arange(24) % 10
    write_cifar10(tmp_path / "cifar10" / "cifar-10-batches-py", images, labels)
    train, test = read(tmp_path / "cifar10")
    assert np.array_equal(np.concatenate([train.pixels, test.pixels]), images)
    assert train.labels.tolist() == labels[:20].tolist()
    assert test.labels.tolist() == labels[20:].tolist()
    data = load("cifar10", tmp_path, normalise="unit")[0]
    assert data.classes == 10
    assert data.x[3, 1, 5, 7].item() == pytest.approx(images[3, 5, 7, 1] / 255)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # numpy.core has moved
def test_the_batches_made_here_are_such_pickles() -> None:
    """Python's own unpickler says what they mean."""
    meant = pickle.loads(batch(labels=[3, 7], data=pixels(2, 3072)), encoding="bytes")
    assert np.array_equal(meant[b"data"], pixels(2, 3072))
    assert meant[b"labels"] == [3, 7]


def test_cifar100_takes_the_fine_labels(tmp_path: Path) -> None:
    images = pixels(6, 32, 32, 3)
    flat = images.transpose(0, 3, 1, 2).reshape(6, 3072)
    tmp_path.joinpath("cifar100").mkdir()
    for name, part in (("train", slice(0, 4)), ("test", slice(4, 6))):
        content = batch(data=flat[part], coarse_labels=np.full(2, 19), fine_labels=np.arange(90, 96)[part])
        (tmp_path / "cifar100" / name).write_bytes(content)
    train, test = read(tmp_path / "cifar100")
    assert np.array_equal(train.pixels, images[:4])
    assert train.labels.tolist() == [90, 91, 92, 93]
    assert test.labels.tolist() == [94, 95]
    assert load("cifar100", tmp_path)[0].classes == 100


@pytest.mark.parametrize(("archive", "before"), [("cifar-10-batches-bin", 1), ("cifar-100-binary", 2)])
def test_binary_archives(tmp_path: Path, archive: str, before: int) -> None:
    images, labels = pixels(12, 32, 32, 3), np.arange(12) % 10
    names = [f"{name}.bin" for name in BATCHES] if before == 1 else ["train.bin", "test.bin"]
    folder = tmp_path / archive
    folder.mkdir()
    flat = images.transpose(0, 3, 1, 2).reshape(12, 3072)
    records = np.concatenate([np.full((12, before - 1), 99), labels[:, None], flat], 1).astype(np.uint8)
    for name, part in zip(names, np.array_split(records, len(names)), strict=True):
        (folder / name).write_bytes(part.tobytes())
    train, test = read(tmp_path)
    assert np.array_equal(np.concatenate([train.pixels, test.pixels]), images)
    assert np.concatenate([train.labels, test.labels]).tolist() == labels.tolist()
    (folder / names[0]).write_bytes(b"short")
    with pytest.raises(FedgistError, match=f"{names[0]}: 5 bytes are no multiple of a record's {before + 3072:,}"):
        read(tmp_path)


class Malicious:
    """A pickle of this calls os.system when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def put(folder: Path, first: bytes) -> None:
    """A whole CIFAR-10 archive whose first batch is `first`."""
    write_cifar10(folder, pixels(6, 32, 32, 3), np.arange(6))
    (folder / BATCHES[0]).write_bytes(first)


@pytest.mark.parametrize(
    "bomb",
    [
        pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.LONG_BINPUT + (1 << 25).to_bytes(4, "little") + pickle.STOP,
        pickle.PROTO + b"\x05" + pickle.BYTEARRAY8 + (1 << 28).to_bytes(8, "little") + pickle.STOP,
        pickle.PROTO + b"\x04" + pickle.BINBYTES8 + (1 << 28).to_bytes(8, "little") + pickle.STOP,
    ],
)
def test_a_pickle_cannot_ask_for_more_memory_than_it_has_bytes(tmp_path: Path, bomb: bytes) -> None:
    put(tmp_path / "cifar10", bomb)
    tracemalloc.start()
    try:
        with pytest.raises(FedgistError, match="data_batch_1"):
            load("cifar10", tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_a_pickle_cannot_crash_its_reader(tmp_path: Path) -> None:
    """A key of tuples within tuples, so deep that hashing it would overflow the stack, in a process of its own."""
    deep = pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.EMPTY_TUPLE + pickle.TUPLE1 * 3_000_000
    (tmp_path / "batch").write_bytes(deep + pickle.NONE + pickle.SETITEM + pickle.STOP)
    code = "import sys; from fedgist.data.cifar import load_batch; load_batch(open(sys.argv[1], 'rb').read(), 'batch')"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "batch"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "batch is put together as no CIFAR batch is; it may be malicious" in done.stderr


def remembered(kind: bytes, at: int, again: bytes = pickle.BINGET) -> bytes:
    """An object is remembered, and the next holds it twice."""
    get = again + at.to_bytes(1 if again == pickle.BINGET else 4, "little")
    return pickle.BINPUT + bytes([at]) + pickle.POP + kind % (get, get)


LISTS, TUPLES = b"](%b%be", b"(%b%bt"
DTYPE = b"q\xff0cnumpy\ndtype\nh\xff\x85R"


@pytest.mark.parametrize(
    "bomb",
    [
        b"}K\x01" + (pickle.DUP + pickle.TUPLE2) * 80 + b"Ns",
        b"}K\x01\x85" + b"".join(remembered(TUPLES, i) for i in range(80)) + b"Ns",
        b"}K\x01\x85" + b"".join(remembered(TUPLES, i, pickle.LONG_BINGET) for i in range(80)) + b"Ns",
        b"}K\x01\x85" + b"".join(pickle.NONE + pickle.POP + remembered(TUPLES, i) for i in range(80)) + b"Ns",
        b"}"
        + text(b"data")
        + b"]"
        + b"".join(remembered(LISTS, i) for i in range(80))
        + b"q\xff0"
        + DTYPE
        + b"h\xff\x85Rs",
        b"}K\x01\x85" + b"".join(b"K\x07q%c0" % i + remembered(TUPLES, i) for i in range(80)) + b"Ns",
    ],
)
def test_a_pickle_that_holds_itself_twice_and_twice_again(tmp_path: Path, bomb: bytes) -> None:
    """Some hundred bytes whose hash, or whose text in a message, has 2^80 parts."""
    put(tmp_path / "cifar10", b"\x80\x02" + bomb + b".")
    with pytest.raises(FedgistError, match="put together as no CIFAR batch is"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("protocol", range(6))
def test_what_is_no_container_may_be_in_a_batch_twice(protocol: int) -> None:
    label = "a label that is remembered"
    content = {label: [label, 3], "other": label}
    assert load_batch(pickle.dumps(content, protocol), "batch") == content


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    trap = tmp_path / "trap"
    put(tmp_path / "cifar10", pickle.dumps({"data": Malicious(trap), "labels": [1]}, protocol))
    with pytest.raises(FedgistError, match=r"data_batch_1 asks for (posix|nt)\.system, which no CIFAR batch contains"):
        load("cifar10", tmp_path)
    assert not trap.exists()


GETATTR = b"cbuiltins\ngetattr\n"
GOOD = {"labels": [1], "data": pixels(1, 3072)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x02" + GETATTR + b".", "asks for builtins.getattr"),
        (b"\x80\x02cnumpy\nload\n.", "asks for numpy.load"),
        (b"\x80\x02cnumpy.core.multiarray\nscalar\n.", "asks for numpy.core.multiarray.scalar"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "asks for os.system"),
        (b"\x80\x02U\x01aQ.", "asks for an outside object"),
        (b"\x80\x02cnumpy\ndtype\nU\x01OK\x00K\x01\x87R.", "bytes or 64-bit integers, not of 'O'"),
        (b"\x80\x02](K\x01e.", "a batch is a dict, not list"),
        (batch(labels=[1]), r"must hold 'data' and 'labels'; it holds \['labels'\]"),
        (batch(**(GOOD | {"data": b"text"})), r"'data' must be uint8 of shape \(N, 3072\)"),
        (batch(**(GOOD | {"data": pixels(1, 3071)})), r"'data' must be uint8 of shape \(N, 3072\)"),
        (batch(**(GOOD | {"labels": [1, 2]})), "1 images but 2 labels"),
        (batch(**(GOOD | {"labels": b"text"})), "'labels' must be a list of whole numbers"),
        (
            batch(**GOOD).replace(struct.pack("<i", 3072) + b"t", struct.pack("<i", 3073) + b"t"),
            "3,072 bytes for an array",
        ),
        (batch(**GOOD)[:-9], "damaged or not what its name says"),
        (b"", "damaged or not what its name says"),
    ],
)
def test_batches_that_are_not_in_order(tmp_path: Path, content: bytes, message: str) -> None:
    put(tmp_path / "cifar10", content)
    with pytest.raises(FedgistError, match=message) as caught:
        load("cifar10", tmp_path)
    assert "data_batch_1" in str(caught.value) or "pickled batch" in str(caught.value)


def test_a_pickle_cannot_change_its_reader(tmp_path: Path) -> None:
    """BUILD with (None, {name: value}) sets attributes of what the reader gave out; the next batch is read as ever."""
    state = b"N}" + text(b"__code__") + b"Ns\x86b"
    put(tmp_path / "first" / "cifar10", b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n" + state + b".")
    put(tmp_path / "second" / "cifar10", batch(**GOOD))
    with pytest.raises(FedgistError, match="data_batch_1"):
        load("cifar10", tmp_path / "first")
    assert load("cifar10", tmp_path / "second")[0].y[0] == 1


# EMNIST and MedMNIST


def write_idx(path: Path, content: np.ndarray) -> None:
    data = struct.pack(f">{1 + content.ndim}I", 0x0800 + content.ndim, *content.shape) + content.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_emnist(folder: Path, split: str, first: int, classes: int, end: str = "") -> dict[str, np.ndarray]:
    upright = {"train": pixels(2 * classes, 28, 28), "test": pixels(classes, 28, 28)}
    for part, images in upright.items():
        labels = (first + np.arange(len(images)) % classes).astype(np.uint8)
        stem = f"emnist-{split}-{part}"
        write_idx(folder / f"{stem}-images-idx3-ubyte{end}", np.ascontiguousarray(images.transpose(0, 2, 1)))
        write_idx(folder / f"{stem}-labels-idx1-ubyte{end}", labels)
    return upright


@pytest.mark.parametrize(("place", "end"), [("", ""), ("gzip", ".gz")])
def test_emnist_letters_stand_upright_and_count_from_zero(tmp_path: Path, place: str, end: str) -> None:
    upright = write_emnist(tmp_path / "emnist-letters" / place, "letters", 1, 26, end)
    train, test = read(tmp_path / "emnist-letters")
    assert np.array_equal(train.pixels, upright["train"])
    assert np.array_equal(test.pixels, upright["test"])
    assert train.labels.tolist() == [*range(26), *range(26)]
    assert load("emnist-letters", tmp_path)[0].classes == 26


def test_a_folder_with_all_of_emnist_is_read_by_its_name(tmp_path: Path) -> None:
    for name in ("emnist-letters", "emnist-digits", "letters and digits"):
        for split, first, classes in (("letters", 1, 26), ("digits", 0, 10)):
            write_emnist(tmp_path / name, split, first, classes)
    assert set(read(tmp_path / "emnist-letters")[0].labels) == set(range(26))
    assert set(read(tmp_path / "emnist-digits")[0].labels) == set(range(10))
    with pytest.raises(FedgistError, match="name the folder after the one to use: emnist-digits, emnist-letters"):
        read(tmp_path / "letters and digits")


def test_half_of_emnist_is_nothing(tmp_path: Path) -> None:
    write_emnist(tmp_path / "emnist-letters", "letters", 1, 26)
    (tmp_path / "emnist-letters" / "emnist-letters-test-labels-idx1-ubyte").unlink()
    assert formats.find(tmp_path / "emnist-letters") is None
    with pytest.raises(FedgistError, match=r"nist\.gov"):
        load("emnist-letters", tmp_path)


def write_medmnist(path: Path, width: int = 1, **change: np.ndarray) -> dict[str, np.ndarray]:
    content = {}
    for split, n in (("train", 9), ("val", 4), ("test", 5)):
        content[f"{split}_images"] = pixels(n, 28, 28, 3)
        content[f"{split}_labels"] = (np.arange(n * width) % 9).reshape(n, width).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **content | change)  # type: ignore[arg-type]
    return content


def test_medmnist(tmp_path: Path) -> None:
    content = write_medmnist(tmp_path / "pathmnist" / "pathmnist.npz")
    train, test = load("pathmnist", tmp_path, normalise="unit")
    assert (train.shape, train.classes, len(train), len(test)) == ((3, 28, 28), 9, 9, 5)
    assert train.y.tolist() == list(range(9))
    assert (test.x * 255).round().byte().numpy().transpose(0, 2, 3, 1).tolist() == content["test_images"].tolist()


def test_medmnist_that_cannot_be_used(tmp_path: Path) -> None:
    write_medmnist(tmp_path / "chestmnist" / "chestmnist.npz", width=14)
    with pytest.raises(FedgistError, match="each image has 14 labels"):
        read(tmp_path / "chestmnist")
    write_medmnist(tmp_path / "organmnist3d" / "organmnist3d.npz", train_images=pixels(9, 28, 28, 28))
    with pytest.raises(FedgistError, match="C at most 4"):
        read(tmp_path / "organmnist3d")
    write_medmnist(tmp_path / "two" / "a.npz")
    assert formats.find(tmp_path / "two") is not None
    write_medmnist(tmp_path / "two" / "b.npz")
    assert formats.find(tmp_path / "two") is None
    write_medmnist(tmp_path / "two" / "two.npz")
    assert formats.find(tmp_path / "two") is not None
    (tmp_path / "two" / "two.npz").write_bytes(b"half a download")
    with pytest.raises(FedgistError, match=r"two/two\.npz is damaged or no \.npz; fetch it again"):
        load("two", tmp_path)


# Image folders and LEAF


@pytest.fixture
def save() -> Callable[..., None]:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install 'fedgist[images]'")

    def write(path: Path, content: np.ndarray, mode: str | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = image.fromarray(content)
        (made.convert(mode) if mode else made).save(path)

    return write


@pytest.mark.parametrize("channels", [(), (3,)])
def test_image_folders(tmp_path: Path, save: Callable[..., None], channels: tuple[int, ...]) -> None:
    """Classes go by the names of their folders, images within them by theirs."""
    images = pixels(6, 5, 4, *channels)
    for i, name in enumerate(("train/cat/b", "train/ant/z", "train/ant/a", "train/cat/a", "test/cat/x", "test/ant/x")):
        save(tmp_path / "own" / f"{name}.png", images[i])
    (tmp_path / "own" / "train" / "cat" / "notes.txt").touch()
    train, test = read(tmp_path / "own")
    assert np.array_equal(train.pixels, images[[2, 1, 3, 0]])
    assert train.labels.tolist() == [0, 0, 1, 1]
    assert np.array_equal(test.pixels, images[[5, 4]])
    assert load("own", tmp_path)[0].shape == (3 if channels else 1, 5, 4)


def test_image_folders_that_are_not_in_order(tmp_path: Path, save: Callable[..., None]) -> None:
    for name in ("train/a/1", "test/a/1"):
        save(tmp_path / f"{name}.png", pixels(5, 4))
    save(tmp_path / "train" / "a" / "2.png", pixels(5, 4), "RGB")
    assert read(tmp_path)[1].pixels.shape == (1, 5, 4, 3)  # one of them is in colour, so all are
    save(tmp_path / "test" / "b" / "1.png", pixels(5, 4))
    with pytest.raises(FedgistError, match=r"has a class 'b' that .*train lacks"):
        read(tmp_path)
    save(tmp_path / "train" / "b" / "1.png", pixels(6, 4))
    with pytest.raises(FedgistError, match=r"b/1.png and 1.png are 4×6 and 4×5 pixels; all images must have one size"):
        read(tmp_path)
    save(tmp_path / "train" / "b" / "1.png", pixels(5, 4).astype(np.uint16))
    with pytest.raises(FedgistError, match=r"b/1.png has pixels of mode 'I;16'; only 8 bits"):
        read(tmp_path)
    (tmp_path / "train" / "b" / "1.png").write_bytes(b"no picture")
    with pytest.raises(FedgistError, match=r"b/1.png is damaged"):
        read(tmp_path)


def test_without_pillow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "test"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a" / "1.png").touch()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(FedgistError, match=r"image files need Pillow: pip install 'fedgist\[images\]'"):
        read(tmp_path)


def write_leaf(folder: Path, content: dict[str, dict[str, dict[str, list[Any]]]]) -> None:
    """Split -> user -> x and y; each user in a file of its own, as LEAF cuts large sets."""
    for split, users in content.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        for i, (user, held) in enumerate(users.items()):
            made = {"users": [user], "num_samples": [len(held["y"])], "user_data": {user: held}}
            (folder / split / f"all_data_{i}.json").write_text(json.dumps(made))


def test_leaf_with_pixels(tmp_path: Path) -> None:
    """FEMNIST: pixels from 0 to 1 in lists, 784 each; writers are the groups, by the order of their names."""
    images = pixels(5, 28, 28)
    x = (images.reshape(5, -1) / 255).tolist()
    train = {"w2": {"x": x[:2], "y": [61, 3]}, "w1": {"x": x[2:4], "y": [0, 1]}}
    write_leaf(tmp_path / "femnist" / "data", {"train": train, "test": {"w3": {"x": x[4:], "y": [5]}}})
    found, test = read(tmp_path / "femnist")
    assert np.array_equal(found.pixels, images[:4])
    assert found.labels.tolist() == [61, 3, 0, 1]
    assert found.groups is not None and found.groups.tolist() == [1, 1, 0, 0]
    assert test.groups is not None and test.groups.tolist() == [2]
    data = load("femnist", tmp_path, limit=3)[0]
    assert data.classes == 62
    assert data.groups is not None and data.groups.tolist() == [1, 1, 0]
    taken = data.take([2, 0]).groups
    assert taken is not None and taken.tolist() == [0, 1]


def test_leaf_with_pictures(tmp_path: Path, save: Callable[..., None]) -> None:
    """CelebA: names of pictures, which are scaled to 84 × 84."""
    folder = tmp_path / "celeba"
    for i in range(3):
        save(folder / "images" / f"{i}.png", np.full((218, 178, 3), 50 * i, np.uint8))
    train = {"7": {"x": ["0.png", "2.png"], "y": [0, 1]}}
    write_leaf(folder, {"train": train, "test": {"9": {"x": ["1.png"], "y": ["1"]}}})
    found, test = read(folder)
    assert found.pixels.shape == (2, 84, 84, 3)
    assert np.unique(found.pixels[1]).tolist() == [100]
    assert test.labels.tolist() == [1]
    write_leaf(folder, {"test": {"9": {"x": ["../0.png"], "y": [1]}}})
    with pytest.raises(FedgistError, match=r"names a picture '../0.png', which .*images does not hold"):
        read(folder)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"x": [[0.5] * 5], "y": [1]}, "must be the pixels of square images"),
        ({"x": [[-1.0] * 4], "y": [1]}, "must be the pixels of square images"),
        ({"x": [[0.5] * 4, [0.5] * 9], "y": [1, 1]}, "lists of numbers of one length"),
        ({"x": [[0.5] * 4], "y": ["a"]}, "y must be lists of whole numbers"),
        ({"x": [[0.5] * 4], "y": [1, 2]}, "all_data_0.json is damaged"),
        ({"x": [], "y": []}, "there are no samples"),
        ({"x": ["a.png"], "y": [1]}, "its JSON names pictures; put them in"),
    ],
)
def test_leaf_that_is_not_in_order(tmp_path: Path, held: dict[str, list[Any]], message: str) -> None:
    write_leaf(tmp_path, {"train": {"u": held}, "test": {"u": {"x": [[0.0] * 4], "y": [0]}}})
    with pytest.raises(FedgistError, match=message):
        read(tmp_path)


def test_groups_survive_an_export_and_make_a_partition(tmp_path: Path) -> None:
    x, users = (pixels(12, 4) / 255).tolist(), {}
    for i in range(4):
        users[f"u{i}"] = {"x": x[3 * i : 3 * i + 3], "y": [0, 1, 1]}
    write_leaf(tmp_path / "own", {"train": users, "test": users})
    datasets.export("own", tmp_path / "exported", tmp_path)
    train = load("own", tmp_path / "exported")[0]
    assert train.groups is not None and train.groups.tolist() == np.repeat(np.arange(4), 3).tolist()
    parts = partitions.split(train.y, 4, Rng(0), "group", train.groups)
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
