"""Flower: its ServerApp and ClientApp with a grid in this process, through which messages travel as Flower's bytes.

As in a deployment, every message meets a site that remembers nothing but its files.
"""

import json
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedgist import methods
from fedgist.cli import app as command_line
from fedgist.core.errors import FedgistError
from fedgist.engines import executor
from fedgist.experiments.config import resolve
from fedgist.experiments.inputs import from_dataset
from fedgist.federation.protocol.envelope import Question, Refusal, seal, unseal
from fedgist.federation.protocol.policy import opened
from fedgist.federation.protocol.remote_engine import Lost, RemoteEngine
from fedgist.federation.protocol.site_host import SiteHost
from fedgist.federation.sim import TRIAL

pytest.importorskip("flwr", reason="needs Flower: pip install 'fedgist[flower]'")

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.cli.config_utils import load_and_validate
from flwr.clientapp import ClientApp
from flwr.common.config import flatten_dict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fedgist.federation import flower as ends
from fedgist.federation.protocol.flower_transport import FlowerTransport, client_app

RUN, SERVER_NODE = 7, 1


class InProcess(Grid):
    """A SuperLink and its SuperNodes: each node has a config, and one app answers for all of them."""

    def __init__(self, app: ClientApp, nodes: dict[int, dict[str, Any]]):
        self.app, self.nodes, self.waiting = app, nodes, dict[str, Message]()
        self.silent, self.failing, self.unreachable = set[int](), set[int](), set[int]()
        self.asked: list[int] = []
        self.before: Callable[[], None] = lambda: None

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        self.before()
        return [self.push(message) for message in messages]

    def push(self, message: Message) -> str:
        node = message.metadata.dst_node_id
        self.asked.append(node)
        if node in self.unreachable:
            return ""
        message = travelled(message)
        if node in self.failing:
            self.waiting[message.metadata.message_id] = Message(Error(5, "node\nunavailable"), reply_to=message)
        elif node not in self.silent:
            context = Context(RUN, node, self.nodes[node], RecordDict(), {})
            self.waiting[message.metadata.message_id] = travelled(self.app(message, context))
        return str(message.metadata.message_id)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.waiting.pop(id) for id in message_ids if id in self.waiting]

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *_: Any, **__: Any) -> list[Message]:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError


def travelled(message: Message) -> Message:
    """The message as the other end makes it from bytes, with the id that Flower gives it."""
    id = message.object_id
    parts = {part: thing.deflate() for part, thing in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(id, parts)
    assert isinstance(arrived, Message)
    arrived.metadata.__dict__["_message_id"] = id
    return arrived


@pytest.fixture(autouse=True)
def in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower makes messages only in a process that it has told who it is."""
    for name, value in {"_task_id": 1, "_run_id": RUN, "_node_id": SERVER_NODE}.items():
        monkeypatch.setattr(TaskIdentity, name, value)


def name_of(context: Context) -> str:
    return str(context.node_config.get("site-name", ""))


# The same as in one process


@pytest.mark.parametrize("method", ["fedavg", "feddm", "repshare", "scaffold"])
def test_flower_gives_the_same(
    method: str, tmp_path: Path, same_as_in_one_process: Callable[..., RemoteEngine]
) -> None:
    layer = {"method": method, "dataset": "digits", "limit": 300, "clients": 3, "device": "cpu"}
    config = resolve(layer, profile="toy")
    inputs = from_dataset(config)
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
    reply = transport.exchange({"a": seal(Question("fedavg", [1, 8, 8], 10))}, 10, 1)["a"]
    assert isinstance(reply, bytes) and b"4711" not in reply
    assert unseal(reply)[0] == Refusal(False, "it cannot begin; the log of the site says why")
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


# A user's path: fedgist federation flower, and what `flwr run` makes of it


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
    with pytest.raises(FedgistError, match="go on with --resume"):
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
