"""A site's model may be its operator's own code; nobody else can name any."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedgist
from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.data import datasets
from fedgist.experiments.config import resolve
from fedgist.experiments.folder import RunFolder
from fedgist.experiments.progress import Silent
from fedgist.experiments.results import Result
from fedgist.federation import runs, site_models, site_setup
from fedgist.federation.protocol.envelope import Start
from fedgist.federation.protocol.policy import Policy, Refused
from fedgist.federation.protocol.remote_engine import Patience
from fedgist.models import own_code

CODE = """import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, columns, classes):
        super().__init__()
        self.token = nn.Linear(columns, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(16, classes)

    def forward(self, x):
        x = self.token(x.flatten(2).squeeze(1).unflatten(1, (8, -1)))
        return self.out(self.drop(self.attention(x, x, x, need_weights=False)[0].mean(1)))

def net(shape, classes):
    return Net(shape[-1], classes)

def wide(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Linear(32, classes))

def nothing(shape, classes):
    return None
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "hospital_nets.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "hospital_nets"
    sys.modules.pop("hospital_nets", None)


class Sites:
    """Sites in this process, each with its half of the digits and its model, and all that passed between them."""

    def __init__(self, folder: Path, models: Mapping[str, str]):
        rules = Policy(min_samples_per_class=1, min_test_samples=1, options={"steps": (2,)})
        self.folder, self.sent = folder, list[bytes]()
        self.hosts = {}
        for number, (id, model) in enumerate(models.items(), 1):
            data = datasets.export("digits", folder / id, part=f"{number}/{len(models)}")
            self.hosts[id] = site_setup.make_host(id, folder / id, site_setup.Settings(str(data), model), rules)

    def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes]:
        answers = {id: self.hosts[id].handle(data) for id, data in requests.items()}
        self.sent += [*requests.values(), *answers.values()]
        return answers

    def run(self, method: str, code: str = "", sites: int = 2, **options: Any) -> Result:
        @contextlib.contextmanager
        def connected() -> Iterator[Any]:
            yield self

        def config(known: dict[str, Any]) -> Any:
            given = options or {"steps": 2}
            return resolve({"method": method, "model": "mlp:hidden=16", "rounds": 2, "device": "cpu", **given}, known)

        self.settled = runs.settle(list(self.hosts), config, self.folder / method, False, code)
        return runs.run(self.settled, connected, False, Patience(sites=sites), Silent())


def test_a_module_with_attention_and_dropout_learns_beside_others(package: str, tmp_path: Path) -> None:
    """Nothing of the code reaches the server but features and a fingerprint; the site keeps and recalls its model."""
    sites = Sites(tmp_path, {"a": f"{package}:net", "b": "mlp:hidden=16"})
    assert sites.hosts["a"].model((1, 8, 8), 10).startswith("module:features=16:form=")
    sites.run("feddistill")
    assert [row["answered"] for row in RunFolder(tmp_path / "feddistill").rows()] == [2, 2]
    assert not any(package.encode() in data for data in sites.sent)
    (name,) = (path.name for path in (tmp_path / "a" / "runs").iterdir())
    kept = [site_models.kept(sites.hosts["a"], name) for _ in range(2)]
    assert kept[0] is not None and kept[1] is not None and "attention.in_proj_weight" in kept[0][1]
    assert all(torch.equal(kept[0][1][key], kept[1][1][key]) for key in kept[0][1])
    said: list[str] = []
    site_models.export(sites.hosts["a"], name, tmp_path / "out", said.append)
    assert "is the model of" in said[0] and (tmp_path / "out" / "model.safetensors").is_file()
    with pytest.raises(FedgistError, match=r"averages weights.*--model package:factory"):
        sites.run("fedavg")


def test_one_module_of_everybodys_is_averaged(package: str, tmp_path: Path) -> None:
    """Each side names the code for itself; the result is that of one process with the same module and data."""
    sites = Sites(tmp_path, dict.fromkeys("ab", f"{package}:net"))
    averaged = sites.run("fedavg", f"{package}:net")
    assert not any(package.encode() in data for data in sites.sent)
    net = own_code.load(f"{package}:net", (1, 8, 8), 10)
    inputs = sites.settled.inputs
    held = {id: site_setup.client_data(tmp_path / id / "digits", inputs.task) for id in sites.hosts}
    here = fedgist.run(
        "fedavg",
        net.module(net.init(Rng(0))),
        {id: (one.x, one.y) for id, one in held.items()},
        inputs.test,
        rounds=2,
        steps=2,
        engine="sequential",
        device="cpu",
    )
    assert averaged.accuracy == here.accuracy and averaged.weights is not None and here.weights is not None
    assert all(torch.equal(averaged.weights[name], here.weights[name]) for name in here.weights)
    assert fedgist.load(tmp_path / "fedavg", module=net.module(here.weights)).out.weight.equal(
        here.weights["out.weight"]
    )


def test_one_module_of_everybodys_is_the_feature_map_of_gist(package: str, tmp_path: Path) -> None:
    """As it begins, so that weights of elsewhere are a frozen map; nothing of it travels but a fingerprint."""
    sites = Sites(tmp_path, dict.fromkeys("ab", f"{package}:net"))
    found = sites.run("gist", f"{package}:net", features="model")
    assert not any(package.encode() in data for data in sites.sent)
    net = own_code.load(f"{package}:net", (1, 8, 8), 10)
    inputs = sites.settled.inputs
    held = {id: site_setup.client_data(tmp_path / id / "digits", inputs.task) for id in sites.hosts}
    data = {id: (one.x, one.y) for id, one in held.items()}
    here = fedgist.run("gist", net.module(net.init(Rng(0))), data, inputs.test, features="model", device="cpu")
    assert found.accuracy == here.accuracy > 0.5
    assert torch.allclose(found.state["weight"], here.state["weight"], rtol=1e-3)


def test_who_has_other_code_or_none_is_named_and_left_out(
    package: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A site whose net is wider, one of a built-in model, and one that was not told to run any code."""
    sites = Sites(tmp_path, {"a": f"{package}:net", "b": f"{package}:wide", "c": "mlp", "d": ""})
    sites.run("fedavg", f"{package}:net", sites=1)
    assert [row["answered"] for row in RunFolder(tmp_path / "fedavg").rows()] == [1, 1]
    assert all(f"site {id} does not take part: fedavg averages weights" in caplog.text for id in "bc")
    assert "code that is not here: start the site with --model package:factory" in caplog.text


def test_a_site_that_lacks_a_class_has_the_module_of_all(package: str, tmp_path: Path) -> None:
    """The run says how many classes there are; code is made for samples of the site's own form alone."""
    folder = datasets.export("digits", tmp_path)
    for path in folder.glob("*.npz"):
        arrays = dict(np.load(path))
        kept = arrays["labels"] < 7
        np.savez(path, **{key: value[kept] if len(value.shape) else value for key, value in arrays.items()})
    settings = site_setup.Settings(str(folder), f"{package}:net")
    whole = own_code.announced(own_code.load(f"{package}:net", (1, 8, 8), 10))
    assert site_setup.announcement(settings, (1, 8, 8), 10) == whole
    for form in (((1, 8, 1 << 20), 10), ((1, 8, 8), 6), ((1, 8, 8), 1 << 40)):
        with pytest.raises(Refused):
            site_setup.announcement(settings, *form)
    site_setup.announcement(settings, (1, 8, 8), 6, private=True)  # else a server would find its largest label
    with pytest.raises(Refused):
        site_setup.announcement(settings, (1, 8, 8), 1 << 40, private=True)


def test_a_server_cannot_name_code(package: str) -> None:
    """Neither of this site's operator nor of the standard library; an import would already be an execution."""
    task = {"shape": [1, 8, 8], "classes": 10, "low": [0.0], "high": [1.0], "mean": [0.0], "std": [1.0], "proxy": False}
    for spec in (f"{package}:net", "this:d", "module:features=16:form=x", "module:features=9999999"):
        start = Start("run-0", "feddistill", 0, spec, {}, {**task, "models": [spec], "model": spec})
        with pytest.raises((Refused, FedgistError)):
            site_setup.task_of(start, Policy(), "")
    assert package not in sys.modules and "this" not in sys.modules


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("hospital_nets:nothing", "has to return"),
        ("hospital_nets:other", "no such factory"),
        ("no_such:x", "no such"),
    ],
)
def test_what_is_wrong_with_the_code_is_said_at_once(package: str, spec: str, complaint: str) -> None:
    with pytest.raises(FedgistError, match=complaint):
        own_code.load(spec, (1, 8, 8), 10)
