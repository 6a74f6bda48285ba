"""Who talks to whom when there is no server: graphs as pure functions of the clients' names and a named `Rng`.

A graph is a mapping of each client to its neighbours; links go both ways, and everybody can be reached: in every round,
or where the graph changes from round to round, in the course of several.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from fedgist.core.errors import FedgistError, check_known, unknown
from fedgist.core.rng import Rng

Graph = dict[str, tuple[str, ...]]
Topology = Callable[[int], Graph]
"""The graph of a round; the first is 1."""

KINDS = {
    "full": "everybody with everybody",
    "ring": "each with the one before and the one after",
    "grid": "rows and columns, each with those beside, above and below; grid:4 has four columns",
    "regular": "random, each with K others: regular:4",
    "gossip": "random and drawn anew in every round, each with K others: gossip:1 is pairs",
    "links": "as given: links:0-1+1-2+2-3",
    "file": "as given in a file, two names a line: file:links.txt",
}


def over_time(text: str, ids: Sequence[str], rng: Rng) -> Topology:
    """The graphs that a text describes: one for all rounds, or with `gossip` another in each."""
    if not changes(text):
        fixed = build(text, ids, rng)
        return lambda round: fixed
    build(text, ids, rng)  # says now what is wrong
    return lru_cache(maxsize=2)(lambda round: build(text, ids, rng("gossip", round)))


def changes(text: str) -> bool:
    """Whether the graph is another in each round, so that anybody may become anybody's neighbour."""
    return text.partition(":")[0] == "gossip"


def settled(text: str) -> str:
    """The same topology without a file: what the file holds, as links."""
    kind, _, path = text.partition(":")
    return f"links:{'+'.join(f'{a}-{b}' for a, b in read(Path(path)))}" if kind == "file" else text


def read(path: Path) -> list[tuple[str, str]]:
    """The links in a file: two names a line; what follows a # is for people."""
    try:
        lines = [line.partition("#")[0].split() for line in path.expanduser().read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise FedgistError(f"cannot read the topology {path}: {getattr(error, 'strerror', error)}") from error
    for number, names in enumerate(lines, 1):
        if len(names) not in (0, 2):
            raise FedgistError(f"{path}, line {number}: a link is two names with a space between them")
    return [(names[0], names[1]) for names in lines if names]


def build(text: str, ids: Sequence[str], rng: Rng) -> Graph:
    """The graph that a text such as `ring`, `regular:4` or `links:0-1+1-2` describes."""
    kind, _, detail = text.partition(":")
    check_known("topology", kind, KINDS)
    if kind == "file":
        return given(ids, read(Path(detail)))
    if kind == "links":
        return given(ids, [_ends(link, ids) for link in detail.split("+")])
    if kind in ("regular", "gossip"):
        if not detail.isdecimal():
            raise FedgistError(f"topology {kind} needs the number of neighbours, as in {kind}:4, not {text!r}")
        return pairs(ids, rng) if (kind, detail) == ("gossip", "1") else regular(ids, int(detail), rng)
    if kind == "grid":
        if detail and not (detail.isdecimal() and 1 <= int(detail) <= len(ids)):
            raise FedgistError(f"topology grid takes a number of columns from 1 to {len(ids)}, as in grid:4")
        return grid(ids, int(detail) if detail else math.ceil(math.sqrt(len(ids))))
    if detail:
        raise FedgistError(f"topology {kind} has no options, so {text!r} cannot be")
    return full(ids) if kind == "full" else ring(ids)


def _ends(link: str, ids: Sequence[str]) -> tuple[str, str]:
    """The two names in a text such as `north-1-south`, which may have hyphens of their own."""
    parts = link.split("-")
    splits = [("-".join(parts[:i]), "-".join(parts[i:])) for i in range(1, len(parts))]
    fitting = [(a, b) for a, b in splits if a in ids and b in ids]
    if len(fitting) > 1:
        raise FedgistError(f"the link {link} can be read in two ways: other names would help")
    if not splits:
        raise FedgistError(f"a link is two names with a hyphen between them, as in 0-1, not {link!r}")
    return fitting[0] if fitting else splits[0]


def full(ids: Sequence[str]) -> Graph:
    """Everybody with everybody."""
    return {id: tuple(other for other in ids if other != id) for id in ids}


def ring(ids: Sequence[str]) -> Graph:
    """Each with the one before and the one after."""
    return given(ids, [(id, ids[(i + 1) % len(ids)]) for i, id in enumerate(ids)])


def grid(ids: Sequence[str], columns: int) -> Graph:
    """Row by row, each with those beside, above and below; the last row may be shorter."""
    beside = [(a, b) for i, (a, b) in enumerate(pairwise(ids)) if (i + 1) % columns]
    return given(ids, [*beside, *zip(ids, ids[columns:], strict=False)])


def pairs(ids: Sequence[str], rng: Rng) -> Graph:
    """Each with one other, at random; where their number is odd, one is alone."""
    order = [ids[i] for i in rng("topology").permutation(len(ids)).tolist()]
    found = zip(order[::2], order[1::2], strict=False)
    return {id: tuple(near) for id, near in _neighbours(ids, found).items()}


def regular(ids: Sequence[str], degree: int, rng: Rng) -> Graph:
    """A random connected graph in which everybody has `degree` neighbours.

    It starts as a circle with links to the nearest, and random pairs of links a–b, c–d become a–d, c–b. That keeps
    every degree, and done often enough it forgets the circle (the switch chain, whose limit is uniform).
    """
    n = len(ids)
    if not 2 <= degree < n or degree * n % 2:
        raise FedgistError(
            f"no connected graph of {n} clients gives each {degree} neighbours: take from 2 to {n - 1}, and an even "
            f"number where that of the clients is odd"
        )
    links = [(ids[i], ids[(i + step) % n]) for step in range(1, degree // 2 + 1) for i in range(n)]
    links += [(ids[i], ids[i + n // 2]) for i in range(n // 2) if degree % 2]
    there = {frozenset(link) for link in links}
    draw = rng("topology").numpy()
    switches = 0
    while switches < 20 * len(links) or not _connected(ids, links):
        switches += 1
        first, second = draw.integers(len(links), size=2)
        (a, b), (c, d) = links[first], links[second][:: draw.choice((1, -1))]
        old, new = {frozenset((a, b)), frozenset((c, d))}, {frozenset((a, d)), frozenset((c, b))}
        if len({a, b, c, d}) == 4 and not new & there:
            there = there - old | new
            links[first], links[second] = (a, d), (c, b)
    return given(ids, links)


def given(ids: Sequence[str], links: Iterable[tuple[str, str]]) -> Graph:
    """The graph with these links; it is an error when they name a stranger or leave somebody unreachable."""
    found = list(links)
    for end in sorted({end for link in found for end in link} - set(ids)):
        raise unknown("client in the topology", end, ids)
    if not _connected(ids, found):
        raise FedgistError("the topology leaves some clients unreachable from others: add links")
    return {id: tuple(sorted(near - {id})) for id, near in _neighbours(ids, found).items()}


def _neighbours(ids: Sequence[str], links: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    near: dict[str, set[str]] = {id: set() for id in ids}
    for a, b in links:
        near[a].add(b)
        near[b].add(a)
    return near


def _connected(ids: Sequence[str], links: Iterable[tuple[str, str]]) -> bool:
    near = _neighbours(ids, links)
    seen: set[str] = set()
    new = {ids[0]}
    while new:
        seen |= new
        new = {other for id in new for other in near[id]} - seen
    return len(seen) == len(ids)
