"""Commands that run methods or show runs: run, compare, demo, report, table."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgist.cli.common import (
    Commands,
    Config,
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
    warning_once,
)
from fedgist.cli.outcome import show_run, side_by_side
from fedgist.core.errors import FedgistError
from fedgist.words import bytes_in

if TYPE_CHECKING:
    from fedgist.experiments.config import RunConfig
    from fedgist.experiments.folder import RunFolder

app = Commands()

Target = Annotated[
    str | None, flag("target", "Accuracy that rounds and bytes are counted to; 95 % of the best without it.", "X")
]
Fairness = Annotated[
    bool, typer.Option("--fairness", help="Run `independent` too, and say which clients gain over learning alone.")
]
Runs = Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that hold them.")]
DEMO = {"clients": 10, "partition": "dirichlet", "alpha": 0.1, "seed": 0}


@app.command(cls=WithSet)
@run_flags()
@warning_once()
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
    port: Port = None,
    fairness: Fairness = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write metrics for TensorBoard into the run's folder.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Run a method.

    `fedgist config METHOD` prints every option with its default; --set changes those that have no flag here.
    """
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
        alone = _alone(resolved, folder, as_json or quiet) if fairness else None
        runs = _run_seeds(resolved, folder, resume, as_json or quiet, group, tensorboard, overwrite, alone)
    show_run(runs, folder, as_json, quiet)


@app.command(cls=WithSet)
@run_flags()
@warning_once()
def compare(
    methods: Annotated[list[str], typer.Argument(help="The methods, in the order of the table.")],
    flags: Flags,
    profile: Profile = None,
    config: Config = None,
    set: Set = None,
    target: Target = None,
    budget: Annotated[
        str | None, flag("budget", "What every method may spend, as in rounds=20 or bytes=10MB.", "WHAT=N")
    ] = None,
    fairness: Fairness = False,
    out: Out = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    live: Live = False,
    port: Port = None,
    quiet: Quiet = False,
) -> None:
    """Run several methods on the same partition, model, initial weights and seeds, and show them side by side.

    Without --profile each method runs with its small profile; what that reduces is said first.
    """
    from fedgist.experiments import comparison
    from fedgist.experiments import config as configs
    from fedgist.experiments.fairness import ALONE

    own, layer = configs.load_several(config) if config else ({}, {})
    layer = {**layer, **configs.assignments(set or []), **flags}
    goal, spent = None if target is None else _fraction(target), {} if budget is None else _budget(budget)
    if fairness and ALONE not in methods:
        methods = [*methods, ALONE]
    resolved, notes = comparison.compare(methods, {**layer, **spent}, profile, own)
    if "max_bytes" in spent:
        notes.append(
            "a method stops before a round that, as dear as its dearest so far, would exceed the budget; the "
            "first is always made, and no method makes more rounds than its profile or --rounds says"
        )
    note("\n".join(notes), as_json or quiet)
    out = out or _free("compare")
    with _live(out, live, port):
        runs = _run_all(resolved, out, resume, as_json or quiet, overwrite)
    side_by_side(runs, out, as_json, quiet, goal)


@app.command()
@warning_once()
def demo(
    only: Annotated[str | None, flag("only", "Only these methods, as in fedavg,fedprox.", "METHODS")] = None,
    out: Out = None,
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The methods side by side on real digits: 10 clients, Dirichlet 0.1."""
    from fedgist.experiments import comparison

    chosen = [name.strip() for name in only.split(",")] if only else None
    resolved, notes = comparison.demo(chosen, DEMO)
    note("\n".join(notes), as_json)
    out = out or _free("demo")
    side_by_side(_run_all(resolved, out, resume, as_json or quiet), out, as_json, quiet)


@app.command()
def report(
    runs: Runs,
    out: Annotated[Path | None, flag("out", "The page; report.html in the first folder without it.", "FILE")] = None,
    target: Target = None,
    single_file: Annotated[
        bool, typer.Option("--single-file", help="With all that it needs inside: 5 MB more.")
    ] = False,
) -> None:
    """Write the HTML report of runs."""
    from fedgist.experiments import folder
    from fedgist.experiments import report as reports

    if out is not None and out.suffix.lower() in (".csv", ".tex", ".md"):
        form = out.suffix.lower().removeprefix(".")
        named = " ".join(shlex.quote(str(path)) for path in runs)
        raise FedgistError(f"a report is a page, {out} would be a table: fedgist table {named} --format {form} > {out}")
    found = [run for path in runs for run in folder.run_folders(path)]
    goal = None if target is None else _fraction(target)
    print(reports.write(found, out or runs[0] / "report.html", goal, single_file))


@app.command()
def table(
    runs: Runs,
    form: Annotated[str, flag("format", "md, csv or tex.", "NAME")] = "md",
    out: Annotated[Path | None, flag("out", "File to write to; without it, standard output.", "FILE")] = None,
) -> None:
    """Print a table of runs, a row for each configuration, with means and deviations over its seeds."""
    from fedgist.experiments import folder
    from fedgist.experiments.report import result_table
    from fedgist.experiments.report.runs import grouped, read

    found = [read(run) for path in runs for run in folder.run_folders(path)]
    text = result_table.write(grouped(found), form)
    if out is None:
        print(text, end="")
    else:
        folder.write_text(out, text)


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
def _live(folder: Path, wanted: bool, port: int | None) -> Iterator[None]:
    """Serves the report of what runs in `folder`, where that is wanted."""
    if port is not None and not wanted:
        raise FedgistError(f"--port {port} is where --live would listen: add --live, or leave out --port")
    if not wanted:
        yield
        return
    from fedgist.experiments.live import LiveReport

    with LiveReport(folder, port or 0) as live:
        print(f"live report: {live.url}", file=sys.stderr)
        yield


def _run_seeds(
    config: "RunConfig",
    out: Path,
    resume: bool,
    quiet: bool,
    group: Path | None,
    tensorboard: bool = False,
    overwrite: bool = False,
    alone: "Sequence[RunFolder | None] | None" = None,
) -> "list[RunFolder]":
    """Makes the runs of a configuration; `group` is the folder of all runs of this command, where there are several.

    `alone` are the runs of `independent` with the same seeds, where there are any.
    """
    from fedgist.experiments import runner
    from fedgist.experiments.folder import RunFolder, each_seed
    from fedgist.experiments.progress import Several, choose
    from fedgist.experiments.tensorboard import TensorBoard

    runs = [(one, RunFolder(path)) for one, path in each_seed(config, out)]
    try:
        for (one, folder), beside in zip(runs, alone or [None] * len(runs), strict=True):
            shown = choose(quiet)
            told = Several(shown, TensorBoard(folder.tensorboard)) if tensorboard else shown
            runner.run(one, folder.path, resume=resume, progress=told, overwrite=overwrite, alone=beside)
    except runner.Interrupted as stop:
        if group is None:
            raise
        where = f"--resume --out {shlex.quote(str(group))}"
        raise runner.Interrupted(f"{stop.kept} of {config.method}", f"the same command and {where}") from None
    return [folder for _, folder in runs]


def _alone(config: "RunConfig", out: Path, quiet: bool) -> "list[RunFolder]":
    """Runs `independent` on the ground of a run, in a folder beside it that is found again by its name."""
    from fedgist.experiments import fairness, runner
    from fedgist.experiments.folder import run_name

    alone = fairness.alone(config)
    folder = out.parent / run_name(runner.prepare(alone))
    return _run_seeds(alone, folder, resume=True, quiet=quiet, group=folder)


def _run_all(
    configs: "Sequence[RunConfig]", out: Path, resume: bool, quiet: bool, overwrite: bool = False
) -> "dict[Path, list[RunFolder]]":
    """Runs the configurations one after the other, each in its own folder; first the one that others look back to."""
    from fedgist.experiments.fairness import ALONE

    done: dict[Path, list[RunFolder]] = {}
    for config in sorted(configs, key=lambda config: config.method != ALONE):
        alone = done.get(out / ALONE)
        done[out / config.method] = _run_seeds(config, out / config.method, resume, quiet, out, False, overwrite, alone)
    return {out / config.method: done[out / config.method] for config in configs}


def _budget(text: str) -> dict[str, int]:
    """A budget as an option of every run."""
    what, _, amount = text.partition("=")
    count = bytes_in(amount) if what == "bytes" else int(amount) if amount.isdecimal() else None
    if what not in ("bytes", "rounds") or not count:
        raise FedgistError(f"--budget must be as rounds=20 or bytes=10MB, not {text!r}")
    return {"max_bytes": count} if what == "bytes" else {"rounds": count}


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value <= 1:
        raise FedgistError(f"--target must be an accuracy above 0 and at most 1, as in 0.9, not {text!r}")
    return value
