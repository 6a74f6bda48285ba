"""The page docs/reproduction.md, made from result files: all tables at a glance, then every cell that ran."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from fedgist.experiments import presets, reproduction
from fedgist.experiments.estimates import REFERENCE
from fedgist.experiments.folder import write_text
from fedgist.experiments.presets import Cell, Preset
from fedgist.experiments.reproduction import Found, Results, Verdict
from fedgist.words import size

HEAD = """\
# Reproduction

The tables and figures of the five papers, and studies beyond them, as presets that one command runs. This page is
written by `fedgist reproduce --page docs/reproduction.md` from the files in [results/](results/), each of which names
its command, version, machine and seeds.

    fedgist reproduce --list                             # all presets, with estimates for this machine
    fedgist reproduce repshare/table1 --only MNIST       # runs what is missing, shows the paper's numbers beside ours
    fedgist reproduce repshare/table1 --show             # shows what is known, runs nothing
    fedgist reproduce feddm/table1 --scale small         # a version for a laptop; says what it reduces

Stopped, `reproduce` goes on when the command is given again. Cells run side by side, one on a core; on a GPU the seeds
of a cell run together. A preset is a table in a TOML file of `src/fedgist/experiments/presets/`, where its settings,
the paper's numbers, tolerances and claims are; the variable `FEDGIST_PRESETS` names a folder with more of them.

*holds*: every cell that ran is within its tolerance, and every claim holds in every column that ran. *holds partly*:
some do. *run*: there is nothing of the paper's to compare with. The tolerance of a cell is what its preset states, or
the paper's own ± where that is larger. *hours left*: of one core ({machine}), from a few timed steps, for all seeds of
the cells that have not run; to be divided by the cores at work. A GPU takes a small part of that. *commit*: where the
command below a table is found as it was then (`python benchmarks/…`: scripts that the presets have replaced); with a
plus, something in the checkout was changed.
"""


def write(path: Path, results: Path) -> None:
    write_text(path, page(results))


def page(folder: Path) -> str:
    """The whole page."""
    reference = json.loads(REFERENCE.read_text("utf-8"))
    by_paper: dict[str, list[tuple[Preset, Results, Verdict]]] = defaultdict(list)
    for preset in presets.available().values():
        if (presets.HERE / f"{preset.name.split('/')[0]}.toml").is_file():  # not those of somebody's own folder
            results = reproduction.load(preset, [folder])
            by_paper[preset.paper].append((preset, results, reproduction.judge(preset, results)))
    parts = [HEAD.format(machine=reference["machine"])]
    for paper, found in by_paper.items():
        parts.append(_glance(paper, found, reference["seconds"]))
    parts.append("## Every cell that ran\n")
    parts += [_details(*one) for found in by_paper.values() for one in found if one[1]]
    return "\n".join(parts)


def _glance(paper: str, found: list[tuple[Preset, Results, Verdict]], seconds: dict[str, float | None]) -> str:
    lines = [
        f"## {paper}\n",
        "| preset | what | state | cells run | within ± | hours left | remarks |",
        "|---|---|---|---|---|---|---|",
    ]
    for preset, results, verdict in found:
        name = f"[{preset.name}](#{_anchor(preset)})" if results else preset.name
        judged = f"{verdict.within} of {verdict.judged}" if verdict.judged else ""
        claims = ", ".join(claims_of(verdict))
        remarks = " ".join(part for part in (f"{claims}." if claims else "", preset.why if results else "") if part)
        run = f"{verdict.run} of {verdict.cells}"
        left = _hours(preset, results, seconds)
        lines.append(f"| {name} | {preset.title} | {verdict.word} | {run} | {judged} | {left} | {remarks} |")
    rest = presets.elsewhere().get(found[0][0].name.split("/")[0], {})
    return "\n".join([*lines, "", *(f"- {what}: {where}." for what, where in rest.items()), ""])


def _hours(preset: Preset, results: Results, seconds: dict[str, float | None]) -> str:
    left = {cell.run: cell for cell in preset.cells if cell.name not in results}
    costs = [seconds.get(cell.run) for cell in left.values()]
    known = [cost for cost in costs if cost is not None]
    if not left:
        return ""
    if not known:
        return "?"
    hours = preset.seeds * sum(known) / 3600
    return ("over " if len(known) < len(costs) else "") + (f"{hours:.1f}" if hours < 100 else f"{hours:,.0f}")


def _anchor(preset: Preset) -> str:
    return preset.name.replace("/", "")


def _details(preset: Preset, results: Results, verdict: Verdict) -> str:
    lines = [f"### {preset.name}\n", f"{preset.title[0].upper()}{preset.title[1:]}.\n"]
    lines += [
        "| cell | paper | ours | difference | within ± | bytes up | bytes down | seconds | seeds |",
        "|---" * 9 + "|",
    ]
    lines += [
        f"| {' | '.join(cell_row(cell, results[cell.name], size))} |" for cell in preset.cells if cell.name in results
    ]
    origins = dict.fromkeys(_origin(found) for found in results.values())
    return "\n".join([*lines, "", *(f"- {origin}" for origin in origins), ""])


def _origin(found: Found) -> str:
    """What was run where, and the commit that has it: a script may be gone since."""
    commit = found.about.get("commit")
    return f"`{found.about['command']}` ({_machine(found)}{f', commit {commit}' if commit else ''})"


def _machine(found: Found) -> str:
    machine = found.about.get("machine") or {}
    where = machine.get("device") or "machine not recorded"
    return f"{machine.get('cores', '?')} cores" if where == "cpu" else str(where)


def claims_of(verdict: Verdict) -> Iterable[str]:
    """How often each claim holds, in words."""
    return [f"{claim} in {held} of {count}" for claim, (held, count) in verdict.claims.items() if count]


def cell_row(cell: Cell, found: Found | None, size: Callable[[float], str]) -> list[str]:
    """A cell as the columns of a table show it."""
    paper = "" if cell.paper is None else _number(cell, cell.paper) + (f" ± {cell.spread:.2f}" if cell.spread else "")
    if found is None:
        return [cell.name, paper, "not run", *[""] * 6]
    ours = _number(cell, found.mean) + ("" if found.std is None else f" ± {_number(cell, found.std)}")
    difference = "" if cell.paper is None else f"{found.mean - cell.paper:+,.{_digits(cell)}f}"
    judged = reproduction.within(cell, found)
    verdict = "" if judged is None else "yes" if judged else "no"
    sizes = [
        size(found.bytes_up),
        size(found.bytes_down),
        f"{found.seconds:.0f}" if found.seconds >= 10 else f"{found.seconds:.1f}",
    ]
    return [cell.name, paper, ours, difference, verdict, *sizes, str(len(found.numbers))]


def _digits(cell: Cell) -> int:
    return {"numbers": 0, "efficiency": 1}.get(cell.take, 2)


def _number(cell: Cell, value: float) -> str:
    return f"{value:,.{_digits(cell)}f}"
