"""Flower in this process: a grid through which messages travel as Flower's bytes to one app that answers for all."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

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


def pretend_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower makes messages only in a process that it has told who it is."""
    for name, value in {"_task_id": 1, "_run_id": RUN, "_node_id": SERVER_NODE}.items():
        monkeypatch.setattr(TaskIdentity, name, value)
