"""A site writes out the model that it keeps of a run; the mean over sites is what the run reports."""

import contextlib
import json
import logging
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fedgist
from fedgist.cli import app
from fedgist.data import datasets
from fedgist.experiments.config import resolve
from fedgist.experiments.progress import Silent
from fedgist.experiments.results import Result
from fedgist.federation import runs, site_setup
from fedgist.federation.protocol import policy
from fedgist.federation.protocol.remote_engine import Patience
from fedgist.federation.site import SETTINGS

RULES = """methods = ["sums", "feddm"]
options = {steps = [5], feddm = {steps = [1], init = ["real"]}}
"""


def kit_of(site: str, folder: Path, number: int) -> site_setup.Settings:
    """A kit as far as a site reads it, and half of the digits as its data."""
    data = datasets.export("digits", folder / site / "data", part=f"{number}/2")
    for name in ("client.crt", "client.key", "rootCA.pem"):
        (folder / site / "startup" / name).parent.mkdir(exist_ok=True)
        (folder / site / "startup" / name).write_text("")
    server = {"servers": [{"service": {"target": "localhost:1"}}], "client": {"fqsn": site}}
    (folder / site / "startup" / "fed_client.json").write_text(json.dumps(server))
    (folder / site / "policy.toml").write_text(RULES)
    settings = site_setup.Settings(str(data), "mlp:hidden=20x16" if site == "a" else "mlp:hidden=16")
    (folder / site / SETTINGS).write_text(json.dumps(asdict(settings)))
    return settings


def run(folder: Path, **options: Any) -> Result:
    hosts = {
        site: site_setup.make_host(
            site, folder / site / "fedgist", kit_of(site, folder, i), policy.load(folder / site / "policy.toml")
        )
        for i, site in enumerate("ab", 1)
    }

    class Wire:
        def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes]:
            return {site: hosts[site].handle(data) for site, data in requests.items()}

    @contextlib.contextmanager
    def connected() -> Iterator[Any]:
        yield Wire()

    def config(known: dict[str, Any]) -> Any:
        return resolve({"model": "mlp:hidden=16", "rounds": 3, "steps": 5, "device": "cpu", **options}, known)

    result = runs.run(runs.settle(["a", "b"], config, folder / "run", False), connected, False, Patience(), Silent())
    for host in hosts.values():
        host.close()
    return result


def export(folder: Path, site: str, run: str = "") -> str:
    (begun,) = (path.name for path in (folder / site / "fedgist" / "runs").iterdir())
    words = ["site", "export", str(folder / site), "--run", run or begun, "--out", str(folder / site / "out")]
    done = CliRunner().invoke(app, words)
    return done.stdout + done.stderr


@pytest.mark.parametrize("options", [{"method": "feddistill"}, {"method": "fedavg", "share": "head", "eval_every": 2}])
def test_the_model_stays_at_the_site_until_it_is_written_out(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "fedgist"):
        result = run(tmp_path, **options)
    assert f"site a: {options['method']}-" in caplog.text and "has ended; `fedgist site export` writes" in caplog.text
    assert not (tmp_path / "run" / "model.json").exists() and not (tmp_path / "run" / "clients").exists()
    scores = []
    for site, hidden in (("a", "20x16"), ("b", "16")):
        assert "last heard of 20" in export(tmp_path, site)
        about = json.loads((tmp_path / site / "out" / "model.json").read_text("utf-8"))
        assert (about["client"], about["rounds"], about["model"].split(":")[1]) == (site, 3, f"hidden={hidden}")
        module = fedgist.load(tmp_path / site / "out", normalised=True)
        train, _ = site_setup.read_images(tmp_path / site / "data" / "digits")
        assert module(torch.tensor(train.pixels[:, None]) / train.peak).shape == (len(train.labels), 10)
        scores.append(about["accuracy"])
    assert statistics.fmean(scores) == pytest.approx(result.accuracy, abs=1e-7)
    assert "unknown run of site a 'other'" in export(tmp_path, "a", "other")


def test_where_the_server_has_the_model_the_site_says_so(tmp_path: Path) -> None:
    kit = {"method": "feddm", "ipc": 1, "server_epochs": 1}
    run(tmp_path, **{**kit, "rounds": 1, "steps": 1})
    assert "where the server has one, it is in its run's folder" in export(tmp_path, "a")
    assert (tmp_path / "run" / "model.json").exists()


@pytest.mark.parametrize("since", ["secure = true", "epsilon = 1.0"])
def test_a_site_has_its_model_whatever_its_policy_has_come_to_want_of_runs(since: str, tmp_path: Path) -> None:
    run(tmp_path, method="feddistill", rounds=1)
    (tmp_path / "a" / "policy.toml").write_text(f"{since}\n{RULES}")
    assert "last heard of 20" in export(tmp_path, "a")
