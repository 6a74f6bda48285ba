"""The command line. It only reads what the user typed and shows what came out; the work is elsewhere.

One module for a group of commands; torch is imported by those that need it, when they run.
"""

from typing import Annotated

import typer

from fedgist.cli import attack, chaos, finish, information, models, operations, privacy, reproduction, runs, tuning

app = typer.Typer(
    help="Collaborative learning in which clients share the gist of what they learned, never their data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for group in (runs, tuning, finish, models, reproduction, information, attack, privacy, operations, chaos):
    app.add_typer(group.app)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        import fedgist

        print(f"fedgist {fedgist.__version__}")


def main() -> None:
    app()
