"""A site's own data in the form of the run: normalised by the run's numbers, whatever its own would be."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from fedgist.core.task import Task
from fedgist.experiments.standardisation import Standardise
from fedgist.federation import site_setup
from fedgist.federation.gains import Comparison
from fedgist.federation.protocol.envelope import Refusal, Start, seal, unseal
from fedgist.federation.protocol.policy import Policy, Refused
from fedgist.federation.protocol.site_host import SiteHost

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


def told_to(host: SiteHost, method: str, layer: str, **told: object) -> str:
    """What a server hears that starts a run at a site."""
    start = Start("run-1", method, 0, "mlp", {}, {**TOLD, "models": ["mlp"], "model": "mlp", **told}, layer=layer)
    answered = unseal(host.handle(seal(start)))[0]
    return answered.why if isinstance(answered, Refusal) else type(answered).__name__


PRIVACY = json.dumps({"privacy": {"epsilon": 4.0, "delta": 1e-5, "noise": "local", "threshold": 1, "colluders": 0}})


@pytest.mark.parametrize("layer", ["", PRIVACY])
def test_a_site_with_a_budget_tells_nothing_for_nothing(layer: str, folder: Path) -> None:
    """One record more, the only one of its class or that without which there are too few: no start is answered in
    another way for it, as nothing is charged for starts."""
    methods = ("gist", "fedavg", Standardise.name, Comparison.name)
    heard = []
    for more in ("", "30,f,yes\n", "30,f,no\n"):
        (folder / "train.csv").write_text("age,sex,sick\n60,f,no\n40,m,no\n" + more, "utf-8")
        rules = Policy(methods=methods, epsilon=1.0, min_samples=3, min_samples_per_class=3)
        for method, classes in product(methods, (1, 2)):
            host = site_setup.make_host("a", folder / f"{len(heard)}", site_setup.Settings(str(folder)), rules)
            heard.append(told_to(host, method, layer, classes=classes, mean=[0.0] * 3, std=[1.0] * 3))
    assert heard[:8] == heard[8:16] == heard[16:], heard
    assert heard[1] == "Ready" if layer else "its policy has a privacy budget" in heard[1]


def test_samples_of_other_classes_are_left_out_of_a_private_run(folder: Path) -> None:
    data = site_setup.client_data(folder, replace(TASK, classes=1, private=True))
    assert data.y.tolist() == [0] and data.x[:, 0].tolist() == [1.0]
    with pytest.raises(Refused, match="it has other classes than the 1 that the run is about"):
        site_setup.client_data(folder, replace(TASK, classes=1))
