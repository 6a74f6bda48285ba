"""A recorded transcript: the encoded messages that a run kept, and each client's update as they show it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedgist.core.codec import Codec
from fedgist.core.errors import FedgistError
from fedgist.core.federation import SERVER
from fedgist.core.message import Params, WireError, tag_of
from fedgist.core.method import Method
from fedgist.core.work import Compute, Place, execute
from fedgist.families.global_model import Global, Local
from fedgist.methods.tofu import TOFU, Start, Updates, Upload, Weights, part_of
from fedgist.synthesis.encoded_updates import apply_update
from fedgist.synthesis.encoding import as_float32, full_size


@dataclass(frozen=True)
class Kept:
    """Where and when a kept message travelled, as the name of its file says."""

    round: int
    exchange: int
    sender: str
    tag: str
    path: Path


class Transcript:
    """The messages of a run, read under the bounds that its method agreed on."""

    def __init__(self, folder: Path, method: Method, place: Place = Place()):
        self.folder, self.method, self.place = folder, method, place
        self.codec = Codec(method.bounds(method.task.model), place)
        pairs = type(method).handlers.values()
        self.types = {tag_of(kind): kind for pair in pairs for kind in (pair.request, pair.reply)}

    def between(self, sender: str, receiver: str) -> list[Kept]:
        """What one sent to the other in the rounds, the first first; without what secure sums need for themselves."""
        ends = re.escape(f"{sender}-{receiver}")  # names may have dashes, too; tags have none
        form = re.compile(rf"(\d+)-round-(\d+)-{ends}-([^-]+)\.safetensors")
        named = ((path, form.fullmatch(path.name)) for path in sorted(self.folder.glob("*-round-*")))
        return [
            Kept(int(m[1]), int(m[2]), sender, m[3], path)
            for path, m in named
            if m and not m[3].startswith("secure_sum.")
        ]

    def read(self, kept: Kept) -> Any:
        """The message, checked as a receiver checks it; of one that is masked, its numbers as they look."""
        if kept.tag.startswith("masked."):
            return self._as_it_looks(kept)
        if kept.tag not in self.types:
            raise FedgistError(f"{kept.path} is a message {kept.tag}, which {self.method.name} does not have")
        try:
            return self.codec.decode(self.types[kept.tag], kept.path.read_bytes(), trusted=True)
        except WireError as error:
            raise FedgistError(f"{kept.path} cannot be read: {error}") from error

    def _as_it_looks(self, kept: Kept) -> Any:
        """Who does not have the masks can do no better than to take ring elements for numbers between −1 and 1."""
        (reply,) = [kind for kind in self.types.values() if f"masked.{kind.__name__}" == kept.tag]
        leaves = {
            name: leaf.double() / -float(torch.iinfo(leaf.dtype).min) if leaf.dtype.is_signed else leaf
            for name, leaf in load_file(kept.path).items()
            if name not in ("shares", "commitments")
        }
        return self.codec.unpack(reply, leaves)


@dataclass(frozen=True, eq=False)
class Seen:
    """A client's update as a transcript shows it."""

    reply: Kept
    before: Params
    update: Params
    """The weights before less the weights after, of the trained tensors."""
    proxy: Tensor | None
    """TOFU's synthetic images at full size, where the update came as such."""


def update_of(transcript: Transcript, client: str, round: int) -> Seen:
    """The update that a client sent in a round: that of FedAvg's weights, or the one that TOFU's server decodes."""
    replies = {kept.round: kept for kept in transcript.between(client, SERVER)}
    reply = replies.get(round)
    if reply is None:
        there = f"it has rounds {_ranges(replies)}" if replies else "it has none"
        raise _missing(transcript, f"no reply of client {client} in round {round}; of this client {there}")
    sent = transcript.read(reply)
    if isinstance(sent, Local):
        return _raw(transcript, reply, sent)
    if isinstance(sent, Upload):
        return _decoded(transcript, reply, sent)
    raise FedgistError(f"a reply {reply.tag} holds no update of weights; inversion knows those of fedavg and tofu")


def _raw(transcript: Transcript, reply: Kept, sent: Local) -> Seen:
    requests = [kept for kept in transcript.between(SERVER, reply.sender) if kept.round == reply.round]
    if not requests:
        raise _missing(transcript, f"no request to client {reply.sender} in round {reply.round}")
    request = transcript.read(requests[0])
    model = transcript.method.model
    if not isinstance(request, Global) or request.w.keys() != model.shapes.keys():
        raise FedgistError("inversion needs all weights on the wire: with share=all and batch_norm=aggregate")
    if sent.p == 0:
        raise _no_data(reply)
    trained = [name for name in request.w if name not in model.buffers]
    return Seen(reply, request.w, {name: request.w[name] - sent.pw[name] / sent.p for name in trained}, None)


def _decoded(transcript: Transcript, reply: Kept, sent: Upload) -> Seen:
    if sent.p == 0:
        raise _no_data(reply)
    method = transcript.method
    assert isinstance(method, TOFU)
    before = _weights(transcript, method, reply, sent.version)
    update = _decode(transcript, sent, before)
    images = method.encoder.read(part_of(sent))["images"]
    return Seen(reply, before, update, full_size(images, method.model.input_shape))


def _weights(transcript: Transcript, method: TOFU, reply: Kept, version: int) -> Params:
    """The weights at which a client encoded its reply: its requests up to then, applied as it applied them."""
    w: Params = {}
    reached = -1
    for kept in _until(transcript, reply):
        msg = transcript.read(kept)
        if isinstance(msg, (Start, Weights)):
            w, reached = msg.w, msg.version
        elif isinstance(msg, Updates) and w:
            for i, statistics in enumerate(msg.statistics):
                w, reached = apply_update(method.model, w, _decode(transcript, msg, w, i), statistics), reached + 1
        elif isinstance(msg, Upload) and w and method.config.single:
            w = apply_update(method.model, w, _decode(transcript, msg, w), as_float32(msg.statistics / msg.p))
            reached += 1
    if reached != version:
        raise _missing(transcript, f"not all requests to client {reply.sender} up to round {reply.round}")
    return w


def _until(transcript: Transcript, reply: Kept) -> Iterator[Kept]:
    """All that went between the server and a client before its reply, in the order of time."""
    both = [
        *((kept.round, kept.exchange, 0, kept) for kept in transcript.between(SERVER, reply.sender)),
        *((kept.round, kept.exchange, 1, kept) for kept in transcript.between(reply.sender, SERVER)),
    ]
    for round, exchange, up, kept in sorted(both, key=lambda item: item[:3]):
        if (round, exchange, up) < (reply.round, reply.exchange, 1):
            yield kept


def _decode(transcript: Transcript, msg: Any, w: Params, i: int = 0) -> Params:
    method = transcript.method
    assert isinstance(method, TOFU)
    decoded: Params = execute(Compute(method.encoder.decode, (part_of(msg, i), w)), transcript.place)
    return decoded


def _no_data(reply: Kept) -> FedgistError:
    return FedgistError(f"client {reply.sender} holds no data in round {reply.round}: there is nothing to find")


def _missing(transcript: Transcript, what: str) -> FedgistError:
    return FedgistError(f"the transcript in {transcript.folder} has {what}; run again with --record all")


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
