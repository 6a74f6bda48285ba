"""Every method across a wire that carries bytes: the same states and the same ledger as in one process."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedgist import methods, storage
from fedgist.core.ledger import Ledger
from fedgist.engines import executor
from fedgist.federation.protocol.policy import opened
from fedgist.federation.protocol.remote_engine import Lost, RemoteEngine
from fedgist.federation.protocol.site_host import SiteHost
from fedgist.federation.sim import TRIAL
from toys import toy, toy_federation


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "method" in metafunc.fixturenames:
        metafunc.parametrize("method", methods.registry())


class InProcess:
    """Hands envelopes to hosts that live here; `damage` may spoil what a site sends, `away` never answer."""

    def __init__(self, hosts: Mapping[str, SiteHost]):
        self.hosts = hosts
        self.away: set[str] = set()
        self.damage: Callable[[str, bytes], bytes] = lambda id, data: data

    def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes | Lost]:
        return {
            id: Lost("is switched off") if id in self.away else self.damage(id, self.hosts[id].handle(data))
            for id, data in requests.items()
        }


def hosts(method: str, folder: Path) -> dict[str, SiteHost]:
    config, inputs = toy(method, clients=5)

    def host(id: str) -> SiteHost:
        def prepare(start: Any) -> Any:
            return methods.find(start.method)(config.options, inputs.task), inputs.sites[id]

        rules = opened(methods.find(method)(config.options, inputs.task), TRIAL)
        return SiteHost(id, folder / id, prepare, executor("sequential"), rules)

    return {id: host(id) for id in inputs.sites}


def remote(method: str, folder: Path, transport: InProcess | None = None) -> RemoteEngine:
    config, inputs = toy(method, clients=5)
    built = methods.find(method)(config.options, inputs.task)
    transport = transport or InProcess(hosts(method, folder))
    return RemoteEngine(built, transport, inputs.info, seed=0, executor=executor("sequential"))


def site_state(engine: RemoteEngine, folder: Path, id: str) -> Any:
    """What a site keeps on its disk of the version that the server knows as current."""
    return storage.load(folder / id / "runs" / engine.run / f"{engine.versions[id]}.safetensors")


def test_bytes_on_a_wire_give_the_same(method: str, tmp_path: Path) -> None:
    """Two rounds with an evaluation after each: states bit for bit, ledger to the byte."""
    test = toy(method, clients=5)[1].test
    near, far = toy_federation(method, clients=5), remote(method, tmp_path)
    near.ledger, far.ledger = Ledger(tmp_path / "near.csv"), Ledger(tmp_path / "far.csv")
    for _ in range(2):
        reports = near.run_round(), far.run_round()
        assert len({(report.answered, report.skipped) for report in reports}) == 1
        assert near.evaluate(test) == far.evaluate(test)
    assert storage.digest(near.states) == storage.digest(far.states)
    for id in far.versions:
        assert storage.digest(near.site_states[id]) == storage.digest(site_state(far, tmp_path, id)), id
    near.ledger.close()
    far.ledger.close()
    assert (tmp_path / "near.csv").read_text() == (tmp_path / "far.csv").read_text()


def test_everybody_killed_and_resumed(method: str, tmp_path: Path) -> None:
    """Server and sites die after round 1 and in the middle of round 2; new ones go on to the same end."""
    whole = remote(method, tmp_path / "whole")
    for _ in range(3):
        whole.run_round()
    first = remote(method, tmp_path / "killed")
    first.run_round()
    storage.save(first.snapshot(), tmp_path / "checkpoint")
    first.run_round()  # its end was never written down
    second = remote(method, tmp_path / "killed")
    second.restore(storage.load(tmp_path / "checkpoint"))
    for _ in range(2):
        second.run_round()
    assert second.digest() == whole.digest()
    for id in whole.versions:
        kept = (site_state(engine, tmp_path / name, id) for engine, name in ((second, "killed"), (whole, "whole")))
        assert len({storage.digest(state) for state in kept}) == 1
