"""Presets: the tables and figures of the papers as data, one TOML file a paper.

A preset is a table of cells: rows × columns, or several such parts. Every row and every column is a set of options, as
`fedgist run --set` takes them; a cell has those of the file, the preset, the part, its column and its row, the later
winning, as far as its method knows them. Cells with the same options share one run. Beside the options of a run:

    take     which number of a run: last, best, best5 (the five best evaluations), numbers (sent up in a round),
             milliseconds (of a round), efficiency (bytes up of the cell `against` until its best round, by ours)
    of       of which column of the metrics; accuracy without it
    until    only rounds up to this one are looked at; 0 is all
    against  the cell that an efficiency is compared with

`values` has the paper's numbers, row by row, `claims` what it concludes from them, as in "ours > FedAvg" (`claims.py`
says what else they may be), `small` what is changed for a laptop (`only` leaves out cells), `why` what there is to say
where our numbers differ. A folder of more such files may be named in the environment variable FEDGIST_PRESETS.
"""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedgist.core.errors import FedgistError, check_known
from fedgist.experiments import config as configs
from fedgist.experiments.claims import Claim
from fedgist.experiments.claims import read as read_claim
from fedgist.experiments.config import RunConfig, method_options
from fedgist.options import Role, having, options

HERE = Path(__file__).parent
TAKES = ("last", "best", "best5", "numbers", "milliseconds", "efficiency")
JUDGED = {"take": "last", "of": "accuracy", "until": 0, "against": ""}
"""What a cell's options may say beside those of its run, and what holds where they do not."""
FILE_KEYS = ("paper", "elsewhere", "options", "small")
PRESET_KEYS = ("title", "seeds", "tolerance", "claims", "why", "options", "small", "part", "rows", "columns", "values")


@dataclass(frozen=True)
class Cell:
    """One number of a table: a run, what is taken of it, and what the paper has there."""

    row: str
    column: str
    layer: dict[str, Any] = field(repr=False)
    """The flat configuration of its run."""
    take: str
    of: str
    until: int
    against: str
    paper: float | None
    spread: float | None
    """What stands behind the paper's ±."""
    tolerance: float | None
    """By how much ours may differ and still be within; None where that is not judged."""

    @property
    def name(self) -> str:
        return ", ".join(part for part in (self.row, self.column) if part)

    @cached_property
    def config(self) -> RunConfig:
        return configs.resolve(self.layer)

    @cached_property
    def run(self) -> str:
        return run_of(self.config)


@dataclass(frozen=True)
class Preset:
    """A table or a figure."""

    name: str
    title: str
    paper: str
    seeds: int
    cells: tuple[Cell, ...]
    claims: tuple[Claim, ...]
    why: str
    scale: str = "full"
    reduced: tuple[str, ...] = ()
    """What the scale changed, one phrase each."""


def run_of(config: RunConfig) -> str:
    """The method, the data set and a hash of all that makes it this run, wherever and however it is made.

    What is as it is without saying so is left out: an option that comes later changes no name.
    """
    known = {**options(RunConfig), **options(config.options)}
    told = {name: value for name, value in configs.flat(config).items() if value != known[name].default}
    for name in having(RunConfig, Role.EXECUTION):
        told.pop(name, None)
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return f"{config.method}-{config.dataset}-{digest[:8]}"


def available(scale: str = "full") -> dict[str, Preset]:
    """All presets by name, those of the user's own folder last."""
    own = os.environ.get("FEDGIST_PRESETS")
    folders = [HERE, *([Path(own)] if own else [])]
    if own and not Path(own).is_dir():
        raise FedgistError(f"FEDGIST_PRESETS names {own}, which is no folder")
    files = [path for folder in folders for path in sorted(folder.glob("*.toml"))]
    return {preset.name: preset for path in files for preset in _read(path, scale)}


def matches(cell: Cell, words: str) -> bool:
    """Whether the words stand in the cell's name: MNIST is not in EMNIST, nor N=1 in N=10."""
    return re.search(rf"(?<!\w){re.escape(words)}(?![\w.])", cell.name) is not None if words else True


def elsewhere() -> dict[str, dict[str, str]]:
    """What of each paper is no preset, and where it is instead."""
    return {path.stem: configs.read(path).get("elsewhere", {}) for path in sorted(HERE.glob("*.toml"))}


def _read(path: Path, scale: str) -> Iterator[Preset]:
    content = configs.read(path)
    for name, table in content.items():
        if name not in FILE_KEYS:
            yield _preset(f"{path.stem}/{name}", table, content, scale)


def _preset(name: str, table: Mapping[str, Any], file: Mapping[str, Any], scale: str) -> Preset:
    for key in table:
        check_known(f"key of preset {name}", key, PRESET_KEYS)
    parts = table.get("part") or [{key: table[key] for key in ("rows", "columns", "values") if key in table}]
    common = {**file.get("options", {}), **table.get("options", {})}
    small = {} if table.get("small") == {} else {**file.get("small", {}), **table.get("small", {})}
    only = small.pop("only", "")
    every = [cell for part in parts for cell in _cells(name, part, common, table.get("tolerance"))]
    cells, reduced = [], {}
    for cell in every:
        if scale == "small":
            if not matches(cell, only):
                continue
            cell, changes = _scaled(cell, small)
            reduced.update(dict.fromkeys(changes))
        cells.append(cell)
    if scale == "small" and only:
        reduced[f"only cells with {only} in their names"] = None
    rows, columns = {cell.row for cell in every}, {cell.column for cell in every}
    claims = tuple(read_claim(name, text, rows, columns) for text in table.get("claims", ()))
    about = {"title": table["title"], "paper": file.get("paper", ""), "why": table.get("why", "")}
    return Preset(
        name,
        seeds=table.get("seeds", 1),
        cells=tuple(cells),
        claims=claims,
        scale=scale,
        reduced=tuple(reduced),
        **about,
    )


def _cells(name: str, part: Mapping[str, Any], common: Mapping[str, Any], tolerance: float | None) -> Iterator[Cell]:
    rows, columns = part.get("rows") or {"": {}}, part.get("columns") or {"": {}}
    values = part.get("values", {})
    for row in values:
        if row not in rows or len(values[row]) != len(columns):
            raise FedgistError(f"preset {name}: values of {row!r} do not fit its {len(columns)} columns")
    ground = {**common, **part.get("options", {})}
    for row, of_row in rows.items():
        for i, (column, of_column) in enumerate(columns.items()):
            given = {**JUDGED, **ground, **of_column, **of_row}
            # A column of its own kind of number (take, until) is about the column, whatever the row says.
            given |= {key: of_column[key] for key in JUDGED if key in of_column}
            judged = {key: given.pop(key) for key in JUDGED}
            check_known(f"take of preset {name}", judged["take"], TAKES)
            paper, spread = _printed(values[row][i]) if row in values else (None, None)
            allowed = None if tolerance is None or paper is None else max(tolerance, spread or 0.0)
            if judged["take"] == "efficiency" and allowed is not None and paper is not None:
                allowed = 0.1 * paper  # the paper prints two digits
            layer = _known(name, given)
            yield Cell(row, column, layer, **judged, paper=paper, spread=spread, tolerance=allowed)


def _known(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the cell's method knows; one that no method knows is a mistake."""
    from fedgist import methods

    if "method" not in given:
        raise FedgistError(f"preset {name}: a cell has no method")
    own, run = method_options(given["method"]), options(RunConfig)
    for key in given:
        if key not in own and key not in run:
            everywhere = {option for method in methods.available() for option in method_options(method)}
            check_known(f"option in preset {name}", key, {*run, *everywhere})
    return {key: value for key, value in given.items() if key in own or key in run}


def _scaled(cell: Cell, small: Mapping[str, Any]) -> tuple[Cell, list[str]]:
    """The cell in the small, and what that changed; a table in `small` is for the method of that name."""
    method = cell.layer["method"]
    known = {**method_options(method), **options(RunConfig)}
    wanted = {key: value for key, value in small.items() if not isinstance(value, dict)} | small.get(method, {})
    given = {key: value for key, value in wanted.items() if key in known}
    judged = {key: value for key, value in wanted.items() if key in JUDGED}
    scaled = dataclasses.replace(cell, layer={**cell.layer, **given}, tolerance=None, **judged)
    before, after = configs.flat(cell.config), configs.flat(scaled.config)
    shown = [f"{key} {_word(before[key])} → {_word(after[key])}" for key in given if before[key] != after[key]]
    return scaled, shown


def _word(value: Any) -> str:
    return "none" if value is None else str(value)


def _printed(value: Any) -> tuple[float | None, float | None]:
    """What a paper prints: 70.06, "87.70±2.07", or nothing."""
    if value == "":
        return None, None
    mean, _, spread = str(value).partition("±")
    return float(mean), float(spread) if spread else None
