"""What sums of features and of their products give away, where the feature map is known.

With z the centred features of a sample and S = Σ zzᵀ over those that are summed, zᵀ(S + λI)⁻¹z is at most 1 for one
that is in the sum, and always less than for the same sample outside: h / (1 + h) instead of h (Sherman and Morrison).
With fewer samples than features S spans just them, and everything else sticks out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.core.message import Content, schema_of
from fedgist.learning.optimisers import Adam
from fedgist.learning.ridge import symmetric
from fedgist.privacy.attacks.interface import Judge, Known, NothingToSee, Score
from fedgist.privacy.attacks.membership import mean, told_apart, unseen
from fedgist.privacy.transcript import Seen, Transcript
from fedgist.synthesis.encoding import learning_rates

MOST = 3
"""Clients that are looked at, at most: with thousands of features each costs a minute."""
RIDGE = 1e-6
"""Of the mean eigenvalue: what rounding on the wire does to the others."""


@dataclass(frozen=True, eq=False)
class Map:
    """Features as they were summed."""

    features: Callable[[Tensor], Tensor]
    centre: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.features(x) - self.centre


def moment_membership(transcript: Transcript, level: str, known: Known, judge: Judge) -> Score:
    """Whether a sample is in a sum of products of features."""
    found, blind = [], []
    for seen in _last(transcript, level, "products")[:MOST]:
        z, products = feature_map(seen, known), next(iter(seen.holding("products").values()))
        spread = symmetric(products.double().reshape(-1, products.shape[-1]).sum(0))
        values, vectors = torch.linalg.eigh(spread)
        floor = RIDGE * float(values.clamp_min(0).mean())
        challenge = judge.challenge(seen.clients)
        with torch.no_grad():
            along = torch.cat([z(part) for part in challenge.x.split(100)]).double() @ vectors
        leverage = (along.square() / values.clamp_min(floor)).sum(1)
        found.append(judge.membership(challenge, -leverage))
        blind.append(unseen(known, judge, challenge))
    return told_apart(found, blind, f"products of {len(found)} sums")


def reconstruction(transcript: Transcript, level: str, known: Known, judge: Judge) -> Score:
    """An image of each class whose features are those that are told of the class."""
    scores: list[float] = []
    controls: list[float] = []
    rows: dict[str, Tensor] = {}
    for seen in _last(transcript, level, "features")[:MOST]:
        for target, labels in _class_features(seen):
            z = feature_map(seen, known)
            images = _search(z, target.to(z.centre), class_means(known)[labels], known)
            value, true = judge.alike(seen.clients, images, labels)
            scores.append(value)
            controls.append(judge.alike(seen.clients, class_means(known)[labels], labels)[0])
            rows = rows or {"made of features": judge.pixels(images), "most alike of a client": true}
    if not scores:
        raise NothingToSee("no features of single classes are seen")
    return Score(mean(scores), mean(controls), "PSNR, dB", "features by class", rows=rows)


def _last(transcript: Transcript, level: str, content: Content) -> list[Seen]:
    """The last of what holds this: of each client, or the sum."""
    last = {seen.clients: seen for seen in transcript.seen(level, content) if seen.holding(content)}
    if not last:
        raise NothingToSee(f"no {content} are seen")
    return list(last.values())


def feature_map(seen: Seen, known: Known) -> Map:
    """What the features are of, if that is known: a model that came with the request, or the one that came out."""
    if seen.request is None:
        raise NothingToSee("the requests were not recorded")
    request = Seen(seen.round, seen.exchange, seen.clients, type(seen.request), vars(seen.request), None)
    weights = request.model("weights")
    model, w = known.method.model, weights
    if weights.keys() != model.shapes.keys():
        if (
            known.model is None
            or known.model[0].shapes.keys() == known.method.task.models[known.method.task.model].shapes.keys()
        ):
            raise NothingToSee("the features are those of models that stay with the clients")
        model, w = known.model
    centre = next(iter(request.holding("centre").values()), known.reserve[0].new_zeros(()))

    def features(x: Tensor) -> Tensor:
        return model(w, x).features

    return Map(features, centre.float())


def _class_features(seen: Seen) -> Iterator[tuple[Tensor, Tensor]]:
    for name, value in seen.holding("features").items():
        shape = schema_of(seen.kind)[name][1].shape
        if isinstance(shape, tuple) and "classes" in shape and value.numel():
            by_class = value.float().movedim(shape.index("classes"), 0).flatten(1)
            size = by_class.norm(dim=1)
            held = (size > 0.05 * size.max()).nonzero().flatten()
            yield by_class[held], held


def _search(z: Map, target: Tensor, start: Tensor, known: Known) -> Tensor:
    """Images whose features point where the targets do, by Adam from what one would guess without them."""
    adam, (low, high) = Adam(), known.ends
    v = {"x": start}
    state = adam.init(v)
    for lr in learning_rates(0.05, known.effort).tolist():
        x = v["x"].detach().requires_grad_()
        apart = 1 - torch.cosine_similarity(z(x), target, dim=1)
        (slope,) = torch.autograd.grad(apart.sum(), x)
        with torch.no_grad():
            v, state = adam.step(v, {"x": slope.nan_to_num(0.0)}, state, torch.tensor(lr))
            v = {"x": torch.maximum(torch.minimum(v["x"], high), low)}
    return v["x"]


def class_means(known: Known) -> Tensor:
    """The mean of the attacker's own samples of each class."""
    x, y = known.reserve
    return torch.stack([x[y == c].mean(0) if (y == c).any() else x.mean(0) for c in range(known.classes)])
