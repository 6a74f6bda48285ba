"""Commands that run methods or show runs: run, compare, demo, report."""

import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedgist.cli.common import (
    Config,
    Debug,
    Flags,
    Json,
    Live,
    Out,
    Overwrite,
    Port,
    Profile,
    Quiet,
    Resume,
    Set,
    WithSet,
    flag,
    naming,
    note,
    run_flags,
    speaking,
    warning_once,
)
from fedgist.core.errors import FedgistError
from fedgist.words import size

if TYPE_CHECKING:
    from fedgist.experiments.config import RunConfig
    from fedgist.experiments.folder import RunFolder
    from fedgist.experiments.results import Result

app = typer.Typer()

Target = Annotated[
    str | None, flag("target", "Accuracy that rounds and bytes are counted to; 95 % of the best without it.", "X")
]
DEMO = {"clients": 10, "partition": "dirichlet", "alpha": 0.1, "seed": 0}


@app.command(cls=WithSet)
@run_flags()
def run(
    flags: Flags,
    method: Annotated[str | None, typer.Argument(help="The method; left out with --config or --resume.")] = None,
    profile: Profile = None,
    config: Config = None,
    set: Set = None,
    out: Out = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    live: Live = False,
    port: Port = 0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write metrics for TensorBoard into the run's folder.")
    ] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run a method.

    `fedgist config METHOD` prints every option with its default; --set changes those that have no flag here.
    """
    with speaking(debug), warning_once():
        from fedgist.experiments import config as configs
        from fedgist.experiments import runner
        from fedgist.experiments.folder import default_folder

        flags = naming(flags, method)
        begun = _begun(out).config if resume and not (method or config) else None
        layers = configs.base_layers("fedgist run fedavg", flags, config, begun)
        resolved = configs.resolve(*layers, configs.assignments(set or []), flags, profile=profile)
        if reduced := configs.profile_note(resolved.method, profile):
            note(f"profile {profile}, where no option says otherwise: {reduced}", as_json or quiet)
        folder = out or default_folder(runner.prepare(resolved))
        group = folder if resolved.seeds > 1 else None
        with _live(folder, live, port):
            results = _run_seeds(resolved, folder, resume, as_json or quiet, group, tensorboard, overwrite)
        show_run(results, folder, as_json, quiet)


@app.command(cls=WithSet)
@run_flags()
def compare(
    methods: Annotated[list[str], typer.Argument(help="The methods, in the order of the table.")],
    flags: Flags,
    profile: Profile = None,
    config: Config = None,
    set: Set = None,
    target: Target = None,
    out: Out = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    live: Live = False,
    port: Port = 0,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run several methods on the same partition, model, initial weights and seeds, and show them side by side.

    Without --profile each method runs with its small profile; what that reduces is said first.
    """
    with speaking(debug), warning_once():
        from fedgist.experiments import comparison
        from fedgist.experiments import config as configs

        layer = {**(configs.load(config) if config else {}), **configs.assignments(set or []), **flags}
        goal = None if target is None else _fraction(target)
        resolved, notes = comparison.compare(methods, layer, profile)
        note("\n".join(notes), as_json or quiet)
        out = out or _free("compare")
        with _live(out, live, port):
            groups = _run_all(resolved, out, resume, as_json or quiet, overwrite)
        _side_by_side(groups, out, as_json, quiet, goal)


@app.command()
def demo(
    only: Annotated[str | None, flag("only", "Only these methods, as in fedavg,fedprox.", "METHODS")] = None,
    out: Out = None,
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """The methods side by side on real digits: 10 clients, Dirichlet 0.1."""
    with speaking(debug), warning_once():
        from fedgist.experiments import comparison

        chosen = [name.strip() for name in only.split(",")] if only else None
        resolved, instead = comparison.demo(chosen, DEMO)
        note(instead, as_json)
        out = out or _free("demo")
        _side_by_side(_run_all(resolved, out, resume, as_json or quiet), out, as_json, quiet)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that hold them.")],
    out: Annotated[Path | None, flag("out", "The page; report.html in the first folder without it.", "FILE")] = None,
    target: Target = None,
    debug: Debug = False,
) -> None:
    """Write the HTML report of runs."""
    with speaking(debug):
        from fedgist.experiments import folder
        from fedgist.experiments import report as reports

        found = [run for path in runs for run in folder.run_folders(path)]
        print(reports.write(found, out or runs[0] / "report.html", None if target is None else _fraction(target)))


def _begun(out: Path | None) -> "RunFolder":
    """The run that goes on where no method is named."""
    from fedgist.experiments.folder import run_folders

    if out is None:
        raise FedgistError("which run goes on? name its folder with --out, or give the command that began it")
    first, *others = run_folders(out)
    if others or first.path != out:
        raise FedgistError(f"{out} holds the runs of a larger command: give that, with --resume --out {out}")
    return first


def _free(name: str) -> Path:
    from fedgist.experiments.folder import free_folder

    return free_folder("runs", name)


@contextmanager
def _live(folder: Path, wanted: bool, port: int) -> Iterator[None]:
    """Serves the report of what runs in `folder`, where that is wanted."""
    if not wanted:
        yield
        return
    from fedgist.experiments.live import LiveReport

    with LiveReport(folder, port) as live:
        print(f"live report: {live.url}", file=sys.stderr)
        yield


def _run_seeds(
    config: "RunConfig",
    out: Path,
    resume: bool,
    quiet: bool,
    group: Path | None = None,
    tensorboard: bool = False,
    overwrite: bool = False,
) -> "list[Result]":
    """The runs of a configuration; `group` is the folder of all runs of this command, where there are several."""
    from fedgist.experiments import runner
    from fedgist.experiments.folder import each_seed
    from fedgist.experiments.progress import Several, choose
    from fedgist.experiments.tensorboard import TensorBoard

    runs = each_seed(config, out)
    listeners = [
        Several(choose(quiet), TensorBoard(path / "tensorboard")) if tensorboard else choose(quiet) for _, path in runs
    ]
    try:
        return [
            runner.run(one, path, resume=resume, progress=listener, overwrite=overwrite)
            for (one, path), listener in zip(runs, listeners, strict=True)
        ]
    except runner.Interrupted as stop:
        if group is None:
            raise
        where = f"--resume --out {shlex.quote(str(group))}"
        raise runner.Interrupted(f"{stop.kept} of {config.method}", f"the same command and {where}") from None


def _run_all(
    configs: "Sequence[RunConfig]", out: Path, resume: bool, quiet: bool, overwrite: bool = False
) -> "list[tuple[Path, list[Result]]]":
    """Runs the configurations one after the other, each in its own folder."""
    folders = [out / config.method for config in configs]
    return [
        (folder, _run_seeds(config, folder, resume, quiet, out, overwrite=overwrite))
        for config, folder in zip(configs, folders, strict=True)
    ]


def _side_by_side(
    groups: "Sequence[tuple[Path, list[Result]]]", out: Path, as_json: bool, quiet: bool, target: float | None = None
) -> None:
    """Shows one table and one report of several runs."""
    from fedgist.experiments import comparison
    from fedgist.experiments.folder import RunFolder

    folders = [[RunFolder(str(result.folder)) for result in results] for _, results in groups]
    target, standings = comparison.standings(folders, target)
    report = _write_report(out, as_json or quiet, [run for runs in folders for run in runs], target)
    if as_json:
        objects = [
            {**_object(results, folder), "rounds_to_target": s.rounds_to, "bytes_to_target": s.bytes_to}
            | {"server_sees": s.server_sees}
            for (folder, results), s in zip(groups, standings, strict=True)
        ]
        print(json.dumps({"runs": objects, "target": target, "report": None if report is None else str(report)}))
        return
    from rich.console import Console
    from rich.table import Table

    to = f"to {target:.4f}"
    table = Table("method", "accuracy", "best", f"rounds {to}", f"bytes {to}", "bytes up", "bytes down", "seconds")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_column("the server sees", max_width=30)
    for (_, results), s in zip(groups, standings, strict=True):
        name, *accuracies, up, down, seconds = _row(results)
        reached = (_reached(s.rounds_to, "{:.0f}".format), _reached(s.bytes_to, size))
        table.add_row(name, *accuracies, *reached, up, down, seconds, s.server_sees)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    print(f"runs in {out}" if report is None else f"report: {report}")


def _reached(values: Sequence[float | None], show: Callable[[float], str]) -> str:
    """The mean over the seeds that reached the target, and how many those are where it is not all."""
    there = [value for value in values if value is not None]
    if not there:
        return "never"
    return show(statistics.fmean(there)) + (f" ({len(there)} of {len(values)})" if len(there) < len(values) else "")


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value <= 1:
        raise FedgistError(f"--target must be an accuracy above 0 and at most 1, as in 0.9, not {text!r}")
    return value


def _row(results: "Sequence[Result]") -> tuple[str, ...]:
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


def show_run(results: "Sequence[Result]", folder: Path, as_json: bool, quiet: bool) -> None:
    """Writes the report of a run, which may have several seeds, and prints what came out."""
    report = _write_report(folder, as_json or quiet)
    if as_json:
        print(json.dumps(_object(results, folder)))
    else:
        _summary(results, folder, report)


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


def _write_report(
    folder: Path, quiet: bool, runs: "Sequence[RunFolder] | None" = None, target: float | None = None
) -> Path | None:
    """The report of the runs in a folder, in the order of `runs`, or a line on what it needs."""
    from fedgist.experiments import report as reports
    from fedgist.experiments.folder import run_folders

    try:
        return reports.write(runs or run_folders(folder), folder / "report.html", target)
    except reports.MissingPlotly as missing:
        note(f"no report.html: {missing}", quiet)
        return None
