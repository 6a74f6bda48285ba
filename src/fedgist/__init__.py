"""Collaborative learning in which clients share the gist of what they learned, never their data.

`fedgist.run(...)` runs a method on your own model and data, `fedgist.load(...)` gives the model of a run; what is wrong
with what they are given, `fedgist.FedgistError` says.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedgist.core.errors import FedgistError
    from fedgist.experiments.api import load, run
    from fedgist.experiments.runner import Result

    __version__: str

__all__ = ["FedgistError", "Result", "__version__", "load", "run"]


_MADE_IN = {
    "FedgistError": "core.errors",
    "Result": "experiments.runner",
    "load": "experiments.api",
    "run": "experiments.api",
}


def __getattr__(name: str) -> Any:
    """Loads torch only for those who run something: `fedgist --help` need not wait for it."""
    if name == "__version__":
        return _version()
    if name in _MADE_IN:
        return getattr(import_module(f"fedgist.{_MADE_IN[name]}"), name)
    raise AttributeError(f"module 'fedgist' has no attribute {name!r}")


@cache  # each look at what is installed takes milliseconds
def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("fedgist")
    except metadata.PackageNotFoundError:  # run from a source folder that was not installed
        return "unknown"
