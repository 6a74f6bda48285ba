"""A user's path: `fedgist federation flower`, and what `flwr run` makes of it, with a grid in this process.

As in a deployment, every message meets a site that remembers nothing but its files.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedgist.cli import app as command_line
from fedgist.core.errors import FedgistError

pytest.importorskip("flwr", reason="needs Flower: pip install 'fedgist[flower]'")

from flwr.app import Context, RecordDict
from flwr.cli.config_utils import load_and_validate
from flwr.common.config import flatten_dict

from fedgist.federation import flower as ends
from flower_grid import RUN, SERVER_NODE, InProcess, pretend_a_task


@pytest.fixture(autouse=True)
def in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_task(monkeypatch)


def fedgist(*arguments: Any) -> Any:
    return CliRunner().invoke(command_line, [str(argument) for argument in arguments])


class Deployment:
    """Two sites with their data and policies, and apps for them."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "policy.toml").write_text('methods = ["fedavg", "scaffold"]\n[options]\nsteps = [3]\n')
        for site, part in (("hospital-a", "1/2"), ("hospital-b", "2/2")):
            assert fedgist("data", "export", "digits", folder / site, "--part", part).exit_code == 0
        self.nodes = {
            node: {
                "site-name": site,
                "data": str(folder / site / "digits"),
                "policy": str(folder / "policy.toml"),
                "folder": str(folder / "states" / site),
            }
            for node, site in ((10, "hospital-a"), (11, "hospital-b"))
        }

    def write(self, method: str, name: str = "app", *more: Any) -> Any:
        size = ["--dataset", "digits", "--rounds", 3, "--set", "steps=3", "--seed", 3, "--device", "cpu"]
        sites = ["--sites", "hospital-a,hospital-b", "--out", self.folder / f"{name}-run"]
        return fedgist("federation", "flower", self.folder / name, method, *size, *sites, *more)

    def run(self, grid: InProcess, name: str = "app", **overrides: Any) -> dict[str, Any]:
        """As `flwr run` does: the app's configuration, overridden, flat."""
        config, warnings = load_and_validate(self.folder / name / "pyproject.toml")
        assert not warnings
        run_config = {**flatten_dict(config["tool"]["flwr"]["app"]["config"]), "wait": 0.2, **overrides}
        ends.server_app(grid, Context(RUN, SERVER_NODE, {}, RecordDict(), run_config))
        return dict(json.loads((self.folder / f"{name}-run" / "result.json").read_text()))

    @property
    def grid(self) -> InProcess:
        return InProcess(ends.client_app, dict(self.nodes))


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return Deployment(tmp_path)


def test_a_run_that_dies_goes_on_to_the_same_end(deployment: Deployment, capfd: pytest.CaptureFixture[str]) -> None:
    """Scaffold, whose clients have states. The ServerApp dies at the beginning of round 3."""
    assert deployment.write("scaffold", "whole").exit_code == 0
    whole = deployment.run(deployment.grid, "whole")
    assert "round 3/3" in capfd.readouterr().err
    assert deployment.write("scaffold", "killed").exit_code == 0
    grid = deployment.grid
    exchanges = iter(range(100))

    def die() -> None:
        if next(exchanges) == 5:  # after who, question, start and two rounds
            raise ConnectionError("the SuperLink is gone")

    grid.before = die
    with pytest.raises(ConnectionError):
        deployment.run(grid, "killed")
    with pytest.raises(FedgistError, match="'resume=true' goes on with it"):
        deployment.run(deployment.grid, "killed")
    resumed = deployment.run(deployment.grid, "killed", resume=True)
    assert resumed["state_sha256"] == whole["state_sha256"]
    assert (resumed["bytes_up"], resumed["bytes_down"]) == (whole["bytes_up"], whole["bytes_down"])


def test_a_site_that_dies_is_named_and_the_run_goes_on(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    assert deployment.write("fedavg").exit_code == 0
    grid = deployment.grid
    exchanges = iter(range(100))
    grid.before = lambda: grid.failing.update([11] if next(exchanges) == 4 else [])  # in round 2
    assert deployment.run(grid)["rounds"] == 3
    assert "round 2: site hospital-b did not answer (Flower's error 5: node unavailable)" in caplog.text
    assert grid.asked[-3:] == [10, 11, 10]  # round 2 asks both, round 3 only who is left
    rows = [json.loads(line) for line in (deployment.folder / "app-run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["answered"] for row in rows] == [2, 1, 1]
    assert rows[2]["missing"].keys() == {"hospital-b"}


def test_options_can_be_changed_for_one_run(deployment: Deployment) -> None:
    assert deployment.write("fedavg").exit_code == 0
    assert deployment.run(deployment.grid, **{"run.rounds": 1, "run.lr": 0.5})["rounds"] == 1
    written = tomllib.loads((deployment.folder / "app-run" / "config.toml").read_text())
    assert (written["rounds"], written["options"]["lr"], written["clients"]) == (1, 0.5, 2)


def test_a_site_answers_only_within_a_policy(deployment: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    assert deployment.write("fedprox").exit_code == 0
    with pytest.raises(FedgistError, match="its policy does not allow the method fedprox"):
        deployment.run(deployment.grid)
    for key in ("policy", "data"):
        caplog.clear()
        grid = deployment.grid
        grid.nodes = {node: {k: v for k, v in known.items() if k != key} for node, known in grid.nodes.items()}
        with pytest.raises(FedgistError, match="it cannot begin; the log of the site says why"):
            deployment.run(grid)
        assert f"site hospital-a cannot answer: the node config says nothing about {key}" in caplog.text


def test_a_run_without_sites_says_whom_it_waited_for(deployment: Deployment) -> None:
    assert deployment.write("fedavg").exit_code == 0
    with pytest.raises(FedgistError, match=r"none of hospital-a, hospital-b has connected within 0\.2 s"):
        deployment.run(InProcess(ends.client_app, {}))
    assert not (deployment.folder / "app-run").exists()


def test_a_missing_site_is_said(deployment: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    assert deployment.write("fedavg").exit_code == 0
    grid = deployment.grid
    del grid.nodes[11]
    deployment.run(grid)
    assert "site hospital-b is not there" in caplog.text
