"""Commands that tell what there is: list, config, cite, data."""

from pathlib import Path
from typing import Annotated

import typer

from fedgist.cli import catalogue
from fedgist.cli.common import Commands, DataDir, Profile, Set, flag
from fedgist.core.errors import unknown

app = Commands()
data_app = Commands(help="Data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")

KINDS = ("methods", "datasets", "models", "partitions", "topologies", "discrepancies")


@app.command("list")
def list_(
    kind: Annotated[str | None, typer.Argument(help=f"{', '.join(KINDS[:-1])} or {KINDS[-1]}; all without it.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Show what there is, one line each."""
    if kind is not None and kind not in KINDS:
        raise unknown("kind of thing to list", kind, KINDS)
    for name in KINDS if kind is None else (kind,):
        if name == "datasets":
            from fedgist.data import inventory  # numpy, which the others need not wait for

            _show("datasets", inventory.readable(data_dir))
            _show("datasets that cannot be read here", inventory.unreadable(data_dir))
        else:
            _show(name, getattr(catalogue, name)())


def _show(heading: str, lines: dict[str, str]) -> None:
    """The names and what is said of each, if there are any."""
    width = max(map(len, lines), default=0)
    if lines:
        print("\n".join([f"{heading}:", *(f"  {key:{width}}  {line}" for key, line in lines.items())]))


@app.command()
def config(
    method: Annotated[str, typer.Argument(help="The method.")],
    profile: Profile = None,
    set: Set = None,
) -> None:
    """Print the configuration of a method, every option with its sentence: a file for --config."""
    from fedgist.experiments import config as configs

    resolved = configs.resolve({"method": method}, configs.assignments(set or []), profile=profile)
    print(configs.dump(resolved), end="")


@app.command()
def cite(method: Annotated[str, typer.Argument(help="The method.")]) -> None:
    """Print the BibTeX entry of a method's paper."""
    from fedgist import methods

    citation = methods.find(method).citation.strip()
    print(citation or f"{method} has no paper of its own")


@data_app.command()
def export(
    name: Annotated[str, typer.Argument(help="The data set.")],
    directory: Annotated[Path, typer.Argument(help="Where to.")],
    data_dir: DataDir = None,
    format: Annotated[str, flag("format", "npz, idx or pictures (a folder of PNG files a class).", "NAME")] = "npz",
    part: Annotated[str, flag("part", "Only every N-th image from the K-th on, as in 1/3.", "K/N")] = "1/1",
) -> None:
    """Write a data set, or a part of it, as files that any machine reads with --data-dir."""
    from fedgist.data import datasets

    print(datasets.export(name, directory, data_dir, format, part))


@data_app.command()
def download(
    name: Annotated[str, typer.Argument(help="The data set.")],
    directory: Annotated[Path, typer.Argument(help="Where to.")],
) -> None:
    """Fetch a data set from the network, through torchvision or medmnist, and write it as export does."""
    from fedgist.data import datasets

    print(datasets.download(name, directory))
