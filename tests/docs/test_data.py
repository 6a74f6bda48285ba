"""What the page on data promises: its example is read and runs, and an empty folder keeps the numbers of classes."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedgist.cli import app
from fedgist.core.errors import FedgistError
from fedgist.data import datasets
from fedgist.federation import site_setup

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text("utf-8")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDGIST_DATA", raising=False)


def test_the_example_is_read_and_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "data.md", "exec"), {})
    said = []
    for line in re.findall(r"^    fedgist (.+? --data-dir data.*)$", PAGE, re.MULTILINE):
        done = CliRunner().invoke(app, shlex.split(line))
        assert done.exit_code == 0, done.output
        said.append(done.stdout)
    assert re.search(r"^  xrays +your own, in data/xrays$", said[0], re.MULTILINE)
    assert said[1].startswith("accuracy")


def test_an_empty_folder_of_a_class_keeps_the_numbers_of_the_others() -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install 'fedgist[images]'")
    for split in ("train", "test"):
        for name in ("benign", "healthy", "malignant"):
            Path("data/scans", split, name).mkdir(parents=True)
        for name in ("healthy", "malignant"):
            image.fromarray(np.zeros((4, 4), np.uint8)).save(Path("data/scans", split, name, "1.png"))
    assert site_setup.read_images(Path("data/scans"))[0].labels.tolist() == [1, 2]
    with pytest.raises(FedgistError, match="label 0 never occurs"):  # a server's own data set has every class
        datasets.load("scans", "data")
