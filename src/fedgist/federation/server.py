"""The server: NVFlare's long-lived process, and runs that are driven from here through a job on it."""

import contextlib
import io
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedgist import methods
from fedgist.core.errors import FedgistError
from fedgist.core.method import Method
from fedgist.engines.engine import Engine
from fedgist.engines.envelope import Question
from fedgist.engines.flare import FlareTransport, write_job
from fedgist.engines.remote import Lost, Patience, RemoteEngine, introductions
from fedgist.engines.scheduler import Executor
from fedgist.experiments import inputs as sources
from fedgist.experiments import runner
from fedgist.experiments.config import OWN, RunConfig
from fedgist.experiments.inputs import Inputs
from fedgist.experiments.progress import Progress
from fedgist.federation import kits, processes
from fedgist.federation.kits import Federation
from fedgist.federation.site import ProvisionedSite

log = logging.getLogger("fedgist")

SIMULATED = ("offline", "delay", "topology", "discrepancy")
"""Options that pretend on one machine what a federation really has, or that need clients to talk without a server."""

Config = Callable[[dict[str, Any]], RunConfig]
"""The configuration of a run, given what only the federation knows: how many sites, and their architectures."""


def start(federation: Federation, say: processes.Say) -> int:
    """Run NVFlare's server until it is interrupted."""
    say(f"server {federation.server}:{federation.port}; sites {', '.join(federation.sites)} may join")
    return processes.watch(processes.server(federation.server_kit, kits.ORGANISATION), processes.AT_SERVER, say)


def run(
    federation: Federation,
    config: Config,
    out: Path | None,
    resume: bool,
    patience: Patience,
    wait: float,
    progress: Progress,
) -> runner.Result:
    """One run across the sites of a federation, from its beginning or from its last checkpoint."""
    first = runner.prepare(config({"clients": len(federation.sites), "partition": OWN}))
    _check(first)
    inputs = sources.from_sites(first, federation.sites)  # what the user got wrong shows before a job is submitted
    with connected(federation, wait) as transport:
        chosen = config(
            {
                "clients": len(federation.sites),
                "partition": OWN,
                **_architectures(federation, first, inputs, transport, patience, resume),
            }
        )

        def make(method: Method, inputs: Inputs, config: RunConfig, executor: Executor) -> Engine:
            return RemoteEngine(method, transport, inputs.info, seed=config.seed, executor=executor, patience=patience)

        final = runner.prepare(chosen)
        inputs = sources.from_sites(final, federation.sites)
        try:
            return runner.run(final, out or runner.default_folder(final), resume, inputs, progress, make)
        except runner.Interrupted as stop:
            raise runner.Interrupted(stop.kept, "the same command and --resume") from None


def _check(config: RunConfig) -> None:
    """Refuses what only one machine can do."""
    usual = RunConfig()
    if changed := [name for name in SIMULATED if getattr(config, name) != getattr(usual, name)]:
        raise FedgistError(f"{changed[0]} is for clients that are simulated on one machine; a federation has real ones")
    if methods.find(config.method).pooled and config.clients > 1:
        raise FedgistError(f"{config.method} wants all data at one site, which is what a federation is not for")
    if config.seeds > 1:
        raise FedgistError("a federation makes one run at a time; for several seeds repeat it with --seed")


def _architectures(
    federation: Federation,
    config: RunConfig,
    inputs: Inputs,
    transport: FlareTransport,
    patience: Patience,
    resume: bool,
) -> dict[str, Any]:
    """What the sites announced; a run that goes on has their architectures in its configuration already."""
    if resume and config.architectures:
        return {}
    question = Question(config.method, list(inputs.task.shape), inputs.task.classes)
    found = introductions(transport, list(federation.sites), question, patience.timeout)
    absent = {id: answer.why for id, answer in found.items() if isinstance(answer, Lost)}
    for id, why in sorted(absent.items()):
        log.warning(f"site {id} does not take part: {why}")
    if len(federation.sites) - len(absent) < patience.sites:
        raise FedgistError(f"fewer than {patience.sites} sites take part: {'; '.join(absent.values())}")
    chosen = [str(found[id]) if id not in absent and found[id] else config.model for id in federation.sites]
    return {"architectures": tuple(chosen)}


@contextlib.contextmanager
def connected(federation: Federation, wait: float) -> Iterator[FlareTransport]:
    """A job on the federation's server that carries envelopes, with those sites that are there."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    logging.getLogger("nvflare").setLevel(logging.CRITICAL)  # what matters of its errors is said below
    with contextlib.ExitStack() as stack:
        transport = FlareTransport()
        stack.callback(transport.close)
        with _in_words(federation):
            with contextlib.redirect_stdout(io.StringIO()):  # it greets
                session = new_secure_session(kits.ADMIN, str(federation.admin_kit), timeout=30.0)
            stack.callback(session.close)
            there = _await_sites(federation, session, wait)
            for site in sorted(set(federation.sites) - there):
                log.warning(f"site {site} is not there; it can join later with --resume")
            with tempfile.TemporaryDirectory() as folder:
                write_job(Path(folder), transport.address, ProvisionedSite, min_sites=len(there))
                job = session.submit_job(folder)
            stack.callback(_end_job, session, job, transport)
            _await_job(session, job, transport)
        yield transport


@contextlib.contextmanager
def _in_words(federation: Federation) -> Iterator[None]:
    """Turns the many ways in which NVFlare says that it cannot into one sentence."""
    try:
        yield
    except FedgistError:
        raise
    except Exception as error:
        raise FedgistError(
            f"the server at {federation.server}:{federation.port} does not answer ({type(error).__name__}: {error}); "
            f"start it with `fedgist federation start {federation.path}`"
        ) from error


def _await_sites(federation: Federation, session: Any, wait: float) -> set[str]:
    """The sites that are connected: all, or those that are after so many seconds."""
    until = time.monotonic() + wait
    while True:
        there = {client.name for client in session.get_connected_client_list()} & set(federation.sites)
        if len(there) == len(federation.sites) or (time.monotonic() > until and there):
            return there
        if time.monotonic() > until:
            raise FedgistError(f"no site has connected within {wait:g} s: start them with `fedgist site start`")
        time.sleep(0.5)


def _await_job(session: Any, job: str, transport: FlareTransport) -> None:
    """Wait until the job's server calls back, for as long as NVFlare has not given the job up."""
    while not transport.wait(2.0):
        if not _alive(status := str(session.get_job_status(job))):
            raise FedgistError(f"NVFlare could not start the job: {status}; the logs of server and sites say why")


def _end_job(session: Any, job: str, transport: FlareTransport) -> None:
    """The job ends when nobody drives it; NVFlare would wait for a site that died in it, so it is told not to."""
    transport.close()
    with contextlib.suppress(Exception):  # the server may be gone, and then so is the job
        for _ in range(10):
            if not _alive(str(session.get_job_status(job))):
                return
            time.sleep(0.5)
        session.abort_job(job)


def _alive(status: str) -> bool:
    return status in ("SUBMITTED", "APPROVED", "DISPATCHED", "RUNNING")
