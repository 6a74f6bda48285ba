"""Envelopes through Flower: the same results as in one process, and what is said about nodes.

As in a deployment, every message meets a site that remembers nothing but its files.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedgist import methods
from fedgist.core.errors import FedgistError
from fedgist.engines import executor
from fedgist.federation.protocol.envelope import Question, Refusal, digest, seal, unseal
from fedgist.federation.protocol.policy import opened
from fedgist.federation.protocol.remote_engine import Lost, RemoteEngine
from fedgist.federation.protocol.site_host import SiteHost
from fedgist.federation.sim import TRIAL

pytest.importorskip("flwr", reason="needs Flower: pip install 'fedgist[flower]'")

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo

from fedgist.federation.protocol.flower_transport import FlowerTransport, client_app
from flower_grid import InProcess, pretend_a_task
from toys import toy


@pytest.fixture(autouse=True)
def in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_task(monkeypatch)


def name_of(context: Context) -> str:
    return str(context.node_config.get("site-name", ""))


@pytest.mark.parametrize("method", ["fedavg", "feddm", "repshare", "scaffold"])
def test_flower_gives_the_same(
    method: str, tmp_path: Path, same_as_in_one_process: Callable[..., RemoteEngine]
) -> None:
    config, inputs = toy(method, clients=3)
    built = methods.find(method)(config.options, inputs.task)

    def make_host(context: Context) -> SiteHost:
        id = name_of(context)
        rules = opened(built, TRIAL)
        return SiteHost(id, tmp_path / id, lambda start: (built, inputs.sites[id]), executor("sequential"), rules)

    nodes = {90 + number: {"site-name": id} for number, id in enumerate(inputs.sites)}
    transport = FlowerTransport(InProcess(client_app(name_of, make_host), nodes), poll=0)
    assert transport.find(inputs.sites, 10) == set()
    far = same_as_in_one_process(built, transport, inputs, tmp_path)
    assert (method in ("repshare", "scaffold")) == bool(far.versions)  # whose clients have states


# What the transport says about nodes


def echo(nodes: dict[int, dict[str, Any]]) -> InProcess:
    """Nodes that cannot begin, and say so: enough to see who is asked and what comes back."""

    def make_host(context: Context) -> SiteHost:
        raise ValueError("patient 4711")

    return InProcess(client_app(name_of, make_host), nodes)


def named(*names: str) -> dict[int, dict[str, Any]]:
    return {number: {"site-name": name} if name else {} for number, name in enumerate(names, 10)}


def test_sites_are_found_by_name_and_strangers_are_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    grid = echo(named("b", "", "a", "z"))
    transport = FlowerTransport(grid, poll=0)
    assert transport.find(["a", "b", "c"], 0.1) == {"c"}
    assert transport.nodes == {"b": 10, "a": 12}
    assert "node 11 is not asked: its node config has no site-name" in caplog.text
    assert "node 13 is not asked: 'z' is not among the sites" in caplog.text
    assert grid.asked == [10, 11, 12, 13]  # once each, however often it looked for c
    grid.asked.clear()
    found = transport.exchange(dict.fromkeys("abc", b""), 1, 3)
    assert found["c"] == Lost("is not connected")
    assert sorted(grid.asked) == [10, 12]


def test_two_nodes_with_one_name_are_an_error() -> None:
    with pytest.raises(FedgistError, match="two nodes are a: give each a name of its own"):
        FlowerTransport(echo(named("a", "a")), poll=0).find(["a", "b"], 1)


def registered(grid: InProcess, **names: str) -> FlowerTransport:
    """A transport on whose SuperLink nodes were registered under names: n10="a" is node 10 as a."""
    known = {int(node[1:]): name for node, name in names.items()}
    grid.get_nodes = lambda: [NodeInfo(node_id=node, name=known.get(node, "")) for node in grid.nodes]  # type: ignore[method-assign]
    return FlowerTransport(grid, poll=0)


def test_a_registered_name_is_taken_before_what_a_node_says(caplog: pytest.LogCaptureFixture) -> None:
    """Node 11 says that it is a, but its key is registered as b; only node 12 has to be asked for its name."""
    grid = echo(named("a", "a", "c"))
    transport = registered(grid, n10="a", n11="b")
    assert transport.find("abc", 10) == set()
    assert transport.nodes == {"a": 10, "b": 11, "c": 12}
    assert grid.asked == [12]
    found = transport.exchange({"b": b"x"}, 10, 1)["b"]
    assert isinstance(found, bytes) and isinstance(unseal(found)[0], Refusal)
    assert "site a cannot answer: it was asked as 'b'" in caplog.text


def test_a_site_that_comes_late_is_waited_for() -> None:
    grid = echo(named("a"))
    looks: list[int] = []

    def get_node_ids() -> list[int]:
        looks.append(1)
        if len(looks) == 3:
            grid.nodes = named("a", "b")
        return list(grid.nodes)

    grid.get_node_ids = get_node_ids  # type: ignore[method-assign]
    assert FlowerTransport(grid, poll=0).find(["a", "b"], 10) == set()


def test_who_does_not_answer_is_named_with_the_reason() -> None:
    grid = echo(named("here", "silent", "failing", "left"))
    transport = FlowerTransport(grid, poll=0)
    assert transport.find(["here", "silent", "failing", "left"], 10) == set()
    grid.silent, grid.failing, grid.unreachable = {11}, {12}, {13}
    found = transport.exchange(dict.fromkeys(transport.nodes, b""), 0.1, 4)
    assert isinstance(found.pop("here"), bytes)
    assert found == {
        "silent": Lost("did not answer within 0.1 s"),
        "failing": Lost("did not answer (Flower's error 5: node unavailable)"),
        "left": Lost("is not connected any more"),
    }


def test_enough_answers_end_an_exchange() -> None:
    """Who was not waited for is not lost; time is not used up."""
    grid = echo(named("a", "b", "c"))
    transport = FlowerTransport(grid, poll=0)
    transport.find("abc", 10)
    grid.silent = {11}
    assert set(transport.exchange(dict.fromkeys("abc", b""), 600, 2)) == {"a", "c"}


def test_what_goes_wrong_at_a_site_stays_there(caplog: pytest.LogCaptureFixture) -> None:
    transport = FlowerTransport(echo(named("a")), poll=0)
    transport.find("a", 10)
    question = seal(Question("fedavg", [1, 8, 8], 10))
    reply = transport.exchange({"a": question}, 10, 1)["a"]
    assert isinstance(reply, bytes) and b"4711" not in reply
    assert unseal(reply)[0] == Refusal(False, "it cannot begin; the log of the site says why", digest(question))
    assert "patient 4711" in caplog.text


def test_a_reply_without_an_envelope_is_none() -> None:
    app = ClientApp()
    app.query("who")(
        lambda message, context: Message(RecordDict({"fedgist": ConfigRecord({"site": "a"})}), reply_to=message)
    )
    app.query("answer")(lambda message, context: Message(RecordDict(), reply_to=message))
    transport = FlowerTransport(InProcess(app, named("a")), poll=0)
    transport.find("a", 10)
    assert transport.exchange({"a": b"x"}, 10, 1) == {"a": b""}
