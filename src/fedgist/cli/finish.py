"""Commands for what gist makes of runs that are there already: finish; gist add, remove and sums."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgist.cli import federation
from fedgist.cli.common import Commands, DataDir, Device, Engine, Json, Out, Quiet, flag
from fedgist.cli.outcome import show_run
from fedgist.core.errors import FedgistError

if TYPE_CHECKING:
    from fedgist.learning.sums import Sums

app = Commands()
gist_app = Commands(help="Sites that join a finished model of gist, or leave it.", no_args_is_help=True)
app.add_typer(gist_app, name="gist")

Run = Annotated[Path, typer.Argument(help="The folder of a finished run of gist; it stays as it is.")]
Site = Annotated[
    Path, typer.Argument(help="The site's images in a folder, or the file that `fedgist gist sums` wrote.")
]
Changed = Annotated[Path, flag("out", "Folder to write the changed run to.", "DIR")]


@app.command()
def finish(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run; it stays as it is.")],
    form: Annotated[str, typer.Argument(help="gist, or gist+scattering, as --finish of `fedgist run`.")] = "gist",
    across: Annotated[
        Path | None, flag("federation", "The folder of the federation, where the run was made across machines.", "DIR")
    ] = None,
    engine: Engine = None,
    device: Device = None,
    data_dir: DataDir = None,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Give a finished run's model the exact head over all clients' data, from one exchange of sums."""
    from fedgist.experiments import finishing, runner
    from fedgist.experiments.folder import RunFolder, read_json
    from fedgist.experiments.progress import choose

    folder = out or run.with_name(f"{run.name}-{form.replace(':', '-')}")
    elsewhere = not read_json(RunFolder(run).partition)["clients"]
    if elsewhere and across is None:
        raise FedgistError(f"{run} was made across machines: name its federation with --federation DIR")
    given = {"engine": engine, "device": device, "data_dir": data_dir}
    config = finishing.begin(
        RunFolder(run),
        folder,
        {"finish": form, **{key: value for key, value in given.items() if value is not None}},
    )
    if across is not None:
        chosen = federation.Choices({}, None, None, [], timeout=600.0)
        known, settled = federation.settle(across, chosen, folder, resume=True)
        federation.run_across(known, settled, chosen, True, as_json, quiet)
        return
    runner.run(config, folder, resume=True, progress=choose(as_json or quiet))
    show_run([RunFolder(folder)], folder, as_json, quiet)


@gist_app.command()
def add(run: Run, site: Site, out: Changed) -> None:
    """Add a site's sums: the model is then the one of a run in which it took part."""
    _change(run, site, 1, out)


@gist_app.command()
def remove(run: Run, site: Site, out: Changed) -> None:
    """Subtract a site's sums: the model is then the one of a run without it."""
    _change(run, site, -1, out)


@gist_app.command()
def sums(
    model: Annotated[Path, typer.Argument(help="The folder of the run, or of its exported model.")],
    data: Annotated[Path, typer.Argument(help="Folder with the site's images: train and test, any format.")],
    out: Annotated[Path, flag("out", "The file to write.", "FILE")],
) -> None:
    """At a site: write the sums that `fedgist gist add` and `remove` take, and nothing else of the data."""
    from fedgist.experiments import membership

    membership.write(_sums(model, data), out)
    print(out)


def _sums(model: Path, data: Path) -> "Sums":
    from fedgist.core.task import Task
    from fedgist.experiments import membership
    from fedgist.federation.protocol.policy import Refused
    from fedgist.federation.site_setup import client_data

    _, _, about = membership.opened(model)
    ends, mean, std = (about.low or (), about.high or ()), about.mean or (), about.std or ()
    task = Task(about.input_shape, about.classes, *ends, {}, "", mean=mean, std=std)
    try:
        return membership.sums_of(model, client_data(data, task))
    except Refused as error:
        raise FedgistError(f"{data}: {error}") from error


def _change(run: Path, site: Path, sign: int, out: Path) -> None:
    from fedgist.experiments import membership
    from fedgist.experiments.folder import RunFolder

    folder = RunFolder(run)
    _, _, there = membership.known(folder)
    found = membership.read(site, there) if site.is_file() else _sums(folder.path, site)
    accuracy = membership.change(folder, found, sign, out)
    print(f"accuracy  {accuracy:.4f}")
    print(f"samples   {there.samples:,.0f} {'+' if sign > 0 else '−'} {found.samples:,.0f}")
    print(f"run       {out}")
