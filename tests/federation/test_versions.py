"""Server and sites of neighbouring versions understand each other; what version 1 left on disk still works.

The files in `version_1/` were made by the code of that version, see `version_1/make.py`.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="needs cryptography, which NVFlare brings along")

from asking import START
from fedgist import methods
from fedgist.core.errors import FedgistError
from fedgist.core.message import WireError
from fedgist.data import datasets
from fedgist.engines import executor
from fedgist.experiments.config import resolve
from fedgist.experiments.folder import RunFolder
from fedgist.experiments.progress import Silent
from fedgist.federation import kits, runs, site, site_setup
from fedgist.federation.protocol import envelope, policy, roster
from fedgist.federation.protocol.envelope import PROTOCOL, Question, Refusal, seal, unseal
from fedgist.federation.protocol.policy import Policy
from fedgist.federation.protocol.remote_engine import Patience
from fedgist.federation.protocol.site_host import SiteHost

BEFORE = Path(__file__).parent / "version_1"
RULES = Policy(min_samples_per_class=1, min_test_samples=1, options={"steps": (2,)})


def fields(data: bytes) -> dict[str, Any]:
    """The header as it travels."""
    found: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


RECORDED = {path.name: path.read_bytes() for path in sorted((BEFORE / "envelopes").iterdir())}
KNOWN = {kind: set(fields(data)) for kind, data in RECORDED.items()} | {"Refusal": {"kind", "refused", "why"}}


class OldSite:
    """A site that knows only the fields of version 1, and refuses others with the words that version had."""

    def __init__(self, host: SiteHost):
        self.host = host

    def handle(self, data: bytes) -> bytes:
        found = fields(data)
        if set(found) != KNOWN[found["kind"]]:
            return seal(Refusal(False, f"{found['kind']}: its fields are not those of one"))
        answer = self.host.handle(data)
        assert set(fields(answer)) == KNOWN[fields(answer)["kind"]]
        return answer


class Wire:
    def __init__(self, hosts: Mapping[str, Any]):
        self.hosts = hosts
        self.carried: list[dict[str, Any]] = []

    def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes]:
        self.carried += [fields(data) for data in requests.values()]
        return {id: self.hosts[id].handle(data) for id, data in requests.items()}


def run(wire: Wire, out: Path, resume: bool = False) -> None:
    @contextlib.contextmanager
    def connected() -> Iterator[Wire]:
        yield wire

    def config(known: dict[str, Any]) -> Any:
        chosen = {"method": "scaffold", "model": "mlp:hidden=4", "rounds": 2, "steps": 2, "device": "cpu"}
        return resolve(chosen, known)

    runs.run(runs.settle(["a", "b"], config, out, resume), connected, resume, Patience(), Silent())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for number, id in enumerate("ab", 1):
        datasets.export("digits", folder / id, part=f"{number}/2")
    return folder


def hosts(folder: Path, data: Path) -> dict[str, SiteHost]:
    return {
        id: site_setup.make_host(id, folder / id, site_setup.Settings(str(data / id / "digits")), RULES) for id in "ab"
    }


def test_envelopes_of_version_1_are_read() -> None:
    assert set(RECORDED) == {"Introduction", "Question", "Ready", "Reply", "Request", "Start"}
    for kind, data in RECORDED.items():
        header, payload = unseal(data)
        assert type(header).__name__ == kind and getattr(header, "protocol", 1) == 1
        assert fields(seal(header, payload, protocol=1)) == fields(data)


def test_a_server_of_version_1_gets_answers_that_it_can_read(tmp_path: Path, data: Path) -> None:
    site = hosts(tmp_path, data)["a"]
    for kind, answer in (("Question", "Introduction"), ("Start", "Ready"), ("Request", "Reply")):
        got = fields(site.handle(RECORDED[kind]))
        assert got["kind"] == answer and set(got) == KNOWN[answer]


def test_a_site_of_version_1_takes_part_beside_one_of_today(tmp_path: Path, data: Path) -> None:
    today = hosts(tmp_path, data)
    wire = Wire({"a": OldSite(today["a"]), "b": today["b"]})
    run(wire, tmp_path / "run")
    assert [row["answered"] for row in RunFolder(tmp_path / "run").rows()] == [2, 2]
    starts = [told.get("protocol") for told in wire.carried if told["kind"] == "Start"]
    assert starts == [None, PROTOCOL]
    assert [told["kind"] for told in wire.carried].count("Question") == 3  # the old site is asked a second time


def test_a_version_too_far_away_is_refused_by_name(tmp_path: Path, data: Path, monkeypatch: Any) -> None:
    site = hosts(tmp_path, data)["a"]
    found, _ = unseal(site.handle(seal(Question("scaffold", [1, 8, 8], 10, protocol=PROTOCOL + 2))))
    here = f"speaks version {PROTOCOL + 2} of the protocol, and here it is version {PROTOCOL}: update fedgist here"
    assert isinstance(found, Refusal) and here in found.why
    monkeypatch.setattr(envelope, "PROTOCOL", 4)
    with pytest.raises(WireError, match="this end speaks version 4 of the protocol, and there it is version 2"):
        unseal(seal(START))


def test_a_neighbour_that_says_more_is_told_the_version(tmp_path: Path, data: Path) -> None:
    """The next version may add a field: this one refuses it, and answers when it is asked in its own."""
    site = hosts(tmp_path, data)["a"]
    told = {**fields(seal(Question("scaffold", [1, 8, 8], 10, protocol=PROTOCOL + 1))), "more": 1}
    text = json.dumps(told).encode()
    assert isinstance(unseal(site.handle(len(text).to_bytes(8, "little") + text))[0], Refusal)
    assert fields(site.handle(seal(Question("scaffold", [1, 8, 8], 10))))["kind"] == "Introduction"


def test_a_run_that_version_1_began_goes_on(tmp_path: Path, data: Path) -> None:
    """Server and sites updated between two rounds: the first round stays, the second starts from the sites' states."""
    for name in ("run", "sites"):
        shutil.copytree(BEFORE / name, tmp_path / name)
    first = RunFolder(tmp_path / "run").rows()
    assert len(first) == 1
    wire = Wire(hosts(tmp_path / "sites", data))
    run(wire, tmp_path / "run", resume=True)
    rows = RunFolder(tmp_path / "run").rows()
    assert rows[:1] == first and [row["answered"] for row in rows] == [2, 2]
    states = {told["state"] for told in wire.carried if told["kind"] == "Request" and told["phase"] == "round"}
    assert states == {"round-000001-000000"}


def test_a_kit_of_version_1_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a roster, as it knows nobody who could sign one, and says so where one is needed."""
    shutil.copytree(BEFORE / "kit", tmp_path / "fed")
    federation = kits.load(tmp_path / "fed")
    assert federation.sites == ("a",)
    kits.settle_server(federation.server_kit)
    allowed = json.loads((federation.server_kit / "local" / "resources.json").read_text())["class_allow_list"]
    assert set(kits.SERVER_CLASSES) <= set(allowed)
    kit = federation.kit("a")
    assert json.loads((kit / "local" / "resources.json").read_text())["class_allow_list"] == kits.SITE_CLASSES
    policy.check_names(policy.load(kit / "policy.toml"), methods.registry())
    (kit / "startup" / "client.key").write_text("")
    assert "site a of the server localhost:8002" in site.status(kit)[0]
    with pytest.raises(FedgistError, match="before federations had rosters"):
        roster.load(kit)
    (kit / site.SETTINGS).write_text('{"data": "nowhere"}')
    host = site._host("a", kit)
    assert host.enrol(b"a roster") == b""
    assert fields(host.handle(seal(Question("fedavg", [1, 8, 8], 10))))["kind"] == "Introduction"


def test_a_server_of_version_1_can_read_a_refusal(tmp_path: Path) -> None:
    rules = Policy(methods=("fedavg",))
    site = SiteHost("a", tmp_path, lambda start: pytest.fail("begun"), executor("sequential"), rules)
    answer = site.handle(seal(Question("real", [1, 8, 8], 10), protocol=1))
    assert fields(answer).keys() == KNOWN["Refusal"] and "does not allow the method real" in fields(answer)["why"]
