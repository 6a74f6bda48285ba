"""The papers' tables run and judged: which runs a preset needs, what they gave, and whether the paper's numbers hold.

Runs lie in OUT/METHOD-DATASET-HASH/seed-N, so that cells, and presets, that need the same run share it, and a finished
one is never made again. What came out of a preset is one JSON file, with the command, the version, the machine and the
seeds.
"""

import dataclasses
import fcntl
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import fedgist
from fedgist.core.errors import FedgistError, check_known
from fedgist.experiments import config as configs
from fedgist.experiments import finishing, presets, provenance, runner, workers
from fedgist.experiments.claims import FAILS, HOLDS, NOISE, SEEN, UNSEEN, Claim, Outcome, outcomes
from fedgist.experiments.config import RunConfig
from fedgist.experiments.folder import RunFolder, read_json, write_json
from fedgist.experiments.presets import Cell, Preset
from fedgist.experiments.results import best_five

T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """What a cell gave."""

    run: str
    numbers: dict[str, list[float]]
    """Seed -> the number, or the five best."""
    bytes_up: float
    bytes_down: float
    seconds: float
    """Means over seeds, of one run."""
    made: tuple[dict[str, Any], ...]
    """Where its numbers come from: commands with version, commit and machine, and the seeds that each gave."""
    curves: dict[str, str] = field(default_factory=dict)
    """Seed -> what is judged by round, as in `1:21.67 2:36.87`; results of before do not have it."""
    sizes: dict[str, list[float]] = field(default_factory=dict)
    """Seed -> bytes up, bytes down and seconds; results of before have their means alone."""

    @property
    def by_seed(self) -> dict[str, float]:
        return {seed: statistics.fmean(numbers) for seed, numbers in self.numbers.items()}

    @property
    def changed(self) -> set[str]:
        """The seeds that a checkout with changes of its own made."""
        return {seed for origin in self.made if str(origin.get("commit")).endswith("+") for seed in origin["seeds"]}

    @property
    def sure(self) -> set[str]:
        """The seeds that the very commit which is named made; one that is not named cannot be looked at."""
        return {seed for origin in self.made if origin.get("commit") for seed in origin["seeds"]} - self.changed

    def lacks(self, other: "Found") -> set[str]:
        """The seeds of another that this has not, or of a changed checkout where the other's is of an unchanged one."""
        return (other.numbers.keys() - self.numbers.keys()) | (other.sure & self.changed)

    def only(self, seeds: set[str]) -> "Found":
        """Some of its seeds."""
        made = [{**origin, "seeds": [seed for seed in origin["seeds"] if seed in seeds]} for origin in self.made]
        sizes = _some(self.sizes, seeds)
        means = _means(sizes) if sizes else {name: getattr(self, name) for name in SIZES}
        return dataclasses.replace(
            self,
            numbers=_some(self.numbers, seeds),
            made=tuple(origin for origin in made if origin["seeds"]),
            curves=_some(self.curves, seeds),
            sizes=sizes,
            **means,
        )

    @property
    def values(self) -> list[float]:
        return [number for numbers in self.numbers.values() for number in numbers]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None


SIZES = ("bytes_up", "bytes_down", "seconds")
CURVED = ("last", "best", "best5")
"""The kinds of number of which a result keeps the curve by round."""
Job = tuple[tuple[RunConfig, Path], ...]
"""Runs of one configuration with different seeds, each with its folder."""
Results = dict[str, Found]
"""By the name of the cell."""


@dataclass(frozen=True)
class Verdict:
    """How a preset stands."""

    cells: int
    run: int
    judged: int
    """Cells that ran, have a number in the paper and a tolerance."""
    within: int
    claims: dict[Claim, list[Outcome]]
    """How each stands in the columns where both of its sides ran."""

    @property
    def word(self) -> str:
        if not self.run:
            return "not run"
        words = {outcome.word for found in self.claims.values() for outcome in found}
        words |= {HOLDS} if self.within else set()
        words |= {FAILS} if self.within < self.judged else set()
        if not words:
            return "run"
        if words <= {HOLDS, SEEN}:
            return HOLDS if words == {HOLDS} else SEEN
        if words & {HOLDS, SEEN}:
            return "holds partly"
        return next(word for word in (FAILS, UNSEEN, NOISE) if word in words)


def find(name: str, scale: str = "full") -> Preset:
    known = presets.available(scale)
    check_known("preset", name, known)
    return known[name]


def needs_of_data(scale: str) -> dict[str, dict[str, list[Cell]]]:
    """Data set -> preset -> the cells that need it."""
    found: dict[str, dict[str, list[Cell]]] = {}
    for preset in presets.available(scale).values():
        for cell in preset.cells:
            found.setdefault(cell.config.dataset, {}).setdefault(preset.name, []).append(cell)
    return found


def choose(preset: Preset, only: str) -> Preset:
    """The preset with those of its cells whose names have these words; what they are compared with comes along."""
    chosen = {cell.name for cell in preset.cells if presets.matches(cell, only)}
    if not chosen:
        raise FedgistError(
            f"no cell of {preset.name} has {only!r} in its name: {'; '.join(c.name for c in preset.cells)}"
        )
    needed = chosen | {cell.against for cell in preset.cells if cell.name in chosen}
    return dataclasses.replace(preset, cells=tuple(cell for cell in preset.cells if cell.name in needed))


def folder_of(cell: Cell, seed: int, out: Path) -> RunFolder:
    return RunFolder(out / cell.run / f"seed-{seed}")


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Nobody else makes runs in this folder meanwhile: two commands would write into the same ones."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with the process, whatever ends it
        except OSError as error:
            raise FedgistError(f"another command makes runs in {out}; wait for it, or use --out") from error
        yield


def jobs(
    preset: Preset, seeds: Sequence[int], out: Path, known: Results, how: Mapping[str, Any], together: int
) -> tuple[list[Job], int]:
    """The runs that are still to be made, up to `together` seeds in a job; and how many are finished already.

    A cell needs no run for the seeds that `known` has. One with a finish first needs the run without it, which is often
    a cell of its own: nothing is trained twice, and the finish is to be made once that is there.
    """
    by_name = {cell.name: cell for cell in preset.cells}
    todo: dict[str, tuple[Cell, set[int]]] = {}
    asked, missing = set(), set()
    for cell in preset.cells:
        there = known[cell.name].numbers if cell.name in known else {}
        for seed in seeds:
            asked.add((cell.run, seed))
            if str(seed) in there:
                continue
            for needed in (cell, by_name[cell.against]) if cell.against else (cell,):
                before = unfinished(needed)
                if not folder_of(needed, seed, out).finished:
                    missing.add((needed.run, seed))
                    now = needed if folder_of(before, seed, out).finished else before
                    todo.setdefault(now.run, (now, set()))[1].add(seed)
    made = []
    for cell, lacking in todo.values():
        for first in range(0, len(lacking), together):
            some = sorted(lacking)[first : first + together]
            made.append(tuple((_config(cell, seed, how), folder_of(cell, seed, out).path) for seed in some))
    return made, len(asked - missing)


def unfinished(cell: Cell) -> Cell:
    """The cell as it would be without a finish."""
    layer = {key: value for key, value in cell.layer.items() if key != "finish"}
    return cell if layer == cell.layer else dataclasses.replace(cell, layer=layer)


def carry_over(todo: Iterable[Job], out: Path) -> None:
    """Gives those runs that are to be finished what was trained without a finish."""
    for config, folder in (run for job in todo for run in job):
        if config.finish is not None and not RunFolder(folder).started:
            trained = out / presets.run_of(dataclasses.replace(config, finish=None)) / folder.name
            told = {name: value for name, value in configs.flat(config).items() if value != "auto"}
            finishing.begin(RunFolder(trained), folder, told)  # what was left to the machine stays as it chose


def make_all(todo: Sequence[Job], at_once: int) -> Iterator[tuple[Job, str]]:
    """Makes the runs of all jobs; each with what was wrong with it, if anything, as it ends."""
    told = [[{"config": configs.flat(config), "folder": str(folder)} for config, folder in job] for job in todo]
    with closing(workers.each(make, told, at_once)) as ended:
        for place, wrong in ended:
            yield todo[place], workers.DIED if wrong is None else wrong


def make(told: Sequence[Mapping[str, Any]]) -> str:
    """Makes the runs of a job together; returns what was wrong, if it is something the user can mend."""
    try:
        runner.run_together([(configs.resolve(run["config"]), Path(run["folder"])) for run in told])
    except FedgistError as error:
        return str(error)
    return ""


def _config(cell: Cell, seed: int, how: Mapping[str, Any]) -> Any:
    often = max(1, cell.config.rounds // 20)  # the states of many large models are not written every round
    changes = {"seed": seed, "seeds": 1, "artifacts_every": 0, "checkpoint_every": often, **how}
    return dataclasses.replace(cell.config, **changes)


def collect(preset: Preset, seeds: Sequence[int], out: Path, about: Mapping[str, Any]) -> Results:
    """What the finished runs of a preset gave."""
    by_name = {cell.name: cell for cell in preset.cells}
    found: Results = {}
    for cell in preset.cells:
        numbers: dict[str, list[float]] = {}
        curves: dict[str, str] = {}
        sizes: dict[str, list[float]] = {}
        machine = None
        for seed in seeds:
            folder = folder_of(cell, seed, out)
            rival = folder_of(by_name[cell.against], seed, out) if cell.against else None
            if not folder.finished or (rival is not None and not rival.finished):
                continue
            result, rows = read_json(folder.result), folder.rows()
            sizes[str(seed)] = [result[key] for key in SIZES]
            numbers[str(seed)] = taken(cell, rows, result, rival.rows() if rival else None)
            curves[str(seed)] = curve(cell, rows)
            machine = read_json(folder.environment)
        if numbers:
            made = ({**about, "machine": machine, "seeds": list(numbers)},)
            kept = {seed: line for seed, line in curves.items() if line}
            found[cell.name] = Found(cell.run, numbers, made=made, curves=kept, sizes=sizes, **_means(sizes))
    return found


def _some(known: Mapping[str, T], seeds: set[str]) -> dict[str, T]:
    return {seed: value for seed, value in known.items() if seed in seeds}


def _means(sizes: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    return dict(zip(SIZES, map(statistics.fmean, zip(*sizes.values(), strict=True)), strict=True))


def curve(cell: Cell, rows: Sequence[Mapping[str, Any]]) -> str:
    """What a cell judges, round by round; nothing where it is no share that was evaluated more than once."""
    shares = [f"{row['round']}:{100 * row[cell.of]:.2f}" for row in rows if cell.take in CURVED and cell.of in row]
    return " ".join(shares) if len(shares) > 1 else ""


def taken(
    cell: Cell, rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any], rival: Sequence[Mapping[str, Any]] | None
) -> list[float]:
    """The number of a run that a cell is about."""
    if cell.take == "numbers":
        return [result[cell.of] / 4 / result["rounds"]]
    if cell.take == "milliseconds":  # the first rounds warm up
        return [1000 * statistics.fmean(row["seconds"] for row in rows[5:] or rows)]
    judged = [row for row in rows if cell.of in row and (not cell.until or row["round"] <= cell.until)]
    if not judged:
        raise FedgistError(f"the run of {cell.name} has no {cell.of} in its metrics")
    if cell.take == "efficiency":
        assert rival is not None
        ours, theirs = (max(r, key=lambda row: row[cell.of]) for r in (judged, [r for r in rival if cell.of in r]))
        return [theirs["bytes_up"] / ours["bytes_up"]]
    shares = [100 * row[cell.of] for row in judged]
    return {"last": shares[-1:], "best": [max(shares)], "best5": best_five(shares)}[cell.take]


def judge(preset: Preset, results: Results) -> Verdict:
    """The cells within their tolerance, and the columns in which each claim holds."""
    ran = [cell for cell in preset.cells if cell.name in results]
    judged = [cell for cell in ran if within(cell, results[cell.name]) is not None]
    numbers = {(cell.row, cell.column): results[cell.name].by_seed for cell in ran}
    columns = list(dict.fromkeys(cell.column for cell in preset.cells))
    stand = {claim: outcomes(claim, numbers, columns) for claim in preset.claims}
    good = sum(bool(within(cell, results[cell.name])) for cell in judged)
    return Verdict(len(preset.cells), len(ran), len(judged), good, stand)


def left(preset: Preset, results: Results, cost: Callable[[Cell], float | None]) -> tuple[float | None, bool]:
    """What all seeds of the cells that have not run cost, and whether of some that is not known; None where of none."""
    lacking = {cell.run: cell for cell in preset.cells if cell.name not in results}
    costs = [cost(cell) for cell in lacking.values()]
    known = [one for one in costs if one is not None]
    return preset.seeds * sum(known) if known or not lacking else None, len(known) < len(costs)


def within(cell: Cell, found: Found) -> bool | None:
    """Whether ours is within the tolerance of the paper's; None where that is not judged."""
    if cell.paper is None or cell.tolerance is None:
        return None
    return abs(found.mean - cell.paper) <= cell.tolerance


# Results on disk


def path_of(preset: Preset, folder: Path) -> Path:
    small = "" if preset.scale == "full" else f".{preset.scale}"
    return folder / f"{preset.name.replace('/', '-')}{small}.json"


def load(preset: Preset, folders: Sequence[Path]) -> Results:
    """What is known of a preset's cells, the earlier folder winning; results of other settings are left out."""
    known: Results = {}
    for folder in reversed(folders):
        path = path_of(preset, folder)
        if path.is_file():
            cells = json.loads(path.read_text("utf-8"))["cells"]
            fitting = [cell.name for cell in preset.cells if cell.name in cells and cells[cell.name]["run"] == cell.run]
            known |= {name: _found(cells[name]) for name in fitting}
    return {cell.name: known[cell.name] for cell in preset.cells if cell.name in known}


def _found(kept: Mapping[str, Any]) -> Found:
    """A cell as a file has it; those of before had one `about`, that of the last command."""
    if "about" in kept:
        rest = {key: value for key, value in kept.items() if key != "about"}
        return Found(**rest, made=({**kept["about"], "seeds": list(kept["numbers"])},))
    return Found(**{**kept, "made": tuple(kept["made"])})


def _added(before: Found, found: Found) -> Found:
    """What was known of a cell and what a command found; a seed stays with the command that first gave its number.

    But a number of a changed checkout that an unchanged one gives again is the latter's.
    """
    new = {seed for seed, numbers in found.numbers.items() if before.numbers.get(seed) != numbers}
    new |= before.changed & found.sure
    origins: list[dict[str, Any]] = []
    for made, theirs in ((before.made, before.numbers.keys() - new), (found.made, new)):
        for origin in made:
            seeds = [seed for seed in origin["seeds"] if seed in theirs]
            same = next((known for known in origins if {**known, "seeds": 0} == {**origin, "seeds": 0}), None)
            if same is not None:  # a command that saves after every run
                same["seeds"] = sorted({*same["seeds"], *seeds}, key=int)
            elif seeds:
                origins.append({**origin, "seeds": seeds})
    numbers, curves = {**before.numbers, **found.numbers}, {**before.curves, **found.curves}
    means = {seed: [one.bytes_up, one.bytes_down, one.seconds] for one in (before, found) for seed in one.numbers}
    sizes = {**means, **before.sizes, **found.sizes}
    return dataclasses.replace(found, numbers=numbers, made=tuple(origins), curves=curves, sizes=sizes, **_means(sizes))


def save(preset: Preset, results: Results, folder: Path) -> Path:
    """Adds results to those that the file has, seed by seed."""
    kept = load(preset, [folder])
    for name, found in results.items():
        kept[name] = _added(kept[name], found) if name in kept else found
    cells = {name: dataclasses.asdict(found) for name, found in kept.items()}
    folder.mkdir(parents=True, exist_ok=True)
    about = {"preset": preset.name, "title": preset.title, "paper": preset.paper, "reduced": preset.reduced}
    write_json(path_of(preset, folder), {**about, "cells": cells})
    return path_of(preset, folder)


def add(preset: Preset, theirs: Path, folder: Path) -> None:
    """Adds the seeds that were found elsewhere and lack here."""
    if not path_of(preset, theirs).is_file():
        raise FedgistError(
            f"{path_of(preset, theirs)} is not there: --add wants a folder with results of {preset.name}"
        )
    ours, gained = load(preset, [folder]), {}
    for name, found in load(preset, [theirs]).items():
        lacking = ours[name].lacks(found) if name in ours else found.numbers.keys()
        if lacking:
            gained[name] = found.only(set(lacking))
    save(preset, gained, folder)


def about(command: str) -> dict[str, Any]:
    """What a published number must name, beside its seeds and its machine."""
    return {"command": command, "version": fedgist.__version__, "commit": provenance.commit("--dirty=+")}
