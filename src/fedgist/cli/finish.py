"""Commands for what gist makes of runs that are there already: finish."""

from pathlib import Path
from typing import Annotated

import typer

from fedgist.cli import federation, runs
from fedgist.cli.common import DataDir, Debug, Device, Engine, Json, Out, Quiet, flag, speaking
from fedgist.core.errors import FedgistError

app = typer.Typer()


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
    debug: Debug = False,
) -> None:
    """Give a finished run's model the exact head over all clients' data, from one exchange of sums."""
    with speaking(debug):
        from fedgist.experiments import finishing, runner
        from fedgist.experiments.folder import RunFolder, read_json
        from fedgist.experiments.progress import choose

        run = run.expanduser()
        folder = out or run.with_name(f"{run.name}-{form.replace(':', '-')}")
        elsewhere = not read_json(run / "partition.json")["clients"]
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
            made = federation.resolver(chosen, folder, resume=True)
            federation.run_across(across, chosen, made, folder, True, as_json, quiet)
            return
        result = runner.run(config, folder, resume=True, progress=choose(as_json or quiet))
        runs.show_run([result], folder, as_json, quiet)
