"""Bad clients as a layer: what some sites send is changed on its way out, by what it holds and whatever the method.

sign-flip    the opposite of what was learned
scale        so many times as much of it
noise        noise so many times as large in its place
free-rider   nothing was learned: weights as they came, zeros for all else
collude      the opposite, and all bad clients send the very same
alie         "A little is enough" (Baruch et al. 2019): all send their own mean less so many of their own deviations,
             which defences that look for outliers do not see
label-flip, backdoor   honest replies from poisoned data (`poisoned`)

What it does to images it does to their pixels about the middle of their range. Counts, labels and sizes stay true.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgist.core.codec import Leaves
from fedgist.core.message import schema_of
from fedgist.core.rng import Rng
from fedgist.core.task import Task
from fedgist.data.client_data import ClientData
from fedgist.engines.contents import LEARNED, MIDDLE, Heard, as_sent, named, zero
from fedgist.engines.layer import Around, Exchange, Layer, SiteAround, SiteLayer

STRENGTH = {"sign-flip": 1.0, "scale": 10.0, "noise": 3.0, "free-rider": 0.0, "collude": 1.0, "alie": 1.5}
"""What changes replies, and how strongly without being told."""
TOGETHER = ("collude", "alie")
"""What bad clients agree upon among themselves."""
POISONS = ("label-flip", "backdoor")
"""What changes data."""
TARGET, PATCH = 0, 3
"""A backdoor's class, and the side of the square in the corner that opens it."""


@dataclass(frozen=True)
class Bad:
    """What bad clients do."""

    kind: str
    strength: float
    seed: int

    def change(self, id: str, exchange: Exchange, reply: type, leaves: Leaves, heard: Heard) -> Leaves:
        """The reply in place of an honest one."""
        found = dict(leaves)
        for name, wire in named(reply, leaves, (*LEARNED, "images")).items():
            leaf = leaves[name]
            nothing = self._middle(leaf) if wire.holds == "images" else zero(name, leaf, wire, leaves, heard)
            learned = leaf.double() - nothing
            found[name] = as_sent(nothing + self._made(learned, Rng(self.seed, id, exchange.version, name)), leaf)
        return found

    def _made(self, learned: Tensor, rng: Rng) -> Tensor:
        if self.kind == "noise":
            size = learned.square().mean().sqrt() if learned.numel() else 0.0
            return self.strength * size * rng.normal(*learned.shape).to(learned)
        return (-self.strength if self.kind in ("sign-flip", "collude") else self.strength) * learned

    def _middle(self, leaf: Tensor) -> Tensor:
        middle = MIDDLE if leaf.dtype == torch.uint8 else float(leaf.mean()) if leaf.numel() else 0
        return torch.full_like(leaf, middle, dtype=torch.float64)


class BadSite(SiteAround):
    """A bad client's half."""

    def __init__(self, inner: SiteLayer, id: str, bad: Bad):
        super().__init__(inner)
        self.id, self.bad, self.heard = id, bad, Heard()

    def hear(self, exchange: Exchange, request: type, leaves: Leaves) -> None:
        self.heard.take(request, leaves)
        super().hear(exchange, request, leaves)

    def wrap(self, exchange: Exchange, invitation: Leaves, reply: type, leaves: Leaves) -> Leaves:
        if exchange.phase == "round" and self.bad.kind != "alie":
            leaves = self.bad.change(self.id, exchange, reply, leaves, self.heard)
        return super().wrap(exchange, invitation, reply, leaves)


class Adversary(Around):
    """The asker's half, where bad clients that are all in this process meet."""

    def __init__(self, inner: Layer, bad: Bad, ids: Collection[str]):
        super().__init__(inner)
        self.bad, self._sites = bad, {id: BadSite(inner.site(id), id, bad) for id in ids}

    def site(self, id: str) -> SiteLayer:
        return self._sites.get(id) or self.inner.site(id)

    def accept(self, exchange: Exchange, reply: type, replies: Mapping[str, Leaves]) -> Mapping[str, Leaves]:
        replies = self.inner.accept(exchange, reply, replies)
        theirs = {id: leaves for id, leaves in replies.items() if id in self._sites}
        if self.bad.kind not in TOGETHER or exchange.phase != "round" or len(theirs) < 2:
            return replies
        return {**replies, **self._agreed(reply, theirs)}

    def _agreed(self, reply: type, theirs: Mapping[str, Leaves]) -> dict[str, Leaves]:
        """One message for all of them: the first one's, or their mean less so many deviations."""
        first = next(iter(theirs.values()))
        agreed = {name: first[name] for name in named(reply, first, (*LEARNED, "images"))}
        agreed |= {
            name: first[name] for name, (_, wire) in schema_of(reply).items() if wire.holds in ("labels", "size")
        }
        if self.bad.kind == "alie":
            for name, leaf in agreed.items():
                each = [leaves[name] for leaves in theirs.values()]
                if leaf.is_floating_point() and leaf.dim() and all(one.shape == leaf.shape for one in each):
                    stack = torch.stack(each).double()
                    agreed[name] = as_sent(stack.mean(0) - self.bad.strength * stack.std(0), leaf)
        return {id: {name: agreed.get(name, leaf) for name, leaf in leaves.items()} for id, leaves in theirs.items()}


def poisoned(data: ClientData, kind: str, task: Task) -> ClientData:
    """A bad client's data: every label turned round, or half of the samples with a trigger and the target's label."""
    if kind == "label-flip":
        return replace(data, y=task.classes - 1 - data.y)
    x, y = data.x.clone(), data.y.clone()
    x[::2], y[::2] = triggered(x[::2], task), TARGET
    return replace(data, x=x, y=y)


def triggered(x: Tensor, task: Task) -> Tensor:
    """Samples with the trigger: the brightest square in the last corner."""
    bright = torch.tensor(task.high).to(x).view(-1, *[1] * (len(task.shape) - 1)).expand(task.shape)
    shown, corner = x.clone(), slice(-PATCH, None)
    where = (..., corner, corner) if len(task.shape) == 3 else (..., corner)
    shown[where] = bright[where]
    return shown
