"""A method: what clients and server compute and which messages travel between them. One file each in `methods/`."""

import inspect
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.core.federation import Federation, Site
from fedgist.core.message import Bounds, schema_of
from fedgist.core.rng import Rng
from fedgist.core.tree import Tree


@dataclass(frozen=True, eq=False)
class Task:
    """What everybody knows about the learning problem; nothing in it comes from a client's data."""

    shape: tuple[int, int, int]
    classes: int
    low: tuple[float, ...]
    high: tuple[float, ...]
    models: Mapping[str, Any]
    model: str
    proxy: Tensor | None = None


@dataclass(frozen=True)
class Handler:
    """A client's answer to one kind of request."""

    name: str
    request: type
    reply: type


class Method(ABC):
    """The base of all methods. A concrete method has a `name` and is final: wrap it, do not inherit from it.

    A client's handlers are its coroutine methods of the form `async def name(self, me: Site, msg: Request) -> Reply`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    citation: ClassVar[str]
    Config: ClassVar[type]
    profiles: ClassVar[dict[str, dict[str, Any]]]
    """Settings under the names `paper`, `small`, `demo` and `toy` (the smallest that means something, for tests)."""
    pooled: ClassVar[bool] = False
    """Whether the method wants one site that holds everybody's data."""
    peer_to_peer: ClassVar[bool] = False
    """Whether `round` also works at a client, whose ids are itself and its neighbours, so that no server is needed."""
    handlers: ClassVar[dict[type, Handler]] = {}

    def __init_subclass__(cls) -> None:
        for base in cls.__mro__[1:]:
            if issubclass(base, Method) and "name" in vars(base):
                raise TypeError(f"{base.__name__} is final: {cls.__name__} may wrap it, not inherit from it")
        cls.handlers = {handler.request: handler for handler in _find_handlers(cls)}

    def __init__(self, config: Any, task: Task):
        self.config = config
        self.task = task

    @property
    def model(self) -> Any:
        """The server's architecture."""
        return self.task.models[self.task.model]

    def bounds(self, model: str) -> Bounds:
        """What the server and a client with this architecture agree on: shapes of `Params`, largest dimensions."""
        return {"model": self.task.models[model].shapes}

    def server_init(self, rng: Rng) -> Tree:
        """The state of the node that drives the rounds, before the first."""
        return {}

    def client_init(self, me: Site) -> Tree:
        """The state of a client, before it is first asked."""
        return {}

    @abstractmethod
    async def round(self, state: Tree, fed: Federation) -> Tree:
        """One round; returns the new state."""

    @abstractmethod
    async def evaluate(self, state: Tree, fed: Federation, test: tuple[Tensor, Tensor]) -> dict[str, float]:
        """What is to be known about the models now; `accuracy` (between 0 and 1) is always among it."""

    def weights(self, state: Tree) -> dict[str, Tensor] | None:
        """The server's model, where a method has one."""
        return None


def _find_handlers(cls: type) -> list[Handler]:
    found: list[Handler] = []
    for name, function in inspect.getmembers(cls, inspect.iscoroutinefunction):
        hints = typing.get_type_hints(function)
        if hints.get("me") is not Site:
            continue
        request, reply = hints.get("msg"), hints.get("return")
        if not (hasattr(request, "__schema__") and hasattr(reply, "__schema__")):
            raise TypeError(f"{cls.__name__}.{name}: a handler is `async def {name}(self, me: Site, msg: M) -> R`")
        if any(handler.request is request for handler in found):
            raise TypeError(f"{cls.__name__}: two handlers answer {request}")
        found.append(Handler(name, typing.cast(type, request), typing.cast(type, reply)))
    return found


def who_sees_what(method: type[Method] | Method) -> list[tuple[str, str, str, bool]]:
    """Every field that a client sends: (request, reply, field, additive). What is not additive the asker sees."""
    return [
        (handler.request.__name__, handler.reply.__name__, name, declared.additive)
        for handler in method.handlers.values()
        for name, (_, declared) in schema_of(handler.reply).items()
    ]


def handler_for(method: Method, request: type) -> Handler:
    if request not in method.handlers:
        raise FedgistError(f"{method.name}: no client handler answers {request.__name__}")
    return method.handlers[request]
