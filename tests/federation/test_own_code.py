"""A site's model may be its operator's own code; nobody else can name any."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgist.core.errors import FedgistError
from fedgist.data import datasets
from fedgist.experiments.config import resolve
from fedgist.experiments.folder import RunFolder
from fedgist.experiments.progress import Silent
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

def nothing(shape, classes):
    return None
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "hospital_nets.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "hospital_nets"
    sys.modules.pop("hospital_nets", None)


def test_a_module_with_attention_and_dropout_learns_beside_others(package: str, tmp_path: Path) -> None:
    """Nothing of the code reaches the server but how many features it has; the site keeps and recalls its model."""
    rules = Policy(min_samples_per_class=1, min_test_samples=1, options={"steps": (2,)})
    hosts = {}
    for number, (id, model) in enumerate({"a": f"{package}:net", "b": "mlp:hidden=16"}.items(), 1):
        settings = site_setup.Settings(str(datasets.export("digits", tmp_path / id, part=f"{number}/2")), model)
        hosts[id] = site_setup.make_host(id, tmp_path / id, settings, rules)
    assert hosts["a"].model == "module:features=16"
    sent = []

    class Wire:
        def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes]:
            answers = {id: hosts[id].handle(data) for id, data in requests.items()}
            sent.extend([*requests.values(), *answers.values()])
            return answers

    @contextlib.contextmanager
    def connected() -> Iterator[Any]:
        yield Wire()

    def run(method: str, out: str) -> RunFolder:
        def config(known: dict[str, Any]) -> Any:
            return resolve(
                {"method": method, "model": "mlp:hidden=16", "rounds": 2, "steps": 2, "device": "cpu"}, known
            )

        runs.run(["a", "b"], connected, config, tmp_path / out, False, Patience(sites=2), Silent())
        return RunFolder(tmp_path / out)

    folder = run("feddistill", "run")
    assert [row["answered"] for row in folder.rows()] == [2, 2]
    assert not any(package.encode() in data for data in sent)
    (name,) = (path.name for path in (tmp_path / "a" / "runs").iterdir())
    kept = [site_models.kept(hosts["a"], name) for _ in range(2)]
    assert kept[0] is not None and kept[1] is not None and "attention.in_proj_weight" in kept[0][1]
    assert all(torch.equal(kept[0][1][key], kept[1][1][key]) for key in kept[0][1])
    said: list[str] = []
    site_models.export(hosts["a"], name, tmp_path / "out", said.append)
    assert "is the model of" in said[0] and (tmp_path / "out" / "model.safetensors").is_file()
    with pytest.raises(FedgistError, match="averages weights"):
        run("fedavg", "averaged")


def test_a_server_cannot_name_code(package: str) -> None:
    """Neither of this site's operator nor of the standard library; an import would already be an execution."""
    task = {"shape": [1, 8, 8], "classes": 10, "low": [0.0], "high": [1.0], "mean": [0.0], "std": [1.0], "proxy": False}
    for spec in (f"{package}:net", "this:d", "module:features=16:x=1", "module:features=99999999"):
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
