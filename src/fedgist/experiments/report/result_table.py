"""What came out of runs as a table: a row for each method, or setting, with means and deviations over its seeds."""

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fedgist.core.errors import FedgistError, check_known
from fedgist.experiments.fairness import EVERYONE, OWN_LABELS, Fairness
from fedgist.experiments.report.runs import Group, Run, mean_and_deviation
from fedgist.words import size

MEAN_OF_CLIENTS = "†"
NOTE = f"{MEAN_OF_CLIENTS} mean of the clients' own models"


@dataclass(frozen=True)
class Column:
    """A number of a run, or a text about it."""

    name: str
    kind: str
    """share (shown in percent), bytes, number or text."""
    of: Callable[[Run], float | str | None]


def _score(name: str) -> Callable[[Run], float | None]:
    return lambda run: run.score(name)


def _fares(part: str, of: Callable[[Fairness], float | None]) -> Callable[[Run], float | None]:
    return lambda run: None if (found := run.fares(part)) is None else of(found)


def _gain(part: str) -> Callable[[Run], str | None]:
    def said(run: Run) -> str | None:
        found = run.fares(part)
        return None if found is None or found.gain is None else f"{found.gain} of {found.clients}"

    return said


def _most_lost(part: str) -> Callable[[Run], float | None]:
    """The greatest loss of a client; 0 where nobody loses. Across machines nobody can say it."""

    def lost(found: Fairness) -> float | None:
        unknown = found.losers is None or (found.lose and not found.losers)
        return None if unknown else min([0.0, *(found.losers or {}).values()])

    return _fares(part, lost)


STEPS = Column("steps", "number", lambda run: run.steps)
RUN = [
    Column("model", "text", lambda run: run.model),
    Column("rounds", "number", lambda run: run.effective_rounds),
    STEPS,
    Column("accuracy", "share", _score("accuracy")),
]
COST = [
    Column("bytes up", "bytes", lambda run: run.last["bytes_up"]),
    Column("bytes down", "bytes", lambda run: run.last["bytes_down"]),
    Column("seconds", "number", lambda run: run.seconds),
]
SCORES = [
    Column("balanced accuracy", "share", _score("balanced_accuracy")),
    Column("AUROC", "share", _score("auroc")),
    Column("lowest recall", "share", lambda run: min(run.recalls.values(), default=None)),
    Column("calibration error", "share", _score("calibration_error")),
]
FAIRNESS = [
    column
    for part in (OWN_LABELS, EVERYONE)
    for column in (
        Column(f"{part}: mean", "share", _fares(part, lambda found: found.mean)),
        Column(f"{part}: worst tenth", "share", _fares(part, lambda found: found.worst_tenth)),
        Column(f"{part}: deviation", "share", _fares(part, lambda found: found.deviation)),
        Column(f"{part}: gain", "text", _gain(part)),
        Column(f"{part}: most lost", "share", _most_lost(part)),
    )
]
COLUMNS = [*RUN, *SCORES, *FAIRNESS, *COST]


def values(group: Group, column: Column) -> list[float | str]:
    """What the seeds say, as far as they say anything."""
    return [value for run in group.runs if (value := column.of(run)) is not None]


def known(groups: Sequence[Group], columns: Iterable[Column]) -> list[Column]:
    """The columns that have something in them."""
    return [column for column in columns if any(values(group, column) for group in groups)]


def shown(group: Group, column: Column) -> str:
    """A cell for people: mean ± deviation (of a sample) over several seeds."""
    found = values(group, column)
    if not found:
        return "–"
    if column.kind == "text":
        return " / ".join(dict.fromkeys(map(str, found)))
    mean, deviation = mean_and_deviation(float(value) for value in found)
    if column.kind == "bytes":
        return size(mean)
    scale, digits = (100, 2) if column.kind == "share" else (1, 0 if column.name == "rounds" else 1)
    if column.name == "steps":
        digits = 0
    text = f"{scale * mean:.{digits}f}"
    return text if len(found) == 1 or column.kind == "number" else f"{text} ± {scale * deviation:.{digits}f}"


def name(group: Group) -> str:
    """The group's label, with a mark where its accuracy is a mean over models of clients' own."""
    return group.label + (MEAN_OF_CLIENTS if group.first.mean_of_clients else "")


def heading(column: Column) -> str:
    return f"{column.name}, %" if column.kind == "share" else column.name


FORMATS = ("md", "csv", "tex")


def write(groups: Sequence[Group], form: str) -> str:
    """The table in one of the formats."""
    check_known("format", form, FORMATS)
    if not any(group.curve for group in groups):
        raise FedgistError("none of these runs was evaluated yet: there is nothing to put into a table")
    columns = known(groups, COLUMNS)
    if form == "csv":
        return _csv(groups, columns)
    best = winner(groups)
    rows = [[name(group), *(shown(group, column) for column in columns)] for group in groups]
    head = ["run", *(heading(column) for column in columns)]
    at = head.index("accuracy, %")
    notes = [NOTE] if any(group.first.mean_of_clients for group in groups) else []
    several = {len(group.runs) for group in groups} != {1}
    notes += ["mean ± standard deviation (of a sample) over seeds"] if several else []
    if form == "md":
        for group, row in zip(groups, rows, strict=True):
            row[at] = f"**{row[at]}**" if group is best else row[at]
        lines = [head, ["---"] + ["---:" if column.kind != "text" else "---" for column in columns], *rows]
        table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
        return "\n".join([table, *(f"\n{note}" for note in notes)]) + "\n"
    for group, row in zip(groups, rows, strict=True):
        row[:] = map(_tex, row)
        row[at] = rf"\textbf{{{row[at]}}}" if group is best else row[at]
    form = "l" + "".join("l" if column.kind == "text" else "r" for column in columns)
    body = [" & ".join(map(_tex, head)) + r" \\", r"\midrule", *(" & ".join(row) + r" \\" for row in rows)]
    comments = [f"% {note}; needs \\usepackage{{booktabs}}" for note in notes or ["a table of fedgist"]]
    return "\n".join(
        [*comments, rf"\begin{{tabular}}{{{form}}}", r"\toprule", *body, r"\bottomrule", r"\end{tabular}", ""]
    )


def winner(groups: Sequence[Group]) -> Group | None:
    """The most accurate at the end that is no reference line, where there are others to compare with."""
    able = [group for group in groups if group.curve and not group.is_reference]
    return max(able, key=lambda group: group.accuracy) if len(able) > 1 else None


def _csv(groups: Sequence[Group], columns: Sequence[Column]) -> str:
    """Numbers as they are: shares from 0 to 1, bytes; the deviation over seeds in a column of its own."""
    file = io.StringIO()
    out = csv.writer(file, lineterminator="\n")
    numbers = [column for column in columns if column.kind != "text"]
    head = [
        part
        for column in columns
        for part in ([column.name, f"{column.name} std"] if column in numbers else [column.name])
    ]
    out.writerow(["run", "seeds", "mean of client models", *head])
    for group in groups:
        row: list[object] = [group.label, len(group.runs), "yes" if group.first.mean_of_clients else "no"]
        for column in columns:
            found = values(group, column)
            if column not in numbers:
                row.append(" / ".join(dict.fromkeys(map(str, found))))
                continue
            each = [float(value) for value in found]
            row += [
                f"{statistics.fmean(each):.6g}" if each else "",
                f"{statistics.stdev(each):.6g}" if len(each) > 1 else "",
            ]
        out.writerow(row)
    return file.getvalue()


def _tex(text: str) -> str:
    replaced = "".join(
        f"\\{character}" if character in "&%$#_{}" else character for character in text.replace("\\", "/")
    )
    return (
        replaced.replace("±", r"$\pm$")
        .replace("†", r"$\dagger$")
        .replace("–", "--")
        .replace("^", r"\^{}")
        .replace("~", r"\~{}")
    )
