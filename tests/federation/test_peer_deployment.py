"""Five sites on a ring, real processes and mutual TLS: one killed and restarted, everything killed, and a relay that is
watched. Only with `make test-federation`: it takes minutes."""

import json
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from deployed import LONG, Background, wait_for
from fedgist import methods, storage
from fedgist.core.rng import Rng
from fedgist.core.tree import leaves
from fedgist.data import topologies
from fedgist.engines import executor
from fedgist.engines.local import LocalEngine
from fedgist.experiments import config as configs
from fedgist.experiments import inputs
from fedgist.federation import sim as simulations
from fedgist.federation import site_setup

pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")

from fedgist.federation.protocol.flare_transport import FlareTransport

pytestmark = pytest.mark.federation

SITES = tuple(f"site-{i}" for i in range(1, 6))
OPTIONS = {
    "repshare": ["--set", "steps=20", "--set", "n_avg=10"],
    "dfedavg": ["--set", "steps=20", "--set", "lr=0.1"],
}


class Deployment:
    """A federation of five in a folder, its processes, and what a run in one process would make of the same."""

    def __init__(self, folder: Path):
        self.folder, self.fed = folder, folder / "fed"
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        simulations.provide(self.fed, SITES, None, "digits", None, port)
        for site in SITES:
            path = self.fed / "sites" / site / "policy.toml"
            path.write_text(path.read_text().replace('methods = ["sums"]', 'methods = ["repshare", "dfedavg"]'))
        self.running: list[Background] = []
        self.server = self.start_server()
        self.sites = {site: self.start_site(site) for site in SITES}
        for site in SITES:
            self.server.expect(f"site {site} is here")

    def begin(self, name: str, *arguments: Any) -> Background:
        started = Background(self.folder / f"{name}-{len(self.running)}.log", *arguments)
        self.running.append(started)
        return started

    def start_server(self) -> Background:
        server = self.begin("server", "federation", "start", self.fed)
        server.expect("the server is ready")
        return server

    def start_site(self, site: str) -> Background:
        data = self.fed / "data" / site / "digits"
        return self.begin(site, "site", "start", self.fed / "sites" / site, "--data", data, "--threads", 1)

    def run(self, out: str, method: str, rounds: int, *more: str) -> Background:
        where = ["--federation", self.fed, "--out", self.folder / out, "--dataset", "digits", "--rounds", rounds]
        where += ["--model", "mlp:hidden=16", "--topology", "ring", "--timeout", 60, "--wait", 200, "--quiet"]
        return self.begin(out, "federation", "run", method, *where, *OPTIONS[method], *more)

    def finished(self, out: str, method: str, rounds: int, *more: str) -> None:
        run = self.run(out, method, rounds, *more)
        run.process.wait(2 * LONG)
        assert run.process.returncode == 0, run.said

    def rows(self, out: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / out / "metrics.jsonl").read_text().splitlines()]

    def done(self, out: str) -> int:
        path = self.folder / out / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def checkpoint(self, out: str) -> Any:
        return storage.load(max((self.folder / out / "checkpoint").glob("*.safetensors")))["engine"]

    def digest(self, out: str) -> str:
        """What the digest of the run would be in one process, from the files of the sites."""
        saved = self.checkpoint(out)

        def kept(versions: Mapping[str, str], part: str) -> dict[str, Any]:
            return {
                site: storage.load(
                    self.fed / "sites" / site / "fedgist" / "runs" / saved["run"] / part / f"{version}.safetensors"
                )
                for site, version in versions.items()
            }

        parts = {"states": kept(saved["nodes"], "node"), "sites": kept(saved["versions"], "")}
        return storage.digest({"round": saved["round"], **parts, "under way": {}})

    def in_process(self, out: str) -> LocalEngine:
        """The same clients, with the same data, in this process."""
        config = configs.resolve(configs.load(self.folder / out / "config.toml"))
        known = inputs.with_architectures(config, inputs.from_sites(config, SITES))
        held = {site: site_setup.client_data(self.fed / "data" / site / "digits", known.task) for site in SITES}
        return LocalEngine(
            methods.find(config.method)(config.options, known.task),
            held,
            seed=config.seed,
            executor=executor("sequential"),
            info=known.info,
            topology=topologies.over_time(config.topology or "", SITES, Rng(config.seed)),
        )


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path_factory.mktemp("peers"))
    try:
        yield deployment
    finally:
        for started in reversed(deployment.running):
            started.stop()


def ledger(path: Path) -> list[list[str]]:
    """Its rows, without the name of the run."""
    return [line.split(",")[1:] for line in path.read_text().splitlines()[1:]]


@pytest.mark.parametrize("method", ["repshare", "dfedavg"])
def test_a_ring_of_five_is_the_run_in_one_process(method: str, deployed: Deployment) -> None:
    deployed.finished(method, method, 3)
    near = deployed.in_process(method)
    for _ in range(3):
        near.run_round()
    assert not any("missing" in row for row in deployed.rows(method))
    assert deployed.digest(method) == near.digest()
    run = deployed.checkpoint(method)["run"]
    sites = [deployed.fed / "sites" / site / "fedgist" / "runs" / run / "ledger.csv" for site in SITES]
    rows = [row for path in sites for row in ledger(path)]
    assert rows and sorted(rows) == sorted(
        row for row in ledger(deployed.folder / method / "ledger.csv") if row[1] == "round"
    )
    totals = near.ledger.totals()
    last = deployed.rows(method)[-1]
    assert (last["bytes_up"], last["bytes_down"]) == (totals.bytes_up, totals.bytes_down)
    assert 0 < last["accuracy"] <= 1


def test_the_relay_and_its_logs_show_only_sealed_bytes(deployed: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the coordinator sends and gets through NVFlare's server, as it is after TLS."""
    from fedgist.federation import kits, runs, server
    from fedgist.federation.protocol.remote_engine import Patience

    traffic: list[bytes] = []
    exchange = FlareTransport.exchange

    def watched(self: FlareTransport, requests: Mapping[str, bytes], timeout: float, enough: int) -> Any:
        found = exchange(self, requests, timeout, enough)
        traffic.extend([*requests.values(), *(data for data in found.values() if isinstance(data, bytes))])
        return found

    monkeypatch.setattr(FlareTransport, "exchange", watched)
    asked = {"method": "repshare", "dataset": "digits", "model": "mlp:hidden=16", "topology": "ring", "rounds": 2}
    out = deployed.folder / "watched"

    def config(known: dict[str, Any]) -> Any:
        return configs.resolve({**asked, "steps": 20, "n_avg": 10}, known)

    from fedgist.experiments.progress import Silent

    fed = kits.load(deployed.fed)
    server.run(fed, runs.settle(fed.sites, config, out, False), False, Patience(timeout=60), 200.0, Silent())
    saved = deployed.checkpoint("watched")
    secrets = []
    for site, version in saved["versions"].items():
        folder = deployed.fed / "sites" / site / "fedgist" / "runs" / saved["run"]
        for leaf in leaves(storage.load(folder / f"{version}.safetensors")["released"]):
            part = leaf.numpy().tobytes()
            secrets += [part[i : i + 16] for i in range(0, len(part) - 16, 64)]
    secrets = [part for part in secrets if len(set(part)) > 4]
    everything = b"".join(traffic)
    assert len(secrets) > 100 and len(everything) > 10_000
    assert not [part for part in secrets if part in everything]
    logs = b"".join(path.read_bytes() for path in deployed.fed.glob("server/**/*log*.txt"))
    logs += (deployed.fed / "logs" / "server.log").read_bytes()
    assert logs and b"Representations" not in logs
    assert not [part for part in secrets if part in logs or part.hex().encode() in logs]
    audit = (deployed.fed / "sites" / "site-1" / "fedgist" / "audit.jsonl").read_text().splitlines()
    letters = [json.loads(line) for line in audit if '"Letter"' in line and saved["run"] in line]
    assert {line["neighbour"] for line in letters} == {"site-2", "site-5"}


def test_a_site_is_killed_and_comes_back(deployed: Deployment) -> None:
    """As in one process, where each exchange misses whom it missed here, which the coordinator's ledger tells."""
    run = deployed.run("absence", "repshare", 1000, "--set", "eval_every=0")

    def away() -> list[int]:
        return [row["round"] for row in deployed.rows("absence") if "site-3" in row.get("missing", {})]

    try:
        wait_for(lambda: deployed.done("absence") >= 3 or run.process.poll() is not None)
        deployed.sites["site-3"].kill_all()
        wait_for(lambda: bool(away()) or run.process.poll() is not None)
        deployed.sites["site-3"] = deployed.start_site("site-3")
        wait_for(lambda: deployed.done("absence") > max(away()) + 2 or run.process.poll() is not None, 4 * LONG)
    finally:
        run.process.send_signal(signal.SIGINT)
        run.process.wait(LONG)
    rounds = deployed.checkpoint("absence")["round"]
    answered = {
        (int(row[0]), int(row[2]), row[4], row[5])
        for row in ledger(deployed.folder / "absence" / "ledger.csv")
        if row[3] == "up"
    }
    missed = {round for round in away() if round <= rounds}
    heard = {round for round, _, _, receiver in answered if receiver == "site-3"}
    near = deployed.in_process("absence")

    def unreachable(node: str, id: str) -> bool:
        if node != id:
            return (near.round, near.exchange, id, node) not in answered
        return id == "site-3" and near.round in missed and near.exchange >= (near.round in heard)

    near._unreachable = unreachable  # type: ignore[method-assign]
    for _ in range(rounds):
        near.run_round()
    assert missed and rounds > max(missed), run.said
    assert deployed.digest("absence") == near.digest(), (missed, heard)


def test_everything_is_killed_and_goes_on_to_the_same_end(deployed: Deployment) -> None:
    deployed.finished("whole", "dfedavg", 6)
    run = deployed.run("cut", "dfedavg", 6)
    wait_for(lambda: deployed.done("cut") >= 2 or run.process.poll() is not None)
    deployed.server.kill_all()
    run.kill_all()
    for site in ("site-2", "site-5"):
        deployed.sites[site].kill_all()
        deployed.sites[site] = deployed.start_site(site)
    deployed.server = deployed.start_server()
    deployed.finished("cut", "dfedavg", 6, "--resume", "--min-sites", "5")
    assert deployed.digest("cut") == deployed.digest("whole")
    ledgers = [(deployed.folder / out / "ledger.csv").read_text() for out in ("cut", "whole")]
    assert ledgers[0] == ledgers[1]
