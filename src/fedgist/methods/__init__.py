"""Methods, one file each. They are found by scanning this package: adding one touches no other file.

Folders named in the environment variable FEDGIST_METHODS are scanned too, for methods that live elsewhere.
"""

import importlib
import importlib.util
import logging
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from fedgist.core.errors import FedgistError, unknown
from fedgist.core.method import Method

log = logging.getLogger("fedgist")

ELSEWHERE = "fedgist_methods"
LEFT_OUT = "what this file has is left out"


@cache
def registry() -> dict[str, type[Method[Any]]]:
    """Name -> class of every method, sorted; those that come with fedgist are cited as references.bib says."""
    found: dict[str, type[Method[Any]]] = {}
    references = _references()
    for module in _modules():
        for method in filter(is_method, vars(module).values()):
            method.citation = references.get(method.citation, method.citation)
            known = found.setdefault(method.name, method)
            if known is not method:
                log.warning(
                    f"{module.__file__}: there is a method {method.name} already, in {_file(known)}; {LEFT_OUT}"
                )
    return dict(sorted(found.items()))


def _references() -> dict[str, str]:
    """The entries of references.bib by their keys."""
    entries = (Path(__file__).parent / "references.bib").read_text("utf-8").strip().split("\n\n")
    return {entry[entry.index("{") + 1 : entry.index(",")]: entry for entry in entries}


def _modules() -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules([str(Path(__file__).parent)]):
        yield importlib.import_module(f"{__name__}.{found.name}")
    folders = [Path(name).resolve() for name in os.environ.get("FEDGIST_METHODS", "").split(os.pathsep) if name]
    for folder in folders:
        if not folder.is_dir():
            raise FedgistError(f"FEDGIST_METHODS names {folder}, but there is no such folder")
    # A package of their own, so that a file may be called like a module of somebody else, and import one beside it.
    package = sys.modules[ELSEWHERE] = ModuleType(ELSEWHERE)
    package.__path__ = [str(folder) for folder in folders]
    for found in pkgutil.iter_modules(package.__path__):
        try:
            yield importlib.import_module(f"{ELSEWHERE}.{found.name}")
        except Exception as error:  # of somebody's own file: whatever it is, it is no reason not to run the others
            log.warning(f"{_explain(error, found.name)}; {LEFT_OUT}")


def _explain(error: Exception, name: str) -> str:
    """Where in a file from elsewhere it went wrong, and what."""
    file = str(getattr(importlib.util.find_spec(f"{ELSEWHERE}.{name}"), "origin", name))
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == file]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    where = file if line is None else f"{file}, line {line}"
    return f"{where}: {type(error).__name__}: {getattr(error, 'msg', error)}"


def line_elsewhere(error: Exception) -> str | None:
    """The last line of a file from FEDGIST_METHODS that an error came through, if it did."""
    folders = getattr(sys.modules.get(ELSEWHERE), "__path__", ())
    trace = traceback.extract_tb(error.__traceback__)
    lines = [f"{at.filename}, line {at.lineno}" for at in trace if str(Path(at.filename).parent) in folders]
    return lines[-1] if lines else None


def _file(method: type[Method[Any]]) -> str | None:
    return sys.modules[method.__module__].__file__


def is_method(value: Any) -> bool:
    """Whether a module attribute is a concrete method."""
    return isinstance(value, type) and issubclass(value, Method) and "name" in vars(value)


def find(name: str) -> type[Method[Any]]:
    """The method of that name."""
    if name not in registry():
        raise unknown("method", name, registry())
    return registry()[name]


def available() -> dict[str, str]:
    """Name -> one line."""
    return {name: method.summary for name, method in registry().items()}
