"""A site's own data in the form of the run: normalised by the run's numbers, whatever its own would be."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedgist.core.task import Task
from fedgist.federation import site_setup
from fedgist.federation.protocol.envelope import Start
from fedgist.federation.protocol.policy import Policy, Refused

COLUMNS = """\
target = "sick"
classes = ["no", "yes"]
[numeric]
age = {mean = 1.0, std = 2.0}
[categorical]
sex = ["f", "m"]
"""
TASK = Task((3,), 2, (0.0,) * 3, (1.0,) * 3, {}, "", None, (50.0, 0.0, 0.0), (10.0, 1.0, 1.0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "columns.toml").write_text(COLUMNS, "utf-8")
    (tmp_path / "train.csv").write_text("age,sex,sick\n60,f,no\n40,m,yes\n", "utf-8")
    (tmp_path / "test.csv").write_text("sick,age,sex\nyes,55,m\n", "utf-8")
    return tmp_path


def test_a_table_is_standardised_by_the_runs_numbers(folder: Path) -> None:
    data = site_setup.client_data(folder, TASK)
    assert data.x.tolist() == [[1.0, 1.0, 0.0], [-1.0, 0.0, 1.0]] and data.y.tolist() == [0, 1]
    assert data.test is not None and torch.equal(data.test[0], torch.tensor([[0.5, 0.0, 1.0]]))
    raw = site_setup.client_data(folder, replace(TASK, mean=(), std=()))
    assert raw.x[:, 0].tolist() == [60.0, 40.0]


def test_a_table_of_another_form_is_refused(folder: Path) -> None:
    with pytest.raises(Refused, match="its samples have the form 3, and the run is about 1×8×8"):
        site_setup.client_data(folder, replace(TASK, shape=(1, 8, 8), mean=(), std=()))


TOLD = {"shape": [3], "classes": 2, "low": [0.0] * 3, "high": [1.0] * 3, "models": [], "model": "", "proxy": False}


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        ({"mean": [0.0], "std": [1.0] * 3}, "does not say how values are normalised"),
        ({"mean": [0.0] * 3, "std": [float("nan")] * 3}, "does not say how values are normalised"),
        ({"mean": [0.0] * 3, "std": [0.0] * 3}, "does not say how values are normalised"),
        ({"shape": [0]}, "a task that cannot be"),
        ({"shape": [2**20, 2**20]}, "a task that cannot be"),
        ({"high": [0.0] * 3}, "a task that cannot be"),  # of version 1, whose range says how images are normalised
    ],
)
def test_a_task_that_cannot_be_is_refused(told: dict[str, object], complaint: str) -> None:
    start = Start("run-0", "fedavg", 0, "", {}, {**TOLD, **told})  # type: ignore[dict-item]
    with pytest.raises(Refused, match=complaint):
        site_setup.task_of(start, Policy())
