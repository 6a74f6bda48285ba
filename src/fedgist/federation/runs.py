"""A run across sites, whatever carries the envelopes."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fedgist import engines, methods
from fedgist.core.errors import FedgistError, MixedModels
from fedgist.core.method import Method
from fedgist.core.rng import Rng
from fedgist.data import topologies
from fedgist.engines.engine import Engine
from fedgist.engines.layer import Layer
from fedgist.engines.scheduler import Executor
from fedgist.experiments import config as configs
from fedgist.experiments import inputs as sources
from fedgist.experiments import privacy, runner, security, standardisation
from fedgist.experiments.config import OWN, RunConfig
from fedgist.experiments.folder import RunFolder, default_folder, read_json
from fedgist.experiments.inputs import Inputs
from fedgist.experiments.progress import Progress
from fedgist.federation import gains
from fedgist.federation.protocol.envelope import Question
from fedgist.federation.protocol.network import MOST_SITES, Network
from fedgist.federation.protocol.peer_engine import PeerEngine
from fedgist.federation.protocol.policy import LARGEST_MODEL, Policy
from fedgist.federation.protocol.remote_engine import (
    Attendance,
    Introduced,
    Lost,
    Patience,
    RemoteEngine,
    Transport,
    ask_introductions,
)
from fedgist.federation.protocol.roster import Roster
from fedgist.models import Model, own_code
from fedgist.options import Role, having, options, toml_value
from fedgist.words import plain, short

log = logging.getLogger("fedgist")


@dataclass(frozen=True)
class Settled:
    """A run as far as it is known before anybody is asked; its data is loaded."""

    config: RunConfig
    """As it was asked for, with `auto` where nobody has chosen."""
    inputs: Inputs
    folder: RunFolder
    sites: Sequence[str]
    """Those that take part; a helper does not."""
    helper: str = ""
    overwrite: bool = False
    """Whether a run in the folder gives way."""


def _begun_with(folder: RunFolder) -> list[str]:
    """The sites of a run that goes on: who has become a member since is not in its state, and who has left is away."""
    return read_json(folder.environment).get("sites", []) if folder.environment.is_file() else []


def run(
    known: Settled,
    connected: Callable[[], AbstractContextManager[Transport]],
    resume: bool,
    patience: Patience,
    progress: Progress,
    membership: "Membership | None" = None,
    alone: RunFolder | None = None,
) -> runner.Result:
    """One run across sites, from its beginning or from its last checkpoint.

    `alone` is a finished run of `independent` across the same sites, with which they compare it at the end.
    """
    members = [*known.sites, *[known.helper] * bool(known.helper)]
    with connected() as transport:
        found = _introductions(members, known, transport, patience, membership)
        if isinstance(lost := found.pop(known.helper, None), Lost):
            raise FedgistError(f"the helper {known.helper} is not there: {lost.why}")

        def attend(absent: Collection[str]) -> Attendance:
            """Who of the absent sites is there now, told and asked like everybody when the run began."""
            if membership is None:
                return Attendance()
            here = sorted(set(absent) & set(membership.present()))
            told = _introductions(here, known, transport, patience, membership) if here else {}
            back = {id: one.protocol for id, one in told.items() if isinstance(one, Introduced)}
            return Attendance(back, membership.expelled())

        if resume and known.folder.started:  # the server's state may hold a part for each architecture: they stay
            chosen = known.folder.configuration().architectures
        else:
            chosen = _architectures(known, found, patience)
        final = configs.resolve({**configs.flat(known.config), "architectures": chosen})

        def make(method: Method, inputs: Inputs, config: RunConfig, executor: Executor) -> Engine:
            about: dict[str, Any] = {
                "seed": config.seed,
                "executor": executor,
                "patience": patience,
                "protocols": {id: one.protocol for id, one in found.items() if isinstance(one, Introduced)},
                "attend": attend,
                "layer": privacy.across(method, config, _layer(config, membership)),
            }
            if config.topology is None:
                return RemoteEngine(method, transport, inputs.info, **about)
            assert membership is not None  # or there would be no layer
            models = {id: told["model"] for id, told in inputs.info.items()}
            network = Network(config.topology, models, membership.known().digest)
            return PeerEngine(method, transport, inputs.info, network, **about)

        def load(config: RunConfig) -> Inputs:
            return sources.with_architectures(config, known.inputs)

        try:
            result = runner.run(final, known.folder.path, resume, load, progress, make, known.overwrite)
        except runner.Interrupted as stop:
            raise runner.Interrupted(stop.kept, "the same command and --resume") from None
        if alone is not None and not gains.compared(known.folder, alone):
            inputs, settled = standardisation.recalled(final, load(final), known.folder), runner.prepare(final)
            here = engines.executor(settled.engine, settled.device)

            def asking(method: Method) -> Engine:
                return make(method, inputs, final, here)

            gains.compare(known.folder, alone, inputs.task, result.weights, asking)
        return result


def _layer(config: RunConfig, membership: "Membership | None") -> Layer | None:
    """What lies between the sites' replies and this server, by the newest roster.

    Where sites ask each other, scores are all that comes here, and only their sum is anybody's business.
    """
    if not (config.secure or config.topology):
        return None
    if membership is None or not membership.roster():
        what = "secure sums" if config.secure else "letters between sites"
        raise FedgistError(f"{what} need the signed roster of a federation on NVFlare, which is not here")
    from fedgist.federation.protocol.secure_sums import server_layer

    chosen = security.read(config.secure or "masks")
    layer = server_layer(membership.known(), chosen.grid, chosen.group, chosen.trips, chosen.by)
    if config.topology:
        layer.title = f"letters between sites, sealed; scores in {layer.title}"
    return layer


def settle(
    sites: Sequence[str],
    config: Callable[[dict[str, Any]], RunConfig],
    out: Path | None,
    resume: bool,
    code: str = "",
    overwrite: bool = False,
) -> Settled:
    """What is known before anybody is asked, so that what the user got wrong shows first.

    `config` makes the configuration, given what only the federation knows: how many sites. `code` is the run's model
    where that is a `package:factory` which the operator of the server has named.
    """
    known = {"clients": len(sites), "partition": OWN}
    helper = security.helper(config(known), sites)
    sites = (_begun_with(RunFolder(out)) if resume and out else []) or [site for site in sites if site != helper]
    asked = config(known := {**known, "clients": len(sites)})
    named: dict[str, Model] = {}
    if code:
        model = sources.from_code(asked, code)
        name = own_code.announced(model)
        named, asked = {name: model}, config({**known, "model": name})
    here = runner.prepare(asked)
    check(here)
    if here.topology is not None:
        topologies.over_time(here.topology, sorted(sites), Rng(here.seed))  # says what is wrong
    for name, given in Policy().outside(here.method, here.options).items():
        value, usual = (
            options(here.options)[name].written(getattr(here.options, name)),
            ", ".join(map(str, given)) or "nothing",
        )
        log.warning(
            f"{name} = {toml_value(value)}: sites allow {usual}, unless their policy.toml says more for {here.method}"
        )
    folder = RunFolder(out or default_folder(here))  # found again whatever the sites have announced
    folder.check_free(resume or overwrite)
    return Settled(asked, sources.from_sites(here, sites, named), folder, sites, helper, overwrite)


def check_typed(names: Collection[str]) -> None:
    """Refuses what whoever starts a run cannot say for its sites; a file of a run on one machine may hold it."""
    if said := [name for name in having(RunConfig, Role.SITES) if name in names]:
        raise FedgistError(
            f"{said[0]} is for a run on one machine: in a federation the clients are the sites, each with data and a "
            f"model of its own; leave out {said[0]}"
        )


def check(config: RunConfig) -> None:
    """Refuses what only one machine can do."""
    if config.seeds > 1:
        raise FedgistError("a federation makes one run at a time; for several seeds repeat it with --seed")
    known = options(RunConfig)
    if changed := [name for name in having(config, Role.SIMULATION) if getattr(config, name) != known[name].default]:
        raise FedgistError(f"{changed[0]} is for clients that are simulated on one machine; a federation has real ones")
    if config.topology is not None and not 2 <= config.clients <= MOST_SITES:
        raise FedgistError(f"a topology across machines has from 2 to {MOST_SITES} sites, not {config.clients}")
    if methods.find(config.method).pooled and config.clients > 1:
        raise FedgistError(f"{config.method} wants all data at one site, which is what a federation is not for")


class Membership(Protocol):
    """Who keeps the roster of a federation."""

    def roster(self) -> bytes:
        """The newest roster, for the sites; empty where there is none."""

    def known(self) -> Roster:
        """The same, read."""

    def hear(self, announced: Mapping[str, bytes]) -> bool:
        """Take what sites announce as their keys; True if that made a new roster."""

    def present(self) -> Collection[str]:
        """The sites that can be asked now."""

    def expelled(self) -> Mapping[str, str]:
        """The sites that do not belong to it any more, and why."""


def _introductions(
    sites: Sequence[str], known: Settled, transport: Transport, patience: Patience, membership: Membership | None
) -> dict[str, Introduced | Lost]:
    """What the sites say of themselves; they are told the newest roster, also one with what they have announced now."""
    question = Question(known.config.method, list(known.inputs.task.shape), known.inputs.task.classes)

    def ask() -> dict[str, Introduced | Lost]:
        roster = membership.roster() if membership else b""
        return ask_introductions(transport, sites, question, patience.timeout, roster)

    found = ask()
    announced = {id: one.announced for id, one in found.items() if isinstance(one, Introduced) and one.announced}
    return ask() if membership and membership.hear(announced) else found


def _architectures(known: Settled, found: Mapping[str, Introduced | Lost], patience: Patience) -> tuple[str, ...]:
    """What each site runs from now on: what it announced, and the run's model where it announced nothing."""
    config, sites = known.config, known.sites
    models = {id: one.model for id, one in found.items() if isinstance(one, Introduced)}
    unfit = {model: _misfit(known, model) for model in {*models.values()} if model}
    absent = {id: one.why for id, one in found.items() if isinstance(one, Lost)}
    absent |= {id: why for id, model in models.items() if (why := unfit.get(model))}
    for id, why in sorted(absent.items()):
        log.warning(f"site {id} does not take part: {why}; to join this run later, it has to run {config.model}")
    if len(sites) - len(absent) < patience.sites:
        reasons = "; ".join(f"{id}: {why}" for id, why in sorted(absent.items()))
        raise FedgistError(f"too few sites take part (--min-sites {patience.sites}; {reasons})")
    chosen = {id: model for id, model in models.items() if id not in absent}
    return tuple(chosen.get(id) or config.model for id in sorted(sites))  # dealt out in the order of the names


def _misfit(known: Settled, model: str) -> str | None:
    """Why a site with such a model cannot take part: there is none, it is too large, or the method wants one for all.

    That is this site's misfortune, and not that of everybody.
    """
    try:
        task = sources.with_architectures(replace(known.config, architectures=(model,)), known.inputs).task
        if task.models[model].size > LARGEST_MODEL:
            raise FedgistError(f"{model} has {short(task.models[model].size)} weights, more than a run bears")
        methods.find(known.config.method)(known.config.options, task)
    except MixedModels as error:
        own = model.startswith(own_code.ELSEWHERE)
        hint = "; if all sites run one module of their own, name it here, too: --model package:factory" if own else ""
        return plain(f"{error}{hint}")
    except FedgistError as error:
        return plain(str(error))
    return None
