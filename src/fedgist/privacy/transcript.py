"""A recorded transcript: the encoded messages that a run kept, read by what their fields are declared to hold.

Nothing here knows a method by its name. A client's update is what its reply holds beside the weights of its request; a
method whose replies only stand for updates says so itself (`disclosed`).
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedgist.core import tree
from fedgist.core.codec import Codec, Leaves, add_up
from fedgist.core.errors import FedgistError
from fedgist.core.federation import SERVER
from fedgist.core.message import Content, Params, WireError, schema_of, tag_of
from fedgist.core.method import Method
from fedgist.core.work import Place

LEVELS = ("replies", "sums")
"""Who sees each reply as it travels, as a server does without a secure sum; who sees sums, and what is visible."""
NAME = re.compile(r"(\d+)-round-(\d+)-(.+)-([^-]+)\.safetensors")
KEPT_IN_MEMORY = 256


@dataclass(frozen=True)
class Kept:
    """Where and when a kept message travelled, as the name of its file says."""

    round: int
    exchange: int
    client: str
    up: bool
    tag: str
    path: Path


@dataclass(frozen=True, eq=False)
class Seen:
    """What is seen of an exchange: one client's reply, or the sum over several; of some, not all fields."""

    round: int
    exchange: int
    clients: tuple[str, ...]
    kind: type
    values: Mapping[str, Any]
    request: Any

    def holding(self, content: Content) -> dict[str, Any]:
        """The fields with such a content, as they came."""
        return {name: value for name, value in self.values.items() if schema_of(self.kind)[name][1].holds == content}

    def mean(self, name: str) -> Any:
        """A field for each one of what it is a multiple of, where that is a number that is seen too."""
        per = schema_of(self.kind)[name][1].per
        unit = self.values.get(per) if per else None
        if not isinstance(unit, float):
            return self.values[name]
        if unit == 0:
            raise NoData(f"{who(self.clients)} holds no data in round {self.round}: there is nothing to find")
        return tree.scale(self.values[name], 1 / unit)

    def model(self, content: Content) -> Params:
        """All named tensors of a model with such a content."""
        found: Params = {}
        for name, value in self.holding(content).items():
            found |= self.mean(name) if isinstance(value, dict) else {}
        return found


class NoData(FedgistError):
    """Who sent this holds no data."""


@dataclass(frozen=True, eq=False)
class Update:
    """A client's update, or the mean of several."""

    seen: Seen
    before: Params
    update: Params
    """The weights before less the weights after, of the trained tensors."""

    @property
    def after(self) -> Params:
        return {name: self.before[name] - self.update.get(name, 0.0) for name in self.before}


class Transcript:
    """The messages of a run, read under the bounds that its method agreed on."""

    def __init__(self, folder: Path, method: Method, place: Place = Place()):
        self.folder, self.method, self.place = folder, method, place
        self.codec = Codec(method.bounds(method.task.model), place)
        pairs = type(method).handlers.values()
        self.types = {tag_of(kind): kind for pair in pairs for kind in (pair.request, pair.reply)}
        self.read = lru_cache(maxsize=KEPT_IN_MEMORY)(self._read)

    @cached_property
    def kept(self) -> list[Kept]:
        """All messages of the rounds between clients and a server, the first first; not what secure sums need."""
        found = []
        for path in sorted(self.folder.glob("*-round-*")):
            m = NAME.fullmatch(path.name)
            if m is None or m[4].startswith("secure_sum."):
                continue
            if up := m[3].endswith(f"-{SERVER}"):
                client = m[3].removesuffix(f"-{SERVER}")
            elif m[3].startswith(f"{SERVER}-"):
                client = m[3].removeprefix(f"{SERVER}-")
            else:  # between peers
                continue
            found.append(Kept(int(m[1]), int(m[2]), client, up, m[4], path))
        return found

    def between(self, sender: str, receiver: str) -> list[Kept]:
        """What one sent to the other, one of them being the server, the first first."""
        up = receiver == SERVER
        return [kept for kept in self.kept if kept.up == up and kept.client == (sender if up else receiver)]

    def kind(self, kept: Kept) -> type:
        """The message that it is, or, where a layer has changed it on its way, was."""
        if kept.tag in self.types:
            return self.types[kept.tag]
        name = kept.tag.partition(".")[2].removeprefix("Noised")
        for kind in self.types.values():
            if kept.tag.startswith(("masked.", "noised.")) and kind.__name__ == name:
                return kind
        raise FedgistError(f"{kept.path} is a message {kept.tag}, which {self.method.name} does not have")

    def _read(self, kept: Kept) -> Any:
        """The message, checked as a receiver checks it; of one that is masked, its numbers as they look."""
        return self.codec.unpack(self.kind(kept), self.leaves(kept))

    def leaves(self, kept: Kept) -> Leaves:
        """The same as it lies on the wire."""
        kind = self.kind(kept)
        if tag_of(kind) != kept.tag:
            return {
                name: _as_it_looks(leaf) if kept.tag.startswith("masked.") else leaf
                for name, leaf in load_file(kept.path).items()
                if name not in ("shares", "commitments")
            }
        try:
            return self.codec.read(kind, kept.path.read_bytes(), trusted=True)
        except WireError as error:
            raise FedgistError(f"{kept.path} cannot be read: {error}") from error

    @cached_property
    def masked(self) -> bool:
        """Whether replies were hidden by a secure sum."""
        return any(kept.tag.startswith("masked.") for kept in self.kept)

    # What can be seen

    def seen(self, level: str, *contents: Content) -> Iterator[Seen]:
        """Of all exchanges whose replies hold something of the kind, what is seen, the first first."""
        if level == "sums" and self.masked:
            raise FedgistError(
                "the sums of this run are in no message, they are opened from masked ones: run it without --secure and "
                "look at its sums, which are the same"
            )
        groups: dict[tuple[int, int, type], list[Kept]] = defaultdict(list)
        for kept in self.kept:
            if kept.up and any(declared.holds in contents for _, declared in schema_of(self.kind(kept)).values()):
                groups[kept.round, kept.exchange, self.kind(kept)].append(kept)
        for (round, exchange, kind), several in groups.items():
            request = self._request(several[0])
            if level == "sums":
                yield self._sum(round, exchange, kind, several, request)
            for kept in several:
                values = self.codec.values(kind, self.leaves(kept), additive=None if level == "replies" else False)
                if values:
                    yield Seen(round, exchange, (kept.client,), kind, values, self._request(kept))

    def asked(self, content: Content) -> Iterator[Seen]:
        """The requests that hold something of the kind, once where several got the same exchange."""
        groups: dict[tuple[int, int, type], list[Kept]] = defaultdict(list)
        for kept in self.kept:
            if not kept.up and any(declared.holds == content for _, declared in schema_of(self.kind(kept)).values()):
                groups[kept.round, kept.exchange, self.kind(kept)].append(kept)
        for (round, exchange, kind), several in groups.items():
            values = vars(self.read(several[0]))
            yield Seen(round, exchange, tuple(kept.client for kept in several), kind, values, None)

    def _sum(self, round: int, exchange: int, kind: type, several: list[Kept], request: Any) -> Seen:
        total = add_up(kind, [self.leaves(kept) for kept in several])
        values = self.codec.values(kind, total, additive=True)
        return Seen(round, exchange, tuple(kept.client for kept in several), kind, values, request)

    def _request(self, reply: Kept) -> Any:
        """What was answered, where it was recorded."""
        kept = self._requests.get((reply.round, reply.exchange, reply.client))
        return None if kept is None else self.read(kept)

    @cached_property
    def _requests(self) -> dict[tuple[int, int, str], Kept]:
        return {(kept.round, kept.exchange, kept.client): kept for kept in self.kept if not kept.up}

    # Updates

    def update_in(self, seen: Seen) -> Update | None:
        """The update of who is seen, where it can be worked out: from its declarations, or as the method discloses."""
        disclosed = getattr(self.method, "disclosed", None)
        if disclosed is not None and len(seen.clients) == 1:
            try:
                found = disclosed([self.read(kept) for kept in self._until(seen)])
            except LookupError as error:
                until = f"to client {seen.clients[0]} up to round {seen.round}"
                raise missing(self, f"{error} {until}") from error
            if found is not None:
                return Update(seen, *found)
        if seen.request is None:
            raise missing(self, f"no request to {who(seen.clients)} in round {seen.round}")
        request = Seen(seen.round, seen.exchange, seen.clients, type(seen.request), vars(seen.request), None)
        before = {**request.model("weights"), **request.model("statistics")}
        trained = [name for name in self.method.model.shapes if name not in self.method.model.buffers]
        after, moved, descended = seen.model("weights"), seen.model("update"), seen.model("gradient")
        if not after and not moved and not descended:
            return None
        if before.keys() != self.method.model.shapes.keys() or not {*trained} <= {*after, *moved, *descended}:
            raise FedgistError("inversion needs all weights on the wire: with share=all and batch_norm=aggregate")
        update = {name: -moved[name] for name in moved} or descended
        return Update(seen, before, {name: before[name] - after[name] if after else update[name] for name in trained})

    def _until(self, seen: Seen) -> Iterator[Kept]:
        """All that went between the server and a client up to its reply, in the order of time."""
        own = [kept for kept in self.kept if kept.client == seen.clients[0]]
        for kept in sorted(own, key=lambda kept: (kept.round, kept.exchange, kept.up)):
            if (kept.round, kept.exchange) <= (seen.round, seen.exchange):
                yield kept

    def reply_of(self, client: str, round: int) -> Seen:
        """The first reply of a client in a round."""
        replies = {kept.round: kept for kept in reversed(self.between(client, SERVER))}
        if round not in replies:
            there = f"it has rounds {_ranges(replies)}" if replies else "it has none"
            raise missing(self, f"no reply of client {client} in round {round}; of this client {there}")
        kept = replies[round]
        values = self.codec.values(self.kind(kept), self.leaves(kept))
        return Seen(round, kept.exchange, (client,), self.kind(kept), values, self._request(kept))


def update_of(transcript: Transcript, client: str, round: int) -> Update:
    """The update that a client sent in a round."""
    seen = transcript.reply_of(client, round)
    if seen.holding("size") and not any(seen.holding("size").values()):
        raise NoData(f"client {client} holds no data in round {round}: there is nothing to find")
    found = transcript.update_in(seen)
    if found is None:
        raise FedgistError(f"a reply {tag_of(seen.kind)} holds no update of a model: there is nothing to invert")
    return found


def who(clients: tuple[str, ...]) -> str:
    return f"client {clients[0]}" if len(clients) == 1 else f"each of {len(clients)} clients"


def missing(transcript: Transcript, what: str) -> FedgistError:
    return FedgistError(f"the transcript in {transcript.folder} has {what}; run again with --record all")


def _as_it_looks(leaf: Tensor) -> Tensor:
    """Who does not have the masks can do no better than to take ring elements for numbers between −1 and 1."""
    return leaf.double() / -float(torch.iinfo(leaf.dtype).min) if leaf.dtype.is_signed else leaf


def _ranges(rounds: Any) -> str:
    """Sorted numbers for people: 1 to 5, 7."""
    numbers = sorted(rounds)
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts)
