"""The command that runs the papers' tables: reproduce."""

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedgist.cli.common import Commands, DataDir, Device, Engine, Json, Quiet, draw, flag, new_table, note
from fedgist.core.errors import FedgistError, check_known
from fedgist.words import duration, size

if TYPE_CHECKING:
    from fedgist.experiments.estimates import Estimates
    from fedgist.experiments.presets import Preset
    from fedgist.experiments.reproduction import Job, Results

app = Commands()

OUT = Path("runs") / "reproduce"
PUBLISHED = Path(__file__).parents[3] / "docs" / "results"
"""Where a checkout has them, whatever folder the command is given in."""
SCALES = ("full", "small")


@app.command()
def reproduce(
    preset: Annotated[str | None, typer.Argument(help="A table or figure, as in repshare/table1.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show all presets; with a preset, its cells.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Show what is known, and run nothing.")] = False,
    data: Annotated[
        bool, typer.Option("--data", help="Show which data sets the presets need, and which lack.")
    ] = False,
    page: Annotated[Path | None, flag("page", "Write the state of all presets as a Markdown page.", "FILE")] = None,
    add: Annotated[
        list[Path] | None,
        flag("add", "Add the results in this folder to those in --results, and run nothing; repeatable.", "DIR"),
    ] = None,
    only: Annotated[str, flag("only", "Only cells with these words in their names.", "WORDS")] = "",
    scale: Annotated[
        str, flag("scale", "full, or small: a version for a laptop, which says what it reduces.", "NAME")
    ] = "full",
    seeds: Annotated[
        str | None,
        flag("seeds", "Seeds 0 to N - 1, or those of a list as in 1,2; without it the preset's number.", "N"),
    ] = None,
    jobs: Annotated[str | None, flag("jobs", "Runs at a time; a core each without it, one on a GPU.", "N")] = None,
    together: Annotated[
        str | None, flag("together", "Seeds driven together in a job, which a GPU stacks; all of them there.", "N")
    ] = None,
    engine: Engine = None,
    device: Device = None,
    data_dir: DataDir = None,
    out: Annotated[Path, flag("out", "Folder of the runs.", "DIR")] = OUT,
    results: Annotated[Path | None, flag("results", "Folder of the results; OUT/results without it.", "DIR")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a table or figure of a paper and show the paper's numbers beside ours; given again, it goes on."""
    from fedgist.experiments import estimates, reproduction

    check_known("scale", scale, SCALES)
    listed = None if seeds is None else _seeds(seeds)
    keep = results or out / "results"
    known = [keep, PUBLISHED]
    if page is not None:
        from fedgist.experiments import reproduction_page

        reproduction_page.write(page, PUBLISHED if results is None else results)
        print(page)
        return
    if data:
        _data(scale, data_dir, as_json)
        return
    clock = estimates.Estimates()
    if preset is None:
        _all(scale, known, clock, as_json)
        return
    whole = reproduction.find(preset, scale)
    chosen = reproduction.choose(whole, only)
    for other in add or ():
        reproduction.add(whole, other, keep)
    if list_ or show or add:
        _table(chosen, reproduction.load(chosen, known), clock if list_ else None, as_json)
        return
    note(_reduced(chosen), as_json or quiet)
    how = _how(engine, device, data_dir)
    gpu = str(how["device"]).startswith("cuda")
    at_once = _number("jobs", jobs) or (1 if gpu else os.cpu_count() or 1)
    wanted = range(chosen.seeds) if listed is None else listed
    seeds_a_job = _number("together", together) or (len(wanted) if gpu else 1)
    with reproduction.alone(out):
        there, about = reproduction.load(chosen, [keep]), reproduction.about(_command())
        todo, finished = reproduction.jobs(chosen, wanted, out, there, how, seeds_a_job)
        note(_plan(chosen, todo, finished, None if gpu else clock, at_once), as_json or quiet)

        def save() -> None:
            if found := reproduction.collect(chosen, wanted, out, about):
                reproduction.save(whole, found, keep)

        wrong: list[str] = []
        while todo and not wrong:  # what is to be finished goes on from what was trained before, or just now
            reproduction.carry_over(todo, out)
            wrong = _run(todo, at_once, finished, save, as_json or quiet)
            todo, finished = reproduction.jobs(chosen, wanted, out, there, how, seeds_a_job)
    save()
    found = reproduction.load(chosen, [keep])
    _table(chosen, found, None, as_json, reproduction.path_of(whole, keep) if found else None)
    if wrong:
        raise FedgistError("; ".join(wrong))


def _how(engine: str | None, device: str | None, data_dir: str | None) -> dict[str, Any]:
    """Where and how runs are made; on a CPU one client after the other, for the cores have runs of their own."""
    import torch

    device = device if device and device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    usual = "sequential" if device == "cpu" else "auto"
    return {"engine": engine or usual, "device": device, "data_dir": data_dir}


def _number(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise FedgistError(f"--{name} must be a whole number from 1, not {text!r}")
    return int(text)


def _seeds(text: str) -> Sequence[int]:
    """How many, or which: one command may leave some to another machine."""
    if "," not in text:
        return range(_number("seeds", text) or 0)
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words):
        raise FedgistError(f"--seeds must be a number of seeds, or a list of them as in 1,2 (2, for one), not {text!r}")
    return sorted({int(word) for word in words})


def _command() -> str:
    """As one would type it; folders are each machine's own."""
    words = ["fedgist", *sys.argv[1:]]
    hidden = ("--data-dir", "--out", "--results")
    for i in range(1, len(words)):
        option, equals, _ = words[i].partition("=")
        if equals and option in hidden:
            words[i] = f"{option}=DIR"
        elif words[i - 1] in hidden:
            words[i] = "DIR"
    return shlex.join(words)


def _reduced(preset: "Preset") -> str | None:
    return f"reduced: {', '.join(preset.reduced)}" if preset.reduced else None


def _plan(preset: "Preset", todo: "Sequence[Job]", finished: int, clock: "Estimates | None", at_once: int) -> str:
    """What is about to happen, and how long it will take here."""
    runs = sum(map(len, todo))
    said = f"{preset.name}: {len(preset.cells)} cells, {runs} runs to make, {finished} finished"
    if clock is None or not todo:
        return said
    costs = [clock.get(config) for job in todo for config, _ in job]
    if None in costs:
        return f"{said}; no estimate for some of them"
    total = sum(cost for cost in costs if cost is not None)
    wall = duration(total / min(at_once, len(todo)))
    return f"{said}; about {wall} with {at_once} at a time ({clock.how()})"


def _run(todo: "Sequence[Job]", at_once: int, finished: int, save: Callable[[], None], quiet: bool) -> list[str]:
    """Makes the runs, and saves what is known after each; returns what was wrong with some, each sentence once."""
    from fedgist.experiments import reproduction
    from fedgist.experiments.folder import RunFolder, read_json

    wrong: dict[str, None] = {}
    done, total = finished, finished + sum(map(len, todo))
    try:
        for job, problem in reproduction.make_all(todo, at_once):
            if problem:
                wrong[problem] = None
                continue
            done += len(job)
            for config, folder in job:
                result = read_json(RunFolder(folder).result)
                said = f"accuracy {result['accuracy']:.4f}, {result['seconds']:.1f} s"
                note(f"{done}/{total} {folder.parent.name}, seed {config.seed}: {said}", quiet)
            save()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; {done} of {total} runs are finished; go on with the same command") from None
    return list(wrong)


def _data(scale: str, data_dir: str | None, as_json: bool) -> None:
    """Which data sets the presets need, which of them can be read here, and what to do about the others."""
    from fedgist.data import inventory
    from fedgist.experiments import reproduction

    there, lacking = inventory.readable(data_dir), inventory.unreadable(data_dir)
    rows: dict[str, dict[str, Any]] = {}
    for name, needed in sorted(reproduction.needs_of_data(scale).items()):
        here = name in there
        cells = {preset: len(cells) for preset, cells in needed.items()}
        rows[name] = {"readable": here, "lacks": "" if here else lacking.get(name, "is not there"), "cells": cells}
    if as_json:
        print(json.dumps(rows))
        return
    table = new_table("data set", "here", "cells", "presets")
    for name, row in sorted(rows.items(), key=lambda item: item[1]["readable"]):
        presets = ", ".join(f"{preset} ({count})" for preset, count in row["cells"].items())
        table.add_row(name, "yes" if row["readable"] else row["lacks"], str(sum(row["cells"].values())), presets)
    draw(table)
    print("`fedgist data download NAME DIR` fetches most of them where there is a network; docs/data.md tells the rest")


def _all(scale: str, known: Sequence[Path], clock: "Estimates", as_json: bool) -> None:
    """All presets: what they are, how they stand, and how long what is left would take."""
    from fedgist.experiments import presets, reproduction

    rows = []
    for preset in presets.available(scale).values():
        results = reproduction.load(preset, known)
        verdict = reproduction.judge(preset, results)
        left = reproduction.left(preset, results, lambda cell: clock.get(cell.config))
        rows.append((preset, verdict, *left))
    if as_json:
        print(json.dumps([_about(*row) for row in rows]))
        return
    table = new_table("preset", "what", "cells", "run", "state", "seeds", "left, hours of a core")
    for preset, verdict, seconds, more in rows:
        hours = "?" if seconds is None else ("over " if more else "") + f"{seconds / 3600:,.1f}"
        hours = hours if verdict.run < verdict.cells else ""
        counts = (str(verdict.cells), str(verdict.run))
        table.add_row(preset.name, preset.title, *counts, verdict.word, str(preset.seeds), hours)
    draw(table)
    print(f"hours of one core ({clock.how()}), to be divided by the cores at work; a GPU is another matter")


def _about(preset: "Preset", verdict: Any, seconds: float | None, more: bool) -> dict[str, Any]:
    return {
        "preset": preset.name,
        "title": preset.title,
        "cells": verdict.cells,
        "run": verdict.run,
        "state": verdict.word,
        "seconds_left": seconds,
        "of_all_cells": not more,
    }


def _table(
    preset: "Preset", results: "Results", clock: "Estimates | None", as_json: bool, path: Path | None = None
) -> None:
    """The paper's numbers beside ours, cell by cell."""
    from fedgist.experiments import reproduction
    from fedgist.experiments.reproduction_page import cell_row, claims_of

    verdict = reproduction.judge(preset, results)
    if as_json:
        cells = {cell.name: _object(cell, results.get(cell.name)) for cell in preset.cells}
        print(json.dumps({"preset": preset.name, "state": verdict.word, "cells": cells, "file": path and str(path)}))
        return
    numbers = ("paper", "ours", "difference", "within ±", "bytes up", "bytes down", "seconds", "seeds")
    table = new_table("cell", *numbers, numbers_from=1)
    if clock is not None:
        table.add_column("a run here", justify="right")
    for cell in preset.cells:
        seconds = None if clock is None else clock.get(cell.config)
        estimate = [] if clock is None else ["?" if seconds is None else duration(seconds)]
        table.add_row(*cell_row(cell, results.get(cell.name), size), *estimate)
    draw(table)
    state = verdict.word if preset.scale == "full" else f"{verdict.word}, in the small"
    print(f"{preset.name}, {preset.title}: {state}; {verdict.run} of {verdict.cells} cells run", end="")
    print(f", {verdict.within} of {verdict.judged} within" if verdict.judged else "")
    for line in claims_of(verdict):
        print(line)
    if preset.why and verdict.run:
        print(preset.why)
    if path is not None:
        print(f"results: {path}")


def _object(cell: Any, found: Any) -> dict[str, Any]:
    from fedgist.experiments.reproduction import within

    if found is None:
        return {"paper": cell.paper, "ours": None}
    more = {"bytes_up": found.bytes_up, "bytes_down": found.bytes_down, "seconds": found.seconds}
    ours = {"ours": found.mean, "std": found.std, "within": within(cell, found), "seeds": list(found.numbers)}
    return {"paper": cell.paper, **ours, **more}
