"""What the folders of runs say, and which of them are seeds of the same thing."""

import csv
import dataclasses
import itertools
import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from fedgist.experiments import config as configs
from fedgist.experiments import fairness
from fedgist.experiments.fairness import GLOBAL, OWN, Accuracies, Fairness, Parts
from fedgist.experiments.folder import RunFolder, read_json

BETWEEN = "deviation_between_clients"
KNOWN = {
    "round",
    "seconds",
    "answered",
    "client_steps",
    "skipped",
    "missing",
    "unevaluated",
    "accuracy",
    "bytes_up",
    "bytes_down",
    BETWEEN,
    "balanced_accuracy",
    "auroc",
    "calibration_error",
}
RECALL = "recall_"
"""What the names of a row's recalls begin with; the class follows."""
SYMBOLS = {"w": "model", "p": "weight in the mean", "x": "inputs"}
"""Fields of messages that have the papers' letters for names, in words."""
FEW = 3  # differing options that a label may name
REFERENCES = ("centralized", fairness.ALONE)
"""The upper and the lower line of a comparison: no method that could win it."""
SHARE_OF_BEST = 0.95
"""The usual target: this share of the best last accuracy of all methods but the references."""


@dataclass
class Counts:
    """Messages of one kind, and their bytes."""

    messages: int = 0
    header: int = 0
    payload: int = 0
    paper: int = 0

    @property
    def bytes(self) -> int:
        return self.header + self.payload


@dataclass
class Wire:
    """What the ledger says."""

    kinds: dict[tuple[str, str, str], Counts] = field(default_factory=lambda: defaultdict(Counts))
    """(phase, direction, type of message) -> counts."""
    paper_up: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Round -> bytes as the papers count them (numbers × 4), from all clients together, evaluation not counted."""

    def crossed(self, phase: str = "round") -> list[tuple[str, str, Counts]]:
        """(direction, type, counts), the largest first."""
        kinds = [(way, kind, counts) for (at, way, kind), counts in self.kinds.items() if at == phase]
        return sorted(kinds, key=lambda one: -one[2].bytes)

    @property
    def replies(self) -> set[str]:
        """The types of message that clients sent, evaluation not counted."""
        return {kind.rsplit(".", 1)[-1] for way, kind, _ in self.crossed() if way == "up"}


@dataclass(frozen=True)
class Run:
    """What a folder says."""

    folder: RunFolder
    config: dict[str, Any]
    text: str
    rows: list[dict[str, Any]]
    result: dict[str, Any] | None
    partition: dict[str, Any]
    environment: dict[str, Any]
    about: dict[str, Any]
    """The method: its summary and citation, and who sees what."""
    wire: Wire
    clients: Accuracies = field(default_factory=dict)
    """How accurate each client is."""
    alone: Parts | None = None
    """The same of clients that learned alone, where that is known."""

    @property
    def model(self) -> str:
        """What is learned: an architecture, or several."""
        specs = self.config.get("architectures") or [str(self.config.get("model", ""))]
        return str(self.about.get("learns") or " + ".join(dict.fromkeys(specs)))

    @property
    def mean_of_clients(self) -> bool:
        """Whether the accuracy is the mean over models that clients keep."""
        rows = self.evaluations
        own = any(BETWEEN in row and "accuracy_clients" not in row for row in rows)
        return own and self.config["method"] != "centralized"

    @property
    def effective_rounds(self) -> int:
        """The rounds in which anything was sent."""
        sent = [0, *(row["bytes_up"] + row["bytes_down"] for row in self.rows)]
        return sum(after > before for before, after in itertools.pairwise(sent))

    @property
    def steps(self) -> float | None:
        """Of loops, that a client which was there in all rounds computed, where that was counted."""
        counted = [row for row in self.rows if "client_steps" in row]
        return sum(row["client_steps"] / max(1, row["answered"]) for row in counted) if counted else None

    def score(self, name: str) -> float | None:
        """The last evaluation's score of that name."""
        found = self.evaluations[-1].get(name) if self.evaluations else None
        return None if found is None else float(found)

    @property
    def recalls(self) -> dict[int, float]:
        """Class -> recall, after the last round."""
        last = self.evaluations[-1] if self.evaluations else {}
        return {int(name.removeprefix(RECALL)): float(last[name]) for name in last if name.startswith(RECALL)}

    @cached_property
    def fairness(self) -> dict[str, dict[str, Fairness]]:
        """Whose model -> what was tested on -> how its clients fare."""
        return fairness.summary(self.clients, self.alone) or fairness.across(self.folder)

    def fares(self, part: str) -> Fairness | None:
        """How clients fare by the model that the accuracy is about."""
        by = self.fairness.get(OWN if self.mean_of_clients else GLOBAL, {})
        return by.get(part)

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options of the run and of its method by name."""
        return {
            **{name: value for name, value in self.config.items() if name != "options"},
            **self.config.get("options", {}),
        }

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row.get("accuracy") is not None]

    @cached_property
    def accuracies(self) -> dict[int, float]:
        """Round -> test accuracy."""
        return {row["round"]: row["accuracy"] for row in self.evaluations}

    @property
    def last(self) -> dict[str, Any]:
        """The last row; before the first round, one that says so."""
        return self.rows[-1] if self.rows else {"round": 0, "bytes_up": 0, "bytes_down": 0}

    @property
    def seconds(self) -> float:
        return float(sum(row["seconds"] for row in self.rows))

    @property
    def peer_to_peer(self) -> bool:
        return self.config.get("topology", "none") != "none"

    @property
    def sends(self) -> bool:
        """Whether clients send more than that they are done."""
        return any(counts.payload for way, _, counts in self.wire.crossed() if way == "up")

    @property
    def seen(self) -> list[dict[str, Any]]:
        """The fields of the replies that crossed the wire, evaluation not counted."""
        replies = self.wire.replies
        return [one for one in self.about.get("sees", []) if one["reply"] in replies]

    @property
    def visible(self) -> list[str]:
        """The fields that whoever asks sees of each client, in words."""
        names = dict.fromkeys(one["field"] for one in self.seen if not one["additive"])
        return [SYMBOLS.get(name, name.replace("_", " ")) for name in names]

    def server_sees(self, most: int | None = None) -> str:
        """What the server learns of a single client, in a few words that name so many fields; all without a number."""
        if not self.sends:
            return "nothing" if self.rows else "nothing yet"
        if "sees" not in self.about:
            return "not recorded"
        if not self.visible:
            return "no server; neighbours add up" if self.peer_to_peer else self.about.get("secure", "sums only")
        whose = "no server; neighbours see" if self.peer_to_peer else "each client's"
        named = self.visible[:most]
        more = f" and {len(self.visible) - len(named)} more" if len(named) < len(self.visible) else ""
        return f"{whose} {', '.join(named)}{more}"

    def reached(self, aim: float) -> tuple[int, int] | None:
        """The first round that was found that accurate, and the bytes up and down until then; None if none was."""
        row = next((row for row in self.evaluations if row["accuracy"] >= aim), None)
        return None if row is None else (row["round"], row["bytes_up"] + row["bytes_down"])

    def further(self) -> dict[str, dict[int, float]]:
        """Name -> round -> value, for all finite numbers in the rows besides those that every run has."""
        found: dict[str, dict[int, float]] = defaultdict(dict)
        for row in self.rows:
            for name, value in row.items():
                if name in KNOWN or name.startswith(RECALL):
                    continue
                if isinstance(value, (int, float)) and math.isfinite(value):
                    found[name][row["round"]] = float(value)
        return dict(found)


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    label: str
    runs: Sequence[Run]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def method(self) -> str:
        return str(self.first.config["method"])

    @property
    def model(self) -> str:
        return self.first.model

    @property
    def accuracy(self) -> float:
        """At the end; there must have been an evaluation."""
        return self.curve[-1][2]

    @property
    def best(self) -> float:
        """In any of the rounds."""
        return max(mean for *_, mean, _ in self.curve)

    def mean(self, of: Callable[[Run], float]) -> float:
        """Of a number of its runs."""
        return statistics.fmean(map(of, self.runs))

    @property
    def is_reference(self) -> bool:
        return self.method in REFERENCES

    @property
    def finished(self) -> bool:
        return all(run.result is not None for run in self.runs)

    @property
    def between_clients(self) -> bool:
        """Whether the deviation of a curve is that between clients: of one seed, whose accuracy is a mean over them."""
        return len(self.runs) == 1 and self.first.mean_of_clients

    @cached_property
    def curve(self) -> list[tuple[int, float, float, float]]:
        """(round, bytes, accuracy, standard deviation), means over the seeds, where all of them were evaluated."""
        if self.between_clients:
            return [
                (row["round"], row["bytes_up"] + row["bytes_down"], row["accuracy"], row.get(BETWEEN, 0.0))
                for row in self.first.evaluations
            ]
        bytes_at = [{row["round"]: row["bytes_up"] + row["bytes_down"] for row in run.rows} for run in self.runs]
        rounds = sorted(set.intersection(*(set(run.accuracies) for run in self.runs)))
        return [
            (r, statistics.fmean(at[r] for at in bytes_at), *mean_and_deviation(run.accuracies[r] for run in self.runs))
            for r in rounds
        ]


def mean_and_deviation(values: Iterable[float]) -> tuple[float, float]:
    """The mean, and the standard deviation of a sample (n − 1), which is 0 for a single value."""
    listed = list(values)
    return statistics.fmean(listed), statistics.stdev(listed) if len(listed) > 1 else 0.0


def read(folder: RunFolder) -> Run:
    accuracies, alone = fairness.read(folder) if folder.finished else ({}, None)
    return Run(
        folder=folder,
        config=configs.read(folder.config),
        text=folder.config.read_text(encoding="utf-8"),
        rows=folder.rows(),
        result=read_json(folder.result) if folder.finished else None,
        partition=read_json(folder.partition),
        environment=read_json(folder.environment),
        about=read_json(folder.method) if folder.method.is_file() else {},
        wire=read_ledger(folder.ledger),
        clients=accuracies,
        alone=alone,
    )


def usual_target(groups: Sequence[Group]) -> float | None:
    """The accuracy that rounds and bytes are counted to where nobody names one: most of the best at the end."""
    shown = [group for group in groups if group.curve]
    last = [group.accuracy for group in [group for group in shown if not group.is_reference] or shown]
    return SHARE_OF_BEST * max(last) if len(shown) > 1 else None


def _unquoted(line: str) -> str:
    """A row in which a name has a comma, with another sign in its place: it is only counted."""
    end = "\n" if line.endswith("\n") else ""
    return ",".join(field.replace(",", ";") for field in next(csv.reader([line]))) + end


def read_ledger(path: Path) -> Wire:
    wire = Wire()
    if not path.is_file():
        return wire
    with path.open(encoding="utf-8") as file:
        at = {name: i for i, name in enumerate(next(csv.reader(file), []))}
        if not at:
            return wire
        behind = at["receiver"] + 1  # sender and receiver lie beside each other, and are all in which most rows differ
        pick = itemgetter(at["round"], at["phase"], at["direction"], behind)
        rows = ((line if '"' not in line else _unquoted(line)).split(",", behind) for line in file)
        # The last row of a run that is being written, or was killed, may be cut short.
        alike = Counter(pick(row) for row in rows if len(row) > behind and row[behind].endswith("\n"))
    names = [name for name in at if at[name] > at["receiver"]]
    columns = itemgetter(*(names.index(name) for name in ("type", "header_bytes", "payload_bytes", "paper_bytes")))
    equal = {(*key[:3], *columns(key[3].rstrip("\n").split(","))): messages for key, messages in alike.items()}
    for row, messages in equal.items():
        round, phase, direction, kind, header, payload, paper = row
        counts = wire.kinds[phase, direction, kind]
        counts.messages += messages
        counts.header += messages * int(header)
        counts.payload += messages * int(payload)
        counts.paper += messages * int(paper or 0)
        if phase == "round" and direction == "up":
            wire.paper_up[int(round)] += messages * int(paper or 0)
    return wire


def grouped(runs: Sequence[Run]) -> list[Group]:
    """The runs with the seeds of one configuration together, in the order in which they came."""
    groups: dict[str, list[Run]] = {}
    for run in beside_alone(runs):
        key = repr({name: value for name, value in run.config.items() if name != "seed"})
        groups.setdefault(key, []).append(run)
    together = list(groups.values())
    return [Group(label, runs) for label, runs in zip(_labels([one[0] for one in together]), together, strict=True)]


def beside_alone(runs: Sequence[Run]) -> list[Run]:
    """The runs, those that do not know how their clients did alone with what a run of `independent` here says."""
    alone = {_ground(run): run.clients.get(OWN) for run in runs if run.config["method"] == fairness.ALONE}
    return [
        run if run.alone or run.config["method"] == fairness.ALONE
        else dataclasses.replace(run, alone=alone.get(_ground(run)))
        for run in runs
    ]  # fmt: skip


def _ground(run: Run) -> tuple[str, ...]:
    """What clients must have in common to be the same: who holds what, seen how, judged on what."""
    names = ("seed", "discrepancy", "validation")
    return str(run.partition.get("sha256")), *(str(run.config.get(name)) for name in names)


def differing(runs: Sequence[Run]) -> list[str]:
    """The options, of the run or of its method, in which configurations differ, the seed aside."""
    flat = [run.options for run in runs]
    names = dict.fromkeys(name for options in flat for name in options if name not in ("seed", "seeds"))
    return [name for name in names if any(options.get(name) != flat[0].get(name) for options in flat)]


def _labels(runs: Sequence[Run]) -> list[str]:
    """Names that tell the groups apart: the method, where that does not suffice what else differs, or the folder."""
    labels = []
    for run in runs:
        alike = [other for other in runs if other.config["method"] == run.config["method"]]
        names = differing(alike)
        said, method = ", ".join(f"{name} {run.options.get(name)}" for name in names), str(run.config["method"])
        both = said if len(alike) == len(runs) else f"{method} ({said})"
        labels.append(both if 0 < len(names) <= FEW else method)
    paths = [run.folder.path.resolve() for run in runs]
    above = Path(os.path.commonpath([path.parent for path in paths])) if paths else Path()
    return [
        label if labels.count(label) == 1 else f"{run.config['method']} ({path.relative_to(above)})"
        for label, run, path in zip(labels, runs, paths, strict=True)
    ]
