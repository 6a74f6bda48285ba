"""The names for a method's author: all that methods use are there, and all that are there are used or documented."""

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest

from fedgist import api, methods

PAGE = (Path(__file__).parents[1] / "docs" / "writing-a-method.md").read_text()
FILES = sorted(Path(methods.__file__).parent.glob("[!_]*.py"))


def used_in(path: Path) -> set[str]:
    """The names x that a file reads as `fg.x`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fg"
    }


def offered() -> set[str]:
    names = {name for name in vars(api) if not name.startswith("__")}
    return {name for name in names if not isinstance(getattr(api, name), ModuleType) or name == "tree"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_name_that_a_method_uses_is_there(path: Path) -> None:
    used = used_in(path)
    assert used, "a method without a name of the api"
    assert used <= offered()


def test_every_name_is_used_by_a_method_or_documented() -> None:
    used = set().union(*map(used_in, FILES))
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    documented = {word for code in re.findall(r"`([^`]+)`", prose) for word in re.findall(r"\w+", code)}
    documented |= set(re.findall(r"\bfg\.(\w+)", PAGE))
    assert offered() - used - documented == set()


def test_what_the_page_uses_is_there() -> None:
    assert set(re.findall(r"\bfg\.(\w+)", PAGE)) <= offered()
