"""Whether a sample was trained on, from the loss of models on it: what was learned is known better.

membership   the loss under the model that a client's last message shows, or, where none does, that the server learned
             (Yeom et al. 2018)
trajectory   by how much the loss fell in training, over all messages: what is easy for every model tells nothing, and
             each round tells a little more (after Watson et al. 2022 and Nasr et al. 2019)
"""

from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core import tree
from fedgist.core.errors import FedgistError
from fedgist.core.message import Params
from fedgist.core.task import Model, Samples
from fedgist.privacy.attacks.interface import Challenge, Judge, Known, NothingToSee, Score
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
    found, blind = [], []
    for clients, net, w in targets:
        challenge = judge.challenge(clients)
        found.append(judge.membership(challenge, -losses(net, w, challenge.x, challenge.y)))
        blind.append(unseen(known, judge, challenge))
    return told_apart(found, blind, seen)


def trajectory(transcript: Transcript, level: str, known: Known, judge: Judge) -> Score:
    """From the loss before less the loss after what is seen of every round."""
    model = known.method.model
    asked: dict[tuple[str, ...], Challenge] = {}
    fell: dict[tuple[str, ...], Tensor] = {}
    messages = 0
    for seen in transcript.seen(level, "weights", "update", "gradient", "images"):
        with suppress(FedgistError):  # no data, or not all weights travel
            update = transcript.update_in(seen)
            if update is None or not tree.finite([update.before, update.update]):
                continue
            if seen.clients not in asked:
                asked[seen.clients] = judge.challenge(seen.clients)
            challenge = asked[seen.clients]
            before, after = (losses(model, w, challenge.x, challenge.y) for w in (update.before, update.after))
            fell[seen.clients] = fell.get(seen.clients, 0.0) + before - after
            messages += 1
    if not fell:
        raise NothingToSee("no update of a model is seen")
    found = [judge.membership(asked[clients], drop) for clients, drop in fell.items()]
    return told_apart(found, [unseen(known, judge, one) for one in asked.values()], f"{messages} updates")


def unseen(known: Known, judge: Judge, challenge: Challenge) -> float:
    """The area that one gets who has seen nothing."""
    return judge.membership(challenge, nearness(known.reserve, challenge.x, challenge.y))[0]


def told_apart(found: list[tuple[float, float | None]], blind: list[float], seen: str) -> Score:
    """The mean over challenges of areas, and of the rates found at 1 % wrong where they say something."""
    rates = [rate for _, rate in found if rate is not None]
    more = {"tpr at 1 % fpr": mean(rates) if rates else None}
    return Score(mean([area for area, _ in found]), mean(blind), "AUC", seen, more)


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
    near = torch.full((len(x),), -torch.inf, device=x.device)
    for c in y.unique().tolist():
        those = some[0][some[1] == c]
        those = those if len(those) else some[0]
        near[y == c] = -torch.cdist(x[y == c].flatten(1), those.flatten(1)).amin(1)
    return near


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
