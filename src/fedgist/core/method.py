"""A method: what clients and server compute and which messages travel between them. One file each in `methods/`."""

import inspect
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from fedgist.core.errors import FedgistError
from fedgist.core.federation import Federation, Site, State
from fedgist.core.message import Bounds, Exactly, Params, is_message, schema_of
from fedgist.core.rng import Rng
from fedgist.core.task import Model, Samples, Task

C = TypeVar("C")
M = TypeVar("M")
Request = TypeVar("Request")
Reply = TypeVar("Reply")


def handler(
    answer: Callable[[M, Site, Request], Coroutine[Any, Any, Reply]],
) -> Callable[[M, Site, Request], Coroutine[Any, Any, Reply]]:
    """Declares a client's answer to one kind of request: `async def name(self, me: Site, msg: Request) -> Reply`."""
    answer.__handler__ = True  # type: ignore[attr-defined]
    return answer


@dataclass(frozen=True)
class Handler:
    """A client's answer to one kind of request."""

    name: str
    request: type
    reply: type


@dataclass(frozen=True)
class NoOptions:
    """The configuration of a method that has no options."""


class Method(ABC, Generic[C]):
    """The base of all methods; `Method[Config]` names its options. What has a `name` is final: wrap it.

    A client's answers are its coroutine methods under `@handler`. `bounds`, `server_init`, `client_init`, `evaluate`,
    `weights` and `client_weights` are hooks: a base may give them, and who inherits from it may add to what that gives.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    citation: ClassVar[str] = ""
    """A BibTeX entry; for those that come with fedgist, its key in methods/references.bib."""
    Config: ClassVar[type] = NoOptions
    profiles: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings under the names `paper`, `small`, `demo` and `toy` (the smallest that means something, for tests)."""
    pooled: ClassVar[bool] = False
    """Whether the method wants one site that holds everybody's data."""
    peer_to_peer: ClassVar[bool] = False
    """Whether `round` also works at a client, whose ids are itself and its neighbours, so that no server is needed."""
    learns: str = ""
    """What is learned, in a few words, where that is not the run's model."""
    handlers: Mapping[type, Handler] = {}
    """By the request that each answers."""

    def __init_subclass__(cls) -> None:
        for base in cls.__mro__[1:]:
            if issubclass(base, Method) and "name" in vars(base):
                raise TypeError(f"{base.__name__} is final: {cls.__name__} may wrap it, not inherit from it")
        for kind in [kind for base in vars(cls).get("__orig_bases__", ()) for kind in typing.get_args(base)]:
            if isinstance(kind, type):
                cls.Config = kind
        cls.handlers = {found.request: found for found in _find_handlers(cls)}

    def __init__(self, config: C, task: Task):
        self.config = config
        self.task = task

    def leave_out(self, needless: Mapping[type, bool]) -> None:
        """A client answers nothing that its configuration does not need; this says which requests are needless."""
        self.handlers = {request: found for request, found in self.handlers.items() if not needless.get(request)}

    @property
    def model(self) -> Model:
        """The server's architecture."""
        return self.task.models[self.task.model]

    def model_of(self, me: Site) -> Model:
        """A client's architecture."""
        return self.task.models[me.info["model"]]

    def bounds(self, model: str) -> Bounds:
        """What the server and a client with this architecture agree on: shapes of `Params`, largest dimensions."""
        task = self.task
        return {"model": task.models[model].shapes, "classes": Exactly(task.classes), "input": task.shape}

    def server_init(self, rng: Rng) -> State:
        """The state of the node that drives the rounds, before the first."""
        return {}

    def client_init(self, me: Site) -> State:
        """The state of a client, before it is first asked."""
        return {}

    @abstractmethod
    async def round(self, state: State, fed: Federation) -> State:
        """One round; returns the new state."""

    @abstractmethod
    async def evaluate(self, state: State, fed: Federation, test: Samples) -> dict[str, float]:
        """What is to be known about the models now; `accuracy` (between 0 and 1) is always among it."""

    def weights(self, state: State, model: str | None = None) -> Params | None:
        """The server's model, where a method has one; `model` says which, where it has one for each architecture."""
        return None

    def client_weights(self, me: Site, sent: Params) -> Params | None:
        """A client's whole model, where it keeps one, or a part that completes the weights that the server sends it."""
        return None


def _find_handlers(cls: type) -> list[Handler]:
    found: dict[type, Handler] = {}
    for name, function in inspect.getmembers(cls, inspect.isfunction):
        declared, pair = hasattr(function, "__handler__"), _messages(function)
        if declared and pair is None:
            form = f"`async def {name}(self, me: Site, msg: Request) -> Reply`, with messages for Request and Reply"
            raise TypeError(f"{_place(function)}: {cls.__name__}.{name} is no handler; one is written {form}")
        if pair is not None and not declared:
            raise TypeError(f"{_place(function)}: {cls.__name__}.{name} answers a message; write @handler above it")
        if pair is None:
            continue
        if (other := found.setdefault(pair[0], Handler(name, *pair))).name != name:
            raise TypeError(f"{_place(function)}: {other.name} and {name} both answer {pair[0].__name__}")
    return list(found.values())


def _messages(function: Callable[..., Any]) -> tuple[type, type] | None:
    """The request and the reply of a coroutine `(self, Site, Request) -> Reply`; None if it is no such thing."""
    if not inspect.iscoroutinefunction(function):
        return None
    hints = typing.get_type_hints(function)
    kinds = [hints.get(name) for name in [*inspect.signature(function).parameters][1:]]
    if len(kinds) != 2 or kinds[0] is not Site or not all(map(is_message, (kinds[1], hints.get("return")))):
        return None
    return typing.cast(type, kinds[1]), typing.cast(type, hints["return"])


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__code__.co_filename}, line {function.__code__.co_firstlineno}"


def who_sees_what(method: type[Method[Any]] | Method[Any]) -> list[tuple[str, str, str, bool]]:
    """Every field that a client sends: (request, reply, field, additive). What is not additive the asker sees."""
    return [
        (handler.request.__name__, handler.reply.__name__, name, declared.additive)
        for handler in method.handlers.values()
        for name, (_, declared) in schema_of(handler.reply).items()
    ]


def handler_for(method: Method[Any], request: type) -> Handler:
    if request not in method.handlers:
        raise FedgistError(f"{method.name}: no client handler answers {request.__name__}")
    return method.handlers[request]
