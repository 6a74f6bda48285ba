"""Evaluation of models that clients hold, or complete with parts of their own: by an exchange, here and elsewhere."""

import math
from collections.abc import Mapping

import torch

from fedgist.core.federation import Federation, Site
from fedgist.core.message import Bounds, Params, message, wire
from fedgist.core.rng import Rng
from fedgist.core.task import Model, Task
from fedgist.core.work import compute
from fedgist.learning.evaluation import Correct, Tally, scores_of, tally_shapes


@message
class Evaluate:
    """Test your own model on your own test set."""


@message
class EvaluateThis:
    """Test these weights (with your own buffers, where they are yours) on your own test set."""

    w: Params


@message
class Score:
    """Accuracies of the answering clients, as a sum, and the squares of how far each is from a half; the images that
    they tested on, and the counts from which the other scores follow, of all clients' images together."""

    accuracy: float = wire(additive=True, low=0, high="clients")
    squares: float = wire(additive=True, low=0, high="clients")
    clients: int = wire(torch.int64, additive=True, low=0, high=1)
    images: int = wire(torch.int64, additive=True, low=0)
    tally: Params = wire(torch.float64, shape="tally", additive=True, low=0, high="images")


@message
class EvaluateOwnLabels:
    """Test your own model on your share, one of `shares`, of the test images of the labels that you hold."""

    shares: int


@message
class EvaluateThisOnOwnLabels:
    """The same for these weights, with whatever you keep of your own in their place."""

    w: Params
    shares: int


@message
class Hits:
    """How many test images the answering clients classified, and how many of them correctly, as sums."""

    correct: int = wire(torch.int64, additive=True, low=0, high="images")
    images: int = wire(torch.int64, additive=True, low=0)


def score_bounds(task: Task) -> Bounds:
    """What both ends of an evaluation agree on."""
    return {"tally": tally_shapes(task.classes)}


async def score(model: Model, w: Params | None, me: Site) -> Score:
    """A client's reply to an evaluation; a client without a model or a test set counts for nothing."""
    if w is None or me.data.test is None or len(me.data.test[1]) == 0:
        nothing = {name: torch.zeros(shape) for name, shape in tally_shapes(model.classes).items()}
        return Score(0.0, 0.0, 0, 0, nothing)
    tally = await compute(Tally(model), w, *me.data.test)
    images = len(me.data.test[1])
    mine = float(tally["right"].sum()) / images
    return Score(mine, (mine - 0.5) ** 2, 1, images, tally)


async def over_clients(fed: Federation, request: object) -> dict[str, float]:
    """Mean and deviation of the accuracies of all clients that have a test set, and the other scores over all their
    images together; `request` may be one for each client."""
    total = (await fed.ask(_addressed(fed, request), None, Score)).sum
    clients = max(1, total.clients)
    mean = float(total.accuracy) / clients
    variance = float(total.squares) / clients - (mean - 0.5) ** 2 if total.clients else 0.0
    deviation = {"deviation_between_clients": math.sqrt(max(0.0, variance))}
    others = scores_of(total.tally) if total.clients else {}
    return {**others, "accuracy": mean, **deviation}


async def hits_on_own_labels(model: Model, w: Params, me: Site, shares: int) -> Hits:
    """A client's part in the evaluation of FedGen's released code: a share of the images of labels it holds."""
    if me.data.test is None or me.data.n == 0:
        return Hits(0, 0)
    x, y = me.data.test
    first = int(Rng(me.rng.root)("test share", me.id).integers(shares, 1))  # the same images in every round
    mine = torch.isin(y, me.data.y.unique()).nonzero().flatten()[first::shares]
    return Hits(int(await compute(Correct(model), w, x[mine], y[mine])), len(mine))


async def pooled_over_clients(fed: Federation, request: object) -> float:
    """The fraction of all clients' test images together that are classified correctly."""
    total = (await fed.ask(_addressed(fed, request), None, Hits)).sum
    return float(total.correct) / max(1, total.images)


def _addressed(fed: Federation, request: object) -> Mapping[str, object]:
    return request if isinstance(request, Mapping) else dict.fromkeys(fed.ids, request)
