"""Flower (1.41): carries envelopes between a ServerApp, which drives a run, and the ClientApps of the sites.

Flower starts a process at a site for every message: what a site keeps lies in files, in its host's folder, and an
exchange costs seconds, whatever is in it. Which site a node is, the SuperLink knows where the node's key was registered
under a name; otherwise the node is asked, and believed.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedgist.core.errors import FedgistError
from fedgist.federation.protocol.envelope import Refusal, digest, seal
from fedgist.federation.protocol.remote_engine import Lost
from fedgist.federation.protocol.site_host import SiteHost

log = logging.getLogger("fedgist")

RECORD = "fedgist"
WHO, ANSWER = "who", "answer"
"""What a ClientApp is asked, as Flower's message types `query.who` and `query.answer`."""

LONGEST_REASON = 200


def client_app(name: Callable[[Context], str], make_host: Callable[[Context], SiteHost]) -> ClientApp:
    """What Flower runs at a site: `name` says which site this node is, `make_host` makes what answers there."""
    app = ClientApp()

    @app.query(WHO)
    def who(message: Message, context: Context) -> Message:
        return Message(_content(site=name(context)), reply_to=message)

    @app.query(ANSWER)
    def answer(message: Message, context: Context) -> Message:
        envelope = _envelope_in(message.content)
        try:
            if (asked := _name_in(message.content)) != name(context):
                raise FedgistError(f"it was asked as {asked!r}: is that its site-name, or the name of its key?")
            answered = make_host(context).handle(envelope)
        except Exception as error:  # its words may be about the site's data, and Flower would tell the server
            log.error(f"site {name(context)} cannot answer: {error}")
            answered = seal(Refusal(False, "it cannot begin; the log of the site says why", digest(envelope)))
        return Message(_content(envelope=answered), reply_to=message)

    return app


class FlowerTransport:
    """The ServerApp's end."""

    def __init__(self, grid: Grid, poll: float = 0.5):
        self.grid, self.poll = grid, poll
        self.nodes: dict[str, int] = {}
        """The node of each site that has been found."""

    def find(self, sites: Iterable[str], wait: float) -> set[str]:
        """Look for nodes until all sites are found, or for so many seconds; returns the sites that are missing."""
        missing, seen = set(sites), set[int]()
        until = time.monotonic() + wait
        while missing and (left := until - time.monotonic()) > 0:
            fresh = {node.node_id: node.name for node in self.grid.get_nodes() if node.node_id not in seen}
            seen.update(fresh)
            for node, name in self._names(fresh, left).items():
                if name in self.nodes:
                    raise FedgistError(f"two nodes are {name}: give each a name of its own")
                if name in missing:
                    self.nodes[name] = node
                    missing.remove(name)
                else:
                    log.warning(f"node {node} is not asked: {name[:60]!r} is not among the sites of this run")
            if missing:
                time.sleep(self.poll)
        return missing

    def _names(self, registered: Mapping[int, str], timeout: float) -> dict[int, str]:
        """Nodes by number: the names under which they are registered, or what they say when they are asked."""
        names = {node: name for node, name in registered.items() if name}
        unnamed = {node: _content() for node in registered if node not in names}
        for node, reply in self._gather(WHO, unnamed, timeout, len(unnamed)).items():
            if isinstance(reply, Lost):
                log.warning(f"node {node} is not asked: it {reply.why}")
            elif name := _name_in(reply):
                names[node] = name
            else:
                log.warning(f"node {node} is not asked: its node config has no site-name")
        return names

    def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes | Lost]:
        found: dict[str, bytes | Lost] = {site: Lost("is not connected") for site in requests if site not in self.nodes}
        sites = {self.nodes[site]: site for site in requests if site in self.nodes}
        messages = {node: _content(site=site, envelope=requests[site]) for node, site in sites.items()}
        for node, reply in self._gather(ANSWER, messages, timeout, enough).items():
            found[sites[node]] = reply if isinstance(reply, Lost) else _envelope_in(reply)
        return found

    def _gather(
        self, action: str, messages: Mapping[int, RecordDict], timeout: float, enough: int
    ) -> dict[int, RecordDict | Lost]:
        """Send each node its message and wait until enough have answered; who was not waited for is left out."""
        if not messages:
            return {}
        until = time.monotonic() + timeout
        sent = self.grid.push_messages(
            [Message(content, node, f"query.{action}", ttl=timeout) for node, content in messages.items()]
        )
        pending = {id: node for id, node in zip(sent, messages, strict=True) if id}
        replies: dict[int, RecordDict | Lost] = dict.fromkeys(
            set(messages) - set(pending.values()), Lost("is not connected any more")
        )
        answered = 0
        while pending and answered < enough and time.monotonic() < until:
            for reply in self.grid.pull_messages(list(pending)):
                node = pending.pop(reply.metadata.reply_to_message_id)
                replies[node] = Lost(_reason(reply.error)) if reply.has_error() else reply.content
                answered += not reply.has_error()
            if pending and answered < enough:
                time.sleep(self.poll)
        if answered < enough:
            replies |= dict.fromkeys(pending.values(), Lost(f"did not answer within {timeout:g} s"))
        return replies


def _content(**values: str | bytes) -> RecordDict:
    return RecordDict({RECORD: ConfigRecord(dict(values))})


def _value(content: RecordDict, key: str) -> object:
    records = content.config_records
    return records[RECORD].get(key) if RECORD in records else None


def _envelope_in(content: RecordDict) -> bytes:
    """The envelope; an empty one, which nobody takes for one, where there is none."""
    data = _value(content, "envelope")
    return data if isinstance(data, bytes) else b""


def _name_in(content: RecordDict) -> str:
    name = _value(content, "site")
    return name if isinstance(name, str) else ""


def _reason(error: Error) -> str:
    """What Flower says about a message that nobody answered, in one line."""
    said = " ".join((error.reason or "").split())[:LONGEST_REASON]
    return f"did not answer (Flower's error {error.code}{': ' if said else ''}{said})"
