"""The leak table: methods side by side, each run once a seed with its transcript, and attacked; from one command.

Transcripts are large and are thrown away; the numbers are kept in one file, run by run, so that a cut loses little.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgist import methods
from fedgist.core.errors import FedgistError, unknown
from fedgist.core.message import Content, schema_of
from fedgist.experiments import config as configs
from fedgist.experiments import curiosity, provenance, runner
from fedgist.experiments.folder import RunFolder, read_json, write_json
from fedgist.experiments.reproduction import about
from fedgist.privacy.attacks import ATTACKS
from fedgist.privacy.transcript import LEVELS

GROUND: dict[str, Any] = {"clients": 10, "partition": "dirichlet-balanced", "alpha": 0.1, "eval_every": 0}
ROWS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {"method": "fedavg"},
    "fedavg, one step of 8": {"method": "fedavg", "rounds": 20, "steps": 1, "batch": 8},
    "gist": {"method": "gist"},
    "gist, ε = 8": {"method": "gist", "epsilon": 8.0, "clip": 0.25},
    "gist, ε = 1": {"method": "gist", "epsilon": 1.0, "clip": 0.25},
    "feddm": {"method": "feddm"},
    "feddm from noise": {"method": "feddm", "init": "noise"},
    "real": {"method": "real"},
    "fedgen": {"method": "fedgen", "rounds": 20},
    "repshare": {"method": "repshare"},
    "fedtgp": {"method": "fedtgp"},
    "tofu": {"method": "tofu"},
    "codream": {"method": "codream"},
}
"""What is compared, each with the rest of its `small` profile."""
UNUSED: tuple[Content, ...] = ("slope", "size")


def make(
    names: Sequence[str] | None,
    given: Mapping[str, Any],
    seeds: Sequence[int],
    out: Path,
    command: str,
    effort: int = 300,
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Runs what the file lacks, attacks it, and adds it to the file."""
    names = list(ROWS) if names is None else list(names)
    for name in names:
        if name not in ROWS:
            raise unknown("row", name, ROWS)
    table: dict[str, Any] = read_json(out) if out.is_file() else {"rows": {}}
    for seed in seeds:
        for name in names:
            row = table["rows"].setdefault(name, {})
            if str(seed) in row:
                continue
            start = time.perf_counter()
            try:
                row[str(seed)] = one(name, given, seed, effort)
            except FedgistError as refused:
                row[str(seed)] = {"refused": str(refused)}
            table["about"] = {**about(command), "machine": provenance.environment(str(given.get("device", "cpu")))}
            write_json(out, table)
            tell(f"{name}, seed {seed}: {time.perf_counter() - start:.0f} s")
    return table


def one(name: str, given: Mapping[str, Any], seed: int, effort: int) -> dict[str, Any]:
    """A row: accuracy, bytes, and what every attack finds, with its control."""
    layer = {**GROUND, **ROWS[name], **given, "seed": seed}
    config = configs.resolve(layer, profile="small")
    config = configs.resolve({**configs.flat(config), "record": worth_recording(config.method)})
    with tempfile.TemporaryDirectory() as place:
        folder, start = RunFolder(Path(place) / "run"), time.perf_counter()
        result = runner.run(config, folder.path)
        ran, start = time.perf_counter() - start, time.perf_counter()
        outcomes = [outcome.as_json() for outcome in curiosity.attack_all(folder, seed=seed, effort=effort)]
        last = folder.rows()[-1]
    return {
        "accuracy": result.accuracy,
        "bytes": last["bytes_up"] + last["bytes_down"],
        "seconds": {"run": round(ran, 1), "attacks": round(time.perf_counter() - start, 1)},
        "attacks": outcomes,
    }


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
            lines.append(f"| {name} | refused | " + " | " * len(attacks) + "|")
            continue
        accuracy = 100 * sum(run["accuracy"] for run in runs) / len(runs)
        for level in LEVELS:
            cells = [_cell(runs, attack, level) for attack in attacks]
            told = (name, f"{accuracy:.1f}") if level == LEVELS[0] else ("", "")
            lines.append(f"| {' | '.join((*told, level, *cells))} |")
    return "\n".join(lines) + "\n"


def _cell(runs: Sequence[Mapping[str, Any]], attack: str, level: str) -> str:
    found = [one for run in runs for one in run["attacks"] if (one["attack"], one["level"]) == (attack, level)]
    scored = [one for one in found if one["value"] is not None]
    if not scored:
        return "–"
    value, control = (sum(one[key] for one in scored) / len(scored) for key in ("value", "control"))
    digits = 1 if scored[0]["measure"].startswith("PSNR") else 2
    return f"{value:.{digits}f} ({control:.{digits}f})"
