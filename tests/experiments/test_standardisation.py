"""Standardisation by an exchange of sums: everybody's numbers, whoever holds the rows, and nobody's own."""

import contextlib
import csv
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedgist
from fedgist.cli import app
from fedgist.core.errors import FedgistError
from fedgist.data import datasets
from fedgist.experiments import config as configs
from fedgist.experiments import inputs, runner, standardisation
from fedgist.experiments.folder import RunFolder
from fedgist.experiments.progress import Silent
from fedgist.federation import runs, site_setup
from fedgist.federation.protocol.policy import Policy
from fedgist.federation.protocol.remote_engine import Patience

TABLE = {"dataset": "breast_cancer", "model": "tabular:hidden=8", "clients": 3, "rounds": 2, "steps": 3, "lr": 0.1}


def config(**changes: Any) -> Any:
    return configs.resolve({"method": "fedavg", "device": "cpu", "normalise": "sums", **TABLE, **changes})


def moments() -> tuple[np.ndarray, np.ndarray]:
    rows = datasets.load("breast_cancer", normalise="unit")[0].x.double().numpy()
    return rows.mean(0), rows.std(0)


def test_the_numbers_are_those_of_all_rows_however_they_are_split(tmp_path: Path) -> None:
    """Σ over clients of Σx is Σx over all rows, so that mean and deviation are those of the undivided table."""
    result = runner.run(config(alpha=0.1), tmp_path / "run")
    told = json.loads((tmp_path / "run" / "standardisation.json").read_text())
    mean, std = moments()
    np.testing.assert_allclose(told["mean"], mean, rtol=1e-6)
    np.testing.assert_allclose(told["std"], std, rtol=1e-6)
    about = json.loads((tmp_path / "run" / "model.json").read_text())["normalisation"]
    assert (about["mean"], about["std"]) == (told["mean"], told["std"])
    usual = runner.run(config(alpha=0.1, normalise="dataset"))
    assert result.accuracy == pytest.approx(usual.accuracy, abs=0.02)
    with (tmp_path / "run" / "ledger.csv").open() as file:
        sent = [row for row in csv.DictReader(file) if row["type"] == "standardisation.Sums"]
    assert len(sent) == 3 and {row["round"] for row in sent} == {"0"}
    assert sum(int(row["payload_bytes"]) for row in sent) == 3 * 8 * (1 + 30 + 30)


def test_it_is_one_scale_for_all_that_is_shared(tmp_path: Path) -> None:
    """Clients, the test set and the ends of the range; the test set that all share stays one tensor."""
    raw = inputs.from_dataset(runner.prepare(config()))
    done = standardisation.applied(raw, {"mean": [2.0] * 30, "std": [4.0] * 30})
    for id, client in done.sites.items():
        assert torch.equal(client.x, (raw.sites[id].x - 2) / 4)
        assert client.test is not None and client.test[0] is done.test[0]
    assert done.task.low == pytest.approx([(low - 2) / 4 for low in raw.task.low])
    assert done.task.mean == (2.0,) * 30 and done.task.std == (4.0,) * 30


def test_a_run_that_goes_on_asks_nobody_again(tmp_path: Path) -> None:
    whole = runner.run(config(), tmp_path / "whole")
    runner.run(config(rounds=1), tmp_path / "run")
    numbers = (tmp_path / "run" / "standardisation.json").read_bytes()
    after = runner.run(config(), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "standardisation.json").read_bytes() == numbers
    assert after.accuracy == whole.accuracy and after.bytes_up == whole.bytes_up
    assert RunFolder(tmp_path / "run").others() == []


def test_secure_sums_hide_them_and_give_the_same(tmp_path: Path) -> None:
    """Columns a thousand times apart in size lie in one ring: what is left of the small ones is still exact."""
    runner.run(config(secure="masks"), tmp_path / "run")
    told = json.loads((tmp_path / "run" / "standardisation.json").read_text())
    mean, std = moments()
    np.testing.assert_allclose(told["mean"], mean, rtol=1e-6)
    np.testing.assert_allclose(told["std"], std, rtol=1e-4)
    with (tmp_path / "run" / "ledger.csv").open() as file:
        types = {row["type"] for row in csv.DictReader(file) if row["round"] == "0"}
    assert "masked.Sums" in types and "standardisation.Sums" not in types


def test_a_constant_column_is_only_moved() -> None:
    """Of 7, 7, … the variance is 0 up to rounding: dividing by it would blow up what is noise."""
    x = torch.cat([torch.full((50, 1), 7.1), torch.arange(50.0)[:, None]], 1)
    data = [(x[:25], torch.arange(25) % 2), (x[25:], torch.arange(25) % 2)]
    result = fedgist.run("fedavg", "mlp:hidden=4", data, data[0], rounds=1, normalise="sums", clip=1.0)
    about = next(iter(result.trained.values())).about
    assert about.std[0] == 1.0 and about.mean[0] == pytest.approx(7.1)
    assert about.std[1] == pytest.approx(torch.arange(50.0).std(correction=0).item())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"epsilon": 1.0, "method": "gist"}, "get no noise"),
        ({"method": "repshare", "topology": "ring"}, "needs a server"),
    ],
)
def test_where_it_cannot_be_it_is_refused(changes: dict[str, Any], complaint: str) -> None:
    options = {name: value for name, value in {**TABLE, **changes}.items() if name not in ("steps", "lr")}
    with pytest.raises(FedgistError, match=complaint):
        configs.resolve({"normalise": "sums", **options})


COLUMNS = """target = "sick"
classes = ["no", "yes"]
[numeric]
age = {mean = 50.0, std = 10.0}
pulse = {}
[categorical]
sex = ["f", "m"]
"""


def table(folder: Path, seed: int, rows: int) -> Path:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    (folder / "columns.toml").write_text(COLUMNS, "utf-8")
    for split in ("train", "test"):
        lines = [
            f"{50 + 10 * a:.3f},{80 + 5 * seed + 9 * b:.3f},{'fm'[int(c > 0)]},{'no' if a + b < 0 else 'yes'}"
            for a, b, c in rng.normal(size=(rows, 3))
        ]
        (folder / f"{split}.csv").write_text("\n".join(["age,pulse,sex,sick", *lines]) + "\n", "utf-8")
    return folder


def test_across_sites_only_what_no_file_states_is_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server's own rows say nothing; a site with too few samples tells nothing, and learns with the others."""
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "server" / "hearts", 9, 40)
    sizes = {"a": 80, "b": 120, "c": 30}
    for seed, (id, rows) in enumerate(sizes.items()):
        table(tmp_path / id / "hearts", seed, rows)
    rules = Policy(min_samples_per_class=1, min_test_samples=1, options={"steps": (2,)})
    hosts = {
        id: site_setup.make_host(id, tmp_path / id, site_setup.Settings(str(tmp_path / id / "hearts")), rules)
        for id in sizes
    }
    lock = threading.Lock()

    class Wire:
        def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes]:
            with lock:
                return {id: hosts[id].handle(data) for id, data in requests.items()}

    @contextlib.contextmanager
    def connected() -> Iterator[Any]:
        yield Wire()

    def asked(known: dict[str, Any]) -> Any:
        ground = {"dataset": "hearts", "data_dir": str(tmp_path / "server"), "model": "tabular:hidden=4"}
        return configs.resolve({"rounds": 2, "steps": 2, "device": "cpu", "normalise": "sums", **ground}, known)

    settled = runs.settle(["a", "b", "c"], asked, tmp_path / "run", False)
    runs.run(settled, connected, False, Patience(), Silent())
    told = json.loads((tmp_path / "run" / "standardisation.json").read_text())
    pulse = np.concatenate([
        np.loadtxt(tmp_path / id / "hearts" / "train.csv", delimiter=",", skiprows=1, usecols=1) for id in "ab"
    ])  # fmt: skip
    assert told["mean"] == [pytest.approx(pulse.mean(), rel=1e-6)]
    assert told["std"] == [pytest.approx(pulse.std(), rel=1e-5)]
    assert "sums of columns are over at least 50 samples here" in caplog.text
    start = hosts["c"].recall(max(path.name for path in (tmp_path / "c" / "runs").glob("fedavg-*"))).start
    assert start.task["mean"] == [50.0, told["mean"][0], 0.0, 0.0] and start.task["std"][2:] == [1.0, 1.0]
    assert [row["answered"] for row in RunFolder(tmp_path / "run").rows()] == [3, 3]


def test_files_that_state_everything_leave_nothing_to_exchange(tmp_path: Path) -> None:
    CliRunner().invoke(app, ["data", "export", "breast_cancer", str(tmp_path), "--format", "csv"])
    words = ["run", "fedavg", "--dataset", "breast_cancer", "--data-dir", str(tmp_path), "--set", "normalise=sums"]
    (tmp_path / "breast_cancer").rename(tmp_path / "mine")
    words[3] = "mine"
    said = CliRunner().invoke(app, [*words, "--model", "tabular", "--out", str(tmp_path / "run")])
    assert said.exit_code == 2 and "state mean and deviation of every column" in said.stderr, said.output
    assert not (tmp_path / "run").exists()
