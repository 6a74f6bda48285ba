"""What a site has answered, written down before it answers, and what it refuses because of that.

Runs are deterministic: the same asked twice for two sets of sites would tell by subtraction what one of them sent.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from fedgist.secure.graph import Group, Refused

MOST_UNPROVEN = 8
"""Sums of a run whose set the server has not yet shown to be everybody's; a server that was killed forgets some."""

Record = dict[str, Any]


class Together(Refused):
    """Of sums that have something in common, by its name `scope`, one more would tell of too few sites."""

    def __init__(self, why: str, scope: str):
        super().__init__(why)
        self.scope = scope


class Memory(Protocol):
    """What was answered."""

    def records(self) -> list[Record]:
        """All that was written, in order."""

    def write(self, record: Record) -> None:
        """Keep this; it must be on the disk when the call returns."""


class Forgetful:
    """In one process, where site and server end together."""

    def records(self) -> list[Record]:
        return []

    def write(self, record: Record) -> None:
        pass


def fewest_apart(sets: Iterable[Collection[str]]) -> int:
    """How many sites at least stand behind whatever can be worked out from the sums over these sets.

    Sites that are in the same of the sets have the same factor in every combination of the sums, so that a combination
    is one of the sums over groups of such sites.
    """
    listed = [frozenset(one) for one in sets]
    groups = Counter(tuple(name in one for one in listed) for name in frozenset[str]().union(*listed))
    return min(groups.values())


class Past:
    """The sums that a site, or a helper, has been asked for and has helped to open."""

    def __init__(self, memory: Memory, least: int):
        self.memory, self.least = memory, least
        self._asked: dict[str, list[str]] = {}
        self._nonces: set[str] = set()
        self._opened: dict[str, Record] = {}
        self._sets: dict[str, dict[frozenset[str], str]] = {}
        self.unproven: dict[str, str] = {}
        """Sums that were opened, by run, of which the server has not shown that all were told of the same set."""
        for record in memory.records():
            self._learn(record)

    def _learn(self, record: Record) -> None:
        version = record["version"]
        if "nonce" in record:
            self._asked[version] = record["cohort"]
            self._nonces.add(record["nonce"])
        if "alive" in record:
            self._opened[version] = record
            for scope in record["scopes"]:
                self._sets.setdefault(scope, {}).setdefault(frozenset(record["alive"]), version)
            if "run" in record:
                self.unproven[version] = record["run"]
        if "proven" in record:
            self.unproven.pop(version, None)

    def _note(self, **record: Any) -> None:
        self.memory.write(record)
        self._learn(record)

    def ask(self, group: Group) -> None:
        """Whether to take part in this exchange; if so it is written down."""
        if len(group.cohort) < self.least:
            raise Refused(f"a sum over {len(group.cohort)} sites is one over fewer than {self.least}")
        if self._asked.get(group.version, list(group.cohort)) != list(group.cohort):
            raise Refused(f"the server asked {group.version} before, for another set of sites")
        if group.nonce.hex() in self._nonces:
            raise Refused("the server used a nonce twice")
        if list(self.unproven.values()).count(group.run) > MOST_UNPROVEN:
            raise Refused("the server does not show that all sites were told of the same sets in earlier sums")
        self._note(version=group.version, cohort=list(group.cohort), nonce=group.nonce.hex())

    def open(
        self, version: str, alive: Sequence[str], least: int, scopes: Sequence[str], apart: int = 0, **more: str
    ) -> None:
        """Whether the sum of these sites may be opened; if so that is written down, and holds from now on.

        scopes: names of what this sum has in common with others (the round, the question that was asked, the answer to
        it), which together must not tell of fewer than `apart` sites.
        """
        alive, apart = sorted(alive), max(apart, self.least)
        if len(alive) < (least := max(least, apart)):
            raise Refused(f"the server wants the sum of {len(alive)} sites, and it must be over at least {least}")
        if version in self._opened and self._opened[version]["alive"] != alive:
            raise Refused(f"the server has opened {version} before, for another set of sites")
        for scope in scopes:
            before = self._sets.get(scope, {})
            if frozenset(alive) not in before and fewest_apart([*before, alive]) < apart:
                raise Together(
                    f"together with {', '.join(before.values())} the sum over this set of sites would tell of fewer "
                    f"than {apart} of them",
                    scope,
                )
        self._note(version=version, alive=alive, scopes=list(scopes), **more)

    def set_of(self, version: str) -> tuple[list[str], list[str], bytes]:
        """Who was asked in a sum that was opened, for whom it was opened, and what it is bound to."""
        opened = self._opened[version]
        return self._asked[version], opened["alive"], bytes.fromhex(opened["context"])

    def prove(self, version: str) -> None:
        """Take note that others were told of the same set."""
        self._note(version=version, proven=True)
