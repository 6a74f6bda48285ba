"""One run at a site: it answers the server's requests, each once, and keeps what its client has become by that.

Randomness derives from the run's seed and the site's name exactly as in one process, so that both give the same.
"""

import dataclasses
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fedgist import storage
from fedgist.core import tree
from fedgist.core.codec import Codec, Leaves, to_bytes
from fedgist.core.federation import Site
from fedgist.core.message import Params, WireError, tag_of
from fedgist.core.method import Handler, Method
from fedgist.core.tree import Tree
from fedgist.data.client_data import ClientData
from fedgist.dp import randomness
from fedgist.engines.engine import SiteFailure, answer, client_rng
from fedgist.engines.layer import Exchange, SiteLayer
from fedgist.engines.scheduler import Executor
from fedgist.federation.protocol import private_sums
from fedgist.federation.protocol.answered import Answered
from fedgist.federation.protocol.envelope import AGAIN, Reply, Request, Start, digest, seal, unseal
from fedgist.federation.protocol.policy import Policy
from fedgist.federation.protocol.states import States

PHASES = ("round", "evaluation")
STARTS = 1000
"""Of so many starts of a run a late copy is known."""


class SiteRun:
    """One run, as a site takes part in it."""

    def __init__(
        self,
        id: str,
        start: Start,
        method: Method,
        data: ClientData,
        executor: Executor,
        folder: Path,
        layer: SiteLayer,
    ):
        self.id, self.start, self.method, self.data, self.executor = id, start, method, data, executor
        self.layer = layer
        self.codec = Codec({**method.bounds(start.model), **layer.form.bounds}, executor.place)
        self.handlers = {tag_of(handler.request): handler for handler in method.handlers.values()}
        first = method.client_init(self._site(0, None, "init"))
        self.states = States(folder, first, executor.place.put)
        self.answered = Answered(folder / "answered.txt")
        self._tokens_file = folder / "starts.txt"
        self._tokens = self._tokens_file.read_text().split("\n") if self._tokens_file.is_file() else [""]
        """Of the starts of this run, as they came; servers of before have none, which is the empty one."""
        self._judged: Request | None = None
        with suppress(OSError, WireError):  # none yet, or a damaged one
            self._judged = self._last_judged()[0]

    def begin(self, token: str) -> None:
        """A server begins with this run, or goes on with it; a copy of a start that was followed by another is late."""
        if token != self._tokens[-1] and (not token or token not in self._tokens):
            tokens = [*self._tokens, token][-STARTS:]
            storage.write(self._tokens_file, "\n".join(tokens).encode())
            self._tokens = tokens

    def check(self, token: str) -> None:
        """Refuses what a server asks that began before the last one: it does not know what that one needs."""
        if token != self._tokens[-1]:
            raise SiteFailure(AGAIN)

    def answer(self, header: Request, payload: bytes, policy: Policy) -> tuple[Reply, bytes]:
        self.check(header.token)
        here = Exchange(header.run, header.phase, header.round, header.exchange)
        fingerprint = header.fingerprint(payload)
        for request, own in self.layer.form.own.items():
            if header.type == tag_of(request):
                answered = self.layer.answer(here, request, self.codec.read(request, payload))
                return Reply(header.run, header.version, tag_of(own), False, fingerprint), to_bytes(own, answered)
        invitation, payload = self._invitation(payload[: header.invited]), payload[header.invited :]
        if header.type not in self.handlers or header.phase not in PHASES:
            raise WireError(f"{self.method.name} has no request {header.type} in a {header.phase}")
        handler = self.handlers[header.type]
        policy.check_reply(handler)
        leaves, state = self.reply(handler, header, payload, header.version)
        question = f"{header.type} {header.state} {digest(payload)}"
        here = dataclasses.replace(here, scopes=(question, self.answered.digest(header.version)))
        wrapped = self.layer.wrap(here, invitation, handler.reply, leaves)
        travels = self.layer.form.travels(handler.reply)
        packed = to_bytes(travels, wrapped)
        if changed := state is not None:
            self.states.put(header.version, state)
        if header.phase == "evaluation" and (self._judged is None or header.round >= self._judged.round):
            storage.write(self.heard, seal(dataclasses.replace(header, invited=0), payload))
            self._judged = header
        self.forget(header.version, header.state, header.keep)
        return Reply(header.run, header.version, tag_of(travels), changed, fingerprint), packed

    def reply(self, handler: Handler, header: Request, payload: bytes, once: str = "") -> tuple[Leaves, Tree | None]:
        """A packed reply, and the state that it leaves behind, if that is a new one.

        Under the name `once` only this request is ever answered, and only so; one without a name leaves the site not.
        """
        asked = header.fingerprint(payload)
        if once:
            self.answered.check(once, asked)
        msg: Any = self.codec.decode(handler.request, payload)
        before = self.states.get(header.state)
        site = self._site(header.round, tree.copy(before), header.phase, header.round, header.exchange)
        if self.method.task.private:
            site.secret = partial(self._secret_bits, header.version, asked)
        (reply,) = self.executor.drive([answer(self.method, handler, site, msg)])
        if isinstance(reply, SiteFailure):
            raise reply
        leaves = self.codec.pack(reply)
        if once:
            self.answered.note(once, asked, to_bytes(handler.reply, leaves))
        return leaves, None if tree.same(site.state, before) else site.state

    def forget(self, version: str, state: str, keep: Collection[str]) -> None:
        """Of the states before a version, keep these, and the one that was judged last."""
        self.states.forget(version, {state, *keep, self._judged.state if self._judged else ""})

    def _secret_bits(self, version: str, asked: str, name: str) -> Callable[[int], Tensor]:
        """Random bits for one answer: the same if the same is asked again, and known to nobody else."""
        key, device = private_sums.own_key(self.states.folder, self.start), self.executor.place.device
        return randomness.keyed(key, version, asked, name, device=device)

    def _invitation(self, data: bytes) -> Leaves:
        """What the layer goes by; a server that leaves it out wants the reply itself."""
        kind = self.layer.form.invitation
        return self.codec.read(kind, data) if kind else {}

    @property
    def heard(self) -> Path:
        """The last request of an evaluation, which says what state was judged, in which round, and with what."""
        return self.states.folder / "evaluation.envelope"

    def weights(self) -> tuple[Params | None, int]:
        """The site's whole model as it was judged last, where it keeps one, and the round of that."""
        if not self.heard.is_file():
            raise SiteFailure(
                "no model of this site was judged yet; where the server has one, it is in its run's folder"
            )
        header, payload = self._last_judged()
        msg: Any = self.codec.decode(self.handlers[header.type].request, payload)
        sent = {name: w for field in vars(msg).values() if isinstance(field, dict) for name, w in field.items()}
        site = self._site(header.round, tree.copy(self.states.get(header.state)), header.phase, header.round)
        return tree.to(self.method.client_weights(site, sent), "cpu"), header.round

    def _last_judged(self) -> tuple[Request, bytes]:
        header, payload = unseal(self.heard.read_bytes())
        if not isinstance(header, Request):
            raise WireError(f"{self.heard} holds a {type(header).__name__}")
        return header, payload

    def _site(self, round: int, state: Tree, *stream: str | int) -> Site:
        rng = client_rng(self.start.seed, self.id)(*stream)
        return Site(self.id, round, self.data, state, rng, {"model": self.start.model})
