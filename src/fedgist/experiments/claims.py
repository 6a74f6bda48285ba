"""What a paper concludes from its numbers, and how that stands: paired by seed, with an interval around the mean.

In a preset a claim is a text, `ROW > ROW` or `ROW < ROW`, looked at in every column; or a table with more to say:

    that       that text; the right side may be a number, too
    only, but  the columns that it is about, or those that it is not
    grows      two columns: the difference is larger in the second than in the first
    headline   the paper's conclusion in its reader's words, for the first page; `note` is a sentence on ours
"""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedgist.core.errors import FedgistError, check_known

ENOUGH = 3
"""Seeds from which on there is an interval."""
KEYS = ("that", "only", "but", "grows", "headline", "note")
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""The 97.5 % points of Student's t for 1, 2, … degrees of freedom."""
HOLDS, SEEN, NOISE, FAILS, UNSEEN = "holds", "seen once", "within noise", "does not hold", "not seen"


@dataclass(frozen=True)
class Claim:
    """LEFT > RIGHT, or LEFT < RIGHT."""

    left: str
    sign: str
    right: str
    """A row, or a number."""
    only: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    grows: tuple[str, ...] = ()
    headline: str = ""
    note: str = ""

    @property
    def text(self) -> str:
        more = f", more so in {self.grows[1]} than in {self.grows[0]}" if self.grows else ""
        return f"{self.left} {self.sign} {self.right}{more}"

    @property
    def where(self) -> str:
        """In which columns it is looked at, where not in all."""
        return "".join(f" {word} {', '.join(of)}" for word, of in (("in", self.only), ("but in", self.but)) if of)

    @property
    def level(self) -> float | None:
        """The number on the right side, if it is one."""
        try:
            return float(self.right)
        except ValueError:
            return None

    def counts(self, column: str) -> bool:
        """Whether it is about a column."""
        return column not in self.but and (not self.only or column in self.only)


@dataclass(frozen=True)
class Outcome:
    """How a claim stands in a column."""

    column: str
    differences: tuple[float, ...]
    """Seed by seed, by how much it is so; below 0 it is the other way round."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def half(self) -> float | None:
        """Half of the 95 % interval of the mean; None where there are too few seeds."""
        count = len(self.differences)
        if count < ENOUGH:
            return None
        return STUDENT[min(count - 2, len(STUDENT) - 1)] * statistics.stdev(self.differences) / count**0.5

    @property
    def word(self) -> str:
        if self.half is None:
            return SEEN if min(self.differences) > 0 else UNSEEN
        if abs(self.mean) <= self.half:
            return NOISE
        return HOLDS if self.mean > 0 else FAILS


def read(preset: str, given: str | Mapping[str, Any], rows: Collection[str], columns: Collection[str]) -> Claim:
    """A claim as a preset states it; whatever it speaks of must be there."""
    told: Mapping[str, Any] = {"that": given} if isinstance(given, str) else given
    for key in told:
        check_known(f"key of a claim of preset {preset}", key, KEYS)
    text = told.get("that", "")
    sign = next((sign for sign in (" > ", " < ") if sign in text), None)
    if sign is None:
        raise FedgistError(f"preset {preset}: a claim is written ROW > ROW, not {text!r}")
    left, _, right = text.partition(sign)
    only, but, grows = (tuple(told.get(key, ())) for key in ("only", "but", "grows"))
    if grows and (len(set(grows)) != 2 or only or but):
        raise FedgistError(f"preset {preset}: the claim {text!r} grows from one column to another, and says no other")
    claim = Claim(left, sign.strip(), right, only, but, grows, told.get("headline", ""), told.get("note", ""))
    if not {left, *(() if claim.level is not None else (right,))} <= set(rows):
        raise FedgistError(f"preset {preset}: the claim {text!r} speaks of rows that there are not")
    if not {*claim.only, *claim.but, *claim.grows} <= set(columns):
        raise FedgistError(f"preset {preset}: the claim {text!r} speaks of columns that there are not")
    return claim


Numbers = Mapping[str, float]
"""Seed -> the number of a cell."""


def outcomes(claim: Claim, cells: Mapping[tuple[str, str], Numbers], columns: Sequence[str]) -> list[Outcome]:
    """How a claim stands, column by column, where both of its sides ran with the same seeds."""
    if claim.grows:
        first, second = (_gaps(claim, cells, column) for column in claim.grows)
        pairs = {" to ".join(claim.grows): [second[seed] - first[seed] for seed in first if seed in second]}
    else:
        pairs = {column: list(_gaps(claim, cells, column).values()) for column in columns if claim.counts(column)}
    return [Outcome(column, tuple(differences)) for column, differences in pairs.items() if differences]


def _gaps(claim: Claim, cells: Mapping[tuple[str, str], Numbers], column: str) -> dict[str, float]:
    """Seed -> by how much the claim is so there."""
    left, level = cells.get((claim.left, column), {}), claim.level
    right = dict.fromkeys(left, level) if level is not None else cells.get((claim.right, column), {})
    sign = 1 if claim.sign == ">" else -1
    return {seed: sign * (left[seed] - right[seed]) for seed in left if seed in right}


def counted(found: Sequence[Outcome]) -> str:
    """The words of some outcomes and how often each: `holds in 2, within noise in 1`; one alone stands for itself."""
    words = [outcome.word for outcome in found]
    if len(words) == 1:
        return words[0]
    if len(set(words)) == 1:
        both, all_of = ("either", "any of") if words[0] in (FAILS, UNSEEN) else ("both", "all")
        return f"{words[0]} in {both if len(words) == 2 else f'{all_of} {len(words)}'}"
    return ", ".join(f"{word} in {words.count(word)}" for word in (HOLDS, SEEN, NOISE, FAILS, UNSEEN) if word in words)
