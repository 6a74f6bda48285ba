"""Secure sums: replies enter a ring, a scheme hides them there, and the asker gets the sum of all and of nobody alone.

The message `masked(Reply)` travels in place of a reply: its visible fields as they are, its additive ones as elements
of a ring, and what the scheme encloses. Codec, ledger and transcript treat it as they treat every message.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgist.core.codec import Leaves
from fedgist.core.federation import TooFewAnswers
from fedgist.core.message import Params, Wire, int16, int32, int64, message, schema_of, tag_of, uint8, wire
from fedgist.core.tree import Tree
from fedgist.engines.layer import Exchange, Form, Layer, SiteLayer, Trip, Unfit
from fedgist.secure.ring import FIRST_RANGE, WIDEST_RANGE, Grid, OutOfRange, Ring, Vector

RING_DTYPES = {16: int16, 32: int32, 64: int64}
MOST_FIELDS = 100
"""Additive fields in a reply."""

Noise = Callable[[Exchange, str, int, Ring], NDArray[np.int64]]
"""So many whole numbers of steps to add to a field (by its name on the wire) before it is hidden."""

Bytes = NDArray[np.uint8]
Enclosed = dict[str, Bytes]
"""What a scheme sends beside the vectors, by the names of the fields of its messages."""


@message
class Invitation:
    """Who is asked with you, in the order of all sites' names; the range ±2^R of each field; a nonce."""

    cohort: Tensor = wire(uint8, shape=("sites",), paper=False, low=0, high=1)
    ranges: Tensor = wire(uint8, shape=("fields",), paper=False, low=FIRST_RANGE, high=WIDEST_RANGE)
    nonce: Tensor = wire(uint8, shape=(16,), paper=False)


@dataclass(frozen=True)
class Group:
    """One exchange as all who were invited to it see it."""

    exchange: Exchange
    cohort: tuple[str, ...]
    nonce: bytes


class Hiding(Protocol):
    """A scheme's half at a site."""

    def hide(self, group: Group, vectors: Mapping[str, Vector]) -> tuple[dict[str, Vector], Enclosed]:
        """The vectors as they travel, and what goes with them."""

    def answer(self, group: Group, asked: Enclosed) -> Enclosed:
        """The answer to the scheme's own message."""


class Scheme(Protocol):
    """How addends are hidden: the asker's half."""

    @property
    def title(self) -> str:
        """What a report calls it."""

    def party(self, id: str) -> Hiding:
        """The other half, where the site is in this process."""


class _Open:
    """Nothing is hidden."""

    def hide(self, group: Group, vectors: Mapping[str, Vector]) -> tuple[dict[str, Vector], Enclosed]:
        return dict(vectors), {}

    def answer(self, group: Group, asked: Enclosed) -> Enclosed:
        raise NotImplementedError


@dataclass(frozen=True)
class Simulated:
    """The sum over the ring, the same bits as with masks, by a server that could see every addend."""

    title: str = "simulated: summed in the ring, hidden by nothing"

    def party(self, id: str) -> Hiding:
        return _Open()


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
    made = type(f"Masked{reply.__name__}", (), {"__doc__": f"{reply.__name__}, its sums hidden."})
    made.__schema__, made.__tag__ = schema, f"masked.{reply.__name__}"  # type: ignore[attr-defined]
    return made


def form(ids: Collection[str]) -> Form:
    """What travels between these sites and their server."""
    return Form(masked, Invitation, {}, {"sites": len(ids), "fields": MOST_FIELDS})


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


def vector_of(leaf: Tensor) -> Vector:
    """The ring elements in a leaf of a masked message."""
    found = leaf.reshape(-1).numpy()
    return found.view(np.dtype(f"u{found.dtype.itemsize}"))


class SecureSite(SiteLayer):
    """A site's half: numbers into the ring, noise, and whatever the scheme does to hide them."""

    def __init__(self, ids: Collection[str], grid: Grid, hiding: Hiding, noise: Noise | None = None):
        self.ids, self.grid, self.hiding, self.noise = tuple(sorted(ids)), grid, hiding, noise
        self.form = form(self.ids)

    def wrap(self, exchange: Exchange, invitation: Leaves, reply: type, leaves: Leaves) -> Leaves:
        if masked(reply) is reply:
            return leaves
        group = group_of(self.ids, exchange, invitation)
        numbers = Numbers(self.grid, reply, len(group.cohort), tuple(invitation["ranges"].tolist()))
        vectors: dict[str, Vector] = {}
        for name, leaf in numbers.additive(leaves).items():
            ring = numbers.ring_of(name, leaf)
            try:
                vectors[name] = ring.enter(f"{tag_of(reply)}.{name}", leaf.cpu().numpy().reshape(-1))
            except OutOfRange as error:
                raise Unfit(str(error), name.split("/")[0], error.needed) from error
            if self.noise is not None:
                drawn = self.noise(exchange, name, leaf.numel(), ring)
                vectors[name] = vectors[name] + drawn.astype(vectors[name].dtype)
        hidden, enclosed = self.hiding.hide(group, vectors)
        return {name: self._leaf(hidden[name], leaf) if name in hidden else leaf for name, leaf in leaves.items()} | {
            name: torch.from_numpy(part) for name, part in enclosed.items()
        }

    @staticmethod
    def _leaf(vector: Vector, like: Tensor) -> Tensor:
        return torch.from_numpy(vector.view(np.dtype(f"i{vector.dtype.itemsize}"))).reshape(like.shape)


@dataclass(eq=False)
class SecureSum(Layer):
    """The asker's half."""

    ids: Sequence[str]
    scheme: Scheme
    grid: Grid = field(default_factory=Grid)
    group: int = 3
    """The fewest sites that a sum is over."""
    noise: Noise | None = None
    ranges: dict[str, int] = field(default_factory=dict)
    """R of the fields that need more than the first."""

    def __post_init__(self) -> None:
        self.ids, self.form, self.title = tuple(sorted(self.ids)), form(self.ids), self.scheme.title
        self._asked: dict[Exchange, Numbers] = {}
        self._sites = {id: SecureSite(self.ids, self.grid, self.scheme.party(id), self.noise) for id in self.ids}

    def invite(self, exchange: Exchange, reply: type, ids: Sequence[str]) -> Leaves:
        numbers = Numbers(self.grid, reply, len(ids), ())
        ranges = tuple(self.ranges.get(f"{tag_of(reply)}.{name}", FIRST_RANGE) for name in numbers.fields)
        self._asked = {exchange: replace(numbers, ranges=ranges)}
        return {
            "cohort": torch.tensor([id in ids for id in self.ids], dtype=uint8),
            "ranges": torch.tensor(ranges, dtype=uint8),
            "nonce": torch.zeros(16, dtype=uint8),
        }

    def mend(self, reply: type, errors: Iterable[Unfit]) -> bool:
        """Widen fields for everybody, with room for what is to come; a site cannot ask for what there is already."""
        before = dict(self.ranges)
        for error in errors if self.grid.bits == 64 else ():
            key = f"{tag_of(reply)}.{error.field}"
            if before.get(key, FIRST_RANGE) < error.needed <= WIDEST_RANGE:
                self.ranges[key] = max(self.ranges.get(key, 0), min(error.needed + 4, WIDEST_RANGE))
        return self.ranges != before

    def total(self, exchange: Exchange, reply: type, replies: Mapping[str, Leaves], trip: Trip) -> Leaves:
        numbers = self._asked[exchange]
        if not numbers.fields or not numbers.addends:
            return {}
        if len(replies) < self.group:
            raise TooFewAnswers(
                f"round {exchange.round}: {len(replies)} of {numbers.addends} answered {reply.__name__}, and a secure "
                f"sum is over at least {self.group}"
            )
        sums: dict[str, Vector] = {}
        for leaves in replies.values():
            for name, leaf in numbers.additive(leaves).items():
                sums[name] = sums[name] + vector_of(leaf) if name in sums else vector_of(leaf)
        first = next(iter(replies.values()), {})
        return {
            name: torch.from_numpy(np.ascontiguousarray(numbers.ring_for(name, first[name]).leave(vector))).reshape(
                first[name].shape
            )
            for name, vector in sums.items()
        }

    def site(self, id: str) -> SiteLayer:
        return self._sites[id]

    def snapshot(self) -> Tree:
        return dict(self.ranges)

    def restore(self, snapshot: Tree) -> None:
        self.ranges = dict(snapshot)


def group_of(ids: Sequence[str], exchange: Exchange, invitation: Leaves) -> Group:
    """What an invitation says."""
    present = invitation["cohort"].tolist()
    cohort = tuple(id for id, there in zip(ids, present, strict=True) if there)
    return Group(exchange, cohort, invitation["nonce"].numpy().tobytes())
