"""The table from which `fedgist reproduce` estimates: seconds of one core for every run of the presets.

    python benchmarks/reference_times.py                  # what the table lacks, for the machine that it is of
    python benchmarks/reference_times.py --all            # all of it, of this machine

A few steps of each kind of a run's work are timed, the rest is counted. The run's own code is driven for two rounds by
an executor that does each kind of work (a function with its shapes) a few steps at a time and only counts the steps
that are left; images are made up, the split of labels is drawn as in the run. Loops over exchanges are counted from two
short ones. What comes out are seconds of one core, by the process's own clock, whatever else the machine does; to be
divided by the cores at work. A GPU is another matter.
"""

import argparse
import dataclasses
import json
import logging
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgist import methods
from fedgist.core import tree
from fedgist.core.errors import FedgistError
from fedgist.core.federation import TooFewAnswers
from fedgist.core.rng import Rng
from fedgist.core.work import Chunks, Compute, Place, Pool, Scan, length, steps
from fedgist.data import partitions
from fedgist.data.cards import CARDS
from fedgist.engines.scheduler import Role
from fedgist.experiments import config as configs
from fedgist.experiments import estimates, presets
from fedgist.experiments import inputs as sources
from fedgist.experiments.config import RunConfig
from fedgist.experiments.folder import write_json
from fedgist.experiments.own_data import by_client
from fedgist.experiments.runner import in_process

TIMED, PATIENCE = 10, 0.5  # at most so many steps, after one that warms up, or so many seconds
TESTED = 200  # made-up test images
PEOPLE = 250  # of whom the samples of CelebA are, and of nobody else's
SIZED = {
    **CARDS,
    "celeba": dataclasses.replace(CARDS["celeba"], sizes=(5000, 600)),
    "cifar100-subset": dataclasses.replace(CARDS["cifar100"], classes=20, sizes=(10_000, 2_000)),
}
"""Data sets as the presets use them, those included whose size is not the same for everybody."""


@dataclass(frozen=True)
class Timed:
    """What has been timed: seconds of a step or a call by its kind."""

    calls: dict[tuple[str, ...], tuple[float, Any]] = field(default_factory=dict)
    """With what the call gave."""
    steps: dict[tuple[str, ...], float] = field(default_factory=dict)
    alike: dict[tuple[str, ...], tuple[float, int]] = field(default_factory=dict)
    """Of a step, however many things it works on: seconds, and the numbers that it carried."""


PLAIN = (bool, int, float, str, tuple, torch.dtype, type(None))


class Counting:
    """Does a few steps of each kind of work, and counts the seconds that all of it would take."""

    name = "counting"

    def __init__(self, timed: Timed | None = None) -> None:
        self.place = Place()
        self.seconds = 0.0
        self.spent = 0.0
        """Seconds that went into the steps that were done."""
        self.timed = Timed() if timed is None else timed

    def drive(self, roles: Sequence[Role]) -> list[Any]:
        return [self._to_its_end(role) for role in roles]

    def _to_its_end(self, role: Role) -> Any:
        value = None
        try:
            while True:
                value = self._count(role.send(value))
        except StopIteration as stop:
            return stop.value
        finally:
            role.close()

    def _count(self, work: Compute | Scan) -> Any:
        start = time.process_time()
        with torch.no_grad():
            result = self._call(work) if isinstance(work, Compute) else self._loop(work)
        self.spent += time.process_time() - start
        return result

    def _call(self, work: Compute) -> Any:
        key = _kind(work.fn, _shapes(work.args))
        if key not in self.timed.calls:
            args = self.place.put(work.args)
            start = time.process_time()
            result = work.fn(*args)
            self.timed.calls[key] = time.process_time() - start, result
        seconds, result = self.timed.calls[key]
        self.seconds += seconds
        return tree.copy(result)

    def _loop(self, work: Scan) -> Any:
        carry, consts, count = self.place.put(work.carry), self.place.put(work.consts), length(work.xs)
        if not count:
            return carry
        met = _one_step(work.xs)
        key = _kind(work.step, [_shapes(work.carry), _shapes(work.consts), met])
        alike = _kind(work.step, [tuple(leaf.shape[1:]) for leaf in tree.leaves(carry) if isinstance(leaf, Tensor)])
        before, carried = self.timed.alike.get(alike, (0.0, 1))
        if key not in self.timed.steps and before > PATIENCE:
            # A slow step of another size is taken to be in proportion to what it carries, and not timed again.
            self.timed.steps[key] = before * _elements(carry) / carried
        if key not in self.timed.steps:
            clock = time.process_time()
            for done, x in enumerate(steps(work.xs, self.place), start=1):
                carry = work.step(carry, x, *consts)
                now = time.process_time()
                if done == 1 and count > 1:
                    clock = now
                elif done in (count, 1 + TIMED) or now - clock > PATIENCE:
                    self.timed.steps[key] = (now - clock) / max(1, done - 1)
                    self.timed.alike[alike] = self.timed.steps[key], _elements(carry)
                    break
        self.seconds += count * self.timed.steps[key]
        return carry


def _elements(carry: Any) -> int:
    return 1 + sum(leaf.numel() for leaf in tree.leaves(carry) if isinstance(leaf, Tensor))


def _kind(fn: Any, shapes: Any) -> tuple[str, ...]:
    """What makes two pieces of work take the same time: the function, its settings and the shapes that it meets."""
    owner = getattr(fn, "__self__", None)
    name = f"{type(owner).__name__} {getattr(fn, '__qualname__', repr(fn))}"
    return name, _settings(owner), repr(shapes)


def _settings(owner: Any, depth: int = 3) -> str:
    """The plain values in a dataclass and in those that it holds."""
    if not dataclasses.is_dataclass(owner) or not depth:
        return repr(owner) if isinstance(owner, PLAIN) else ""
    held = {part.name: getattr(owner, part.name) for part in dataclasses.fields(owner)}
    return f"{type(owner).__name__}({' '.join(f'{k}={_settings(v, depth - 1)}' for k, v in held.items())})"


def _shapes(what: Any) -> Any:
    """Of all tensors; of a pool that is only reached through indices, without how many samples it has."""
    if isinstance(what, Pool):
        return [tuple(leaf.shape[1:]) for leaf in tree.leaves(what)]
    if isinstance(what, list | tuple):
        return [_shapes(part) for part in what]
    return [tuple(leaf.shape) for leaf in tree.leaves(what) if isinstance(leaf, Tensor) and leaf.ndim]


def _one_step(xs: Any) -> Any:
    """The shapes that one step of a scan meets."""
    made = xs.make(xs.seed, 0, 1) if isinstance(xs, Chunks) else xs
    return [tuple(leaf.shape[1:]) for leaf in tree.leaves(made)]


def estimate(config: RunConfig, timed: Timed | None = None) -> float | None:
    """Seconds of one core for one run, or None where the data set's size is not known; `timed` is what was before."""
    if config.dataset not in SIZED or SIZED[config.dataset].sizes is None:
        return None
    counting, config = Counting(timed), dataclasses.replace(config, device="cpu")
    with estimates.one_core(), _quiet():
        if not hasattr(config.options, "exchanges"):
            return _seconds(config, counting)
        few, more = 2, 6
        low, high = (_seconds(_with(config, exchanges=n), counting) for n in (few, more))
        return low + max(0.0, high - low) / (more - few) * (config.options.exchanges - few)


@contextmanager
def _quiet() -> Iterator[None]:
    """What a run warns of is not true of its shortened forms."""
    log = logging.getLogger("fedgist")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _seconds(config: RunConfig, counting: Counting) -> float:
    """Of all rounds and evaluations, from two rounds; what happens every so many rounds is counted apart."""
    every = getattr(config.options, "distil_every", 1)
    first, later, evaluation = _rounds(_with(config, distil_every=1) if every > 1 else config, counting)
    lesson = 0.0
    if every > 1:
        plain = _rounds(_with(config, distil_every=10**6), counting)
        lesson, (first, later, evaluation) = later - plain[1], plain
    evaluations = config.rounds // config.eval_every if config.eval_every else 1
    sizes = SIZED[config.dataset].sizes
    assert sizes is not None
    scale = sizes[1] / TESTED
    whole = first + (config.rounds - 1) * later + lesson * (config.rounds // every)
    return whole + max(1, evaluations) * evaluation * scale


def _rounds(config: RunConfig, counting: Counting) -> tuple[float, float, float]:
    """Seconds of the first round, of the second, and of an evaluation on so many made-up images."""
    inputs = _made_up(config)
    method = methods.find(config.method)(config.options, inputs.task)
    engine = in_process(method, inputs, config, counting)
    marks = [_mark(counting)]
    for _ in range(2):
        engine.run_round()
        marks.append(_mark(counting))
    with suppress(TooFewAnswers):
        engine.evaluate(inputs.test)
    marks.append(_mark(counting))
    first, later, evaluation = (after - before for before, after in pairwise(marks))
    return first, later, evaluation


def _mark(counting: Counting) -> float:
    """Where the count stands: all work, and what messages and states really took meanwhile."""
    return counting.seconds + time.process_time() - counting.spent


def _made_up(config: RunConfig) -> sources.Inputs:
    """Clients as the run has them, with labels drawn in turn and one image for all, which costs no memory."""
    card = SIZED[config.dataset]
    assert card.sizes is not None
    shape, classes, size = card.shape, card.classes, min(card.sizes[0], config.limit or card.sizes[0])
    y = torch.arange(size) % classes
    x = Rng(0)("image").uniform(1, *shape)
    settings = {name: getattr(config, name) for name in partitions.options(config.partition)}
    seed = config.seed if config.partition_seed is None else config.partition_seed
    people = torch.arange(size) % PEOPLE
    parts = partitions.split(y, config.clients, Rng(seed)("partition"), config.partition, people, **settings)
    clients = [(x.expand(len(part), *shape), y[part]) for part in parts]
    test = x.expand(TESTED, *shape), torch.arange(TESTED) % classes
    made = sources.from_memory(config, by_client(clients), test, classes)
    if config.proxy is None:
        return made
    proxy = x.expand(configs.proxy_spec(config.proxy)[1], *shape)
    return dataclasses.replace(made, task=dataclasses.replace(made.task, proxy=proxy))


def _with(config: RunConfig, **changes: Any) -> RunConfig:
    return configs.resolve({**configs.flat(config), **changes})


def processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def write(path: Path, afresh: bool) -> None:
    """Adds to the table what it lacks, as its machine would take; or makes a table of this machine."""
    cells = [cell for scale in ("full", "small") for one in presets.available(scale).values() for cell in one.cells]
    known = json.loads(path.read_text("utf-8"))
    speed = statistics.median(estimates.calibration() for _ in range(5))
    if afresh:
        known = {"machine": processor(), "calibration": round(speed, 2), "seconds": {}}
    factor, timed = speed / known["calibration"], Timed()
    wanted = {cell.run: cell.config for cell in cells}
    seconds = {run: known["seconds"][run] for run in wanted if run in known["seconds"]}
    for number, (run, config) in enumerate(wanted.items(), start=1):
        if run not in seconds:
            try:
                counted, said = estimate(config, timed), ""
            except FedgistError as wrong:  # a run that cannot be made takes no known time
                counted, said = None, f" ({wrong})"
            seconds[run] = None if counted is None else round(counted / factor, 1)
            print(f"{number}/{len(wanted)} {run}: {seconds[run]} s{said}", flush=True)
            write_json(path, {**known, "seconds": dict(sorted(seconds.items()))})  # stopped, it goes on from here
    write_json(path, {**known, "seconds": dict(sorted(seconds.items()))})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="time everything anew, on this machine")
    parser.add_argument("--out", type=Path, default=estimates.REFERENCE, help="the table")
    asked = parser.parse_args()
    write(asked.out, asked.all)
