"""The scheduler: drives the coroutines of methods, and the interface of the executors that do their work."""

import types
from collections.abc import Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fedgist.core.federation import Ask
from fedgist.core.work import Place, execute

Role = Coroutine[Any, Any, Any]


class Executor(Protocol):
    """Runs coroutines whose only requests are work (`Compute`, `Scan`) to their ends, in any order it likes."""

    name: str
    place: Place

    def drive(self, roles: Sequence[Role]) -> list[Any]:
        """The results of all, in the order given; the first exception of any is raised."""


def drive_one(role: Role, place: Place) -> Any:
    """Run one coroutine to its end, doing its work on the spot."""
    value = None
    try:
        while True:
            value = execute(role.send(value), place)
    except StopIteration as stop:
        return stop.value
    finally:
        role.close()


@dataclass(frozen=True)
class Finished:
    """A round coroutine has returned."""

    result: Any


@types.coroutine
def until_ask(role: Role, value: Any) -> Generator[Any, Any, Ask | Finished]:
    """Continue a round coroutine with `value` up to its next exchange; its own work on the way goes to the executor."""
    while True:
        try:
            request = role.send(value)
        except StopIteration as stop:
            return Finished(stop.value)
        if isinstance(request, Ask):
            return request
        value = yield request
