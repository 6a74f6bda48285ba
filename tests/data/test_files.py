"""Reading IDX and .npz: round trips, and a clear error that names the file for everything that is not in order."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.data.files import Images, missing_splits, read_folder, read_idx, read_npz, write_npz


def pixels(*shape: int) -> np.ndarray:
    return Rng(0, "pixels", *shape).numpy().integers(0, 256, shape, dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, prefix: str, images: np.ndarray, labels: np.ndarray, packed: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels.astype(np.uint8))):
        path = folder / f"{prefix}-{name}{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))


def write_parts(folder: Path, **parts: int) -> None:
    """One image a part, whose label tells which part it was."""
    for name, label in parts.items():
        write_npz(folder / f"{name}.npz", Images(pixels(1, 2, 2), np.array([label])))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("test_prefix", ["t10k", "test"])
def test_idx_round_trip(tmp_path: Path, packed: bool, test_prefix: str) -> None:
    labels = np.arange(6) % 3
    write_idx(tmp_path, "train", pixels(6, 5, 4), labels, packed)
    assert missing_splits(tmp_path) == ["test"]
    write_idx(tmp_path, test_prefix, pixels(3, 5, 4), labels[:3], packed)
    train, test = read_folder(tmp_path)
    assert np.array_equal(train.pixels, pixels(6, 5, 4))
    assert np.array_equal(train.labels, labels)
    assert train.labels.dtype == np.int64
    assert np.array_equal(test.pixels, pixels(3, 5, 4))
    assert missing_splits(tmp_path) == []


@pytest.mark.parametrize("shape", [(4, 3, 2), (4, 3, 2, 1), (4, 3, 2, 3)])
def test_npz_round_trip(tmp_path: Path, shape: tuple[int, ...]) -> None:
    write_npz(tmp_path / "deep" / "train.npz", Images(pixels(*shape) // 2, np.array([3, 1, 0, 2]), peak=127))
    read = read_npz(tmp_path / "deep" / "train.npz")
    assert np.array_equal(read.pixels, pixels(*shape) // 2)
    assert read.labels.tolist() == [3, 1, 0, 2]
    assert read.peak == 127
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["train.npz"]  # no draft is left behind


def test_npz_without_a_peak_has_whole_bytes(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", images=pixels(2, 3, 3), labels=np.array([0, 1], np.uint8))
    assert read_npz(tmp_path / "train.npz").peak == 255


def test_a_number_for_one_channel_need_not_be_a_list(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", images=pixels(2, 3, 3), labels=np.array([0, 1]), mean=0.5, std=0.25)
    assert (found := read_npz(tmp_path / "train.npz")).mean == (0.5,) and found.std == (0.25,)


def test_parts_are_read_in_numerical_order(tmp_path: Path) -> None:
    write_parts(tmp_path, **{f"train_{k}": k for k in range(1, 12)}, test=0)
    assert read_folder(tmp_path)[0].labels.tolist() == list(range(1, 12))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("train_1", "train_3", "test"), "lacks train_2.npz"),
        (("train_2", "train_3", "test"), "lacks train_1.npz"),
        (("train", "train_1", "test"), "holds both train.npz and train_1.npz"),
        (("train",), "has no test split; it needs t10k-images-idx3-ubyte"),
    ],
)
def test_an_incomplete_or_ambiguous_folder_is_refused(tmp_path: Path, parts: tuple[str, ...], message: str) -> None:
    write_parts(tmp_path, **dict.fromkeys(parts, 0))
    with pytest.raises(FedgistError, match=message):
        read_folder(tmp_path)


def test_parts_and_splits_must_have_the_same_form(tmp_path: Path) -> None:
    write_parts(tmp_path, train_1=0, train_2=0, test=0)
    write_npz(tmp_path / "train_2.npz", Images(pixels(1, 3, 2), np.array([0])))
    with pytest.raises(FedgistError, match=r"train_2\.npz: its images have another shape, peak or mean than .*_1\.npz"):
        read_folder(tmp_path)
    (tmp_path / "train_2.npz").unlink()
    write_npz(tmp_path / "test.npz", Images(pixels(1, 2, 2, 3), np.array([0])))
    with pytest.raises(FedgistError, match="the same form"):
        read_folder(tmp_path)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ends inside its header"),
        (idx(pixels(4, 3, 2))[:11], "ends inside its header"),
        (idx(pixels(4, 3, 2))[:-1], "truncated: it has fewer bytes than its header"),
        (idx(pixels(4, 3, 2)) + b"\0", "has more bytes than its header"),
        (idx(pixels(4)) + bytes(20), "starts with 0x00000801, not 0x00000803"),
        (struct.pack(">4I", 0x0D03, 1, 1, 1) + bytes(4), "starts with 0x00000d03"),  # floats
        (struct.pack(">4I", 0x0803, *[2**32 - 1] * 3), "truncated"),  # 8·10^28 bytes, if it were believed
    ],
)
def test_wrong_idx_files_are_refused_by_name(tmp_path: Path, packed: bool, content: bytes, message: str) -> None:
    path = tmp_path / ("images.gz" if packed else "images")
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(FedgistError, match=message) as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)


def test_a_truncated_or_false_gzip_file_is_refused_by_name(tmp_path: Path) -> None:
    whole = gzip.compress(idx(pixels(40, 3, 2)))
    for content in (whole[: len(whole) // 2], whole[:-4], b"not gzip at all", b""):
        (tmp_path / "images.gz").write_bytes(content)
        with pytest.raises(FedgistError, match=r"images\.gz"):
            read_idx(tmp_path / "images.gz", 3)


def test_a_wrong_number_of_labels_is_refused(tmp_path: Path) -> None:
    write_idx(tmp_path, "train", pixels(6, 2, 2), np.zeros(5))
    write_idx(tmp_path, "t10k", pixels(6, 2, 2), np.zeros(6))
    with pytest.raises(
        FedgistError, match=r"train-images-idx3-ubyte and train-labels-idx1-ubyte: 6 images but 5 labels"
    ):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": pixels(2, 3, 3)}, r"the keys 'images' and 'labels'; it has \['images'\]"),
        ({"images": pixels(2, 3, 3), "labels": np.array([0, 1, 2])}, "2 images but 3 labels"),
        ({"images": pixels(2, 3, 3), "labels": np.array([0.0, 1.0])}, "labels must be a list of integers, not float64"),
        ({"images": pixels(2, 3, 3), "labels": np.array([[0], [1]])}, "labels must be a list of integers"),
        ({"images": pixels(2, 3, 3), "labels": np.array([0, -1])}, "label -1 is negative"),
        (
            {"images": pixels(2, 3, 3), "labels": np.array([0, 2**63 + 1], np.uint64)},
            "label 9223372036854775809 is",
        ),
        ({"images": pixels(2, 3, 3), "labels": np.array([0, 1]), "mean": 0.5, "std": 0.0}, "1 numbers each"),
        ({"images": pixels(2, 3, 3), "labels": np.array([0, 1]), "mean": [[0.5]], "std": [0.5]}, "1 numbers each"),
        (
            {"images": pixels(2, 3, 3), "labels": np.array([0, 1]), "groups": np.array([0, 2**63], np.uint64)},
            "groups must be 2 whole numbers",
        ),
        ({"images": pixels(2, 3, 3) / 255, "labels": np.array([0, 1])}, "images must be uint8 .* not float64"),
        ({"images": pixels(2, 9), "labels": np.array([0, 1])}, r"not uint8 of shape \(2, 9\)"),
        ({"images": pixels(2, 3, 8, 8), "labels": np.array([0, 1])}, "with C at most 4"),
        ({"images": pixels(0, 3, 3), "labels": np.array([], int)}, "no images"),
        ({"images": pixels(2, 3, 3), "labels": np.array([0, 1]), "peak": 16}, "above the declared peak 16"),
        ({"images": pixels(2, 3, 3), "labels": np.array([0, 1]), "peak": 0}, "peak must be between 1 and 255"),
        ({"images": pixels(2, 3, 3), "labels": np.array([0, None])}, "Object arrays cannot be loaded"),
    ],
)
def test_wrong_npz_files_are_refused_by_name(tmp_path: Path, arrays: dict, message: str) -> None:
    path = tmp_path / "train.npz"
    np.savez(path, **arrays)
    with pytest.raises(FedgistError, match=message) as caught:
        read_npz(path)
    assert str(path) in str(caught.value)


def test_other_files_called_npz_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.npz"
    with path.open("wb") as file:
        np.save(file, pixels(3))
    with pytest.raises(FedgistError, match=r"is damaged or no \.npz; fetch it again, or write it with numpy\.savez"):
        read_npz(path)
    for content in (b"", b"text", b"PK\x03\x04 and no more"):
        path.write_bytes(content)
        with pytest.raises(FedgistError, match=r"train\.npz is damaged"):
            read_npz(path)


@given(st.data())
def test_damage_is_noticed_or_harmless_and_never_a_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    write_npz(folder / "train.npz", Images(pixels(3, 2, 2), np.arange(3)))
    (folder / "images").write_bytes(idx(pixels(3, 2, 2)))
    (folder / "images.gz").write_bytes(gzip.compress(idx(pixels(3, 2, 2))))
    for path in folder.iterdir():
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
        try:
            read = read_npz(path).pixels if path.suffix == ".npz" else read_idx(path, 3)
        except FedgistError:
            continue
        assert read.size == 12
