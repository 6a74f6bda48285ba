"""The command line. It only reads what the user typed and shows what came out; the work is in `fedgist.experiments`.

Exit codes: 0 done, 1 a defect in fedgist, 2 something the user can mend (one line on standard error), 130 Ctrl-C.
"""

import json
import shlex
import statistics
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedgist.core.errors import FedgistError, unknown

if TYPE_CHECKING:
    from fedgist.experiments.config import RunConfig
    from fedgist.experiments.runner import Result

app = typer.Typer(
    help="Collaborative learning in which clients share the gist of what they learned, never their data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")

DEMO = {"clients": 10, "partition": "dirichlet", "alpha": 0.1, "seed": 0}
KINDS = ("methods", "datasets", "models", "partitions")


def _flag(name: str, help: str, metavar: str = "TEXT") -> Any:
    return typer.Option(f"--{name}", help=help, metavar=metavar)


# The values stay text until the configuration reads them, so that each mistake gets its one sentence.
Dataset = Annotated[str | None, _flag("dataset", "Data set.", "NAME")]
DataDir = Annotated[str | None, _flag("data-dir", "Folder with data files (or FEDGIST_DATA).", "DIR")]
Clients = Annotated[str | None, _flag("clients", "Number of clients.", "N")]
Alpha = Annotated[str | None, _flag("alpha", "Dirichlet concentration of the partition.", "X")]
Partition = Annotated[str | None, _flag("partition", "How the data is split.", "NAME")]
Rounds = Annotated[str | None, _flag("rounds", "Communication rounds.", "N")]
Model = Annotated[str | None, _flag("model", "Model, as in mlp or mlp:hidden=200x100.", "NAME")]
Engine = Annotated[str | None, _flag("engine", "auto, sequential or threaded.", "NAME")]
Device = Annotated[str | None, _flag("device", "auto, cpu, cuda or cuda:N.", "NAME")]
Seed = Annotated[str | None, _flag("seed", "Seed of everything random.", "N")]
Seeds = Annotated[str | None, _flag("seeds", "Number of runs, with the seeds SEED, SEED + 1, …", "N")]
Record = Annotated[str | None, _flag("record", "Message types to keep in full, or all.", "TYPES")]
Profile = Annotated[str | None, _flag("profile", "The method's own settings: paper, small or demo.", "NAME")]
Config = Annotated[Path | None, _flag("config", "TOML file with options.", "FILE")]
Set = Annotated[list[str] | None, _flag("set", "Any option of the run or the method; repeatable.", "KEY=VALUE")]
Out = Annotated[Path | None, _flag("out", "Folder to write to.", "DIR")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue what was begun in the folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error came from.")]


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        import fedgist

        print(f"fedgist {fedgist.__version__}")


@app.command()
def run(
    method: Annotated[str | None, typer.Argument(help="The method; left out with --config or --resume.")] = None,
    dataset: Dataset = None,
    data_dir: DataDir = None,
    clients: Clients = None,
    alpha: Alpha = None,
    partition: Partition = None,
    rounds: Rounds = None,
    model: Model = None,
    engine: Engine = None,
    device: Device = None,
    seed: Seed = None,
    seeds: Seeds = None,
    record: Record = None,
    profile: Profile = None,
    config: Config = None,
    set: Set = None,
    out: Out = None,
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run a method."""
    flags = _given(
        method=method, dataset=dataset, data_dir=data_dir, clients=clients, alpha=alpha, partition=partition,
        rounds=rounds, model=model, engine=engine, device=device, seed=seed, seeds=seeds, record=record,
    )  # fmt: skip
    with _speaking(debug):
        from fedgist.experiments import config as configs
        from fedgist.experiments import runner

        layers = [configs.load(config)] if config else []
        if resume and out and not (method or config):
            layers = [configs.load(out / "config.toml")]
        elif not any("method" in layer for layer in [*layers, flags]):
            raise FedgistError("which method? name one, as in `fedgist run fedavg`; `fedgist list methods` shows them")
        resolved = configs.resolve(*layers, configs.assignments(set or []), flags, profile=profile)
        _note(configs.profile_note(resolved.method, profile), as_json or quiet)
        folder = out or runner.default_folder(resolved)
        results = _run_seeds(resolved, folder, resume, as_json or quiet, folder if resolved.seeds > 1 else None)
        report = _write_report(folder, as_json or quiet)
        if as_json:
            print(json.dumps(_object(results, folder)))
        else:
            _summary(results, folder, report)


@app.command()
def compare(
    methods: Annotated[list[str], typer.Argument(help="The methods, in the order of the table.")],
    dataset: Dataset = None,
    data_dir: DataDir = None,
    clients: Clients = None,
    alpha: Alpha = None,
    partition: Partition = None,
    rounds: Rounds = None,
    model: Model = None,
    engine: Engine = None,
    device: Device = None,
    seed: Seed = None,
    seeds: Seeds = None,
    record: Record = None,
    profile: Profile = None,
    config: Config = None,
    set: Set = None,
    out: Out = None,
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run several methods on the same partition and seeds, and show them side by side."""
    flags = _given(
        dataset=dataset, data_dir=data_dir, clients=clients, alpha=alpha, partition=partition, rounds=rounds,
        model=model, engine=engine, device=device, seed=seed, seeds=seeds, record=record,
    )  # fmt: skip
    with _speaking(debug):
        from fedgist.experiments import comparison
        from fedgist.experiments import config as configs

        layer = {**(configs.load(config) if config else {}), **configs.assignments(set or []), **flags}
        resolved = comparison.same_ground(methods, layer, profile)
        _side_by_side(resolved, out or _free("compare"), resume, as_json, quiet)


@app.command()
def demo(
    only: Annotated[str | None, _flag("only", "Only these methods, as in fedavg,fedprox.", "METHODS")] = None,
    out: Out = None,
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """The methods side by side on real digits: 10 clients, Dirichlet 0.1."""
    with _speaking(debug):
        from fedgist.experiments import comparison

        chosen = [name.strip() for name in only.split(",")] if only else None
        resolved, note = comparison.demo(chosen, DEMO)
        _note(note, as_json)
        _side_by_side(resolved, out or _free("demo"), resume, as_json, quiet)


@app.command("list")
def list_(
    kind: Annotated[str | None, typer.Argument(help="methods, datasets, models or partitions; all without it.")] = None,
    data_dir: DataDir = None,
    debug: Debug = False,
) -> None:
    """Show what there is, one line each."""
    with _speaking(debug):
        if kind is not None and kind not in KINDS:
            raise unknown("list", kind, KINDS)
        for name in KINDS if kind is None else (kind,):
            lines = _available(name, data_dir)
            width = max(map(len, lines))
            print("\n".join([f"{name}:", *(f"  {key:{width}}  {line}" for key, line in lines.items())]))


@app.command()
def config(
    method: Annotated[str, typer.Argument(help="The method.")],
    profile: Profile = None,
    set: Set = None,
    debug: Debug = False,
) -> None:
    """Print the configuration of a method, every option with its sentence: a file for --config."""
    with _speaking(debug):
        from fedgist.experiments import config as configs

        resolved = configs.resolve({"method": method}, configs.assignments(set or []), profile=profile)
        print(configs.dump(resolved), end="")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that hold them.")],
    out: Annotated[Path | None, _flag("out", "The page; report.html in the first folder without it.", "FILE")] = None,
    debug: Debug = False,
) -> None:
    """Write the HTML report of runs."""
    with _speaking(debug):
        from fedgist.experiments import folder
        from fedgist.experiments import report as reports

        found = [run for path in runs for run in folder.run_folders(path)]
        print(reports.write(found, out or runs[0] / "report.html"))


@app.command()
def cite(method: Annotated[str, typer.Argument(help="The method.")], debug: Debug = False) -> None:
    """Print the BibTeX entry of a method's paper."""
    with _speaking(debug):
        from fedgist import methods

        citation = methods.find(method).citation.strip()
        print(citation or f"{method} has no paper of its own")


@data_app.command()
def export(
    name: Annotated[str, typer.Argument(help="The data set.")],
    directory: Annotated[Path, typer.Argument(help="Where to.")],
    data_dir: DataDir = None,
    debug: Debug = False,
) -> None:
    """Write a data set as .npz files that any machine reads with --data-dir."""
    with _speaking(debug):
        from fedgist.data import datasets

        print(datasets.export(name, directory, data_dir))


@data_app.command()
def download(
    name: Annotated[str, typer.Argument(help="The data set.")],
    directory: Annotated[Path, typer.Argument(help="Where to.")],
    debug: Debug = False,
) -> None:
    """Fetch a data set from the network, through torchvision or medmnist, and write it as export does."""
    with _speaking(debug):
        from fedgist.data import datasets

        print(datasets.download(name, directory))


def _given(**flags: str | None) -> dict[str, str]:
    return {name: value for name, value in flags.items() if value is not None}


@contextmanager
def _speaking(debug: bool) -> Iterator[None]:
    """Turns what goes wrong into one line and the right exit code."""
    try:
        yield
    except FedgistError as error:
        _fail(str(error), 2, debug)
    except KeyboardInterrupt as stop:
        _fail(str(stop) or "stopped", 130, debug)
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as error:
        what = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        _fail(f"internal error, please report it ({what}); --debug shows where", 1, debug)


def _fail(line: str, code: int, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"fedgist: {line}", file=sys.stderr)
    raise typer.Exit(code)


def _note(note: str | None, quiet: bool) -> None:
    if note and not quiet:
        print(note, file=sys.stderr)


def _free(name: str) -> Path:
    from fedgist.experiments.folder import free_folder

    return free_folder("runs", name)


def _available(kind: str, data_dir: str | None) -> dict[str, str]:
    if kind == "methods":
        from fedgist import methods

        return methods.available()
    if kind == "models":
        from fedgist import models

        return models.available()
    from fedgist.data import datasets, partitions

    return datasets.available(data_dir) if kind == "datasets" else partitions.available()


def _run_seeds(config: "RunConfig", out: Path, resume: bool, quiet: bool, group: Path | None = None) -> "list[Result]":
    """The runs of a configuration; `group` is the folder of all runs of this command, where there are several."""
    from fedgist.experiments import runner
    from fedgist.experiments.progress import choose

    runs = runner.each_seed(config, out)
    try:
        return [runner.run(one, path, resume=resume, progress=choose(quiet)) for one, path in runs]
    except runner.Interrupted as stop:
        if group is None:
            raise
        where = f"--resume --out {shlex.quote(str(group))}"
        raise runner.Interrupted(f"{stop.kept} of {config.method}", f"the same command and {where}") from None


def _side_by_side(configs: "Sequence[RunConfig]", out: Path, resume: bool, as_json: bool, quiet: bool) -> None:
    """Runs the configurations one after the other, each in its own folder, and shows one table and one report."""
    groups = []
    for config in configs:
        folder = out / config.method
        groups.append((folder, _run_seeds(config, folder, resume, as_json or quiet, out)))
    report = _write_report(out, as_json or quiet)
    if as_json:
        objects = [_object(results, folder) for folder, results in groups]
        print(json.dumps({"runs": objects, "report": None if report is None else str(report)}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("method", "accuracy", "best", "bytes up", "bytes down", "seconds")
    for column in table.columns[1:]:
        column.justify = "right"
    for _, results in groups:
        table.add_row(*_row(results))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(f"runs in {out}" if report is None else f"report: {report}")


def _row(results: "Sequence[Result]") -> tuple[str, ...]:
    from fedgist.experiments.progress import size

    return (
        results[0].method,
        _spread([r.accuracy for r in results]),
        _spread([r.accuracy_max for r in results]),
        size(statistics.fmean(r.bytes_up for r in results)),
        size(statistics.fmean(r.bytes_down for r in results)),
        f"{statistics.fmean(r.seconds for r in results):.1f}",
    )


def _spread(values: Sequence[float]) -> str:
    """The value, or mean ± standard deviation (of a sample: n − 1) over several seeds."""
    mean = f"{statistics.fmean(values):.4f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.4f}"


def _object(results: "Sequence[Result]", folder: Path) -> dict[str, Any]:
    """What --json prints; with several seeds means, the standard deviation, and the single runs."""
    singles: list[dict[str, Any]] = [
        {
            "method": r.method,
            "accuracy": r.accuracy,
            "bytes_up": r.bytes_up,
            "bytes_down": r.bytes_down,
            "seconds": r.seconds,
            "run": str(r.folder),
        }
        for r in results
    ]
    if len(singles) == 1:
        return singles[0]
    keys = ("accuracy", "bytes_up", "bytes_down", "seconds")
    means = {key: statistics.fmean(single[key] for single in singles) for key in keys}
    spread = statistics.stdev(s["accuracy"] for s in singles)
    return {"method": results[0].method, **means, "std": spread, "run": str(folder), "runs": singles}


def _summary(results: "Sequence[Result]", folder: Path, report: Path | None) -> None:
    _, accuracy, best, up, down, seconds = _row(results)
    five = _spread([r.accuracy_best5 for r in results])
    print(f"accuracy  {accuracy} (best {best}, mean of the best five {five})")
    print(f"bytes     {up} up, {down} down")
    print(f"seconds   {seconds}")
    print(f"run       {folder}")
    if report is not None:
        print(f"report    {report}")


def _write_report(folder: Path, quiet: bool) -> Path | None:
    """The report of the runs in a folder, or a line on what it needs."""
    from fedgist.experiments import report as reports
    from fedgist.experiments.folder import run_folders

    try:
        return reports.write(run_folders(folder), folder / "report.html")
    except reports.MissingPlotly as missing:
        _note(f"no report.html: {missing}", quiet)
        return None


def main() -> None:
    app()
