"""A run across sites, whatever carries the envelopes."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fedgist import methods
from fedgist.core.errors import FedgistError
from fedgist.core.method import Method
from fedgist.engines.engine import Engine
from fedgist.engines.scheduler import Executor
from fedgist.experiments import config as configs
from fedgist.experiments import inputs as sources
from fedgist.experiments import runner
from fedgist.experiments.config import OWN, RunConfig
from fedgist.experiments.folder import RunFolder
from fedgist.experiments.inputs import Inputs
from fedgist.experiments.progress import Progress
from fedgist.federation.protocol.envelope import Question
from fedgist.federation.protocol.remote_engine import Lost, Patience, RemoteEngine, Transport, ask_introductions

log = logging.getLogger("fedgist")

SIMULATED = ("offline", "delay", "topology", "discrepancy", "validation", "client_test")
"""Options that pretend what a federation really has, let clients talk without a server, or decide on sites' data."""

Config = Callable[[dict[str, Any]], RunConfig]
"""The configuration of a run, given what only the federation knows: how many sites, and their architectures."""


def run(
    sites: Sequence[str],
    connected: Callable[[], AbstractContextManager[Transport]],
    config: Config,
    out: Path | None,
    resume: bool,
    patience: Patience,
    progress: Progress,
) -> runner.Result:
    """One run across sites, from its beginning or from its last checkpoint."""
    first, inputs, folder = settle(sites, config, out, resume)
    with connected() as transport:
        if resume and folder.started:  # the server's state may hold a part for each architecture: they stay
            chosen = configs.resolve(configs.load(folder.config)).architectures
        else:
            chosen = _architectures(sites, first, inputs, transport, patience)
        final = runner.prepare(config({"clients": len(sites), "partition": OWN, "architectures": chosen}))

        def make(method: Method, inputs: Inputs, config: RunConfig, executor: Executor) -> Engine:
            return RemoteEngine(method, transport, inputs.info, seed=config.seed, executor=executor, patience=patience)

        inputs = sources.from_sites(final, sites)
        try:
            return runner.run(final, folder.path, resume, inputs, progress, make)
        except runner.Interrupted as stop:
            raise runner.Interrupted(stop.kept, "the same command and --resume") from None


def settle(sites: Sequence[str], config: Config, out: Path | None, resume: bool) -> tuple[RunConfig, Inputs, RunFolder]:
    """What is known before anybody is asked, so that what the user got wrong shows first."""
    first = runner.prepare(config({"clients": len(sites), "partition": OWN}))
    check(first)
    folder = RunFolder(out or runner.default_folder(first))  # found again whatever the sites have announced
    runner.check_free(folder, resume)
    return first, sources.from_sites(first, sites), folder


def check(config: RunConfig) -> None:
    """Refuses what only one machine can do."""
    usual = RunConfig()
    if changed := [name for name in SIMULATED if getattr(config, name) != getattr(usual, name)]:
        raise FedgistError(f"{changed[0]} is for clients that are simulated on one machine; a federation has real ones")
    if methods.find(config.method).pooled and config.clients > 1:
        raise FedgistError(f"{config.method} wants all data at one site, which is what a federation is not for")
    if config.seeds > 1:
        raise FedgistError("a federation makes one run at a time; for several seeds repeat it with --seed")


def _architectures(
    sites: Sequence[str], config: RunConfig, inputs: Inputs, transport: Transport, patience: Patience
) -> tuple[str, ...]:
    """What each site runs from now on: what it announced, and the run's model where it announced nothing."""
    question = Question(config.method, list(inputs.task.shape), inputs.task.classes)
    found = ask_introductions(transport, list(sites), question, patience.timeout)
    absent = {id: answer.why for id, answer in found.items() if isinstance(answer, Lost)}
    for id, why in sorted(absent.items()):
        log.warning(f"site {id} does not take part: {why}; to join this run later, it has to run {config.model}")
    if len(sites) - len(absent) < patience.sites:
        raise FedgistError(f"fewer than {patience.sites} sites take part: {'; '.join(absent.values())}")
    announced = {id: answer for id, answer in found.items() if isinstance(answer, str)}
    return tuple(announced.get(id) or config.model for id in sorted(sites))  # dealt out in the order of the names
