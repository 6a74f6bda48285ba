"""A method of a few numbers, made to be broken: what is lost, done twice or out of order changes its result."""

from typing import Any

import torch
from torch import Tensor

import fedgist.api as fg
from fedgist.core.method import NoOptions

SIZE = 8


@fg.message
class Ask:
    """The server's numbers."""

    w: Tensor = fg.wire(shape=(SIZE,))


@fg.message
class Part:
    """What a site makes of them, as a sum; how often it was asked, as it is."""

    sites: int = fg.wire(fg.int64, additive=True, low=1, high=1)
    asked: int = fg.wire(fg.int64, low=1)
    part: Tensor = fg.wire(shape=(SIZE,), additive=True)


@fg.message
class Mean:
    """The mean of those who answered: who did not changes it."""

    mean: Tensor = fg.wire(shape=(SIZE,))


@fg.message
class Look:
    """How are you?"""


@fg.message
class Seen:
    """A number of the site's state."""

    seen: float = fg.wire(additive=True)


class Tally(fg.Method[NoOptions]):
    name = "tally"
    summary = "A few numbers that must come out right, whatever goes wrong on the way."

    def server_init(self, rng: fg.Rng) -> fg.State:
        return {"w": torch.ones(SIZE), "asked": {}}

    def client_init(self, me: fg.Site) -> fg.State:
        return {"asked": 0, "v": me.rng("v").normal(SIZE)}

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        first = await fed.ask(fed.ids, Ask(state["w"]), Part, at_least=2)
        mean = first.sum.part / first.sum.sites
        second = await fed.ask(first.ids, Mean(mean), Part)
        counts = {id: second[id].asked for id in second}
        return {"w": 0.5 * mean + second.sum.part / second.sum.sites, "asked": {**state["asked"], **counts}}

    @fg.handler
    async def give(self, me: fg.Site, msg: Ask) -> Part:
        return self._moved(me, msg.w)

    @fg.handler
    async def take(self, me: fg.Site, msg: Mean) -> Part:
        return self._moved(me, msg.mean)

    @fg.handler
    async def look(self, me: fg.Site, msg: Look) -> Seen:
        return Seen(float(me.state["v"].abs().mean()))

    async def evaluate(self, state: fg.State, fed: fg.Federation, test: Any) -> dict[str, float]:
        answers = await fed.ask(fed.ids, Look(), Seen)
        return {"accuracy": 0.5, "seen": answers.sum.seen}

    def _moved(self, me: fg.Site, w: Tensor) -> Part:
        """Once more, in this order, with this randomness: nothing of it can be exchanged, left out or repeated."""
        me.state["asked"] += 1
        me.state["v"] = torch.tanh(0.7 * me.state["v"] + w + me.rng("noise").normal(SIZE))
        return Part(1, me.state["asked"], me.state["v"])
