"""The tables of the page: what they say is in the folders, and how they say it is for people."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedgist.experiments.fairness import ALONE
from fedgist.experiments.report import result_table
from fedgist.experiments.report.efficiency import Cost
from fedgist.experiments.report.runs import Group, mean_and_deviation
from fedgist.experiments.results import best_five
from fedgist.words import percent, short, size, times

FEW = 3  # names of fields, or of clients, that a cell has room for
MANY_CLASSES = 20
"""More than a table of recalls has room for."""


@dataclass(frozen=True)
class Cell:
    """A text, what it says in full when pointed at, and how it is set."""

    text: str
    title: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Table:
    caption: str
    head: Sequence[str]
    rows: list[list[Cell]] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class Card:
    name: str
    value: str
    note: str


def number(text: Any, title: str = "") -> Cell:
    return Cell(str(text), title, "number")


def bytes_cell(count: float) -> Cell:
    return number(size(count), f"{count:,.0f} bytes")


def spread(values: Sequence[float]) -> Cell:
    mean, deviation = mean_and_deviation(values)
    return number(f"{100 * mean:.2f}" if len(values) == 1 else f"{100 * mean:.2f} ± {100 * deviation:.2f}")


def reached(group: Group, aim: float) -> list[tuple[int, int]]:
    """For each seed that got there: the first round that did, and the bytes up and down until then."""
    return [there for run in group.runs if (there := run.reached(aim)) is not None]


def summary(groups: Sequence[Group], aim: float | None) -> Table:
    head = [
        "run",
        "accuracy, %",
        "best, %",
        "best five, %",
        "model",
        "rounds",
        "steps",
        "bytes up",
        "bytes down",
        "seconds",
        "the server sees",
    ]
    if aim is not None:
        there = f"{100 * aim:.1f} %".replace(" ", "\u00a0")
        head[4:4] = [f"rounds to {there}", f"bytes to {there}"]
    notes = [_seeds_note(groups), *([f"{result_table.NOTE}."] if any(g.first.mean_of_clients for g in groups) else [])]
    notes.append(
        "Rounds: those in which anything was sent. Steps: of training or making data, of a client in all rounds."
    )
    rows = [_summary_row(group, aim) for group in groups]
    return Table("The runs side by side", head, rows, " ".join(filter(None, notes)))


def scores(groups: Sequence[Group]) -> Table:
    """Other scores than accuracy."""
    note = (
        "Balanced accuracy is the mean recall of the classes. The calibration error is the mean gap between how sure a "
        "model is and how often it is right."
    )
    known = result_table.known(groups, result_table.SCORES)
    rows = [
        [Cell(result_table.name(group), kind="name"), *(number(result_table.shown(group, column)) for column in known)]
        for group in groups
    ]
    return Table("Scores", ["run", *map(result_table.heading, known)], rows if known else [], note)


def fairness(groups: Sequence[Group]) -> Table:
    """How clients fare, by the global model and by their own, and against learning alone."""
    head = [
        "run",
        "model",
        "tested on",
        "mean, %",
        "worst tenth, %",
        "deviation",
        "gain",
        "mean gain",
        "who loses most",
    ]
    rows = []
    for group in groups:
        lines = [(model, part, one) for model, parts in group.first.fairness.items() for part, one in parts.items()]
        for i, (model, part, one) in enumerate(lines):
            lost = [f"{id} ({100 * gain:.1f})" for id, gain in (one.losers or {}).items()]
            gained = "–" if one.gain is None else f"{one.gain} of {one.clients}"
            mean_gain = "–" if one.gain_mean is None else f"{100 * one.gain_mean:+.2f}"
            unnamed = f"{one.lose}, who know it" if one.lose else "nobody"  # across machines
            most = ", ".join(lost[:FEW]) or (unnamed if one.gain is not None else "–")
            losers = Cell(most, ", ".join(lost), "text")
            numbers = [number(f"{100 * value:.2f}") for value in (one.mean, one.worst_tenth, one.deviation)]
            gains = [number(gained), number(mean_gain)]
            rows.append([_first(group, i), Cell(model), Cell(part), *numbers, *gains, losers])
    note = (
        "Every client on the test images of the labels that it holds, and on everybody's test set, by the global model "
        "or its own. Gain: how many clients are more accurate than in a run of independent on the same ground; who "
        "loses, by how many points. With several seeds, the first."
    )
    return Table("How clients fare", head, rows, note)


def recalls(groups: Sequence[Group]) -> Table:
    """The recall of each class, where there are not too many of them."""
    classes = sorted({c for group in groups for run in group.runs for c in run.recalls})
    if len(classes) > MANY_CLASSES:
        return Table("Recall by class, %", [])
    rows = []
    for group in groups:
        of = [[run.recalls[c] for run in group.runs if c in run.recalls] for c in classes]
        cells = [number(f"{100 * statistics.fmean(values):.1f}" if values else "–") for values in of]
        rows += [[Cell(result_table.name(group), kind="name"), *cells]] if any(of) else []
    return Table("Recall by class, %", ["run", *map(str, classes)], rows)


def _summary_row(group: Group, aim: float | None) -> list[Cell]:
    accuracies = [list(run.accuracies.values()) for run in group.runs if run.evaluations]
    none = number("–")
    found = [(each[-1], max(each), statistics.fmean(best_five(each))) for each in accuracies]
    cells = [spread(values) for values in zip(*found, strict=True)] or [none] * 3
    if aim is not None:
        there = reached(group, aim)
        some = f" ({len(there)} of {len(group.runs)})" if 0 < len(there) < len(group.runs) else ""
        rounds, sent = (statistics.fmean(values) for values in zip(*there, strict=True)) if there else (None, None)
        cells.append(none if rounds is None else number(f"{rounds:.3g}{some}"))
        cells.append(none if sent is None else number(f"{size(sent)}{some}", f"{sent:,.0f} bytes"))
    return [
        Cell(result_table.name(group), str(group.first.about.get("summary", "")), "name"),
        *cells,
        Cell(group.model),
        _rounds(group),
        number(result_table.shown(group, result_table.STEPS)),
        bytes_cell(group.mean(lambda run: run.last["bytes_up"])),
        bytes_cell(group.mean(lambda run: run.last["bytes_down"])),
        number(f"{group.mean(lambda run: run.seconds):.1f}"),
        Cell(group.first.server_sees(FEW), ", ".join(group.first.visible), "text"),
    ]


def _rounds(group: Group) -> Cell:
    done = [run.last["round"] for run in group.runs]
    wanted = group.first.config["rounds"]
    if group.finished:
        return number(max(run.effective_rounds for run in group.runs), f"{max(done)} in all")
    return number(f"{min(done)} of {wanted}, unfinished")


def _seeds_note(groups: Sequence[Group]) -> str:
    counts = {len(group.runs) for group in groups}
    if counts == {1}:
        return ""
    how_many = str(counts.pop()) if len(counts) == 1 else "several"
    return f"Means over {how_many} seeds, ± one standard deviation (of a sample)."


def cards(groups: Sequence[Group], aim: float | None) -> list[Card]:
    """The few numbers that a reader looks for first."""
    alone = max((group.accuracy for group in groups if group.method == ALONE and group.curve), default=0.0)
    able = [group for group in groups if group.curve and not group.is_reference]
    shown = [group for group in able if group.accuracy >= alone] or able  # to save at what is of no use is no feat
    if len(groups) == 1:
        return _single(groups[0])
    if not shown:
        return []
    most = max(shown, key=lambda group: group.accuracy)
    sending = [group for group in shown if group.first.sends]
    found = [Card("Most accurate", percent(most.accuracy), most.label)]
    if sending:
        least = min(sending, key=lambda group: group.curve[-1][1])
        found.append(Card("Fewest bytes in all", size(least.curve[-1][1]), least.label))
    if aim is not None and (there := [group for group in sending if len(reached(group, aim)) == len(group.runs)]):
        cost = {group.label: statistics.fmean(sent for _, sent in reached(group, aim)) for group in there}
        cheapest = min(cost, key=lambda label: cost[label])
        found.append(Card(f"Fewest bytes to {100 * aim:.1f} %", size(cost[cheapest]), cheapest))
    fastest = min(shown, key=lambda group: group.mean(lambda run: run.seconds))
    seconds = fastest.mean(lambda run: run.seconds)
    return [*found, Card("Fastest here", f"{seconds:.1f} s", fastest.label)]


def _single(group: Group) -> list[Card]:
    up = group.mean(lambda run: run.last["bytes_up"])
    down = group.mean(lambda run: run.last["bytes_down"])
    found = []
    if group.curve:
        found.append(Card("Accuracy", percent(group.accuracy), f"best {percent(group.best)}"))
    done, wanted = group.first.last["round"], group.first.config["rounds"]
    each = f"{len(group.runs)} seeds" if len(group.runs) > 1 else f"seed {group.first.config['seed']}"
    found.append(Card("Rounds", f"{done}" if group.finished else f"{done} of {wanted}", each))
    found.append(Card("Sent by clients", size(up), "up"))
    found.append(Card("Sent to clients", size(down), "down"))
    seconds = group.mean(lambda run: run.seconds)
    return [*found, Card("Time", f"{seconds:.1f} s", "rounds, without evaluation")]


def _first(group: Group, i: int) -> Cell:
    """The name of a group, for all to see in the first of its rows only."""
    return Cell(group.label, kind="again" if i else "name")


def wire(groups: Sequence[Group]) -> Table:
    head = ["run", "", "message", "messages", "header", "payload", "as papers count"]
    rows = []
    for group in groups:
        crossed = [("round", *one) for one in group.first.wire.crossed()]
        crossed += [("evaluation", *one) for one in group.first.wire.crossed("evaluation")]
        for i, (phase, way, kind, counts) in enumerate(crossed):
            direction = way if phase == "round" else f"{way}, evaluation"
            rows.append(
                [
                    _first(group, i),
                    Cell(direction, kind=way if way in ("up", "down") else ""),
                    Cell(kind),
                    number(f"{counts.messages:,}"),
                    bytes_cell(counts.header),
                    bytes_cell(counts.payload),
                    bytes_cell(counts.paper),
                ]
            )
    several = " With several seeds, those of the first." if any(len(group.runs) > 1 for group in groups) else ""
    note = f"Papers count four bytes a number, and leave out what is not part of the idea.{several}"
    return Table("What crossed the wire, by type of message", head, rows, note)


def who_sees_what(groups: Sequence[Group]) -> Table:
    asker = "peers that ask" if all(group.first.peer_to_peer for group in groups) else "the server"
    head = ["run", "reply", f"{asker} sees of each client", "sees only as a sum", "what the reply is"]
    rows = []
    for group in groups:
        says = group.first.about.get("replies", {})
        for i, reply in enumerate(dict.fromkeys(one["reply"] for one in group.first.seen)):
            fields = [one for one in group.first.seen if one["reply"] == reply]
            each, summed = (
                ", ".join(dict.fromkeys(one["field"] for one in fields if bool(one["additive"]) is additive))
                for additive in (False, True)
            )
            seen_as = Cell(each, kind="each" if each else ""), Cell(summed, kind="sum" if summed else "")
            rows.append([_first(group, i), Cell(reply), *seen_as, Cell(says.get(reply) or "", kind="text")])
    return Table("What a client's replies reveal", head, rows)


def missing(groups: Sequence[Group]) -> Table:
    """Sites of federations that were asked and left out."""
    rows = []
    for group in groups:
        rounds: dict[tuple[str, str], list[int]] = {}
        for row in (row for run in group.runs for row in run.rows):
            for site, why in row.get("missing", {}).items():
                rounds.setdefault((site, why), []).append(row["round"])
        for i, ((site, why), at) in enumerate(sorted(rounds.items())):
            rows.append([_first(group, i), Cell(site), number(len(at), f"first in {at[0]}"), Cell(why, kind="text")])
    return Table("Who was left out", ["run", "site", "rounds", "why"], rows)


def efficiency(found: Sequence[Cost]) -> Table:
    head = ["run", "best accuracy", "after round", "numbers from a client", "η as defined", "η at equal accuracy"]
    rows = [
        [
            Cell(cost.label, kind="name"),
            number(percent(cost.accuracy)),
            number(cost.round),
            number(short(cost.numbers), f"{cost.numbers:,.0f} numbers"),
            number(times(cost.by_definition)),
            number(f"{times(cost.at_equal_accuracy)}{_at(cost)}"),
        ]
        for cost in found
    ]
    note = (
        "η is what FedAvg sends, in numbers and in one direction, up to its best accuracy, over what the method sends "
        "up to its own (Garg et al. 2022). At equal accuracy both are counted up to the first round that reaches the "
        "lower of the two best accuracies. No ratio stands where the models differ, or where either is less accurate "
        "than clients that learn alone."
    )
    return Table("Communication efficiency", head, rows, note)


def encryption(found: Sequence[Cost], base: Cost | None) -> Table:
    head = ["run", "for a client, Σ (n + k)", "for the server, Σ (n·k + n²)", "FedAvg over this, client", "server"]
    rows = [
        [
            Cell(cost.label, kind="name"),
            number(short(cost.client), f"{cost.client:,.0f}"),
            number(short(cost.server), f"{cost.server:,.0f}"),
            number(times(base.client / cost.client if base and cost.by_definition is not None else None)),
            number(times(base.server / cost.server if base and cost.by_definition is not None else None)),
        ]
        for cost in found
    ]
    note = (
        "The estimate of Garg et al. 2022, if all that is sent were encrypted: secure aggregation costs n + k for a "
        "client and n·k + n² for the server in a round of n clients with k numbers each, up to the best accuracy. It "
        "is an estimate of size only: images that encode an update cannot be added up, so a server that must decode "
        "each of them has to see each of them."
    )
    return Table("If everything were encrypted", head, rows, note)


def _at(cost: Cost) -> str:
    return "" if cost.at_equal_accuracy is None else f" at {percent(cost.common_accuracy or 0)}"
