"""Whether a sample was trained on, from the loss of a model on it: what was learned is known better (Yeom et al. 2018).

The model is the one that a client's last message shows, or, where none does, what the server learned.
"""

from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.core.message import Params
from fedgist.core.task import Model, Samples
from fedgist.privacy.attacks.interface import Judge, Known, NothingToSee, Score
from fedgist.privacy.transcript import Transcript

BATCH = 200


def membership(transcript: Transcript, level: str, known: Known, judge: Judge) -> Score:
    """Loss threshold: AUC, and the true positive rate at 1 % false positives."""
    model = known.method.model
    targets: list[tuple[tuple[str, ...], Model, Params]]
    targets = [((id,), model, w) for id, w in shown_models(transcript, level).items()]
    seen = f"weights of {len(targets)} clients"
    if not targets and known.model is not None:
        targets, seen = [(tuple(known.sizes), *known.model)], "the model that came out"
    if not targets:
        raise NothingToSee("no model is shown, and none comes out at the server")
    found = []
    for clients, net, w in targets:
        challenge = judge.challenge(clients)
        found.append((judge.membership(challenge, -losses(net, w, challenge.x, challenge.y)), challenge))
    blind = [judge.membership(challenge, nearness(known.reserve, challenge.x, challenge.y)) for _, challenge in found]
    rates = [rate for (_, rate), _ in found if rate is not None]
    more = {"tpr at 1 % fpr": mean(rates) if rates else None}
    return Score(mean([area for (area, _), _ in found]), mean([area for area, _ in blind]), "AUC", seen, more)


def shown_models(transcript: Transcript, level: str) -> dict[str, Params]:
    """The last whole model that each client's messages show, where they show one."""
    found: dict[str, Params] = {}
    if level != "replies":
        return found
    whole = transcript.method.model.shapes.keys()
    last = {seen.clients[0]: seen for seen in transcript.seen(level, "weights", "update", "gradient", "images")}
    for client, seen in last.items():
        with suppress(FedgistError):  # no data, or not all weights travel
            own = {**seen.model("statistics"), **seen.model("weights")}
            if own.keys() == whole:
                found[client] = own
            elif update := transcript.update_in(seen):
                found[client] = update.after
    return found


def losses(model: Model, w: Params, x: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of each sample."""
    with torch.no_grad():
        batches = zip(x.split(BATCH), y.split(BATCH), strict=True)
        return torch.cat([F.cross_entropy(model(w, a).logits, b, reduction="none") for a, b in batches])


def nearness(some: Samples, x: Tensor, y: Tensor) -> Tensor:
    """Minus the distance of each sample to the nearest of `some` with its label: all that one can say unseen."""
    near = torch.full((len(x),), -torch.inf)
    for c in y.unique().tolist():
        those = some[0][some[1] == c]
        those = those if len(those) else some[0]
        near[y == c] = -torch.cdist(x[y == c].flatten(1), those.flatten(1)).amin(1)
    return near


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
