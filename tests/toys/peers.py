"""Sites that write to each other, all in this process, with real hosts, real keys and a relay that can be watched."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedgist import methods, storage
from fedgist.core.rng import Rng
from fedgist.data import topologies
from fedgist.engines import executor
from fedgist.engines.layer import SiteLayer
from fedgist.engines.local import LocalEngine
from fedgist.federation.protocol.desk import open_desk
from fedgist.federation.protocol.envelope import Start
from fedgist.federation.protocol.keys import SiteKeys
from fedgist.federation.protocol.letters import Desk
from fedgist.federation.protocol.network import Network
from fedgist.federation.protocol.peer_engine import PeerEngine
from fedgist.federation.protocol.policy import Policy, opened
from fedgist.federation.protocol.remote_engine import Lost
from fedgist.federation.protocol.roster import Member, make
from fedgist.federation.protocol.secure_sums import server_layer, site_layer
from fedgist.federation.protocol.site_host import SiteHost
from fedgist.federation.sim import TRIAL
from fedgist.secure.ring import Grid
from toys import toy, toy_federation

IDS = [str(i) for i in range(5)]
PRIVATE = {id: SiteKeys(Ed25519PrivateKey.generate(), X25519PrivateKey.generate()) for id in IDS}


def member(id: str) -> Member:
    public = [key.public_key().public_bytes_raw() for key in (PRIVATE[id].signing, PRIVATE[id].agreement)]
    return Member(id, id.encode() * 32, *public)


ROSTER = make(1, "trial", map(member, IDS))


class Relay:
    """Carries envelopes to hosts here, and keeps all that it sees; `away` do not answer, `spoil` may change a thing."""

    def __init__(self, method: str, folder: Path, rules: Policy = TRIAL, **options: Any):
        self.method, self.folder = method, folder
        self.config, self.inputs = toy(method, clients=5, **options)
        self.rules = opened(methods.find(method)(self.config.options, self.inputs.task), rules)
        self.hosts = {id: self.host(id) for id in IDS}
        self.away: Callable[[str, bytes], bool] = lambda id, data: False
        self.spoil: Callable[[str, bytes], bytes] = lambda id, data: data
        self.seen: list[tuple[str, bytes, bytes]] = []

    def host(self, id: str) -> SiteHost:
        def prepare(start: Any) -> Any:
            return methods.find(start.method)(self.config.options, self.inputs.task), self.inputs.sites[id]

        def layer(start: Start, folder: Path) -> SiteLayer:
            return site_layer(id, start, folder, self.rules, ROSTER, PRIVATE[id])

        def desk(network: Network) -> Desk:
            return open_desk(id, network, ROSTER, PRIVATE[id])

        place = executor("sequential")
        return SiteHost(id, self.folder / id, prepare, place, self.rules, layer=layer, desk=desk)

    def restart(self, *ids: str) -> None:
        """New processes: what they had in memory is gone."""
        self.hosts |= {id: self.host(id) for id in ids}

    def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes | Lost]:
        found: dict[str, bytes | Lost] = {}
        for id, data in requests.items():
            if self.away(id, data):
                found[id] = Lost("is switched off")
                continue
            sent = self.spoil(id, data)
            answer = self.hosts[id].handle(sent)
            self.seen.append((id, data, answer))
            found[id] = answer
        return found

    def engine(self, topology: str = "ring", **about: Any) -> PeerEngine:
        built = methods.find(self.method)(self.config.options, self.inputs.task)
        network = Network(topology, {id: about["model"] for id, about in self.inputs.info.items()}, ROSTER.digest)
        layer = server_layer(ROSTER, Grid(), 3)
        known = {"seed": 0, "executor": executor("sequential"), "layer": layer, **about}
        return PeerEngine(built, self, self.inputs.info, network, **known)


def in_process(method: str, topology: str = "ring", **about: Any) -> LocalEngine:
    graph = topologies.over_time(topology, IDS, Rng(0))
    return toy_federation(method, clients=5, topology=graph, **about)


def states(engine: PeerEngine, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the sites keep on their disks of the versions that are committed: states of clients, and of nodes."""

    def kept(versions: Mapping[str, str], part: str) -> dict[str, Any]:
        return {
            id: storage.load(folder / id / "runs" / engine.run / part / f"{version}.safetensors")
            for id, version in versions.items()
        }

    return kept(engine.versions, ""), kept(engine.nodes, "node")


def digest(engine: PeerEngine, folder: Path) -> str:
    """What LocalEngine's digest is of the same run."""
    clients, nodes = states(engine, folder)
    return storage.digest({"round": engine.rounds_done, "states": nodes, "sites": clients, "under way": {}})


def audit(folder: Path, id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / id / "audit.jsonl").read_text().splitlines()]
