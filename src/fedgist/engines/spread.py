"""Work of many clients on many processes or machines, by Ray: each worker has an engine of its own and runs its part.

Work is pure, so that whoever does it gets the same, and what a worker that died had to do is done again by the one that
takes its place. What belongs to one client alone (its samples) stays at the worker that first had it, and is not sent
again once it has come a second time. Ray moves everything as pickles: only between machines of one user.
"""

import itertools
import os
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fedgist.core import tree
from fedgist.core.errors import FedgistError
from fedgist.core.tree import Tree
from fedgist.core.work import Chunks, Compute, Place, Suspend, Work, execute
from fedgist.engines.scheduler import Executor, Role, drive_together, gpu_arithmetic
from fedgist.engines.threaded import cores

WORTH_KEEPING = 1 << 10
"""Numbers from which on a tensor is looked for at a worker."""
TRIES = 3


@dataclass(frozen=True)
class Kept:
    """Stands for a tensor that a worker keeps, or shall keep from now on; all others travel as arrays of numpy."""

    key: int
    array: np.ndarray | None


class Worker:
    """What runs elsewhere: an engine, and the tensors that it keeps."""

    def __init__(self, make: Any):
        self.executor: Executor = make()
        self.kept: dict[int, Tensor] = {}

    def pid(self) -> int:
        return os.getpid()

    def run(self, works: Sequence[Work], gone: Sequence[int]) -> list[tuple[list[int], Tree, list[Any]]]:
        """The results; those of one form as stacks, each of which travels as one array."""
        for key in gone:
            self.kept.pop(key, None)
        read: dict[int, Tensor] = {}  # what several clients share stays one tensor
        results = self.executor.drive([_suspended(_mapped(work, partial(self._find, read))) for work in works])
        forms: dict[Any, list[int]] = {}
        for i, result in enumerate(results):
            shapes = tuple((leaf.shape, leaf.dtype) for leaf in tree.tensors(result))
            forms.setdefault((tree.structure(result), shapes), []).append(i)
        return [_stacked(members, [results[i] for i in members]) for members in forms.values()]

    def _find(self, read: dict[int, Tensor], leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            if id(leaf) not in read:
                read[id(leaf)] = torch.tensor(leaf)
            return read[id(leaf)]
        if not isinstance(leaf, Kept):
            return leaf
        if leaf.array is not None:
            self.kept[leaf.key] = self.executor.place.put(torch.tensor(leaf.array))
        return self.kept[leaf.key]


@dataclass
class Home:
    """Where a tensor belongs."""

    worker: int
    key: int
    version: int
    life: int | None = None
    """The life of the worker in which it was sent there, to be kept."""


@dataclass
class Desk:
    """A worker as its employer sees it."""

    actor: Any
    life: int = 0
    """How many before it have died."""
    gone: list[int] = field(default_factory=list)
    """Keys of tensors that nobody needs any more."""


class Spread:
    """An executor whose work is done by the engine `name` in so many processes here, or on a cluster (`ray://HOST`)."""

    def __init__(self, name: str, place: Place, workers: str):
        self.name, self.place = name, place
        self._ray, count = _connect(workers, place)
        shared = {"num_gpus": min(1.0, self._ray.cluster_resources().get("GPU", 0) / count)} if _gpu(place) else {}
        self._actor = self._ray.remote(num_cpus=1, **shared)(Worker)
        self._make = _Make(name, place, max(1, cores() // count))
        self._desks = [Desk(self._actor.remote(self._make)) for _ in range(count)]
        self._homes: Any = WeakTensorKeyDictionary()
        self._keys = itertools.count()

    def drive(self, roles: Sequence[Role]) -> list[Any]:
        return drive_together(roles, self._execute)

    def _execute(self, works: dict[int, Work]) -> dict[int, Any]:
        """The results of all work; what is done alone, on this device for all to agree on, is done here."""
        here = {i: work for i, work in works.items() if len(works) == 1 or (isinstance(work, Compute) and work.alone)}
        there = {i: work for i, work in works.items() if i not in here}
        seen = Counter(id(leaf) for work in there.values() for leaf in _tensors(work))
        parts: list[dict[int, Work]] = [{} for _ in self._desks]
        for i, work in there.items():
            own = [leaf for leaf in _tensors(work) if seen[id(leaf)] == 1 and leaf.numel() >= WORTH_KEEPING]
            home = next((self._homes[leaf].worker for leaf in own if leaf in self._homes), None)
            worker = min(range(len(parts)), key=lambda k: len(parts[k])) if home is None else home
            parts[worker][i] = work
            for leaf in own:
                self._settle(leaf, worker)
        with gpu_arithmetic(self.place):
            outcomes = {i: execute(work, self.place) for i, work in here.items()}
        under_way = [self._send(worker, part) if part else None for worker, part in enumerate(parts)]
        for worker, (part, answer) in enumerate(zip(parts, under_way, strict=True)):
            if part:
                outcomes |= dict(zip(part, self._receive(worker, part, answer), strict=True))
        return outcomes

    def _settle(self, leaf: Tensor, worker: int) -> None:
        """A tensor that comes for the first time, or was written into since, has its home where it is needed."""
        home = self._homes.get(leaf)
        if home is None or home.version != leaf._version or home.worker != worker:
            self._homes[leaf] = Home(worker, next(self._keys), leaf._version)

    def _send(self, worker: int, part: dict[int, Work]) -> Any:
        desk, arrays = self._desks[worker], dict[int, np.ndarray]()

        def put(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            home = self._homes.get(leaf)
            known = home is not None and (home.worker, home.version) == (worker, leaf._version)
            if home is not None and known and home.life == desk.life:
                return Kept(home.key, None)
            if id(leaf) not in arrays:  # what several clients share travels once
                arrays[id(leaf)] = leaf.detach().cpu().numpy()
            if home is None or not known:
                return arrays[id(leaf)]
            if home.life is None:  # the first time; if it comes again, it will be kept
                home.life = -1
                return arrays[id(leaf)]
            if home.life == -1:
                weakref.finalize(leaf, desk.gone.append, home.key).atexit = False
            home.life = desk.life
            return Kept(home.key, arrays[id(leaf)])

        gone, desk.gone[:] = list(desk.gone), []
        return desk.actor.run.remote([_mapped(work, put) for work in part.values()], gone)

    def _receive(self, worker: int, part: dict[int, Work], answer: Any) -> list[Any]:
        """A worker's results; if it has died, those of the one that takes its place."""
        for attempt in range(TRIES):
            try:
                found: list[Any] = [None] * len(part)
                for members, form, leaves in self._ray.get(answer):
                    stacks = [_rows(leaf, self.place, len(members)) for leaf in leaves]
                    for k, i in enumerate(members):
                        found[i] = tree.rebuild(form, [stack[k] for stack in stacks])
                return found
            except self._ray.exceptions.RayActorError as error:
                if attempt == TRIES - 1:
                    raise FedgistError(f"a worker died {TRIES} times at the same work: {error}") from error
                desk = self._desks[worker]
                desk.actor, desk.life = self._actor.remote(self._make), desk.life + 1
                answer = self._send(worker, part)
        raise AssertionError("unreachable")


@dataclass(frozen=True)
class _Make:
    """Makes a worker's engine, where it runs."""

    name: str
    place: Place
    threads: int

    def __call__(self) -> Executor:
        from fedgist import engines

        torch.set_num_threads(self.threads if self.name == "sequential" else 1)
        return engines.at(self.name, self.place, self.threads)


def _connect(workers: str, place: Place) -> tuple[Any, int]:
    """Ray, started here or found elsewhere, and how many workers there shall be: one for each GPU, or core."""
    elsewhere = workers.startswith("ray://")
    if not elsewhere and not (workers.isdecimal() and int(workers) > 0):
        raise FedgistError(f"workers is a number of processes here, or ray://HOST:10001 of a cluster, not {workers!r}")
    try:
        import ray
    except ImportError:
        raise FedgistError("workers need Ray: pip install 'fedgist[ray]'") from None
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if not ray.is_initialized():
        local = {} if elsewhere else {"num_cpus": int(workers), "include_dashboard": False}
        ray.init(address=workers if elsewhere else "local", **local, **quiet)
    found = ray.cluster_resources()
    return ray, int(found.get("GPU" if _gpu(place) else "CPU", 1)) if elsewhere else int(workers)


def _gpu(place: Place) -> bool:
    return place.device.type == "cuda"


async def _suspended(work: Work) -> Any:
    return await Suspend(work)


def _mapped(work: Work, fn: Any) -> Work:
    """Work with other leaves in the place of its tensors."""
    if isinstance(work, Compute):
        return replace(work, args=tree.map(fn, work.args))
    xs = work.xs if isinstance(work.xs, Chunks) else tree.map(fn, work.xs)
    return replace(work, carry=tree.map(fn, work.carry), xs=xs, consts=tree.map(fn, work.consts))


def _tensors(work: Work) -> list[Tensor]:
    parts = work.args if isinstance(work, Compute) else (work.carry, () if isinstance(work.xs, Chunks) else work.xs)
    more = () if isinstance(work, Compute) else work.consts
    return [leaf for part in (*parts, *more) for leaf in tree.tensors(part)]


def _stacked(members: list[int], results: list[Tree]) -> tuple[list[int], Tree, list[Any]]:
    """Which results these are, one of them for its form, and each leaf of all: an array, or a list of what is none."""
    columns = zip(*(tree.leaves(result) for result in results), strict=True)
    stacks = [
        torch.stack(column).cpu().numpy() if isinstance(column[0], Tensor) else list(column) for column in columns
    ]
    return members, tree.map(lambda leaf: None, results[0]), stacks


def _rows(leaf: Any, place: Place, count: int) -> Sequence[Any]:
    """One for each result, all of which lie in one stack."""
    if isinstance(leaf, list):
        return leaf
    stack = torch.tensor(leaf).to(place.device)
    return stack.unbind() if count > 1 else [stack[0].clone()]
