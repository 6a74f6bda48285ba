"""Tables of results in the pages: every number of a table that names its presets is in their results or in the paper.

A table is marked with a line before it, `<!-- results: repshare/table1, repshare/figure4 -->`. What stands outside of
brackets is then a mean over some of the first seeds, a deviation, a single seed's number, a number of the paper's, the
difference of ours to it, or by how much a claim is so. In brackets there is what results do not keep: rounds, gains.
"""

import re
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fedgist.experiments import presets, reproduction

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"<!-- results: (?P<presets>[^>]+) -->")
NUMBER = re.compile(r"(?<![\w.,=-])[−+-]?\d{1,3}\.\d+(?![\w.])")
PAGES = {
    "codream": 6,
    "feddm": 4,
    "fedgen": 5,
    "fedtgp": 1,
    "gist": 7,
    "gist-findings": 1,
    "privacy": 1,
    "repshare": 7,
    "tofu": 2,
}
"""And how many of their tables are marked at least."""


@cache
def all_presets() -> dict[str, presets.Preset]:
    return presets.available()


@cache
def values(preset: str) -> tuple[float, ...]:
    """All that a table may say of a preset."""
    found: list[float] = []
    chosen = all_presets()[preset]
    results = reproduction.load(chosen, [ROOT / "docs" / "results"])
    for cell in chosen.cells:
        found += [x for x in (cell.paper, cell.spread) if x is not None]
        known = results.get(cell.name)
        if known is None:
            continue
        by_seed = [numbers for _, numbers in sorted(known.numbers.items(), key=lambda item: int(item[0]))]
        for count in range(1, len(by_seed) + 1):
            some = [number for numbers in by_seed[:count] for number in numbers]
            found += [statistics.fmean(some), *([statistics.stdev(some)] if len(some) > 1 else [])]
        found += [statistics.fmean(numbers) for numbers in by_seed]
        if cell.paper is not None:
            found += [x - cell.paper for x in found[-2 * len(by_seed) :]]
    verdict = reproduction.judge(chosen, results)
    return (*found, *(outcome.mean for outcomes in verdict.claims.values() for outcome in outcomes))


def tables(page: str) -> Iterator[tuple[list[str], list[str]]]:
    """(presets, lines) of every marked table."""
    lines = page.splitlines()
    for i, line in enumerate(lines):
        if marked := MARK.fullmatch(line.strip()):
            start = next(j for j in range(i + 1, len(lines)) if lines[j].startswith("|"))
            assert start - i <= 2, f"a mark stands before its table: {line}"
            end = next((j for j in range(start, len(lines)) if not lines[j].startswith("|")), len(lines))
            yield [name.strip() for name in marked["presets"].split(",")], lines[start:end]


def strangers(page: str) -> list[str]:
    """The numbers of marked tables that are nowhere in the results of their presets, with the line that has them."""
    wrong = []
    for names, lines in tables(page):
        known = [value for name in names for value in values(name)]
        for line in lines[2:]:
            for text in NUMBER.findall(re.sub(r"\([^)]*\)", "", line.split("|", 2)[2])):
                digits, number = len(text.partition(".")[2]), float(text.replace("−", "-"))
                room = 0.5 * 10**-digits + 1e-6
                if not any(abs(value - number) <= room for value in known):
                    wrong.append(f"{text} in {line}")
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_every_number_is_in_the_results(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    assert len(list(tables(text))) >= PAGES[page], "a table does not say which presets it is of"
    assert strangers(text) == []


def test_a_wrong_number_is_found() -> None:
    """One digit off in one cell of a table that is right."""
    right = "<!-- results: repshare/table1 -->\n| | N=10 | thesis |\n|---|---|---|\n| ours | 83.96 ± 0.54 | 82.07 |\n"
    assert strangers(right) == []
    assert strangers(right.replace("83.96", "83.69")) == ["83.69 in | ours | 83.69 ± 0.54 | 82.07 |"]
    assert strangers(right.replace("82.07", "82.70")) == ["82.70 in | ours | 83.96 ± 0.54 | 82.70 |"]
    assert strangers(right.replace("0.54", "0.45")) == ["0.45 in | ours | 83.96 ± 0.45 | 82.07 |"]
