"""Commands for federations across machines, and for their sites."""

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedgist.cli.common import (
    Commands,
    Config,
    DataDir,
    Flags,
    Json,
    Out,
    Overwrite,
    Profile,
    Quiet,
    Resume,
    Set,
    WithSet,
    flag,
    naming,
    note,
    run_flags,
)
from fedgist.cli.outcome import show_run
from fedgist.core.errors import FedgistError
from fedgist.options import Role

if TYPE_CHECKING:
    from fedgist.experiments.config import RunConfig
    from fedgist.federation.kits import FederationFolder
    from fedgist.federation.protocol.remote_engine import Patience
    from fedgist.federation.runs import Settled

app = Commands()
federation_app = Commands(help="Federations across machines, on NVFlare or Flower.", no_args_is_help=True)
site_app = Commands(help="What a site of a federation runs.", no_args_is_help=True)
app.add_typer(federation_app, name="federation")
app.add_typer(site_app, name="site")

NOT_HERE = Role.SITES | Role.SIMULATION
Folder = Annotated[Path, typer.Argument(help="The folder of the federation.")]
Kit = Annotated[Path, typer.Argument(help="The kit that the site was given.")]
Timeout = Annotated[float, flag("timeout", "Seconds until a silent site is left out for a while.", "S")]
Fairness = Annotated[
    bool, typer.Option("--fairness", help="Run `independent` too, and say how many sites gain over learning alone.")
]


def _say(line: str) -> None:
    print(line, flush=True)


@federation_app.command()
def new(
    directory: Annotated[Path, typer.Argument(help="A folder to make, with certificates and kits.")],
    server: Annotated[str, flag("server", "Host name of the server, as all sites reach it.", "HOST")],
    sites: Annotated[str, flag("sites", "Names of the sites, as in hospital-a,hospital-b.", "NAMES")],
    port: Annotated[int, flag("port", "The server's port.", "N")] = 8002,
) -> None:
    """Make certificates, a kit for each site, and a README that says who runs what."""
    from fedgist.federation import kits

    made = kits.new(directory, server, [name.strip() for name in sites.split(",") if name.strip()], port)
    print(f"{made.path / 'README.md'} says what each side runs; kits: {made.path / 'sites'}")


@federation_app.command()
def start(
    directory: Folder,
    metrics_port: Annotated[
        int | None, flag("metrics-port", "Show metrics of runs at http://127.0.0.1:N/metrics, too.", "N")
    ] = None,
) -> None:
    """Run the server; it stays until Ctrl-C."""
    from fedgist.federation import kits
    from fedgist.federation import server as servers

    raise typer.Exit(servers.start(kits.load(directory), _say, metrics_port))


@federation_app.command(cls=WithSet)
@run_flags(NOT_HERE)
def run(
    flags: Flags,
    method: Annotated[str | None, typer.Argument(help="The method; left out with --config or --resume.")] = None,
    federation: Annotated[Path | None, flag("federation", "The folder of the federation.", "DIR")] = None,
    profile: Profile = None,
    config: Config = None,
    set: Set = None,
    timeout: Timeout = 600.0,
    enough: Annotated[float, flag("enough", "Share of the asked sites whose answers suffice.", "X")] = 1.0,
    min_sites: Annotated[int, flag("min-sites", "Fewest sites to begin and to go on with.", "N")] = 1,
    wait: Annotated[float, flag("wait", "Seconds to wait for sites that are not there yet.", "S")] = 60.0,
    max_norm: Annotated[float, flag("max-norm", "Refuse who adds so many times the round's median.", "X")] = 100.0,
    out: Out = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    fairness: Fairness = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Go on without this terminal; `federation attach` shows it again.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a method across the sites of a federation; --dataset is what the server tests on."""
    if federation is None:
        raise FedgistError("which federation? name its folder with --federation DIR")
    chosen = Choices(naming(flags, method), profile, config, set or [], timeout, enough, min_sites, wait, max_norm)
    known, settled = settle(federation, chosen, out, resume, overwrite)
    if detach:
        _detach(known, settled)
    else:
        run_across(known, settled, chosen, resume, as_json, quiet, fairness)


@federation_app.command(cls=WithSet)
@run_flags(NOT_HERE, "dataset", "data_dir")
def sim(
    flags: Flags,
    directory: Annotated[Path, typer.Argument(help="The folder of the federation; made if it does not exist.")],
    method: Annotated[
        str | None, typer.Argument(help="A method to run; without it, the federation just stays.")
    ] = None,
    sites: Annotated[int, flag("sites", "How many sites a new federation has.", "N")] = 3,
    dataset: Annotated[
        str, flag("dataset", "Data set that the sites share out and the server tests on.", "NAME")
    ] = "digits",
    data_dir: DataDir = None,
    port: Annotated[int, flag("port", "The server's port in a new federation.", "N")] = 8002,
    profile: Profile = None,
    config: Config = None,
    set: Set = None,
    timeout: Timeout = 600.0,
    fairness: Fairness = False,
    out: Out = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Try it out on this machine: a server and sites as real processes, with TLS on loopback."""
    from fedgist.federation import runs as runs_across
    from fedgist.federation import sim as simulations

    data = {"dataset": dataset} | ({} if data_dir is None else {"data_dir": data_dir})
    chosen = Choices({**naming(flags, method), **data}, profile, config, set or [], timeout, wait=simulations.READY)
    names = simulations.names(directory, sites, str(chosen.flags.get("secure") or ""))
    settled = None
    if method is not None or config is not None:  # what the user got wrong shows before anything is started
        known = resolver(chosen, out, resume)
        settled = runs_across.settle(names, known, out, resume, chosen.code, overwrite)
    elif profile or set or flags.keys() - (["model"] if chosen.code else []):
        raise FedgistError("here are options of a run, but no run: name its method, or leave them out")
    federation = simulations.provide(directory, names, settled, dataset, data_dir, port)
    if settled is not None:
        simulations.allow(federation, settled, note)
    with simulations.running(federation, settled, dataset, note, chosen.code):
        if settled is not None:
            run_across(federation, settled, chosen, resume, as_json, quiet, fairness)
        else:
            note(f"try: fedgist federation run fedavg --federation {directory} --dataset {dataset}; Ctrl-C ends")
            signal.pause()


@federation_app.command(cls=WithSet)
@run_flags(NOT_HERE)
def flower(
    flags: Flags,
    directory: Annotated[Path, typer.Argument(help="A folder to make: the Flower app.")],
    method: Annotated[str | None, typer.Argument(help="The method; left out with --config.")] = None,
    sites: Annotated[str, flag("sites", "The sites, by the site-name in their node config.", "NAMES")] = "",
    profile: Profile = None,
    config: Config = None,
    set: Set = None,
    out: Out = None,
) -> None:
    """Write a Flower app that runs a method across the SuperNodes of a Flower federation; `flwr run` starts it."""
    from fedgist.experiments import config as configs
    from fedgist.experiments import runner
    from fedgist.experiments.folder import default_folder
    from fedgist.federation import flower_app
    from fedgist.federation import runs as runs_across

    flags, given = naming(flags, method), configs.assignments(set or [])
    runs_across.check_typed({*flags, *given})
    layers = configs.base_layers("fedgist federation flower APP fedavg --sites a,b", flags, config)
    names = tuple(name.strip() for name in sites.split(",") if name.strip())
    app = flower_app.App(names)
    known = {"clients": len(names)}
    chosen = configs.resolve(*layers, given, flags, known, profile=profile)
    folder = (out or default_folder(runner.prepare(chosen))).resolve()
    flower_app.write(directory, replace(app, out=str(folder), run=configs.flat(chosen)))
    _say(f"{directory / 'pyproject.toml'} is the app; start it with: flwr run {directory} SUPERLINK --stream")
    _say(f"the run's folder will be {folder}, on the machine of the SuperLink")
    note(flower_app.expectation(chosen))


@dataclass(frozen=True)
class Choices:
    """What the user typed about a run."""

    flags: Flags
    profile: str | None
    config: Path | None
    set: list[str]
    timeout: float
    enough: float = 1.0
    min_sites: int = 1
    wait: float = 60.0
    max_norm: float = 100.0

    @property
    def code(self) -> str:
        """The run's model, if that is code: it was named here, by whoever runs it."""
        from fedgist.models import own_code

        model = str(self.flags.get("model", ""))
        return model if own_code.is_code(model) else ""


def resolver(chosen: Choices, out: Path | None, resume: bool) -> Callable[[dict[str, Any]], "RunConfig"]:
    """What makes the configuration, given what only the federation knows."""
    from fedgist.experiments import config as configs
    from fedgist.experiments.folder import RunFolder
    from fedgist.federation import runs as runs_across

    given = configs.assignments(chosen.set)
    runs_across.check_typed({*chosen.flags, *given})
    begun = RunFolder(out).config if resume and out and RunFolder(out).started else None
    command = "fedgist federation run fedavg --federation DIR"
    layers = configs.base_layers(command, chosen.flags, chosen.config, begun)

    def resolve(known: dict[str, Any]) -> "RunConfig":
        flags = {name: value for name, value in chosen.flags.items() if name != "model" or not chosen.code}
        return configs.resolve(*layers, given, flags, known, profile=chosen.profile)

    return resolve


def settle(
    directory: Path, chosen: Choices, out: Path | None, resume: bool, overwrite: bool = False
) -> tuple["FederationFolder", "Settled"]:
    """The federation in a folder, and a run across it; says what the user got wrong."""
    from fedgist.federation import kits
    from fedgist.federation import runs as runs_across

    federation = kits.load(directory)
    _patience(chosen, len(federation.sites))
    resolve = resolver(chosen, out, resume)
    return federation, runs_across.settle(federation.sites, resolve, out, resume, chosen.code, overwrite)


def run_across(
    federation: "FederationFolder",
    settled: "Settled",
    chosen: Choices,
    resume: bool,
    as_json: bool,
    quiet: bool,
    fairness: bool = False,
) -> None:
    """Makes a run across the sites of a federation, and shows it; with `fairness` first one in which each is alone."""
    from fedgist.experiments.fairness import alone as by_themselves
    from fedgist.experiments.folder import RunFolder, run_name
    from fedgist.experiments.progress import choose
    from fedgist.experiments.runner import prepare
    from fedgist.federation import server as servers

    shown, alone = choose(as_json or quiet), None
    patience, wait = _patience(chosen, len(federation.sites)), chosen.wait
    if fairness:
        if settled.config.epsilon is not None:
            raise FedgistError("--fairness needs scores of the sites' test samples, which do not leave in private runs")
        single = by_themselves(settled.config)
        alone = RunFolder(settled.folder.path.parent / run_name(prepare(single)))
        servers.run(
            federation, replace(settled, config=single, folder=alone, overwrite=False), True, patience, wait, shown
        )
    servers.run(federation, settled, resume, patience, wait, shown, alone)
    show_run([settled.folder], settled.folder.path, as_json, quiet)


def _patience(chosen: Choices, sites: int) -> "Patience":
    from fedgist.federation.protocol.remote_engine import Patience

    if not 1 <= chosen.min_sites <= sites:
        raise FedgistError(f"--min-sites must be from 1 to {sites}, not {chosen.min_sites}")
    for name, value in (("timeout", chosen.timeout), ("max-norm", chosen.max_norm)):
        if value <= 0:
            raise FedgistError(f"--{name} must be above 0, not {value:g}")
    if not 0 < chosen.enough <= 1:
        raise FedgistError(f"--enough must be above 0 and at most 1, not {chosen.enough:g}")
    return Patience(chosen.timeout, chosen.enough, chosen.min_sites, chosen.max_norm)


def _detach(federation: "FederationFolder", settled: "Settled") -> None:
    """The same command in a process of its own, once what the user may have got wrong has been looked at."""
    from fedgist.federation import records

    again = [word for word in sys.argv[1:] if word != "--detach"]
    started = records.detached(federation.path, settled.folder.path, [sys.executable, "-m", "fedgist", *again])
    _say(f"run {started.name} goes on by itself, as process {started.process}; its log: {started.log(federation.path)}")
    shows = f"`fedgist federation attach {federation.path} {started.name}` shows it"
    _say(f"{shows}; kill {started.process} stops it in order")


@site_app.command("start")
def start_site(
    kit: Kit,
    data: Annotated[
        Path | None, flag("data", "Folder with the site's images: train and test, any format.", "FOLDER")
    ] = None,
    helper: Annotated[
        bool, typer.Option("--helper", help="No data: hold what hides others' secure sums, as --secure helper asks.")
    ] = False,
    model: Annotated[
        str,
        flag("model", "The site's architecture, or package:factory; without it, what the run says.", "NAME"),
    ] = "",
    device: Annotated[str, flag("device", "auto, cpu, cuda or cuda:N.", "NAME")] = "cpu",
    engine: Annotated[str, flag("engine", "Who computes: sequential, threaded or stacked.", "NAME")] = "sequential",
    threads: Annotated[
        int | None, flag("threads", "Threads of a computation; without it, torch's choice.", "N")
    ] = None,
) -> None:
    """Connect to the federation's server and answer it, under the kit's policy.toml, until Ctrl-C."""
    from fedgist.federation import site as sites

    if (data is None) != helper:
        raise FedgistError("a site has data, or is a helper: name --data FOLDER or --helper")
    settings = sites.Settings(str(data.resolve()) if data else "", model, device, engine, threads)
    raise typer.Exit(sites.start(kit.resolve(), settings, _say))


@site_app.command("status")
def site_status(kit: Kit) -> None:
    """Say whether the site is running, what its policy allows, and what of its last runs could leave."""
    from fedgist.federation import site as sites

    for line in sites.status(kit.resolve()):
        _say(line)


@site_app.command("export")
def export_site(
    kit: Annotated[Path, typer.Argument(help="The kit that the site was started with.")],
    run: Annotated[str, flag("run", "The run, as the site's log names it.", "RUN")],
    out: Annotated[Path, flag("out", "Folder to write the model to.", "FOLDER")],
) -> None:
    """Write the model that the site keeps of a run, for fedgist.load and `fedgist predict`. Nothing leaves the site."""
    from fedgist.federation import site as sites

    sites.export(kit.resolve(), run, out, _say)
