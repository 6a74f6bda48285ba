"""A method whose sites count how often they were asked, and the envelopes of a run of it: for tests of the protocol."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgist.core.codec import Codec
from fedgist.core.federation import Federation, Site
from fedgist.core.message import message, tag_of, wire
from fedgist.core.method import Method, handler
from fedgist.core.rng import Rng
from fedgist.core.task import Task
from fedgist.data.client_data import ClientData
from fedgist.engines import executor
from fedgist.federation.protocol.envelope import (
    Reply,
    Request,
    Start,
    seal,
    unseal,
)
from fedgist.federation.protocol.policy import Policy
from fedgist.federation.protocol.site_host import SiteHost
from fedgist.options import option


@dataclass(frozen=True)
class Config:
    act: str = option("", "What site b does wrong.")


@message
class Ping:
    """A number."""

    x: Tensor = wire(shape=("size",))


@message
class Pong:
    """A sum, and how often the site was asked."""

    total: Tensor = wire(shape=("size",), additive=True)
    asked: int


@message
class Look:
    """Show how often you were asked."""


@message
class Shown:
    """It."""

    asked: int


class Asking(Method):
    """Two exchanges a round; each site counts how often it was asked in the first."""

    name = "asking"
    summary = "A method for tests."
    citation = ""
    Config = Config
    profiles: dict[str, dict[str, Any]] = {}

    def bounds(self, model: str) -> Any:
        return {"size": 4}

    def server_init(self, rng: Rng) -> Any:
        return {"total": torch.zeros(2), "asked": {}}

    def client_init(self, me: Site) -> Any:
        return {"asked": 0}

    async def round(self, state: Any, fed: Federation) -> Any:
        answers = await fed.ask(fed.ids, Ping(state["total"] + 1), Pong)
        shown = await fed.ask(answers.ids, Look(), Shown)
        return {"total": answers.sum.total, "asked": {id: shown[id].asked for id in shown}}

    @handler
    async def pong(self, me: Site, msg: Ping) -> Pong:
        me.state["asked"] += 1
        if me.id == "b" and self.config.act == "break":
            raise ZeroDivisionError("label 7 of patient 12")
        wide = me.id == "b" and self.config.act == "misfit"
        return Pong(torch.ones(3) if wide else msg.x, me.state["asked"])

    @handler
    async def look(self, me: Site, msg: Look) -> Shown:
        return Shown(me.state["asked"])

    async def evaluate(self, state: Any, fed: Federation, test: tuple[Tensor, Tensor]) -> dict[str, float]:
        return {"accuracy": 0.5}


TASK = Task((1, 1, 1), 2, (0.0,), (1.0,), {"none": None}, "none")
DATA = ClientData(torch.zeros(4, 1, 1, 1), torch.tensor([0, 0, 0, 1]), 2)
START = Start("run-1", "asking", 0, "none", {}, {})
CODEC = Codec({"size": 4})


def host(
    folder: Path, id: str = "a", act: str = "", rules: Policy | None = None, model: str = "", **more: Any
) -> SiteHost:
    rules = rules or Policy(methods=("asking",), min_samples_per_class=1)
    return SiteHost(
        id,
        folder / id,
        lambda start: (Asking(Config(act), TASK), DATA),
        executor("sequential"),
        rules,
        lambda shape, classes: model,
        **more,
    )


def request(exchange: int = 0, state: str = "", keep: tuple[str, ...] = (), run: str = "run-1") -> bytes:
    header = Request(run, 1, "round", exchange, tag_of(Ping), state, list(keep))
    return seal(header, CODEC.encode(Ping(torch.ones(2))))


def opened(data: bytes) -> Any:
    return unseal(data)[0]


def asked(data: bytes) -> int:
    """How often the site says that it was asked."""
    header, payload = unseal(data)
    assert isinstance(header, Reply), header
    return CODEC.decode(Pong, payload).asked
