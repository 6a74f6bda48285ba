"""What sites are told of a run without a server: who takes part, with which model, who is whose neighbour."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedgist.core.errors import FedgistError
from fedgist.core.method import Method
from fedgist.core.rng import Rng
from fedgist.data import topologies
from fedgist.data.topologies import Topology
from fedgist.federation.protocol import private_sums
from fedgist.federation.protocol.envelope import NAME, Start
from fedgist.federation.protocol.policy import Policy, Refused

MOST_SITES = 99
"""As many as an envelope may name."""


@dataclass(frozen=True)
class Network:
    """Everybody makes the same graph of it, and holds others to it."""

    topology: str
    models: Mapping[str, str]
    """The architecture of each site."""
    roster: str
    """The digest of the roster whose keys seal letters."""

    def describe(self) -> dict[str, Any]:
        return {"network": asdict(self)}

    def over_time(self, seed: int) -> Topology:
        return topologies.over_time(self.topology, sorted(self.models), Rng(seed))

    def possible(self, site: str, seed: int) -> list[str]:
        """All that may become a site's neighbours in the course of a run."""
        others = [id for id in sorted(self.models) if id != site]
        return others if topologies.changes(self.topology) else list(self.over_time(seed)(1)[site])


def asked(start: Start) -> Network | None:
    """The network of a run, as its start says; None where it has a server."""
    told = start.task.get("network")
    if told is None:
        return None
    try:
        found = Network(str(told["topology"]), dict(sorted(told["models"].items())), str(told["roster"]))
        good = all(NAME.fullmatch(id) and type(model) is str for id, model in found.models.items())
        if not good or not 2 <= len(found.models) <= MOST_SITES or found.topology.startswith("file"):
            raise ValueError("its sites, or its topology")
        found.over_time(start.seed)(1)
    except (KeyError, TypeError, ValueError, AttributeError, FedgistError) as error:
        raise Refused(f"the run describes a network that cannot be: {error}") from error
    return found


def check(network: Network, site: str, start: Start, method: Method, rules: Policy) -> None:
    """Whether a site may take part: what it replies its neighbours see as it is, also what a server would only sum."""
    if site not in network.models:
        raise Refused("the run's network does not have this site")
    if start.model != network.models[site]:
        raise Refused("the run gives this site two models")
    rules.check_peers(method, network.possible(site, start.seed))
    if not method.peer_to_peer:
        raise Refused(f"{method.name} needs a server, and this run has none")
    if private_sums.asked(start) is not None:
        raise Refused("a run without a server is not differentially private: what goes to neighbours has no noise")
    if not start.layer:
        raise Refused("in a run without a server scores leave only in secure sums")
