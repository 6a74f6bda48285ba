"""Secure sums: replies enter a ring, a scheme hides them there, and the asker gets the sum of all and of nobody alone.

The message `masked(Reply)` travels in place of a reply: its visible fields as they are, its additive ones as elements
of a ring, and what the scheme encloses. Codec, ledger and transcript treat it as they treat every message.
"""

import functools
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgist.core.codec import Leaves
from fedgist.core.federation import TooFewAnswers
from fedgist.core.message import (
    Params,
    Wire,
    WireError,
    int16,
    int32,
    int64,
    message,
    schema_of,
    tag_of,
    uint8,
    wire,
)
from fedgist.core.tree import Tree
from fedgist.engines.layer import Exchange, Form, Layer, SiteLayer, Trip, Unfit
from fedgist.secure.graph import CannotOpen, Group, Sent, peers
from fedgist.secure.ring import FIRST_RANGE, WIDEST_RANGE, Grid, OutOfRange, Ring, Vector
from fedgist.secure.shamir import Bytes

log = logging.getLogger("fedgist")

RING_DTYPES = {16: int16, 32: int32, 64: int64}
MOST_FIELDS, MOST_LEAVES = 100, 10_000
"""Additive fields in a reply, and tensors in them."""
LARGEST = 1 << 33
"""Bytes of the ring vectors of a reply."""

Noise = Callable[[Exchange, str, int, Ring], NDArray[np.int64]]
"""So many whole numbers of steps to add to a field (by its name on the wire) before it is hidden."""

Hide = Callable[[Group, Mapping[str, Vector], Sequence[str]], tuple[dict[str, Vector], Bytes, Bytes]]
"""What a scheme does at a site: vectors as they travel, shares of what hides them, and commitments to it. The last of
what it is given is what this sum has in common with others (`Exchange.scopes`)."""

PHASES = ("round", "evaluation")


@message
class Invitation:
    """Who is asked with you, in the order of all sites' names; the range ±2^R of each field; a nonce; and, of the sum
    before (phase, round, exchange), who has signed that it was opened for the set that they were told of."""

    cohort: Tensor = wire(uint8, shape=("sites",), paper=False, low=0, high=1)
    ranges: Tensor = wire(uint8, shape=("fields",), paper=False, low=FIRST_RANGE, high=WIDEST_RANGE)
    nonce: Tensor = wire(uint8, shape=(16,), paper=False)
    before: Tensor = wire(int64, shape=(3,), paper=False, low=0)
    signatures: Tensor = wire(uint8, shape=("signers", 64), paper=False)


@message
class Agree:
    """Whose vectors arrived: sign that this is the set that you were told of."""

    alive: Tensor = wire(uint8, shape=("sites",), paper=False, low=0, high=1)


@message
class Agreed:
    """The signature."""

    signature: Tensor = wire(uint8, shape=(64,), paper=False)


@message
class Unmask:
    """Whose vectors arrived, what the neighbours among them have sealed for you, and, with three trips, who has signed
    that set: help to open their sum."""

    alive: Tensor = wire(uint8, shape=("sites",), paper=False, low=0, high=1)
    sealed: Tensor = wire(uint8, shape=("others", "bundle"), paper=False)
    signatures: Tensor = wire(uint8, shape=("signers", 64), paper=False)


@message
class Unmasked:
    """Shares of the keys that are left over in the sum; and a signature of whose sum it is."""

    keys: Tensor = wire(uint8, shape=("rows", 32), paper=False)
    signature: Tensor = wire(uint8, shape=(64,), paper=False)


@message
class Seeds:
    """To a helper: whose vectors arrived, what each of them has sealed, and bits and count of each of their vectors."""

    alive: Tensor = wire(uint8, shape=("sites",), paper=False, low=0, high=1)
    sealed: Tensor = wire(uint8, shape=("signers", "bundle"), paper=False)
    form: Tensor = wire(int64, shape=("leaves", 2), paper=False, low=0)


@message
class MaskSum:
    """The sum of these sites' masks: the vectors' bytes, one after the other."""

    masks: Tensor = wire(uint8, shape=("bytes",), paper=False)


@dataclass(frozen=True)
class Opened:
    """What is known of a sum beside its numbers."""

    wrong: Mapping[str, str] = field(default_factory=dict)
    """Who gave what cannot be."""
    signatures: Mapping[str, bytes] = field(default_factory=dict)
    """Of the set, where sites are to be shown them with the next request."""


class Scheme(Protocol):
    """How addends are hidden: the asker's half."""

    @property
    def title(self) -> str:
        """What hides them, in a report's words."""

    @property
    def roster(self) -> bytes:
        """The digest of who takes part, by which keys."""

    @property
    def own(self) -> Mapping[type, type]:
        """The messages by which a sum is opened, and their answers."""

    def site(self, id: str, ids: Sequence[str], grid: Grid, noise: "Noise | None") -> SiteLayer:
        """The other half, where it is in this process."""

    def open(
        self, group: Group, sent: Mapping[str, Sent], total: Mapping[str, Vector], ids: Sequence[str], trip: Trip
    ) -> Opened:
        """Take off what hides the sum of the vectors, in place, or `CannotOpen`."""


@functools.cache
def masked(reply: type) -> type:
    """The message that travels in place of a reply; one that adds nothing up travels as it is."""
    if not any(declared.additive for _, declared in schema_of(reply).values()):
        return reply
    schema: dict[str, tuple[Any, Wire]] = {}
    for name, (kind, declared) in schema_of(reply).items():
        if declared.additive:
            kind = Params if kind == Params else Tensor
            dtypes = tuple(RING_DTYPES.values())
            declared = replace(declared, dtypes=dtypes, low=None, high=None, below=None, per=None)
        schema[name] = kind, declared
    schema |= {
        "shares": (Tensor, Wire((uint8,), ("others", "bundle"), paper=False)),
        "commitments": (Tensor, Wire((uint8,), ("peers", 32), paper=False)),
    }
    made = type(f"Masked{reply.__name__}", (), {"__doc__": f"{reply.__name__}, its sums hidden."})
    made.__schema__, made.__tag__ = schema, f"masked.{reply.__name__}"  # type: ignore[attr-defined]
    return made


def form(sites: int, own: Mapping[type, type]) -> Form:
    """What travels between so many sites and their server."""
    near = peers(sites)
    sizes = {"sites": sites, "signers": sites, "fields": MOST_FIELDS, "peers": near, "others": near}
    sizes |= {"bundle": 32 * near + 512, "rows": near * near, "leaves": MOST_LEAVES, "bytes": LARGEST}
    return Form(masked, Invitation, own, sizes)


@dataclass(frozen=True)
class Numbers:
    """How a reply's additive fields lie in rings."""

    grid: Grid
    reply: type
    addends: int
    ranges: tuple[int, ...]

    @property
    def fields(self) -> list[str]:
        return [name for name, (_, declared) in schema_of(self.reply).items() if declared.additive]

    def additive(self, leaves: Leaves) -> dict[str, Tensor]:
        return {name: leaf for name, leaf in leaves.items() if name.split("/")[0] in self.fields}

    def ring(self, name: str, bytes: bool, whole: bool) -> Ring:
        if bytes or whole:
            return self.grid.bytes(self.addends) if bytes else self.grid.integers(self.addends)
        return self.grid.floats(self.addends, self.ranges[self.fields.index(name.split("/")[0])])

    def ring_of(self, name: str, leaf: Tensor) -> Ring:
        """By what a site has packed."""
        return self.ring(name, leaf.dtype == uint8, leaf.dtype == int64)

    def ring_for(self, name: str, sent: Tensor) -> Ring:
        """By what travelled: only bytes are added in fewer bits than floats."""
        dtypes = schema_of(self.reply)[name.split("/")[0]][1].dtypes
        short = sent.dtype != RING_DTYPES[self.grid.bits] and sent.dtype != int64
        return self.ring(name, short and uint8 in dtypes, dtypes == (int64,))


class SecureSite(SiteLayer):
    """A site's half: numbers into the ring, noise, and then the scheme hides them."""

    def __init__(
        self,
        ids: Collection[str],
        roster: bytes,
        grid: Grid,
        hide: Hide,
        noise: Noise | None = None,
        alike: str = "",
    ):
        """`alike` is the digest of what the run is, whatever it is called."""
        self.ids, self.roster, self.grid, self.hide, self.noise = tuple(sorted(ids)), roster, grid, hide, noise
        self.form, self.alike = form(len(self.ids), {}), alike

    def wrap(self, exchange: Exchange, invitation: Leaves, reply: type, leaves: Leaves) -> Leaves:
        if masked(reply) is reply:
            return leaves
        cohort, nonce = named(self.ids, invitation["cohort"]), invitation["nonce"].numpy().tobytes()
        group = Group(exchange.run, exchange.version, self.roster, cohort, nonce, self.alike)
        numbers = Numbers(self.grid, reply, len(cohort), tuple(invitation["ranges"].tolist()))
        vectors = self._vectors(exchange, numbers, leaves)
        hidden, shares, commitments = self.hide(group, vectors, exchange.scopes)
        found = {name: _leaf(hidden[name], leaf) if name in hidden else leaf for name, leaf in leaves.items()}
        return {**found, "shares": torch.from_numpy(shares), "commitments": torch.from_numpy(commitments)}

    def room(self, invitation: Leaves, reply: type, field: str) -> tuple[float, float]:
        numbers = Numbers(self.grid, reply, int(invitation["cohort"].sum()), tuple(invitation["ranges"].tolist()))
        ring = numbers.ring(field, False, False)
        return ring.step, ring.limit

    def _vectors(self, exchange: Exchange, numbers: Numbers, leaves: Leaves) -> dict[str, Vector]:
        vectors: dict[str, Vector] = {}
        for name, leaf in numbers.additive(leaves).items():
            ring = numbers.ring_of(name, leaf)
            try:
                vectors[name] = ring.enter(f"{tag_of(numbers.reply)}.{name}", leaf.cpu().numpy().reshape(-1))
            except OutOfRange as error:
                raise Unfit(str(error), name.split("/")[0], error.needed) from error
            if self.noise is not None:
                drawn = self.noise(exchange, name, leaf.numel(), ring)
                vectors[name] = vectors[name] + drawn.astype(vectors[name].dtype)
        return vectors


@dataclass(eq=False)
class SecureSum(Layer):
    """The asker's half."""

    ids: Sequence[str]
    scheme: Scheme
    grid: Grid = field(default_factory=Grid)
    group: int = 3
    """The fewest sites that a sum is over, and by which two sums of a round differ, if they do."""
    noise: Noise | None = None

    def __post_init__(self) -> None:
        self.ids = tuple(sorted(self.ids))
        self.form = form(len(self.ids), self.scheme.own)
        self.title = f"sums of at least {self.group}, {self.scheme.title}"
        self.ranges: dict[str, int] = {}
        """R of the fields that need more than the first."""
        self.expected: dict[str, Mapping[str, float]] = {}
        """Deviations of the noise that sites have added to fields."""
        self.signed: dict[str, Any] = {}
        """Of the last sum: which it was, and who has signed for what set."""
        self.told: dict[str, Any] = {}
        """What sites elsewhere are told of this layer."""
        self._asked: tuple[Group, Numbers] | None = None
        self._steady: tuple[str, tuple[str, ...]] = ("", ())
        self._sites: dict[str, SiteLayer] = {}

    def expect(self, reply: type, noise: Mapping[str, float]) -> None:
        self.expected[tag_of(reply)] = noise

    def choose(self, exchange: Exchange, ids: Sequence[str]) -> Sequence[str]:
        """Within a round only those who were in its sums so far: sets that differ by a few would tell of those few."""
        kind, alive = self._steady
        return [id for id in ids if id in (alive if kind == _round(exchange) else self.ids)]

    def invite(self, exchange: Exchange, reply: type, ids: Sequence[str]) -> Leaves:
        numbers = Numbers(self.grid, reply, len(ids), ())
        noise = {
            name: self.grid.range_of(len(ids), size) for name, size in self.expected.get(tag_of(reply), {}).items()
        }
        keys = {name: f"{tag_of(reply)}.{name}" for name in numbers.fields}
        ranges = tuple(noise.get(name) or self.ranges.get(key, FIRST_RANGE) for name, key in keys.items())
        group = Group(exchange.run, exchange.version, self.scheme.roster, tuple(ids), secrets.token_bytes(16))
        self._asked = group, replace(numbers, ranges=ranges)
        return {
            "cohort": marked(self.ids, ids),
            "ranges": torch.tensor(ranges, dtype=uint8),
            "nonce": as_bytes(group.nonce),
            "before": torch.tensor(self.signed.get("exchange", [0, 0, 0])),
            "signatures": signature_rows(self.ids, self.signed.get("signatures", {})),
        }

    def mend(self, reply: type, errors: Iterable[Unfit]) -> bool:
        """Widen fields for everybody, with room for what is to come.

        A site cannot ask for what there is already, nor for fields that there are not, each time for another.
        """
        before, fields = dict(self.ranges), Numbers(self.grid, reply, 0, ()).fields
        for error in errors if self.grid.bits == 64 else ():
            key = f"{tag_of(reply)}.{error.field}"
            if error.field in fields and before.get(key, FIRST_RANGE) < error.needed <= WIDEST_RANGE:
                self.ranges[key] = max(self.ranges.get(key, 0), min(error.needed + 4, WIDEST_RANGE))
        return self.ranges != before

    def total(self, exchange: Exchange, reply: type, replies: Mapping[str, Leaves], trip: Trip) -> Leaves:
        assert self._asked is not None
        group, numbers = self._asked
        if not numbers.fields or not numbers.addends:
            return {}
        kind, before = self._steady
        few = len(replies) < self.group
        if few or (kind == _round(exchange) and 0 < len({*before} ^ {*replies}) < self.group):
            why = (
                f"a secure sum is over at least {self.group}"
                if few
                else f"the set of a round's sums changes by at least {self.group} sites, or not at all"
            )
            counts = f"{len(replies)} of {numbers.addends} answered {reply.__name__}"
            raise TooFewAnswers(f"round {exchange.round}: {counts}, and {why}")
        sums: dict[str, Vector] = {}
        for leaves in replies.values():
            for name, leaf in numbers.additive(leaves).items():
                if name in sums:
                    sums[name] += _vector(leaf)
                else:
                    sums[name] = _vector(leaf).copy()
        sent = {id: Sent(leaves["shares"].numpy(), leaves["commitments"].numpy()) for id, leaves in replies.items()}

        try:
            opened = self.scheme.open(group, sent, sums, self.ids, trip)
        except CannotOpen as error:
            raise TooFewAnswers(f"round {exchange.round}: {reply.__name__} cannot be summed: {error}") from error
        for id, what in opened.wrong.items():
            log.warning(f"{exchange.phase} {exchange.round}: site {id} {what}; the sum is right without it")
        self.signed = {
            "exchange": [PHASES.index(exchange.phase), exchange.round, exchange.number],
            "signatures": {id: signature.hex() for id, signature in opened.signatures.items()},
        }
        self._steady = (_round(exchange), tuple(replies))
        first = next(iter(replies.values()))
        rings = {name: numbers.ring_for(name, first[name]) for name in sums}
        if strays := [name for name, vector in sums.items() if not rings[name].holds(vector)]:
            raise TooFewAnswers(
                f"round {exchange.round}: {reply.__name__} cannot be summed: {strays[0]} is more than sites can add. "
                f"One of {', '.join(replies)}, or who helps them, hid its part by another mask than it gave away, or "
                "added what it may not; which one, nobody can tell who may not see parts. If it happens again, run "
                "without some of them in turn, and see with whom it ends"
            )
        return {
            name: torch.from_numpy(np.ascontiguousarray(rings[name].leave(vector))).reshape(first[name].shape)
            for name, vector in sums.items()
        }

    def describe(self) -> Mapping[str, Any]:
        return self.told

    def site(self, id: str) -> SiteLayer:
        if id not in self._sites:
            self._sites[id] = self.scheme.site(id, self.ids, self.grid, self.noise)
        return self._sites[id]

    def snapshot(self) -> Tree:
        return {"ranges": dict(self.ranges), "signed": dict(self.signed)}

    def restore(self, snapshot: Tree) -> None:
        self.ranges, self.signed = dict(snapshot["ranges"]), dict(snapshot["signed"])


def _round(exchange: Exchange) -> str:
    return f"{exchange.phase} {exchange.round}"


def named(ids: Sequence[str], present: Tensor) -> tuple[str, ...]:
    """The sites that a message marks."""
    if len(present) != len(ids):
        raise WireError(f"it speaks of {len(present)} sites, and the roster has {len(ids)}")
    return tuple(id for id, there in zip(ids, present.tolist(), strict=True) if there)


def marked(ids: Sequence[str], present: Collection[str]) -> Tensor:
    """The same as it travels."""
    return torch.tensor([id in present for id in ids], dtype=uint8)


def signers(ids: Sequence[str], sent: Tensor) -> dict[str, bytes]:
    """Signatures by site: a row for each, of zeros where there is none; or no row at all."""
    return {id: row.numpy().tobytes() for id, row in zip(ids, sent, strict=False) if row.any()}


def signature_rows(ids: Sequence[str], signatures: Mapping[str, str]) -> Tensor:
    """The same as they travel, from hexadecimal digits."""
    found = [list(bytes.fromhex(signatures.get(id, "00" * 64))) for id in ids] if signatures else []
    return torch.tensor(found, dtype=uint8).reshape(-1, 64)


def as_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=uint8)


def _vector(leaf: Tensor) -> Vector:
    """The ring elements in a leaf of a masked message."""
    found = leaf.reshape(-1).numpy()
    return found.view(np.dtype(f"u{found.dtype.itemsize}"))


def _leaf(vector: Vector, like: Tensor) -> Tensor:
    """Ring elements as they travel."""
    return torch.from_numpy(vector.view(np.dtype(f"i{vector.dtype.itemsize}"))).reshape(like.shape)
