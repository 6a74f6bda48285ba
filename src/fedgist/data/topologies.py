"""Who talks to whom when there is no server: graphs as pure functions of the clients' names and a named `Rng`.

A graph is a mapping of each client to its neighbours; links go both ways, and everybody can be reached.
"""

from collections.abc import Iterable, Sequence

from fedgist.core.errors import FedgistError, unknown
from fedgist.core.rng import Rng

Graph = dict[str, tuple[str, ...]]

KINDS = {
    "full": "everybody with everybody",
    "ring": "each with the one before and the one after",
    "regular": "random, each with K others: regular:4",
    "links": "as given: links:0-1+1-2+2-3",
}


def build(text: str, ids: Sequence[str], rng: Rng) -> Graph:
    """The graph that a text such as `ring`, `regular:4` or `links:0-1+1-2` describes."""
    kind, _, detail = text.partition(":")
    if kind not in KINDS:
        raise unknown("topology", kind, KINDS)
    if kind == "links":
        return given(ids, [(a, b) for a, _, b in (link.partition("-") for link in detail.split("+"))])
    if kind == "regular":
        if not detail.isdecimal():
            raise FedgistError(f"topology regular needs the number of neighbours, as in regular:4, not {text!r}")
        return regular(ids, int(detail), rng)
    if detail:
        raise FedgistError(f"topology {kind} has no options, so {text!r} cannot be")
    return full(ids) if kind == "full" else ring(ids)


def full(ids: Sequence[str]) -> Graph:
    """Everybody with everybody."""
    return {id: tuple(other for other in ids if other != id) for id in ids}


def ring(ids: Sequence[str]) -> Graph:
    """Each with the one before and the one after."""
    return given(ids, [(id, ids[(i + 1) % len(ids)]) for i, id in enumerate(ids)])


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
