"""What an honest but curious server learns: what attacks on a run's transcript found, with controls and pictures."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgist.experiments import curiosity
from fedgist.experiments.report.runs import Group
from fedgist.experiments.report.tables import Cell, Table, number


@dataclass(frozen=True)
class Picture:
    """A picture inside the page, and what its rows are."""

    url: str
    caption: str


@dataclass(frozen=True)
class Section:
    """One run's."""

    table: Table
    unseen: str
    """Which attacks had nothing to look at, and why."""
    pictures: list[Picture]


NOTE = (
    "Found: what the attack gets. Blind: what the same guess gets without the transcript; no more is claimed than lies "
    "between the two. Replies is what the server's machine receives, sums what a secure sum leaves to be seen."
)


def sections(groups: Sequence[Group]) -> list[Section]:
    """Of those runs that were attacked (`fedgist attack all`)."""
    found = []
    for group in groups:
        if rows := curiosity.read(group.first.folder):
            head = ("attack", "seen", "found", "blind", "measure", "from what")
            scored = [_row(row) for row in rows if row["value"] is not None]
            table = Table(f"{group.label}: what its transcript gives away", head, scored, NOTE)
            found.append(
                Section(table, _unseen(rows), [_picture(row) for row in _drawn(rows, group.first.folder.artifacts)])
            )
    return found


def _unseen(rows: list[dict[str, Any]]) -> str:
    why: dict[str, list[str]] = {}
    for row in rows:
        if row["value"] is None:
            why.setdefault(row["why"], []).append(f"{row['attack']} ({row['level']})")
    return "; ".join(f"{', '.join(attacks)}: {reason}" for reason, attacks in why.items())


def _row(row: dict[str, Any]) -> list[Cell]:
    numbers = (number(f"{row[name]:.3f}") for name in ("value", "control"))
    return [
        Cell(row["attack"], kind="name"),
        Cell(row["level"]),
        *numbers,
        Cell(row["measure"]),
        Cell(curiosity.from_what(row), kind="text"),
    ]


def _drawn(rows: list[dict[str, Any]], place: Path) -> list[tuple[dict[str, Any], Path]]:
    paths = [(row, place / "attacks" / f"{row['attack']}-{row['level']}.png") for row in rows if row.get("rows")]
    return [(row, path) for row, path in paths if path.is_file()]


def _picture(drawn: tuple[dict[str, Any], Path]) -> Picture:
    row, path = drawn
    lines = "; ".join(f"row {i}: {name}" for i, name in enumerate(row["rows"], 1))
    url = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return Picture(url, f"{row['attack']}, {row['level']}. {lines}")
