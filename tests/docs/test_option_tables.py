"""The tables of options in the pages of methods are those that the methods declare.

A page has a line such as `<!-- options: feddm -->` or `<!-- options: real beside feddm -->` above a table. Where a
declaration changes, this writes the tables anew:

    python tests/docs/test_option_tables.py
"""

import re
from pathlib import Path
from typing import Any

from fedgist import methods
from fedgist.options import Option, options

PAGES = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
TABLE = re.compile(r"^<!-- options: (\S+)(?: beside (\S+))? -->\n\n(?:\|.*\n)*", re.MULTILINE)
BASE = "fedavg"


def own(method: str, other: str | None = None) -> list[Option]:
    """The options of a method that are not just as those of another: of FedAvg, which has a table of all its own."""
    known = options(methods.find(other or BASE).Config)
    mine = options(methods.find(method).Config)
    return [option for name, option in mine.items() if method == BASE or option != known.get(name)]


def shown(value: Any) -> str:
    """As one would type it."""
    if isinstance(value, tuple):
        return ",".join(map(shown, value)) or "–"
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"


def table(method: str, other: str | None) -> str:
    line = f"<!-- options: {method}{f' beside {other}' if other else ''} -->"
    options = own(method, other)
    rows = [f"| `{one.name}` | {shown(one.default)} | {' '.join(one.sentences.splitlines())} |" for one in options]
    return "\n".join([f"{line}\n", "| option | default | meaning |", "|---|---|---|", *rows, ""])


def test_tables_are_what_the_methods_declare() -> None:
    for page in PAGES:
        for found in TABLE.finditer(page.read_text("utf-8")):
            made = table(found[1], found[2])
            assert found[0] == made, f"{page.name} is out of date: python tests/docs/test_option_tables.py"


def test_every_option_of_a_method_is_in_some_table() -> None:
    tables = [found for page in PAGES for found in TABLE.finditer(page.read_text("utf-8"))]
    described = {(option.name, option.help) for found in tables for option in own(found[1], found[2])}
    for method in methods.available():
        missing = [option.name for option in own(method) if (option.name, option.help) not in described]
        assert not missing, f"no page has a table with {', '.join(missing)} of {method}"


if __name__ == "__main__":
    for page in PAGES:
        text = page.read_text("utf-8")
        page.write_text(TABLE.sub(lambda found: f"{table(found[1], found[2])}", text), "utf-8")
