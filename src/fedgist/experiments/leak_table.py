"""The leak table: methods side by side, each run once a seed with its transcript, and attacked; from one command.

Who is attacked stands in leak_tables.toml. First every row is tuned: its settings are tried with seed 0 on samples that
are held out from the clients, and the best is what all its runs have. Transcripts are large and are thrown away; the
numbers are kept in one file, run by run, so that a cut loses little.
"""

import dataclasses
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgist import engines, methods
from fedgist.core.errors import FedgistError, check_known
from fedgist.core.message import Content, schema_of
from fedgist.core.method import who_sees_what
from fedgist.dp.accountant import MissingLibrary
from fedgist.experiments import config as configs
from fedgist.experiments import curiosity, provenance, runner, workers
from fedgist.experiments.config import RunConfig
from fedgist.experiments.folder import RunFolder, read_json, write_json
from fedgist.experiments.reproduction import about
from fedgist.experiments.tuning import VALIDATION, grid
from fedgist.privacy.attacks import ATTACKS
from fedgist.privacy.transcript import LEVELS

TABLES = Path(__file__).parent / "leak_tables.toml"
UNUSED: tuple[Content, ...] = ("slope", "size")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of one row, and how it is attacked; a trial of a setting is not."""

    name: str
    seed: int
    layer: Mapping[str, Any]
    setting: Mapping[str, Any]
    """What was chosen for the row, or is tried."""
    effort: int
    pictures: str | None
    trial: bool = False

    def __str__(self) -> str:
        return f"{self.name}, {told(self.setting)}, held out" if self.trial else f"{self.name}, seed {self.seed}"


def rows_of(dataset: str) -> dict[str, dict[str, Any]]:
    """What is compared on a data set: the options of every row."""
    file = configs.read(TABLES)
    known = [name for name in file if name not in ("options", "rows")]
    check_known("leak table", dataset, known)
    own = file[dataset]
    ground = {**file["options"], **own.get("options", {}), "dataset": dataset}
    return {name: {**ground, **row, **own.get("rows", {}).get(name, {})} for name, row in file["rows"].items()}


def settings(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is tried of a row: all combinations of the values of those options that have several."""
    return grid({name: values for name, values in row.items() if isinstance(values, list)})


def told(setting: Mapping[str, Any]) -> str:
    """A setting as one types it."""
    return ", ".join(f"{name}={value}" for name, value in setting.items())


def chosen(row: Mapping[str, Any], trials: Mapping[str, float | None]) -> dict[str, Any]:
    """The setting that was best on held-out samples, the first of equals; what is refused there is the worst."""
    return max(settings(row), key=lambda one: trials.get(told(one)) or 0.0)


def untried(row: Mapping[str, Any], trials: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """The settings that are to be tried yet; of a row without a choice none."""
    return [setting for setting in settings(row) if setting and told(setting) not in trials]


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
    tuned: Path | None = None,
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Tunes and runs what the file lacks, attacks it, and adds it to the file; what `tuned` has is not tuned again."""
    rows = rows_of(dataset)
    names = list(rows) if names is None else list(names)
    for name in names:
        check_known("row", name, rows)
    device = str(engines.find_device(str(given.get("device", "auto"))))
    table: dict[str, Any] = read_json(out) if out.is_file() else {"rows": {}}
    trials = table.setdefault("trials", {})
    for name, tried in ({} if tuned is None else read_json(tuned)["trials"]).items():
        trials.setdefault(name, {}).update(tried)
    broken = []

    def finished(todo: Sequence[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        for cell, found, seconds in _done(todo, jobs):
            if "broken" in found:
                broken.append(f"{cell}: {found['broken']}")
            tell(broken[-1] if "broken" in found else f"{cell}: {seconds:.0f} s")
            yield cell, found
            table["about"] = {**about(command), "machine": provenance.environment(device)}
            write_json(out, table)

    dear_first = names[::-1]  # what takes longest stands last in the file, and several at a time should end together
    todo = [
        Cell(name, 0, {**rows[name], **given, "seed": 0}, setting, effort, None, trial=True)
        for name in dear_first
        for setting in untried(rows[name], trials.get(name, {}))
    ]
    for cell, found in finished(todo):
        if "broken" not in found:
            trials.setdefault(cell.name, {})[told(cell.setting)] = found.get("accuracy")
    todo = [
        Cell(
            name, seed, {**rows[name], **given, "seed": seed}, best, effort, None if pictures is None else str(pictures)
        )
        for seed in seeds
        for name in dear_first
        for best in [chosen(rows[name], trials.get(name, {}))]
        if str(seed) not in table["rows"].get(name, {}) and not untried(rows[name], trials.get(name, {}))
    ]
    for cell, found in finished(todo):
        if "broken" not in found:
            table["rows"].setdefault(cell.name, {})[str(cell.seed)] = found
            order = {name: i for i, name in enumerate(rows)}
            table["rows"] = dict(sorted(table["rows"].items(), key=lambda item: order.get(item[0], len(order))))
    if broken:
        raise FedgistError(f"{len(broken)} runs broke, and are not in the table: {broken[0]}")
    return table


def _done(todo: Sequence[Cell], jobs: int) -> Iterator[tuple[Cell, dict[str, Any], float]]:
    """All cells, `jobs` at a time, as they end."""
    for place, made in workers.each(timed, [dataclasses.asdict(cell) for cell in todo], jobs):
        found, seconds = made or ({"broken": workers.DIED}, 0.0)
        yield todo[place], found, seconds


def timed(given: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """What came of a cell, and the seconds that it took."""
    start = time.perf_counter()
    try:
        found = one(Cell(**given))
    except MissingLibrary as lacking:  # of this machine, and no refusal of the method's
        found = {"broken": str(lacking)}
    except FedgistError as refused:
        found = {"refused": str(refused)}
    except Exception as error:  # one run must not take all others with it
        traceback.print_exc()
        found = {"broken": f"{type(error).__name__}: {error}"}
    return found, time.perf_counter() - start


def one(cell: Cell) -> dict[str, Any]:
    """A row: accuracy, bytes, and what every attack finds, with its control; of a trial, its accuracy alone."""
    config = configs.resolve({**cell.layer, **cell.setting}, profile="small")
    more = {"validation": VALIDATION} if cell.trial else {"record": worth_recording(config.method)}
    config = configs.resolve({**configs.flat(config), **more})
    with tempfile.TemporaryDirectory() as place:
        folder, start = RunFolder(Path(place) / "run"), time.perf_counter()
        result = runner.run(config, folder.path)
        if cell.trial:
            return {"accuracy": result.accuracy}
        ran, start = time.perf_counter() - start, time.perf_counter()
        device = str(engines.find_device(config.device))
        transcript, known, judge = curiosity.opened(folder, cell.seed, cell.effort, device)
        outcomes = curiosity.attacked(transcript, known, judge, levels=_levels(config))
        shown = [f"{reply}.{field}" for _, reply, field, summed in who_sees_what(transcript.method) if not summed]
        if cell.pictures is not None:
            curiosity.draw(outcomes, Path(cell.pictures), f"{cell.name}-{cell.seed}-")
        last = folder.rows()[-1]
    return {
        "accuracy": result.accuracy,
        "of clients": known.model is None,
        "chosen": cell.setting,
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


def markdown(table: Mapping[str, Any]) -> str:
    """The table as a page shows it: found (blind), means over seeds, of replies and of sums.

    † marks an accuracy that is the mean over models that the clients keep.
    """
    lines = [f"| | accuracy | seen | {' | '.join(ATTACKS)} |", "|" + "---|" * (3 + len(ATTACKS))]
    for name, row in table["rows"].items():
        runs = [run for run in row.values() if "refused" not in run]
        if not runs:
            lines.append(f"| {name} | refused |" + " |" * (1 + len(ATTACKS)))
            continue
        accuracy = 100 * sum(run["accuracy"] for run in runs) / len(runs)
        row_of = [name, f"{accuracy:.1f}{'†' * runs[0].get('of clients', False)}"]
        for level in sorted({one["level"] for one in runs[0]["attacks"]}):
            cells = [_cell(runs, attack, level) for attack in ATTACKS]
            seen = f"{level}, masks refused" if level == "sums" and runs[0].get("shown") else level
            lines.append(f"| {' | '.join((*row_of, seen, *cells))} |")
            row_of = ["", ""]
    return "\n".join(lines) + "\n"


def _cell(runs: Sequence[Mapping[str, Any]], attack: str, level: str) -> str:
    found = [one for run in runs for one in run["attacks"] if (one["attack"], one["level"]) == (attack, level)]
    scored = [one for one in found if one["value"] is not None]
    if not scored:
        return "–"
    value, control = (sum(one[key] for one in scored) / len(scored) for key in ("value", "control"))
    digits = 1 if scored[0]["measure"].startswith("PSNR") else 2
    return f"{value:.{digits}f} ({control:.{digits}f})"
