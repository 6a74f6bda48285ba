"""What commands show of runs that are done: a summary of one, several side by side, a JSON object, the report."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgist.cli.common import draw, new_table, note
from fedgist.words import size

if TYPE_CHECKING:
    from fedgist.experiments.folder import RunFolder
    from fedgist.experiments.report.result_table import Column
    from fedgist.experiments.report.runs import Group

WIDTH = 180
"""Of tables of runs side by side, where no terminal says it."""


def show_run(runs: "Sequence[RunFolder]", folder: Path, as_json: bool, quiet: bool) -> None:
    """Writes the report of a run, which may have several seeds, and prints what came out."""
    from fedgist.experiments import comparison

    report = write_report(folder, as_json or quiet)
    (group,) = comparison.groups([runs])
    if as_json:
        print(json.dumps(_object(group, folder)))
    else:
        _summary(group, folder, report)


def side_by_side(
    runs: "Mapping[Path, Sequence[RunFolder]]", out: Path, as_json: bool, quiet: bool, target: float | None = None
) -> None:
    """Shows two tables, on cost and on clients, and one report of several runs, each with a folder of all its seeds."""
    from fedgist.experiments import comparison

    groups = comparison.groups([*runs.values()])
    target = comparison.target(groups) if target is None else target
    report = write_report(out, as_json or quiet, [run for seeds in runs.values() for run in seeds], target)
    if as_json:
        objects = [
            {**_object(group, folder), "rounds_to_target": rounds, "bytes_to_target": sent}
            | {"server_sees": group.first.server_sees()}
            for folder, group in zip(runs, groups, strict=True)
            for rounds, sent in [_until(group, target)]
        ]
        print(json.dumps({"runs": objects, "target": target, "report": None if report is None else str(report)}))
        return
    _tables(groups, target)
    print(f"runs in {out}" if report is None else f"report: {report}")


def _tables(groups: "Sequence[Group]", target: float) -> None:
    from fedgist.experiments.report import result_table as tables

    to = f"to {target:.4f}"
    counts = ("rounds", "steps", "accuracy", "best", f"rounds {to}", f"bytes {to}", "bytes up", "bytes down", "seconds")
    table = new_table("method", "model", *counts, numbers_from=2)
    table.columns[1].max_width, table.columns[1].overflow = 24, "fold"
    table.add_column("the server sees", max_width=30)
    for group in groups:
        *accuracies, up, down, seconds = _row(group)
        model, rounds, steps = (tables.shown(group, column) for column in tables.RUN[:3])
        rounds_to, bytes_to = _until(group, target)
        reached = (_reached(rounds_to, "{:.0f}".format), _reached(bytes_to, size))
        sees = group.first.server_sees()
        table.add_row(tables.name(group), model, rounds, steps, *accuracies, *reached, up, down, seconds, sees)
    draw(table, WIDTH)
    for title, kind in (("scores, %", tables.SCORES), ("clients, %", tables.FAIRNESS)):
        if columns := tables.known(groups, kind):
            draw(_further(title, groups, columns), WIDTH)
    for line in _notes(groups):
        print(line)


def _further(title: str, groups: "Sequence[Group]", columns: "Sequence[Column]") -> Any:
    from fedgist.experiments.report import result_table as tables

    table = new_table(title, *(column.name for column in columns), numbers_from=1)
    table.columns[0].no_wrap = True
    for group in groups:
        table.add_row(tables.name(group), *(tables.shown(group, column) for column in columns))
    return table


def _notes(groups: "Sequence[Group]") -> list[str]:
    """What a reader of the tables must know."""
    from fedgist.experiments.report import result_table as tables

    lines = [tables.NOTE] if any(group.first.mean_of_clients for group in groups) else []
    own = [f"{group.label} learns {said}" for group in groups if (said := group.first.about.get("learns"))]
    lines += [f"{', '.join(own)}, whatever the model"] if own else []
    if any(run.fares(part) for group in groups for run in group.runs for part in run.fairness.get("global", {})):
        known = any(run.alone for group in groups for run in group.runs)
        alone = "gain: how many clients are more accurate than alone" if known else "--fairness says who gains"
        lines.append(f"own labels, everyone: each client on the test images of its labels, and on all; {alone}")
    over = [group for group in groups if any(_over_budget(run) for run in group.runs)]
    lines += [f"{group.label} sent more than the budget in its first round already" for group in over]
    return lines


def _over_budget(run: Any) -> bool:
    most = run.config.get("max_bytes", "none")
    return most != "none" and run.last["bytes_up"] + run.last["bytes_down"] > int(most)


def _until(group: "Group", target: float) -> tuple[Sequence[int | None], Sequence[int | None]]:
    """For each seed the first round that was that accurate, and the bytes until then; None where none was."""
    rounds, sent = zip(*(run.reached(target) or (None, None) for run in group.runs), strict=True)
    return rounds, sent


def _reached(values: Sequence[float | None], show: Callable[[float], str]) -> str:
    """The mean over the seeds that reached the target, and how many those are where it is not all."""
    there = [value for value in values if value is not None]
    if not there:
        return "never"
    return show(statistics.fmean(there)) + (f" ({len(there)} of {len(values)})" if len(there) < len(values) else "")


def _results(group: "Group", name: str) -> list[float]:
    """What result.json says under a name, for each seed."""
    return [(run.result or {})[name] for run in group.runs]


def _row(group: "Group") -> tuple[str, ...]:
    return (
        _spread(_results(group, "accuracy")),
        _spread(_results(group, "accuracy_max")),
        size(statistics.fmean(_results(group, "bytes_up"))),
        size(statistics.fmean(_results(group, "bytes_down"))),
        f"{statistics.fmean(_results(group, 'seconds')):.1f}",
    )


def _spread(values: Sequence[float]) -> str:
    """The value, or mean ± standard deviation (of a sample: n − 1) over several seeds."""
    mean = f"{statistics.fmean(values):.4f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.4f}"


def _object(group: "Group", folder: Path) -> dict[str, Any]:
    """What --json prints; with several seeds means, the standard deviation, and the single runs."""
    from fedgist.experiments import fairness

    singles: list[dict[str, Any]] = [
        {
            "method": group.method,
            "model": run.model,
            "accuracy": result["accuracy"],
            "mean_of_client_models": run.mean_of_clients,
            "bytes_up": result["bytes_up"],
            "bytes_down": result["bytes_down"],
            "seconds": result["seconds"],
            "rounds": run.effective_rounds,
            "steps": run.steps,
            "scores": {name: run.score(name) for name in ("balanced_accuracy", "auroc", "calibration_error")}
            | {"recall": run.recalls},
            "fairness": fairness.as_json(run.fairness),
            "run": str(run.folder.path),
        }
        for run in group.runs
        for result in [run.result or {}]
    ]
    if len(singles) == 1:
        return singles[0]
    keys = ("accuracy", "bytes_up", "bytes_down", "seconds")
    means = {key: statistics.fmean(single[key] for single in singles) for key in keys}
    spread = statistics.stdev(s["accuracy"] for s in singles)
    return {"method": group.method, **means, "std": spread, "run": str(folder), "runs": singles}


def _summary(group: "Group", folder: Path, report: Path | None) -> None:
    from fedgist.experiments.report import result_table as tables

    accuracy, best, up, down, seconds = _row(group)
    five = _spread(_results(group, "accuracy_best5"))
    of = " (mean of the clients' own models)" if group.first.mean_of_clients else ""
    print(f"accuracy  {accuracy}{of} (best {best}, mean of the best five {five})")
    scores = tables.known([group], tables.SCORES)
    if scores:
        print(f"scores    {', '.join(f'{column.name} {tables.shown(group, column)} %' for column in scores)}")
    for model, parts in group.first.fairness.items():
        for part, found in parts.items():
            print(f"clients   {_fares(model, part, found)}")
    print(f"bytes     {up} up, {down} down")
    print(f"seconds   {seconds}")
    print(f"run       {folder}")
    if report is not None:
        print(f"report    {report}")


def _fares(model: str, part: str, found: Any) -> str:
    """How the clients of the first seed fare, in a line."""
    on = "own labels" if part == "own labels" else "everybody's test set"
    said = f"{model} model on {on}: {100 * found.mean:.2f} %, worst tenth {100 * found.worst_tenth:.2f} %"
    said += f", deviation {100 * found.deviation:.2f}"
    if found.gain is None:
        return said
    said += f"; {found.gain} of {found.clients} gain over learning alone"
    named = [f"{id} by {-100 * gain:.2f}" for id, gain in list(found.losers.items())[:3]]
    more = f" and {len(found.losers) - 3} more" if len(found.losers) > 3 else ""
    if found.lose and not named:  # across machines: each site knows its own gain
        return said + f", {found.lose} lose, the worst tenth of gains is {100 * found.gain_worst_tenth:+.1f}"
    return said + (f", {', '.join(named)}{more} lose" if named else ", nobody loses")


def write_report(
    folder: Path, quiet: bool, runs: "Sequence[RunFolder] | None" = None, target: float | None = None
) -> Path | None:
    """The report of the runs in a folder, in the order of `runs`, or a line on what it needs."""
    from fedgist.experiments import report as reports
    from fedgist.experiments.folder import run_folders

    try:
        return reports.write(runs or run_folders(folder), folder / "report.html", target)
    except reports.MissingPlotly as missing:
        note(f"no report.html: {missing}", quiet)
        return None
