"""Robust aggregation as a layer: before anything is summed or shown to a method, replies are held against each other.

clip      towards the coordinate-wise median, to the median distance from it (centred clipping)
trimmed   the coordinate-wise mean without the largest and smallest `SHARE` of the replies
median    the coordinate-wise median (Yin et al. 2018)
krum      the reply that is nearest to its nearest (Blanchard et al. 2017)
filter    images of a class that lie far from where those of most clients do are left out

All take replies for each one of what they are multiples of (weights for each p), so that nobody gains by claiming more
data, and count at least half of the clients as honest. They need single replies. Where a secure sum hides those, a
client can only clip itself (`ClippedSite`), which binds clients that run this code and nobody else.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedgist.core.codec import Leaves
from fedgist.core.rng import Rng
from fedgist.engines.contents import LEARNED, Heard, as_sent, named, unit, zero
from fedgist.engines.layer import Around, Exchange, Layer, SiteAround, SiteLayer

WAYS = ("clip", "trimmed", "median", "krum", "filter")
SHARE = 0.3
"""Of the clients, as many as may be bad."""
FAR = 3.0
"""Times the median distance from which on images are left out."""
EMBEDDING = 64


class Robust(Around):
    """The asker's half."""

    def __init__(self, inner: Layer, way: str, norm: float = 0.0):
        """With a `norm` sites clip what they have learned to it themselves, and replies are taken as they come."""
        super().__init__(inner)
        self.way, self.norm = way, norm
        self._sites: dict[str, ClippedSite] = {}

    def site(self, id: str) -> SiteLayer:
        if not self.norm:
            return self.inner.site(id)
        return self._sites.setdefault(id, ClippedSite(self.inner.site(id), self.norm))

    def accept(self, exchange: Exchange, reply: type, replies: Mapping[str, Leaves]) -> Mapping[str, Leaves]:
        replies = self.inner.accept(exchange, reply, replies)
        if self.norm or exchange.phase != "round" or len(replies) < 3:
            return replies
        if self.way == "filter":
            return without_outliers(reply, replies)
        return held_together(reply, replies, self.way)


class ClippedSite(SiteAround):
    """A site's half that clips what was learned, all of it together, to a norm."""

    def __init__(self, inner: SiteLayer, norm: float):
        super().__init__(inner)
        self.norm, self.heard = norm, Heard()

    def hear(self, exchange: Exchange, request: type, leaves: Leaves) -> None:
        self.heard.take(request, leaves)
        super().hear(exchange, request, leaves)

    def wrap(self, exchange: Exchange, invitation: Leaves, reply: type, leaves: Leaves) -> Leaves:
        wires = named(reply, leaves, LEARNED)
        if exchange.phase == "round" and wires:
            start = {name: zero(name, leaves[name], wire, leaves, self.heard) for name, wire in wires.items()}
            units = {name: unit(leaves, wire, leaves[name]).clamp_min(1e-12) for name, wire in wires.items()}
            learned = {name: (leaves[name].double() - start[name]) / units[name] for name in wires}
            size = float(torch.stack([one.square().sum() for one in learned.values()]).sum().sqrt())
            part = min(1.0, self.norm / max(size, 1e-12))
            clipped = {name: as_sent(start[name] + part * learned[name] * units[name], leaves[name]) for name in wires}
            leaves = {**leaves, **clipped}
        return super().wrap(exchange, invitation, reply, leaves)


def held_together(reply: type, replies: Mapping[str, Leaves], way: str) -> dict[str, Leaves]:
    """All that was learned, made robust."""
    first = next(iter(replies.values()))
    wires = named(reply, first, LEARNED)
    alike = [name for name in wires if len({leaves[name].shape for leaves in replies.values()}) == 1]
    if not alike:
        return dict(replies)
    units = {name: torch.stack([unit(one, wires[name], one[name]) for one in replies.values()]) for name in alike}
    # Who holds nothing, of a class or at all, says nothing about it: NaN, which no median counts.
    each = {
        name: torch.stack([leaves[name].double() for leaves in replies.values()]) / _shaped(units[name], first[name])
        for name in alike
    }
    each = {name: torch.where(values.isfinite(), values, torch.nan) for name, values in each.items()}
    robust = {"clip": _clipped, "krum": _krum}.get(way, lambda values: _middles(values, way))(each)
    made: dict[str, Leaves] = {}
    for k, (id, leaves) in enumerate(replies.items()):
        new = {}
        for name in alike:
            value = robust[name] if robust[name].dim() == leaves[name].dim() else robust[name][k]
            mine = torch.where(value.isnan(), 0.0, value) * _shaped(units[name], first[name])[k]
            new[name] = as_sent(mine, leaves[name])
        made[id] = {**leaves, **new}
    return made


def _shaped(units: Tensor, leaf: Tensor) -> Tensor:
    """One for each client, to divide stacked leaves by."""
    return units.view(-1, *[1] * leaf.dim()) if units.dim() == 1 else units


def middle(values: Tensor, way: str) -> Tensor:
    """Over the first dimension: the median, or the mean without as many as may be bad at both ends."""
    count = len(values)
    if values.isnan().any():
        return values.nanmedian(0).values
    cut = (count - 1) // 2 if way != "trimmed" else min(int(SHARE * count), (count - 1) // 2)
    return values.sort(0).values[cut : count - cut].mean(0)


def _middles(each: Mapping[str, Tensor], way: str) -> dict[str, Tensor]:
    return {name: middle(values, way) for name, values in each.items()}


def _clipped(each: Mapping[str, Tensor]) -> dict[str, Tensor]:
    centre = _middles(each, "median")
    apart = {name: values - centre[name] for name, values in each.items()}
    size = torch.stack([one.nan_to_num(0.0).flatten(1).square().sum(1) for one in apart.values()]).sum(0).sqrt()
    part = (size.median() / size.clamp_min(1e-12)).clamp_max(1.0)
    return {name: centre[name] + one * part.view(-1, *[1] * (one.dim() - 1)) for name, one in apart.items()}


def _krum(each: Mapping[str, Tensor]) -> dict[str, Tensor]:
    flat = torch.cat([values.nan_to_num(0.0).flatten(1) for values in each.values()], 1)
    return {name: values[krum(flat)] for name, values in each.items()}


def krum(vectors: Tensor) -> int:
    """The one with the smallest sum of squared distances to the n − f − 2 that are nearest to it."""
    count = len(vectors)
    near = max(1, count - int(SHARE * count) - 2)
    apart = torch.cdist(vectors, vectors).square()
    return int(apart.sort(1).values[:, 1 : near + 1].sum(1).argmin())


def without_outliers(reply: type, replies: Mapping[str, Leaves]) -> dict[str, Leaves]:
    """Images of a class whose mean embedding is far from the median of the clients' are left out, with their labels.

    The embedding is a random one that everybody could draw: a layer of ReLUs on pixels.
    """
    fields = named(reply, next(iter(replies.values())), ("images", "labels"))
    held = {wire.holds: name for name, wire in fields.items()}
    if "images" not in held:  # sums by which inputs are standardised
        return dict(replies)
    pictures, labels = held["images"], held["labels"]
    embedded = {id: _embedding(leaves[pictures]) for id, leaves in replies.items()}
    keep = {id: torch.ones(len(leaves[labels]), dtype=torch.bool) for id, leaves in replies.items()}
    for c in torch.cat([leaves[labels] for leaves in replies.values()]).unique().tolist():
        means = {
            id: embedded[id][leaves[labels] == c].mean(0)
            for id, leaves in replies.items()
            if (leaves[labels] == c).any()
        }
        if len(means) < 3:
            continue
        stack = torch.stack([*means.values()])
        apart = (stack - middle(stack, "median")).norm(dim=1)
        for id, far in zip(means, (apart > FAR * apart.sort().values[len(apart) // 2]).tolist(), strict=True):
            if far:
                keep[id] &= replies[id][labels].cpu() != c
    return {
        id: {name: leaf[keep[id].to(leaf.device)] if name in fields else leaf for name, leaf in leaves.items()}
        for id, leaves in replies.items()
    }


def _embedding(images: Tensor) -> Tensor:
    flat = images.double().flatten(1)
    basis = Rng(0)("embedding").normal(flat.shape[1], EMBEDDING).to(flat) / max(1, flat.shape[1]) ** 0.5
    return (flat @ basis).relu()
