"""One schedule: a run across simulated sites, through all that goes wrong, to its end; and what must hold then."""

import errno
import logging
import os
import random
import secrets
import tempfile
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from fedgist import methods
from fedgist.core.errors import FedgistError
from fedgist.core.method import Method
from fedgist.engines import executor
from fedgist.engines.engine import Engine
from fedgist.engines.scheduler import Executor
from fedgist.experiments import config as configs
from fedgist.experiments import inputs as sources
from fedgist.experiments import runner
from fedgist.experiments.config import RunConfig
from fedgist.experiments.folder import RunFolder
from fedgist.experiments.inputs import Inputs
from fedgist.experiments.progress import Silent
from fedgist.federation.chaos import invariants
from fedgist.federation.chaos.faults import Crash, Faults
from fedgist.federation.chaos.tally import Tally
from fedgist.federation.chaos.world import SERVER, World
from fedgist.federation.protocol import site_host
from fedgist.federation.protocol.envelope import PROTOCOL, Start
from fedgist.federation.protocol.policy import Policy, opened
from fedgist.federation.protocol.remote_engine import Attendance, Patience, RemoteEngine
from fedgist.federation.protocol.site_host import SiteHost

TIMEOUT = 20.0
"""Seconds, on the simulated clock, until a silent site is given up."""
MOST_ATTEMPTS = 60
"""How often the operator starts the server before a run counts as one that does not end."""
RULES = Policy(min_samples_per_class=1, min_test_samples=1, max_runs=6)
MEMORY = "/dev/shm"


@dataclass
class Outcome:
    """What became of a schedule."""

    number: int
    faults: str
    wrong: list[str]
    """What should hold and does not."""
    story: list[str] = field(repr=False)
    attempts: int = 0
    complete: bool = False
    """Whether every site answered every exchange, so that the result is that of a run without faults."""


class Operator(Silent):
    """Sees what the server says of its rounds; a round that was shown is one that was kept."""

    def __init__(self, world: World, every: int):
        self.world, self.every, self.shown, self.wrong = world, every, 0, list[str]()

    def start(self, title: str, done: int, rounds: int) -> None:
        self.world.tell(f"the server goes on after round {done}")
        if done < self.shown:
            self.wrong.append(f"round {self.shown} was shown as done, and the run goes on after round {done}")

    def round(self, row: dict[str, Any]) -> None:
        self.world.tell(f"round {row['round']}: {row['answered']} answered; {row.get('missing', 'all there')}")
        self.shown = max(self.shown, row["round"] // self.every * self.every)


@cache
def task(method: str, sites: int, rounds: int) -> tuple[RunConfig, Inputs]:
    """A run of the method's toy profile on a few small digits, a share for each site."""
    known = {"method": method, "dataset": "digits", "limit": 60, "clients": sites, "rounds": rounds}
    given = {"device": "cpu", "engine": "sequential", "checkpoint_every": 1, "eval_every": 1}
    profile = "toy" if "toy" in methods.find(method).profiles else None
    config = configs.resolve({**known, **given, "model": "mlp:hidden=4"}, profile=profile)
    config = runner.prepare(replace(config, rounds=rounds, clients=sites))
    return config, sources.from_dataset(config)


def play(seed: int, number: int, method: str = Tally.name) -> Outcome:
    """Play a schedule and check what must hold."""
    faults = Faults(seed, number)
    memory = MEMORY if os.path.isdir(MEMORY) else None
    with tempfile.TemporaryDirectory(prefix="fedgist-", dir=memory) as folder, _staged(faults):
        return _play(faults, Path(folder), method)


@contextmanager
def _staged(faults: Faults) -> Iterator[None]:
    """What is not part of the play: another method in the list, no timers and no chance but the schedule's own."""
    log, names = logging.getLogger("fedgist"), random.Random(f"names of {faults.seed}/{faults.number}")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)  # thousands of refusals, each as it should be
    try:
        with (
            mock.patch.dict(methods.registry(), {Tally.name: Tally}),
            mock.patch.object(site_host, "within_seconds", lambda *_: nullcontext()),
            mock.patch.object(secrets, "token_hex", lambda size: f"{names.getrandbits(8 * size):0{2 * size}x}"),
        ):
            yield
    finally:
        log.setLevel(before)


def _play(faults: Faults, folder: Path, name: str) -> Outcome:
    dice = faults.dice
    config, inputs = task(name, dice.choice((2, 3, 3)), dice.choice((2, 3, 4)))
    config = replace(config, checkpoint_every=dice.choice((1, 1, 2)), eval_every=dice.choice((0, 1, 1, 2)))
    method = methods.find(name)(config.options, inputs.task)

    def host(id: str, at: Path) -> SiteHost:
        def prepare(start: Start) -> tuple[Method, Any]:
            return method, inputs.sites[id]

        return SiteHost(id, at, prepare, executor("sequential"), opened(method, RULES))

    world = World(faults, folder, host, sorted(inputs.sites))
    operator, run = Operator(world, config.checkpoint_every), RunFolder(folder / SERVER / "run")
    patience = Patience(TIMEOUT, enough=dice.choice((1.0, 1.0, 1.0, 0.6)))
    outcome = Outcome(faults.number, str(faults), operator.wrong, world.story)
    there = replace(inputs, sites={}, counts={}, parts=None)

    def make(method: Method, inputs: Inputs, config: RunConfig, executor: Executor) -> Engine:
        known: Any = {"seed": config.seed, "executor": executor, "patience": patience}
        return RemoteEngine(method, world, inputs.info, **known, attend=attend if faults.number % 2 else None)

    def attend(absent: Collection[str]) -> Attendance:
        """Who was lost and is up joins at the next round; in every other schedule only with the next resume."""
        return Attendance(back={id: PROTOCOL for id in absent if world.is_up(id)})

    with world.disk.between():
        finished = _operate(config, run, there, world, operator, make, outcome)
        world.drain()
    if finished is not None:
        outcome.wrong += invariants.broken(world, run, finished, inputs, method, outcome)
    return outcome


def _operate(
    config: RunConfig, run: RunFolder, inputs: Inputs, world: World, operator: Operator, make: Any, outcome: Outcome
) -> RunConfig | None:
    """Start the server, and start it again whatever it died of, until the run has ended; None if it does not."""
    while outcome.attempts < MOST_ATTEMPTS:
        outcome.attempts += 1
        try:
            runner.run(config, run.path, True, lambda _: inputs, operator, make)
            return config
        except Crash:
            world.server_died()
        except (FedgistError, OSError) as error:
            world.tell(f"the server stops: {error}")
            if not _expected(error):
                outcome.wrong.append(f"the server stopped: {error}")
                return None
            if "no evaluation" in str(error):
                operator.shown = 0  # the last round is done again, and one more for another evaluation
                config = replace(config, rounds=config.rounds + 1)
            world.make_room()
        except Exception:
            outcome.wrong.append(f"the server failed: {traceback.format_exc()}")
            return None
    outcome.wrong.append(f"the run does not end in {MOST_ATTEMPTS} attempts")
    return None


def _expected(error: Exception) -> bool:
    """What stops a server that lost its sites or has no room; the run goes on when that is mended."""
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    said = ("sites are left", "no evaluation gave", "is full", os.strerror(errno.ENOSPC))
    return full or (isinstance(error, FedgistError) and any(words in str(error) for words in said))
