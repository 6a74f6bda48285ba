"""Commands for what a run has learned: predict, export."""

import math
from pathlib import Path
from typing import Annotated

import typer

from fedgist.cli.common import Commands, flag
from fedgist.core.errors import FedgistError

app = Commands()

Run = Annotated[Path, typer.Argument(help="The folder of a run, or of an exported model.")]
Client = Annotated[str | None, flag("client", "Whose model, where clients keep their own.", "ID")]


@app.command()
def predict(
    run: Run,
    files: Annotated[list[Path], typer.Argument(help="npz, csv, pictures, or folders of pictures.")],
    client: Client = None,
    out: Annotated[Path | None, flag("out", "Write the predictions to this file.", "FILE")] = None,
    format: Annotated[str, flag("format", "csv or json.", "NAME")] = "csv",
    peak: Annotated[
        float | None, flag("peak", "Value of full intensity; without it, 255 of bytes and 1 of other numbers.", "X")
    ] = None,
) -> None:
    """Class, name and probabilities of every sample; where the files have labels, the accuracy too."""
    from fedgist.experiments import predictions
    from fedgist.experiments.folder import write_text

    if peak is not None and not 0 < peak < math.inf:
        raise FedgistError(f"--peak must be a number above 0, not {peak:g}")
    made = predictions.predict(run, files, client, peak)
    text = predictions.as_text(made, format)
    if out is None:
        print(text, end="")
    else:
        write_text(out, text)
    if made.accuracy is not None:
        typer.echo(f"accuracy  {made.accuracy:.4f} ({made.correct} of {made.judged})", err=out is None)


@app.command()
def export(
    run: Run,
    out: Annotated[Path, flag("out", "The file to write.", "FILE")],
    format: Annotated[str, flag("format", "torchscript, onnx or safetensors.", "NAME")] = "safetensors",
    client: Client = None,
    normalised: Annotated[
        bool, typer.Option("--normalised", help="The exported model takes pixels from 0 to 1 and normalises them.")
    ] = False,
) -> None:
    """Write a model in a form that other programs read."""
    from fedgist.experiments import exporting

    print(exporting.export(run, out, format, client, normalised))
