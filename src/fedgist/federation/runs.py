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
from fedgist.engines.envelope import Question
from fedgist.engines.remote import Lost, Patience, RemoteEngine, Transport, introductions
from fedgist.engines.scheduler import Executor
from fedgist.experiments import inputs as sources
from fedgist.experiments import runner
from fedgist.experiments.config import OWN, RunConfig
from fedgist.experiments.inputs import Inputs
from fedgist.experiments.progress import Progress

log = logging.getLogger("fedgist")

SIMULATED = ("offline", "delay", "topology", "discrepancy")
"""Options that pretend on one machine what a federation really has, or that need clients to talk without a server."""

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
    first = runner.prepare(config({"clients": len(sites), "partition": OWN}))
    check(first)
    inputs = sources.from_sites(first, sites)  # what the user got wrong shows before anybody is asked
    with connected() as transport:
        asked = _architectures(sites, first, inputs, transport, patience, resume)
        final = runner.prepare(config({"clients": len(sites), "partition": OWN, **asked}))

        def make(method: Method, inputs: Inputs, config: RunConfig, executor: Executor) -> Engine:
            return RemoteEngine(method, transport, inputs.info, seed=config.seed, executor=executor, patience=patience)

        inputs = sources.from_sites(final, sites)
        try:
            return runner.run(final, out or runner.default_folder(final), resume, inputs, progress, make)
        except runner.Interrupted as stop:
            raise runner.Interrupted(stop.kept, "the same command and --resume") from None


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
    sites: Sequence[str],
    config: RunConfig,
    inputs: Inputs,
    transport: Transport,
    patience: Patience,
    resume: bool,
) -> dict[str, Any]:
    """What the sites announced; a run that goes on has their architectures in its configuration already."""
    if resume and config.architectures:
        return {}
    question = Question(config.method, list(inputs.task.shape), inputs.task.classes)
    found = introductions(transport, list(sites), question, patience.timeout)
    absent = {id: answer.why for id, answer in found.items() if isinstance(answer, Lost)}
    for id, why in sorted(absent.items()):
        log.warning(f"site {id} does not take part: {why}")
    if len(sites) - len(absent) < patience.sites:
        raise FedgistError(f"fewer than {patience.sites} sites take part: {'; '.join(absent.values())}")
    announced = {id: answer for id, answer in found.items() if isinstance(answer, str)}
    chosen = [announced.get(id) or config.model for id in sorted(sites)]  # dealt out in the order of the names
    return {"architectures": tuple(chosen)}
