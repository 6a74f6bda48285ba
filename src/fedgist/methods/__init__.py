"""Methods, one file each. They are found by scanning this package: adding one touches no other file.

Folders named in the environment variable FEDGIST_METHODS are scanned too, for methods that live elsewhere.
"""

import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from fedgist.core.errors import unknown
from fedgist.core.method import Method


@cache
def registry() -> dict[str, type[Method]]:
    """Name -> class of every method, sorted."""
    found = [value for module in _modules() for value in vars(module).values() if is_method(value)]
    return {method.name: method for method in sorted(found, key=lambda method: method.name)}


def _modules() -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules([str(Path(__file__).parent)]):
        yield importlib.import_module(f"{__name__}.{found.name}")
    for folder in filter(None, os.environ.get("FEDGIST_METHODS", "").split(os.pathsep)):
        for path in sorted(Path(folder).glob("*.py")):
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None and spec.loader is not None
            module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            yield module


def is_method(value: Any) -> bool:
    """Whether a module attribute is a concrete method."""
    return isinstance(value, type) and issubclass(value, Method) and "name" in vars(value)


def find(name: str) -> type[Method]:
    """The method of that name."""
    if name not in registry():
        raise unknown("method", name, registry())
    return registry()[name]


def available() -> dict[str, str]:
    """Name -> one line."""
    return {name: method.summary for name, method in registry().items()}
