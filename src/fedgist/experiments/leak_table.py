"""The leak table: methods side by side, each run once a seed with its transcript, and attacked; from one command.

Who is attacked stands in leak_tables.toml. Transcripts are large and are thrown away; the numbers are kept in one file,
run by run, so that a cut loses little.
"""

import dataclasses
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from fedgist import engines, methods
from fedgist.core.errors import FedgistError, unknown
from fedgist.core.message import Content, schema_of
from fedgist.core.method import who_sees_what
from fedgist.experiments import config as configs
from fedgist.experiments import curiosity, provenance, runner
from fedgist.experiments.config import RunConfig
from fedgist.experiments.folder import RunFolder, read_json, write_json
from fedgist.experiments.reproduction import about
from fedgist.privacy.attacks import ATTACKS
from fedgist.privacy.transcript import LEVELS

TABLES = Path(__file__).parent / "leak_tables.toml"
UNUSED: tuple[Content, ...] = ("slope", "size")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of one row, and how it is attacked."""

    name: str
    seed: int
    layer: Mapping[str, Any]
    effort: int
    pictures: Path | None


def rows_of(dataset: str) -> dict[str, dict[str, Any]]:
    """What is compared on a data set: the options of every row."""
    file = configs.read(TABLES)
    known = [name for name in file if name not in ("options", "rows")]
    if dataset not in known:
        raise unknown("leak table", dataset, known)
    own = file[dataset]
    ground = {**file["options"], **own.get("options", {}), "dataset": dataset}
    return {name: {**ground, **row, **own.get("rows", {}).get(name, {})} for name, row in file["rows"].items()}


def make(
    dataset: str,
    names: Sequence[str] | None,
    given: Mapping[str, Any],
    seeds: Sequence[int],
    out: Path,
    command: str,
    effort: int = 300,
    jobs: int = 1,
    pictures: Path | None = None,
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Runs what the file lacks, attacks it, and adds it to the file."""
    rows = rows_of(dataset)
    names = list(rows) if names is None else list(names)
    for name in names:
        if name not in rows:
            raise unknown("row", name, rows)
    device = str(engines.find_device(str(given.get("device", "auto"))))
    table: dict[str, Any] = read_json(out) if out.is_file() else {"rows": {}}
    todo = [
        Cell(name, seed, {**rows[name], **given, "seed": seed}, effort, pictures)
        for seed in seeds
        for name in names
        if str(seed) not in table["rows"].get(name, {})
    ]
    broken = []
    for cell, found, seconds in _done(todo, jobs):
        if "broken" in found:
            broken.append(f"{cell.name}, seed {cell.seed}: {found['broken']}")
            tell(broken[-1])
            continue
        table["rows"].setdefault(cell.name, {})[str(cell.seed)] = found
        order = {name: i for i, name in enumerate(rows)}
        table["rows"] = dict(sorted(table["rows"].items(), key=lambda item: order.get(item[0], len(order))))
        table["about"] = {**about(command), "machine": provenance.environment(device)}
        write_json(out, table)
        tell(f"{cell.name}, seed {cell.seed}: {seconds:.0f} s")
    if broken:
        raise FedgistError(f"{len(broken)} of {len(todo)} runs broke, and are not in the table: {broken[0]}")
    return table


def _done(todo: Sequence[Cell], jobs: int) -> Iterator[tuple[Cell, dict[str, Any], float]]:
    """All cells, `jobs` at a time, as they end."""
    if jobs == 1:
        yield from map(_timed, todo)
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_quiet, initargs=(threads,)) as pool:
        for future in as_completed([pool.submit(_timed, cell) for cell in todo]):
            yield future.result()


def _quiet(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def _timed(cell: Cell) -> tuple[Cell, dict[str, Any], float]:
    start = time.perf_counter()
    try:
        found = one(cell)
    except FedgistError as refused:
        found = {"refused": str(refused)}
    except Exception as error:  # one run must not take all others with it
        traceback.print_exc()
        found = {"broken": f"{type(error).__name__}: {error}"}
    return cell, found, time.perf_counter() - start


def one(cell: Cell) -> dict[str, Any]:
    """A row: accuracy, bytes, and what every attack finds, with its control."""
    config = configs.resolve(dict(cell.layer), profile="small")
    config = configs.resolve({**configs.flat(config), "record": worth_recording(config.method)})
    with tempfile.TemporaryDirectory() as place:
        folder, start = RunFolder(Path(place) / "run"), time.perf_counter()
        result = runner.run(config, folder.path)
        ran, start = time.perf_counter() - start, time.perf_counter()
        device = str(engines.find_device(config.device))
        transcript, known, judge = curiosity.opened(folder, cell.seed, cell.effort, device)
        outcomes = curiosity.attacked(transcript, known, judge, levels=_levels(config))
        shown = [f"{reply}.{field}" for _, reply, field, summed in who_sees_what(transcript.method) if not summed]
        if cell.pictures is not None:
            curiosity.draw(outcomes, cell.pictures, f"{cell.name}-{cell.seed}-")
        last = folder.rows()[-1]
    return {
        "accuracy": result.accuracy,
        "bytes": last["bytes_up"] + last["bytes_down"],
        "shown": shown,
        "seconds": {"run": round(ran, 1), "attacks": round(time.perf_counter() - start, 1)},
        "attacks": [outcome.as_json() for outcome in outcomes],
    }


def _levels(config: RunConfig) -> tuple[str, ...]:
    """Noise that suffices in a sum alone is for who sees the sum alone."""
    return ("sums",) if config.epsilon is not None and config.dp_noise == "sum" else LEVELS


def worth_recording(method: str) -> tuple[str, ...]:
    """The messages that an attack may look at, by names that they keep where a layer wraps them."""
    pairs = methods.find(method).handlers.values()
    kinds = {kind for pair in pairs for kind in (pair.request, pair.reply)}
    worth = [kind for kind in kinds if {wire.holds for _, wire in schema_of(kind).values()} - {None, *UNUSED}]
    return tuple(sorted({kind.__name__ for kind in worth}))


def markdown(table: Mapping[str, Any], attacks: Sequence[str] = tuple(ATTACKS)) -> str:
    """The table as a page shows it: found (blind), means over seeds, of replies and of sums."""
    lines = [f"| | accuracy | seen | {' | '.join(attacks)} |", "|" + "---|" * (3 + len(attacks))]
    for name, row in table["rows"].items():
        runs = [run for run in row.values() if "refused" not in run]
        if not runs:
            lines.append(f"| {name} | refused |" + " |" * (1 + len(attacks)))
            continue
        accuracy = 100 * sum(run["accuracy"] for run in runs) / len(runs)
        told = [name, f"{accuracy:.1f}"]
        for level in sorted({one["level"] for one in runs[0]["attacks"]}):
            cells = [_cell(runs, attack, level) for attack in attacks]
            seen = f"{level}, masks refused" if level == "sums" and runs[0].get("shown") else level
            lines.append(f"| {' | '.join((*told, seen, *cells))} |")
            told = ["", ""]
    return "\n".join(lines) + "\n"


def _cell(runs: Sequence[Mapping[str, Any]], attack: str, level: str) -> str:
    found = [one for run in runs for one in run["attacks"] if (one["attack"], one["level"]) == (attack, level)]
    scored = [one for one in found if one["value"] is not None]
    if not scored:
        return "–"
    value, control = (sum(one[key] for one in scored) / len(scored) for key in ("value", "control"))
    digits = 1 if scored[0]["measure"].startswith("PSNR") else 2
    return f"{value:.{digits}f} ({control:.{digits}f})"
