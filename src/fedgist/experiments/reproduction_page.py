"""The page docs/reproduction.md, made from result files: all tables at a glance, then every cell that ran."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgist.experiments import presets, reproduction
from fedgist.experiments.claims import Claim, Outcome, counted
from fedgist.experiments.estimates import REFERENCE
from fedgist.experiments.folder import read_json, write_text
from fedgist.experiments.presets import Cell, Preset
from fedgist.experiments.reproduction import Found, Results, Verdict
from fedgist.words import size

HEAD = """\
# Reproduction

The tables and figures of five papers as presets that one command runs, what came out, and what of the papers'
conclusions holds. This page is written by `fedgist reproduce --page docs/reproduction.md` from the files in
[results/](results/).

## In a minute

{headlines}

*holds*: the 95 % interval over three seeds or more lies above zero; *seen once*: one or two seeds, all of them so; the
rest [below](#how-to-read-this). *in 3*: of the columns of the preset's table (data sets, splits, numbers of clients)
that ran with both sides. *points*: by how much the first is above the second, in accuracy or what else the claim
compares, mean over seeds with its interval, or the smallest and the largest mean of several columns. *bytes*: up and
down, of all clients in a whole run, the first side against the second.

## How to read this

    fedgist reproduce --list                             # all presets, with estimates for this machine
    fedgist reproduce repshare/table1 --only MNIST       # runs what is missing, shows the paper's numbers beside ours
    fedgist reproduce repshare/table1 --show             # shows what is known, runs nothing
    fedgist reproduce repshare/table1 --add DIR          # adds results in DIR (of another machine), runs nothing
    fedgist reproduce --data                             # which data sets lack, for which presets (docs/data.md)
    fedgist reproduce feddm/table1 --scale small         # a version for a laptop; says what it reduces

Stopped, `reproduce` goes on when the command is given again. Cells run side by side, one on a core; on a GPU the
seeds of a cell run together. A preset is a table in a TOML file of `src/fedgist/experiments/presets/`, where its
settings, the paper's numbers, tolerances and claims are; the variable `FEDGIST_PRESETS` names a folder with more of
them.

A claim of a paper is looked at in every column where both of its sides ran, seed by seed:

- *holds*: at least three seeds, and the 95 % interval of the mean difference (Student's t) lies on its side of zero.
- *seen once*: so in every seed, but there are only one or two. *not seen*: of so few, at least one is not so.
- *within noise*: three seeds or more, and the interval has zero in it.
- *does not hold*: three seeds or more, and the interval lies on the other side of zero.

Nothing is corrected for how many claims are looked at: of forty behind which there is nothing, one *holds* by chance.

A preset *holds* where all its claims do and every cell that ran is within its tolerance; it is *seen once* where some
claims lack seeds, and *holds partly* where some do and some do not. Where none does it has the worst of their words,
and *does not hold* if a cell is out of its tolerance. *run*: nothing of the paper's is judged. The tolerance of a cell
is what its preset states (1 point for FedDM and 2 for the others, about what seeds of ours differ by; a tenth of a
ratio of bytes), or the paper's own ± where that is larger. Behind ± in *ours* is the standard deviation over seeds, for
*five best rounds* over seeds and rounds, as FedGen's code has it. Cells that did not run are named, and count for
nothing. *hours left*: of one core ({machine}), from a few timed steps, for all seeds of the cells that have not run; to
be divided by the cores at work. A GPU takes a small part of that: `benchmarks/evidence.toml` lists what is worth most
of what has not run, with its GPU seconds, and `benchmarks/lanes.py` makes it. Below a table is every command that
made some of it, with the commit where it is found as it was then (`python benchmarks/…`: scripts that the presets
have replaced); a plus, there and behind a number of seeds, marks a checkout with changes of its own.
"""


HEADLINES = """\
| paper | what it concludes | our verdict, points | seeds | bytes | in a sentence |
|---|---|---|---|---|---|"""


def write(path: Path, results: Path) -> None:
    write_text(path, page(results))


def page(folder: Path) -> str:
    """The whole page."""
    reference = read_json(REFERENCE)
    by_paper: dict[str, list[tuple[Preset, Results, Verdict]]] = defaultdict(list)
    for preset in presets.available().values():
        if (presets.HERE / f"{preset.name.split('/')[0]}.toml").is_file():  # not those of somebody's own folder
            results = reproduction.load(preset, [folder])
            by_paper[preset.paper].append((preset, results, reproduction.judge(preset, results)))
    told = [_headline(*one, claim) for found in by_paper.values() for one in found for claim in one[0].claims]
    lines = "\n".join(line for line in told if line)
    parts = [HEAD.format(machine=reference["machine"], headlines=f"{HEADLINES}\n{lines}")]
    for paper, found in by_paper.items():
        parts.append(_glance(paper, found, reference["seconds"]))
    parts.append("## Every cell that ran\n")
    parts += [_details(*one) for found in by_paper.values() for one in found if one[1]]
    return "\n".join(parts)


def _headline(preset: Preset, results: Results, verdict: Verdict, claim: Claim) -> str:
    """A line of the first page, if a claim is for it."""
    if not claim.headline:
        return ""
    found = verdict.claims[claim]
    cells = {(cell.row, cell.column): results[cell.name] for cell in preset.cells if cell.name in results}
    columns = [outcome.column for outcome in found] if not claim.grows else list(claim.grows)
    both = [[cells[row, c] for c in columns if (row, c) in cells] for row in (claim.left, claim.right)]
    sizes = [_range([one.bytes_up + one.bytes_down for one in side], size) for side in both if side]
    seeds = _range([float(len(outcome.differences)) for outcome in found], "{:.0f}".format)
    place = f"[{preset.name}](#{_anchor(preset)})" if results else preset.name
    paper = preset.paper.partition(" (")[0]
    said = f"{counted(found)}, {_points(found)}" if found else "not run"
    return f"| {paper} | {claim.headline} ({place}) | {said} | {seeds} | {' against '.join(sizes)} | {claim.note} |"


def _points(found: Sequence[Outcome]) -> str:
    """By how much a claim is so, over its columns."""
    if len(found) > 1:
        return _range([outcome.mean for outcome in found], "{:+.1f}".format)
    half = found[0].half
    return f"{found[0].mean:+.1f}" + ("" if half is None else f" ± {half:.1f}")


def _range(values: Sequence[float], shown: Callable[[float], str]) -> str:
    ends = dict.fromkeys(shown(end) for end in (min(values), max(values))) if values else {}
    return " to ".join(ends)


def _glance(paper: str, found: list[tuple[Preset, Results, Verdict]], seconds: dict[str, float | None]) -> str:
    lines = [
        f"## {paper}\n",
        "| preset | what | state | cells run | within ± | hours left | remarks |",
        "|---|---|---|---|---|---|---|",
    ]
    for preset, results, verdict in found:
        name = f"[{preset.name}](#{_anchor(preset)})" if results else preset.name
        judged = f"{verdict.within} of {verdict.judged}" if verdict.judged else ""
        claims = "; ".join(claims_of(verdict))
        remarks = " ".join(part for part in (f"{claims}." if claims else "", preset.why if results else "") if part)
        run = f"{verdict.run} of {verdict.cells}"
        left = _hours(preset, results, seconds)
        lines.append(f"| {name} | {preset.title} | {verdict.word} | {run} | {judged} | {left} | {remarks} |")
    rest = presets.elsewhere().get(found[0][0].name.split("/")[0], {})
    return "\n".join([*lines, "", *(f"- {what}: {where}." for what, where in rest.items()), ""])


def _hours(preset: Preset, results: Results, seconds: dict[str, float | None]) -> str:
    left, more = reproduction.left(preset, results, lambda cell: seconds.get(cell.run))
    if left is None:
        return "?"
    hours = left / 3600
    return ("over " if more else "") + (f"{hours:.1f}" if hours < 100 else f"{hours:,.0f}") if left else ""


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
    lines += [f"\n{line}" for line in _judged(verdict)]
    if left := [cell.name for cell in preset.cells if cell.name not in results]:
        lines.append(f"\nNot run ({len(left)}): {'; '.join(left)}.")
    origins = dict.fromkeys(_origin(made) for found in results.values() for made in found.made)
    return "\n".join([*lines, "", *(f"- {origin}" for origin in origins), ""])


def _judged(verdict: Verdict) -> list[str]:
    """Each claim with its differences, a table of them all."""
    rows = [
        f"| {claim.text} | {one.column or 'all'} | {one.word} | {_points([one])} | {len(one.differences)} |"
        for claim, found in verdict.claims.items()
        for one in found
    ]
    return ["\n".join(["| claim | where | verdict | points | seeds |", "|---|---|---|---|---|", *rows])] if rows else []


def _origin(made: Mapping[str, Any]) -> str:
    """What was run where, and the commit that has it: a script may be gone since."""
    commit = made.get("commit")
    return f"`{made['command']}` ({_machine(made)}{f', commit {commit}' if commit else ''})"


def _machine(made: Mapping[str, Any]) -> str:
    machine = made.get("machine") or {}
    where = machine.get("device") or "machine not recorded"
    return f"{machine.get('cores', '?')} cores" if where == "cpu" else str(where)


def claims_of(verdict: Verdict) -> Iterable[str]:
    """How each claim stands, in words."""
    return [f"{claim.text}{claim.where}: {counted(found)}" for claim, found in verdict.claims.items() if found]


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
    return [cell.name, paper, ours, difference, verdict, *sizes, f"{len(found.numbers)}{' +' if found.changed else ''}"]


def _digits(cell: Cell) -> int:
    return {"numbers": 0, "efficiency": 1}.get(cell.take, 2)


def _number(cell: Cell, value: float) -> str:
    return f"{value:,.{_digits(cell)}f}"
