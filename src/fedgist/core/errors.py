"""Errors that a user can act on: one sentence that says what is wrong, where, and what to do."""

import difflib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager


class FedgistError(ValueError):
    """Something the user can mend; the command line prints it in one line and exits with code 2."""


class MixedModels(FedgistError):
    """Models that cannot learn together; who knows which site runs which adds their names."""


@contextmanager
def extra(line: str, kind: type[FedgistError] = FedgistError) -> Iterator[None]:
    """Around the import of what is no requirement: where it is not installed, this line says so."""
    try:
        yield
    except ImportError:
        raise kind(line) from None


def check_known(kind: str, name: str, known: Collection[str]) -> None:
    """Refuses a name that is none of those that are known."""
    if name not in known:
        raise unknown(kind, name, known)


def unknown(kind: str, name: str, known: Iterable[str]) -> FedgistError:
    """The error for a mistyped name, with the nearest known one as a suggestion."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
    return FedgistError(f"unknown {kind} {name!r}; {hint}")
