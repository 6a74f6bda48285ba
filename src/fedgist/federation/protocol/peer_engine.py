"""A run without a server, across machines: sites drive their own rounds; here they are only conducted.

The coordinator says when everybody goes on to the next exchange, carries letters that it cannot open from site to site,
and knows which version of its states each site has committed. It is told what it sees anyway: who wrote to whom, which
message, how long; and of an evaluation a sum of scores.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from fedgist import storage
from fedgist.core.codec import Size
from fedgist.core.ledger import Entry
from fedgist.core.message import WireError
from fedgist.core.method import Method
from fedgist.core.tree import Tree
from fedgist.engines.engine import RoundReport
from fedgist.engines.layer import version_of
from fedgist.federation.protocol.envelope import Delivered, Delivery, Step, Stepped, seal
from fedgist.federation.protocol.letters import bundle, unbundle
from fedgist.federation.protocol.network import Network
from fedgist.federation.protocol.peer_site import ASKED, FINISHED, SKIPPED
from fedgist.federation.protocol.remote_engine import RemoteEngine, Transport, open_as
from fedgist.words import plain

Mail = dict[str, dict[str, bytes]]
"""Letters by receiver and sender."""
Row = tuple[Entry, Size]
S = TypeVar("S", Stepped, Delivered)


class PeerEngine(RemoteEngine):
    """A federation whose sites ask each other. No state is here; each site has a client's, and one as a node."""

    def __init__(
        self,
        method: Method,
        transport: Transport,
        info: Mapping[str, Mapping[str, Any]],
        network: Network,
        **about: Any,
    ):
        super().__init__(method, transport, info, **about)
        self.states = {}
        self.nodes: dict[str, str] = {}
        """The committed version of each site's state as a node; a site that is not in it has its first."""
        self._kept_nodes: list[dict[str, str]] = []
        self.network = network.describe()
        self.topology = network.over_time(self.rng.root)

    def run_round(self) -> RoundReport:
        self._take_attendance()
        self._begin("round", self.rounds_done + 1)
        if not self._started:
            self._start(self.ids)
        finished, skipped = self._conduct()
        self.rounds_done += 1
        if finished:
            self.versions.update(self.working)
            self.nodes.update(finished)
        why = None if finished else skipped or f"round {self.round}: no site came to the end of it"
        return RoundReport(self.rounds_done, self.answered, why, (), dict(self.missing))

    def snapshot(self) -> Tree:
        self._kept_nodes = [*self._kept_nodes[-1:], dict(self.nodes)]
        return {**super().snapshot(), "nodes": dict(self.nodes)}

    def restore(self, snapshot: Tree) -> None:
        super().restore(snapshot)
        self.nodes = dict(snapshot["nodes"])
        self._kept_nodes = [dict(self.nodes)]

    def digest(self) -> str:
        """Of what is known here: which versions of their states the sites have committed, not what is in them."""
        return storage.digest([self.rounds_done, self.versions, self.nodes])

    # A round

    def _conduct(self) -> tuple[dict[str, str], str]:
        """Exchange after exchange, until no site has anything more to ask.

        Returns the versions of the states of nodes that came to the end of the round, and why the first did not.
        """
        here = [id for id in self.ids if id not in self.gone]
        going, finished, skipped = list(here), dict[str, str](), ""
        mail, absent = Mail(), dict[str, dict[str, str]]()
        while going:
            stepped = self._step(going, here, mail, absent)
            here = [id for id in here if id in stepped or id not in going]
            for id, (header, why, _) in stepped.items():
                if header.how == FINISHED:
                    finished[id] = header.version
                elif header.how == SKIPPED:
                    skipped = skipped or why
            going = [id for id, (header, _, _) in stepped.items() if header.how == ASKED]
            if not going:
                break
            changed = {id for id in going if stepped[id][0].changed}
            answered = {id for id in going if stepped[id][0].answered}
            mail, absent, others = self._deliver({id: stepped[id][2] for id in going}, here)
            answered |= {sender for letters in mail.values() for sender in letters}
            self.working |= dict.fromkeys(changed | others, version_of("round", self.round, self.exchange))
            self.answered = min(self.answered, len(answered))
            self.exchange += 1
        return finished, skipped

    def _step(
        self, going: Iterable[str], here: list[str], mail: Mail, absent: Mapping[str, Mapping[str, str]]
    ) -> dict[str, tuple[Stepped, str, dict[str, bytes]]]:
        """Have sites go on to their next exchange: how far they came, why not further, and what they write to whom."""
        steps = {}
        for id in going:
            state, keep, node = self._state(id), self._keep(id), self.nodes.get(id, "")
            header = Step(self.run, self.round, self.exchange, state, node, keep, here, self._tokens[id])
            steps[id] = seal(header, bundle({"absent": absent.get(id, {})}, mail.get(id, {})))

        def read(id: str, data: bytes) -> tuple[Stepped, dict[str, Any], dict[str, bytes], list[Row]]:
            stepped, told, letters = self._checked(*open_as(Stepped, data, steps[id]))
            return stepped, told, letters, self._rows(id, told)

        found: dict[str, tuple[Stepped, str, dict[str, bytes]]] = {}
        rows: list[Row] = []
        for id, (stepped, told, letters, own) in self._call(
            steps, read, f"left round {self.round} at exchange {self.exchange}"
        ).items():
            rows += own
            found[id] = stepped, plain(str(told.get("why"))), letters
            self._heard(id, told)
        # In one process an exchange's replies are counted before the requests of the next.
        for entry, size in sorted(rows, key=lambda row: (row[0].exchange, row[0].direction == "up")):
            self.ledger.write(entry, size)
        return found

    def _deliver(
        self, written: Mapping[str, Mapping[str, bytes]], here: list[str]
    ) -> tuple[Mail, dict[str, dict[str, str]], set[str]]:
        """Carry letters to those who are there, and their answers back: what each asker gets, and of whom nothing.

        Also says whose state was changed by answering.
        """
        there: Mail = {}
        absent: dict[str, dict[str, str]] = {}
        for sender, letters in written.items():
            for receiver, letter in letters.items():
                if receiver not in self.topology(self.round)[sender]:
                    self._miss(sender, f"wrote to {plain(receiver)}, which is no neighbour of it")
                elif receiver in here:
                    there.setdefault(receiver, {})[sender] = letter
                else:
                    absent.setdefault(sender, {})[receiver] = self.missing.get(receiver, "is not there")
        deliveries = {}
        for id, letters in there.items():
            state, keep = self._state(id), self._keep(id)
            header = Delivery(self.run, self.round, self.exchange, state, keep, self._tokens[id])
            deliveries[id] = seal(header, bundle({}, letters))

        def read(id: str, data: bytes) -> tuple[Delivered, dict[str, Any], dict[str, bytes]]:
            return self._checked(*open_as(Delivered, data, deliveries[id]))

        back, changed = Mail(), set[str]()
        for id, (answered, told, letters) in self._call(
            deliveries, read, f"did not take its letters of exchange {self.exchange}"
        ).items():
            changed |= {id} if answered.changed else set()
            for asker, letter in letters.items():
                if asker in there[id]:
                    back.setdefault(asker, {})[id] = letter
            refused: Any = told.get("refused")
            for asker in sorted(there[id].keys() & refused.keys()) if isinstance(refused, dict) else ():
                self._miss(id, f"refused {asker}: {refused[asker]}")
        for id, letters in there.items():
            for asker in letters.keys() - {asker for asker, found in back.items() if id in found}:
                absent.setdefault(asker, {})[id] = self.missing.get(id, "did not answer")
        return back, absent, changed

    def _checked(self, header: S, payload: bytes) -> tuple[S, dict[str, Any], dict[str, bytes]]:
        """What a site says in this exchange: how far it came, what else it tells, and its letters."""
        if (header.run, header.version) != (self.run, version_of("round", self.round, self.exchange)):
            raise WireError("it answers another request")
        return header, *unbundle(payload)

    def _state(self, id: str) -> str:
        return self.working.get(id, self.versions.get(id, ""))

    def _keep(self, id: str) -> list[str]:
        kept = [*self._kept, self.versions, *self._kept_nodes, self.nodes]
        return sorted({version for versions in kept if (version := versions.get(id))})

    def _heard(self, id: str, told: Mapping[str, Any]) -> None:
        """Whom a site could not hear."""
        missing = told.get("missing")
        for other, why in missing.items() if isinstance(missing, dict) else ():
            if other in self.ids and other not in self.missing:
                self._miss(other, f"was not heard by {id}: {why}")

    def _rows(self, id: str, told: Mapping[str, Any]) -> list[Row]:
        """What a site says that it asked and was answered, for the ledger; of the two last exchanges only."""
        found: list[Row] = []
        rows = told.get("rows", [])
        if isinstance(rows, list) and len(rows) > 2 * len(self.ids):
            raise WireError("it counts more than it can have sent and got")
        for row in rows if isinstance(rows, list) else [rows]:
            try:
                exchange, direction, other, kind, *sizes = row
                whole = len(sizes) == 3 and all(type(n) is int and 0 <= n < 1 << 40 for n in (exchange, *sizes))
                known = other in self.ids and direction in ("up", "down") and 0 <= self.exchange - exchange <= 1
                if not whole or not known:
                    raise ValueError("no row")
            except (TypeError, ValueError) as error:
                raise WireError("it counts what cannot be") from error
            sender, receiver = (id, other) if direction == "down" else (other, id)
            entry = Entry(self.round, "round", exchange, direction, sender, receiver, plain(str(kind), 100))
            found.append((entry, Size(*sizes)))
        return found
