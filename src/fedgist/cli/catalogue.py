"""What there is, read from the source without running it: importing it would take torch, and that seconds.

Only `methods` from FEDGIST_METHODS are imported: whether a file of somebody's own works, only that can tell.
"""

import ast
import os
from pathlib import Path
from typing import Any

import fedgist

SOURCE = Path(fedgist.__file__).parent


def methods() -> dict[str, str]:
    """Name -> one line."""
    if os.environ.get("FEDGIST_METHODS"):
        from fedgist import methods

        return methods.available()
    found = {}
    for file in (SOURCE / "methods").glob("*.py"):
        for made in [node for node in _parse(file) if isinstance(node, ast.ClassDef)]:
            values = _constants(made.body)
            if "name" in values:
                found[values["name"]] = values["summary"]
    return dict(sorted(found.items()))


def models() -> dict[str, str]:
    return _documented("ARCHITECTURES", "models/registry.py", "models/feed_forward.py", "models/residual.py")


def partitions() -> dict[str, str]:
    return _documented("KINDS", "data/partitions.py")


def discrepancies() -> dict[str, str]:
    return _documented("KINDS", "data/discrepancies.py")


def topologies() -> dict[str, str]:
    kinds: dict[str, str] = ast.literal_eval(_assigned(_parse(SOURCE / "data/topologies.py"))["KINDS"])
    return kinds


def _documented(table: str, *files: str) -> dict[str, str]:
    """The functions in a table of the first file, with the first lines of their docstrings, which any of them has."""
    parsed = [_parse(SOURCE / file) for file in files]
    lines = {
        node.name: (ast.get_docstring(node) or "").partition("\n")[0]
        for body in parsed
        for node in body
        if isinstance(node, ast.FunctionDef)
    }
    kinds: Any = _assigned(parsed[0])[table]
    return {key.value: lines[value.id] for key, value in zip(kinds.keys, kinds.values, strict=True)}


def _parse(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8")).body


def _assigned(body: list[ast.stmt]) -> dict[str, ast.expr]:
    """What names are set to, as it is written."""
    plain = [(node.targets[0], node.value) for node in body if isinstance(node, ast.Assign)]
    declared = [(node.target, node.value) for node in body if isinstance(node, ast.AnnAssign)]
    return {name.id: value for name, value in [*plain, *declared] if isinstance(name, ast.Name) and value}


def _constants(body: list[ast.stmt]) -> dict[str, Any]:
    """The names that are set to a text or a number."""
    return {name: value.value for name, value in _assigned(body).items() if isinstance(value, ast.Constant)}
