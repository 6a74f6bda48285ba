"""Commands for who operates a federation: its members, how it stands, and runs that go on by themselves."""

from pathlib import Path
from typing import Annotated

import typer

from fedgist.cli.federation import Folder, app, federation_app

__all__ = ["app"]  # with these commands beside those that run something

Names = Annotated[list[str], typer.Argument(help="Names of sites.")]


@federation_app.command()
def roster(
    directory: Folder,
    files: Annotated[
        list[Path] | None, typer.Argument(help="Keys that sites have announced, where no run has brought them here.")
    ] = None,
) -> None:
    """Sign a new roster if members or their keys have changed; show who is in it."""
    from fedgist.federation import kits, membership

    signed, refused = membership.sign(kits.load(directory), files or [])
    for line in refused:
        typer.echo(f"not believed: {line}", err=True)
    typer.echo(f"roster {signed.number} of {signed.federation}, SHA-256 {signed.digest}")
    for member in signed.members:
        known = f"signs with {member.signing.hex()[:16]}…" if member.enrolled else "has not announced its keys yet"
        typer.echo(f"  {member.name}: certificate {member.certificate.hex()[:16]}…, {known}")


@federation_app.command("add-site")
def add_site(directory: Folder, names: Names) -> None:
    """Make kits for new sites. The others stay as they are, and a running server goes on."""
    from fedgist.federation import kits, membership

    grown, signed = membership.add_sites(kits.load(directory), names)
    for name in names:
        typer.echo(f"carry {grown.kit(name)} to its site, and start it there; later runs ask it")
    typer.echo(_passed_on(signed.number))


@federation_app.command()
def renew(
    directory: Folder,
    names: Annotated[list[str] | None, typer.Argument(help="Sites, or the server; without any, everybody.")] = None,
) -> None:
    """Make new certificates. Those of before stay valid until their end: there is time to bring the new ones."""
    from fedgist.federation import kits, membership

    written, signed = membership.renew(kits.load(directory), names or [])
    for path in written:
        typer.echo(f"new: {path}")
    typer.echo("carry them into startup/ of each kit that is elsewhere, and start server and sites again")
    typer.echo(_passed_on(signed.number))


@federation_app.command()
def revoke(directory: Folder, name: Annotated[str, typer.Argument(help="The site.")]) -> None:
    """Leave a site out for good: no run asks it, and its certificates are refused, also by a running server."""
    from fedgist.federation import kits, membership, processes

    fewer, signed = membership.revoke(kits.load(directory), name)
    up = processes.in_use(fewer.server_kit)
    typer.echo(f"site {name} is revoked" + ("; the server, which is running, ends its connection" if up else ""))
    typer.echo(_passed_on(signed.number))


def _passed_on(number: int) -> str:
    return f"roster {number} is signed; the next run brings it to the sites"


@federation_app.command()
def status(directory: Folder) -> None:
    """Say who is there, since when, in which run, what went wrong last, and when certificates end."""
    from fedgist.federation import kits
    from fedgist.federation import status as standing

    for line in standing.describe(kits.load(directory)):
        typer.echo(line)


@federation_app.command()
def attach(
    directory: Folder,
    run: Annotated[str | None, typer.Argument(help="The run, as `status` names it; else the newest.")] = None,
) -> None:
    """Show what a detached run says, until it ends; Ctrl-C ends only the showing."""
    from fedgist.federation import kits, records

    federation = kits.load(directory).path
    found = records.find(federation, run)
    records.follow(found.log(federation), lambda: not records.find(federation, found.name).alive, typer.echo)
    ended = records.find(federation, found.name)
    raise typer.Exit(0 if ended.state == records.FINISHED else 1)
