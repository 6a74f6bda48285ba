"""What all commands share: their flags, and how they speak when something goes wrong.

Exit codes: 0 done, 1 a defect in fedgist, 2 something the user can mend (one line on standard error), 130 Ctrl-C and
SIGTERM.
"""

import functools
import inspect
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperCommand
from typer.models import CommandFunctionType

from fedgist.core.errors import FedgistError
from fedgist.experiments.config import RunConfig
from fedgist.options import Role, options


def flag(name: str, help: str, metavar: str = "TEXT", low: int | None = None) -> Any:
    """A flag; where it is a number, it may have to be at least `low`."""

    def check(value: Any) -> Any:
        if value is not None and value < low:
            fail(f"--{name} must be at least {low}, not {value}", 2)
        return value

    return typer.Option(f"--{name}", help=help, metavar=metavar, callback=None if low is None else check)


def flag_of(name: str, hidden: bool = False) -> Any:
    """The flag of an option of a run. Its value stays text until the configuration reads it: one sentence a mistake."""
    option = options(RunConfig)[name]
    return typer.Option(
        f"--{name.replace('_', '-')}",
        help=option.help,
        metavar=option.flag,
        rich_help_panel=option.group,
        hidden=hidden,
    )


Flags = dict[str, str]
"""The flags of a run that were given, by the names of their options."""


def naming(flags: Flags, method: str | None) -> Flags:
    """The flags and the method, if one was named: beside options, an argument may be one."""
    return flags if method is None else {**flags, "method": method}


def run_flags(without: Role = Role.NONE, *but: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Puts all flags of a run in the place of a command's parameter `flags`, but those with such a name.

    Options with a role `without` are read and not shown: the command says of them why they are not for it.
    """
    known = {
        name: bool(option.role & without)
        for name, option in options(RunConfig).items()
        if (option.flag or option.role & without) and name not in but
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_flags(**typed: Any) -> None:
            given = {name: value for name in known if (value := typed.pop(name)) is not None}
            command(flags=given, **typed)

        flags = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[str | None, flag_of(name, hidden)],
            )
            for name, hidden in known.items()
        ]
        own = inspect.signature(command).parameters.values()
        shown = [one for parameter in own for one in (flags if parameter.name == "flags" else [parameter])]
        return _taking(with_flags, shown)

    return decorate


def _taking(command: Callable[..., None], parameters: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """The command with these parameters, by name, for whoever asks what it takes."""
    named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    command.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in named}
    return command


class WithSet(TyperCommand):
    """A command with --set, which it names when an option that has no flag is given as one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("-", "_")
            if name in _all_options():
                fail(f"{error.option_name} is no flag: give it as --set {name}={_value(error.option_name, typed)}", 2)
            raise


def _all_options() -> set[str]:
    """The options of a run, and of all methods."""
    from fedgist import methods

    return {name for of in (RunConfig, *(one.Config for one in methods.registry().values())) for name in options(of)}


def _value(flag: str, typed: list[str]) -> str:
    """What was given with a flag, as in --lr=0.1 or --lr 0.1."""
    for here, following in zip(typed, [*typed[1:], "VALUE"], strict=True):
        if here == flag:
            return "VALUE" if following.startswith("--") else following
        if here.startswith(f"{flag}="):
            return here.removeprefix(f"{flag}=")
    return "VALUE"


DataDir = Annotated[str | None, flag_of("data_dir")]
Engine = Annotated[str | None, flag_of("engine")]
Device = Annotated[str | None, flag_of("device")]
Profile = Annotated[str | None, flag("profile", "The method's own settings: paper, small, demo or toy.", "NAME")]
Config = Annotated[Path | None, flag("config", "TOML file with options.", "FILE")]
Set = Annotated[list[str] | None, flag("set", "Any option of the run or the method; repeatable.", "KEY=VALUE")]
Out = Annotated[Path | None, flag("out", "Folder to write to.", "DIR")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue what was begun in the folder.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Take the run in the folder away and make it anew.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Live = Annotated[bool, typer.Option("--live", help="Serve the report to this machine's browsers while it runs.")]
Port = Annotated[
    int | None, typer.Option("--port", help="Port of --live; without it, a free one.", metavar="N", min=0, max=65535)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error came from.")]


class Commands(typer.Typer):
    """Commands that all have --debug, know ~ in every path, and say in one line what went wrong."""

    def command(self, *name: Any, **about: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        register = super().command(*name, **about)

        def decorate(command: CommandFunctionType) -> CommandFunctionType:
            @functools.wraps(command)
            def speaking(debug: bool, **typed: Any) -> None:
                with _speaking(debug):
                    command(**{name: _at_home(value) for name, value in typed.items()})

            debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
            register(_taking(speaking, [*inspect.signature(command).parameters.values(), debug]))
            return command

        return decorate


def _at_home(value: Any) -> Any:
    """Shells leave the ~ of --out=~/runs alone, and a folder named ~ is a danger."""
    if isinstance(value, list):
        return [_at_home(one) for one in value]
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value


@contextmanager
def _speaking(debug: bool) -> Iterator[None]:
    """Turns what goes wrong into one line and the right exit code."""
    try:
        with _terminable():
            yield
    except FedgistError as error:
        fail(str(error), 2, debug)
    except KeyboardInterrupt as stop:
        fail(str(stop) or "stopped", 130, debug)
    except (typer.Exit, BrokenPipeError):
        raise
    except OSError as error:  # a folder that may not be written, a full disk: nothing that fedgist could mend
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}", 2, debug)
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, by its name: help must not wait for torch
            fail("the GPU's memory is full: make batches smaller, or choose --device cpu", 2, debug)
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # numpy's, and torch's of a CPU
            fail("this machine's memory is full: make batches, models or data smaller", 2, debug)
        what = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        from fedgist import methods  # imported here: it brings torch, which help must not wait for

        if line := methods.line_elsewhere(error):  # the author of that file can mend it, and nobody else
            fail(f"{line}: {what}; --debug shows how it came there", 1, debug)
        fail(f"internal error, please report it ({what}); --debug shows where", 1, debug)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM, with which schedulers stop what runs too long, is Ctrl-C: what is kept is said, and how to go on."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield  # not ours to change
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def warning_once() -> Iterator[None]:
    """Seeds and methods that are run side by side have much in common: what one warned of, the next does not."""
    said: set[str] = set()

    def new(record: logging.LogRecord) -> bool:
        before = len(said)
        said.add(record.getMessage())
        return len(said) > before

    log = logging.getLogger("fedgist")
    log.addFilter(new)
    try:
        yield
    finally:
        log.removeFilter(new)


def fail(line: str, code: int, debug: bool = False) -> None:
    if debug:
        traceback.print_exc()
    print(f"fedgist: {line}", file=sys.stderr)
    raise typer.Exit(code)


def new_table(*head: str, numbers_from: int | None = None) -> Any:
    """A table of rich with that head; from that column on there are numbers."""
    from rich.table import Table

    table = Table(*head)
    for column in table.columns[len(head) if numbers_from is None else numbers_from :]:
        column.justify = "right"
    return table


def draw(table: Any, width: int = 140) -> None:
    """Print a table of rich: as wide as the terminal is, or where there is none as wide as it may need to be."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else width).print(table)


def note(note: str | None, quiet: bool = False) -> None:
    if note and not quiet:
        print(note, file=sys.stderr)
