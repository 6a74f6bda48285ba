"""Tables: what columns.toml and the rows of a .csv may be, one-hot categories, embedded tables, arrays as .npz."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedgist.core.errors import FedgistError
from fedgist.data import datasets, samples

COLUMNS = """\
target = "sick"
classes = ["no", "yes"]

[numeric]
age = {mean = 50.0, std = 10.0}
pulse = {}

[categorical]
sex = ["f", "m"]
"""
TRAIN = "sex,age,sick,pulse\nf,60,no,70\nm,40,yes,80\nm,50,yes,90\n"
TEST = "pulse,sick,age,sex\n75,yes,55,f\n85,no,45,m\n"


def folder(tmp_path: Path, columns: str = COLUMNS, train: str = TRAIN, test: str = TEST) -> Path:
    place = tmp_path / "ward"
    place.mkdir()
    for name, text in (("columns.toml", columns), ("train.csv", train), ("test.csv", test)):
        (place / name).write_text(text, "utf-8")
    return tmp_path


def test_columns_are_found_by_name_standardised_and_one_hot(tmp_path: Path) -> None:
    train, test = datasets.load("ward", folder(tmp_path))
    std = np.std([70, 80, 90])  # of the train set, as nothing is public of the pulse
    torch.testing.assert_close(
        train.x, torch.tensor([[1, -10 / std, 1, 0], [-1, 0, 0, 1], [0, 10 / std, 0, 1]], dtype=torch.float32)
    )
    torch.testing.assert_close(
        test.x, torch.tensor([[0.5, -5 / std, 1, 0], [-0.5, 5 / std, 0, 1]], dtype=torch.float32)
    )
    assert train.y.tolist() == [0, 1, 1] and test.y.tolist() == [1, 0] and train.names == ("no", "yes")
    assert train.columns == ("age", "pulse", "sex=f", "sex=m") and train.shape == (4,)
    torch.testing.assert_close(torch.tensor([train.low, train.high]), torch.stack(test.x.aminmax(dim=0)))


def test_what_a_model_takes_is_found_by_name(tmp_path: Path) -> None:
    path = folder(tmp_path) / "ward" / "test.csv"
    found = samples.read(path, (4,), columns=("age", "pulse", "sex=f", "sex=m"), classes=("no", "yes"))
    assert found.x.tolist() == [[55, 75, 1, 0], [45, 85, 0, 1]]
    assert found.y is not None and found.y.tolist() == [1, 0]
    with pytest.raises(FedgistError, match="there is no column 'weight', which the model takes"):
        samples.read(path, (2,), columns=("age", "weight"), classes=())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"train": TRAIN.replace("m,50", "x,50")}, r"train.csv: row 4: sex is 'x', and only f, m are listed for it"),
        ({"train": TRAIN.replace("40", "")}, "train.csv: row 3: age must be a number, not ''"),
        ({"train": TRAIN.replace("40", "nan")}, "row 3: age must be a number, not 'nan'"),
        ({"test": TEST.replace("no", "maybe")}, "test.csv: row 3: sick is 'maybe', and only no, yes are listed"),
        ({"test": TEST.replace("sex", "gender")}, "there is no column 'sex'; its heading has pulse, sick, age, gender"),
        ({"test": TEST.replace("45,m", "45")}, "row 3 has 3 cells, the heading 4"),
        ({"test": TEST.replace("sick", "age")}, "a name occurs twice"),
        ({"test": TEST.splitlines()[0]}, "needs a heading and rows"),
        ({"columns": COLUMNS.replace('"no", "yes"', '"no"')}, "classes must be a list of at least two different words"),
        ({"columns": COLUMNS.replace('"f", "m"', "1, 2")}, "categorical.sex must be a list of"),
        ({"columns": COLUMNS.replace("std = 10.0", "std = 0")}, "age must be .* with std above 0"),
        ({"columns": COLUMNS.replace('"sick"', '"age"')}, "target must name the column that says the class"),
        ({"columns": "traget = 1"}, "'traget' is not known"),
        ({"columns": "target = "}, "columns.toml is damaged or not what its name says"),
    ],
)
def test_mistakes_are_named(change: dict[str, str], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(FedgistError, match=complaint):
        datasets.load("ward", folder(tmp_path, **change))


@pytest.mark.parametrize("name", ["breast_cancer", "wine"])
@pytest.mark.parametrize("form", ["csv", "npz"])
def test_an_embedded_table_is_as_its_card_says_and_comes_back_from_files(name: str, form: str, tmp_path: Path) -> None:
    train, test = datasets.load(name)
    card = datasets.CARDS[name]
    assert ((len(train), len(test)), train.shape, train.classes) == (card.sizes, card.shape, card.classes)
    assert train.names == card.names and len(train.columns) == card.shape[0]
    torch.testing.assert_close(train.x.mean(0), torch.zeros(card.shape), atol=1e-4, rtol=0)
    torch.testing.assert_close(train.x.std(0, correction=0), torch.ones(card.shape), atol=1e-4, rtol=0)
    assert not set(map(tuple, train.x.tolist())) & set(map(tuple, test.x.tolist()))

    datasets.export(name, tmp_path, form=form)
    (tmp_path / name).rename(tmp_path / "mine")
    again, other = datasets.load("mine", tmp_path)
    assert torch.equal(again.x, train.x) and torch.equal(other.x, test.x) and torch.equal(again.y, train.y)
    assert (again.mean, again.deviation, again.low) == (train.mean, train.deviation, train.low)


def arrays(place: Path, **given: np.ndarray) -> Path:
    place.mkdir()
    for split in ("train", "test"):
        np.savez(place / f"{split}.npz", labels=np.array([0, 1, 1]), **given)
    return place.parent


def test_arrays_of_other_types_are_normalised_as_their_files_say(tmp_path: Path) -> None:
    counts = np.arange(3 * 2 * 5, dtype=np.uint16).reshape(3, 2, 5) * 100
    stated = {"peak": np.array(4000), "mean": np.array([0.1, 0.2]), "std": np.array([0.5, 0.25])}
    train, _ = datasets.load("ecg", arrays(tmp_path / "ecg", images=counts, **stated))
    expected = (torch.tensor(counts / 4000) - torch.tensor([[0.1], [0.2]])) / torch.tensor([[0.5], [0.25]])
    torch.testing.assert_close(train.x, expected.float())
    assert train.shape == (2, 5) and train.mean == (0.1, 0.2)

    volts = np.linspace(-3, 9, 24, dtype=np.float32).reshape(3, 1, 2, 2, 2)
    train, _ = datasets.load("mri", arrays(tmp_path / "mri", images=volts), "unit")
    assert torch.equal(train.x, torch.tensor(volts)) and (train.low, train.high) == ((-3.0,), (9.0,))


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"images": np.full((3, 2), np.nan, np.float32)}, "not all values are finite"),
        ({"images": np.zeros((3, 2))}, "images must be uint8 .* or float32 or uint16 .* not float64"),
        ({"images": np.zeros((3, 2), np.float32), "mean": np.zeros(3), "std": np.ones(3)}, "must be 2 numbers each"),
        ({"images": np.zeros((3, 2), np.float32), "mean": np.zeros(2), "std": np.zeros(2)}, "and std above 0"),
        ({"images": np.zeros((3, 2), np.uint16), "peak": np.array(70_000)}, "peak must be between 1 and 65535"),
    ],
)
def test_arrays_that_cannot_be_used(given: dict[str, np.ndarray], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(FedgistError, match=complaint):
        datasets.load("x", arrays(tmp_path / "x", **given))
