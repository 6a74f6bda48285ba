"""docs/architecture.md is held to the tree: its packages, its picture, and the functions of its walk."""

import importlib
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fedgist"
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
SCRIPT = runpy.run_path(str(ROOT / "docs" / "make_architecture.py"))
ROWS = {row[0]: row[1:] for row in re.findall(r"^\| `([\w/.]+)` \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)}
WALK = PAGE[PAGE.index("## What happens in") :]


def test_every_package_has_a_sentence() -> None:
    packages = {f"{path.parent.relative_to(SOURCE)}/" for path in SOURCE.glob("*/**/__init__.py")}
    modules = {path.name for path in SOURCE.glob("[!_]*.py")}
    assert ROWS.keys() == packages | modules
    assert all(sentence.endswith(".") and touches for sentence, touches in ROWS.values())


def test_the_picture_is_what_the_script_draws() -> None:
    assert SCRIPT["PICTURE"].read_text("utf-8") == SCRIPT["draw"](), "run python docs/make_architecture.py"


def test_the_picture_shows_the_layers_that_the_linter_checks() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (checked,) = (contract["layers"] for contract in contracts if contract["name"] == "imports point one way")
    drawn = [{name for name, _, _ in layer} for layer in SCRIPT["LAYERS"]]
    known = [set(re.findall(r"\w+", layer)) for layer in checked]
    assert [layer for layer in drawn if layer != {"api"}] == [layer for layer in known if layer != {"api"}]


def find(name: str) -> Any:
    """What a dotted name below fedgist means: the longest module in it, and attributes of that."""
    parts = ["fedgist", *name.split(".")]
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if not ".".join(parts[:count]).startswith(str(error.name)):
                raise
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


NAMES = sorted(set(re.findall(r"`([a-z_]+(?:\.\w+)+)`", WALK)))


def test_the_walk_has_names() -> None:
    assert len(NAMES) > 20


@pytest.mark.parametrize("name", NAMES)
def test_what_the_walk_names_is_there(name: str) -> None:
    assert callable(find(name))


def test_a_name_that_is_not_there_is_found_out() -> None:
    for name in ("core.codec.nothing", "nowhere.function"):
        with pytest.raises(AttributeError):
            find(name)
