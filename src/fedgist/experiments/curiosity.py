"""What an honest but curious server learns from a finished run: every attack on its transcript, judged.

The attacks get the transcript and what is public, and half of the test set for samples of their own; the other half is
what nobody holds. The clients' data are rebuilt from the run's configuration, for the judge alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedgist.core import tree
from fedgist.core.errors import FedgistError, check_known
from fedgist.core.federation import SERVER
from fedgist.core.rng import Rng
from fedgist.core.work import Place
from fedgist.engines.scheduler import gpu_arithmetic
from fedgist.experiments import config as configs
from fedgist.experiments.folder import RunFolder, read_json, write_json
from fedgist.experiments.leakage import picture, recorded
from fedgist.privacy.attacks import ATTACKS, Judge, Known, NothingToSee, Score
from fedgist.privacy.transcript import LEVELS, Transcript

OWN, NOBODYS = 2000, 5000
"""Samples of the attacker's, and of nobody's, at most."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """One attack at one level: its score, or why there is none."""

    attack: str
    level: str
    score: Score | None
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        if self.score is None:
            return {"attack": self.attack, "level": self.level, "value": None, "why": self.why}
        one = self.score
        numbers = {"value": one.value, "control": one.control, **one.more}
        kept = {
            name: None if number is None or not math.isfinite(number) else round(number, 4)
            for name, number in numbers.items()
        }
        return {
            "attack": self.attack,
            "level": self.level,
            **kept,
            "measure": one.measure,
            "seen": one.seen,
            "rows": [*one.rows],
        }


def attack_all(
    folder: RunFolder,
    names: Sequence[str] = tuple(ATTACKS),
    levels: Sequence[str] = LEVELS,
    seed: int = 0,
    effort: int = 300,
    device: str = "cpu",
) -> list[Outcome]:
    """The attacks of these names on a recorded run, at each level."""
    for name in names:
        check_known("attack", name, ATTACKS)
    return attacked(*opened(folder, seed, effort, device), names, levels)


def attacked(
    transcript: Transcript,
    known: Known,
    judge: Judge,
    names: Sequence[str] = tuple(ATTACKS),
    levels: Sequence[str] = LEVELS,
) -> list[Outcome]:
    """What each finds at each level."""
    with gpu_arithmetic(transcript.place):
        return [_tried(name, level, transcript, known, judge) for name in names for level in levels]


def opened(folder: RunFolder, seed: int, effort: int, device: str = "cpu") -> tuple[Transcript, Known, Judge]:
    """A run's transcript, what is public of it, and who knows the truth; all of it lies on the device."""
    _, inputs, method = recorded(folder, device)
    saved, w = folder.last_checkpoint(), None
    if saved is not None and (state := saved["engine"]["states"].get(SERVER)) is not None:
        w = tree.to(method.weights(state), device)
    model = None if w is None or w.keys() != method.model.shapes.keys() else (method.model, w)
    rng, (x, y) = Rng(seed)("attack"), inputs.test
    order = rng("halves").permutation(len(y))
    own, rest = order[: len(y) // 2][:OWN], order[len(y) // 2 :][:NOBODYS]
    sizes = {id: data.n for id, data in inputs.sites.items() if data.n}
    known = Known(method, sizes, (x[own], y[own]), model, rng, effort)
    held = {id: (data.x, data.y) for id, data in inputs.sites.items() if data.n}
    transcript = Transcript(folder.transcript, method, Place(torch.device(device)))
    return transcript, known, Judge(held, (x[rest], y[rest]), *known.ends, rng("judge"))


def _tried(name: str, level: str, transcript: Transcript, known: Known, judge: Judge) -> Outcome:
    try:
        return Outcome(name, level, ATTACKS[name](transcript, level, known, judge))
    except (NothingToSee, FedgistError) as why:
        return Outcome(name, level, None, str(why))


def write(outcomes: Sequence[Outcome], folder: RunFolder) -> list[Path]:
    """Keeps the numbers and, where Pillow is there, the pictures, for the report; returns what was written."""
    place = folder.artifacts / "attacks"
    path = place / "attacks.json"
    write_json(path, [one.as_json() for one in outcomes])
    return [path, *draw(outcomes, place)]


def draw(outcomes: Sequence[Outcome], place: Path, name: str = "") -> list[Path]:
    """The pictures, where Pillow is there, under names that begin with `name`."""
    written: list[Path] = []
    for one in outcomes:
        if one.score is not None and one.score.rows:
            rows = [row.cpu() for row in one.score.rows.values()]
            written += picture(rows, place / f"{name}{one.attack}-{one.level}.png")
    return written


def read(folder: RunFolder) -> list[dict[str, Any]]:
    """What attacks found earlier; nothing where none was tried."""
    path = folder.artifacts / "attacks" / "attacks.json"
    return read_json(path) if path.is_file() else []


def from_what(row: Mapping[str, Any]) -> str:
    """What of the transcript a row's attack looked at; of one that tells members from others, how well it does."""
    rate = row.get("tpr at 1 % fpr")
    return str(row["seen"]) + (f"; {100 * rate:.1f} % found at 1 % wrong" if rate is not None else "")


# Positive controls: what every attack must find, or its silence means nothing

DIGITS: Mapping[str, Any] = {"dataset": "digits", "clients": 1, "partition": "iid", "record": ("all",), "device": "cpu"}
_REAL = {"method": "real", "model": "mlp:hidden=8", "rounds": 1, "ipc": 10, "limit": 150, "server_epochs": 1}
_ONE = {"method": "fedavg", "model": "mlp:hidden=32", "rounds": 1, "steps": 1, "batch": 1, "lr": 0.1, "limit": 1}
_OVERFITTED = {"method": "fedavg", "model": "mlp", "rounds": 1, "epochs": 150, "lr": 0.3, "limit": 30}
_FITTED = {**_OVERFITTED, "clients": 5, "rounds": 12, "steps": 10, "batch": 30, "lr": 0.1, "limit": 150}
_GIST = {"method": "gist", "rounds": 1}
_SKEWED = {**_GIST, "clients": 5, "partition": "dirichlet", "alpha": 0.1, "limit": 300}
PLANTED: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "inversion": ("one image, one step", "replies", _ONE),
    "first layer": ("three images, one step", "replies", {**_ONE, "batch": 3, "limit": 3}),
    "membership": ("an overfitted model", "replies", _OVERFITTED),
    "trajectory": ("clients of 30 samples", "replies", _FITTED),
    "images": ("real images", "replies", _REAL),
    "copies": ("real images", "replies", _REAL),
    "moments": ("fewer samples than features", "sums", {**_GIST, "limit": 60}),
    "reconstruction": ("one or two samples of a class", "sums", {**_GIST, "limit": 12}),
    "presence": ("each client's counts", "replies", _SKEWED),
    "shares": ("each client's counts", "replies", _SKEWED),
    "differencing": ("one away, the rest the same", "sums", {**_SKEWED, "rounds": 4, "offline": 0.2, "seed": 1}),
}
"""For each attack: what is planted, who sees it, and the run."""


def planted(folder: Path, effort: int = 300) -> dict[str, tuple[str, Outcome]]:
    """Every attack on the leak that is planted for it, each in a small run of digits under `folder`."""
    from fedgist.experiments import runner

    found = {}
    for name, (what, level, settings) in PLANTED.items():
        out = folder / name
        runner.run(configs.resolve({**DIGITS, **settings}), out)
        (found_one,) = attack_all(RunFolder(out), [name], [level], effort=effort)
        found[name] = what, found_one
    return found
