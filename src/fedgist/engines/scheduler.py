"""The scheduler: drives the coroutines of methods, and the interface of the executors that do their work."""

import gc
import types
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fedgist.core.federation import Ask
from fedgist.core.work import Place, Scan, Work, execute, length

Role = Coroutine[Any, Any, Any]

OBJECTS = 200_000
"""New objects after which Python's collector looks for cycles among them while a round runs."""


class Executor(Protocol):
    """Runs coroutines whose only requests are work (`Compute`, `Scan`) to their ends, in any order it likes."""

    name: str
    place: Place

    def drive(self, roles: Sequence[Role]) -> list[Any]:
        """The results of all, in the order given; the first exception of any is raised."""


def drive_one(role: Role, place: Place, execute: Callable[[Work, Place], Any] = execute) -> Any:
    """Run one coroutine to its end, doing its work on the spot."""
    value = None
    try:
        while True:
            value = execute(role.send(value), place)
    except StopIteration as stop:
        return stop.value
    finally:
        role.close()


def drive_together(roles: Sequence[Role], execute: Callable[[dict[int, Work]], dict[int, Any]]) -> list[Any]:
    """Run coroutines to their ends, step by step: what all of them want next, by their numbers, is done at once."""
    results: list[Any] = [None] * len(roles)
    outcomes: dict[int, Any] = dict.fromkeys(range(len(roles)))
    try:
        while outcomes:
            works: dict[int, Work] = {}
            for i in list(outcomes):
                try:
                    works[i] = roles[i].send(outcomes.pop(i))
                except StopIteration as stop:
                    results[i] = stop.value
            outcomes = execute(works) if works else {}
    finally:
        for role in roles:
            role.close()
    return results


@contextmanager
def gpu_arithmetic(place: Place) -> Iterator[None]:
    """On a GPU: products in float32, where torch's default takes TF32 for convolutions, or all of them in TF32.

    Convolutions add their gradients up in a fixed order, so that training ends at the same weights when it is repeated.
    """
    if place.device.type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    settings: list[tuple[Any, str, Any]] = [(cudnn, "deterministic", True)]
    if hasattr(cudnn, "conv"):  # torch 2.9 and later
        precision = "tf32" if place.tf32 else "ieee"
        settings += [(module, "fp32_precision", precision) for module in (matmul, cudnn.conv, cudnn.rnn)]
    else:
        settings += [(module, "allow_tf32", place.tf32) for module in (matmul, cudnn)]
    before = [getattr(module, name) for module, name, _ in settings]
    try:
        for module, name, value in settings:
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), old in zip(settings, before, strict=True):
            setattr(module, name, old)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Python's collector waits: a round makes many objects that live as long as it does, and no cycles, but one look in
    several goes through all that the process holds, and takes longer than a round."""
    now, *older = gc.get_threshold()
    gc.set_threshold(now and max(now, OBJECTS), *older)
    try:
        yield
    finally:
        gc.set_threshold(now, *older)


@dataclass(frozen=True)
class Finished:
    """A round coroutine has returned."""

    result: Any


@types.coroutine
def counting(start: Callable[[], Role], count: Callable[[int], None]) -> Generator[Any, Any, Any]:
    """A coroutine as it is; of every loop that it hands to the executor, `count` is told the number of steps."""
    role, value = start(), None
    try:
        while True:
            request = role.send(value)
            if isinstance(request, Scan):
                count(length(request.xs))
            value = yield request
    except StopIteration as stop:
        return stop.value
    finally:
        role.close()


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
