"""Which classes a client holds, and how much of each: from what is told, or from how an update pulls at the classifier.

The gradient of the classifier's bias of class c is mean(p_c) − (share of class c) in every step of training on
cross-entropy: pulls are shares less what the model expects ("User-Level Label Leakage", Wainakh et al. 2022).
"""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.core.message import Content, schema_of
from fedgist.privacy.attacks.images import images_in
from fedgist.privacy.attacks.interface import Judge, Known, NothingToSee, Score
from fedgist.privacy.transcript import Seen, Transcript

Told = tuple[Tensor, str]


def presence(transcript: Transcript, level: str, known: Known, judge: Judge) -> Score:
    """Which classes each client holds."""
    return _judged(transcript, level, known, judge.presence, "AUC")


def shares(transcript: Transcript, level: str, known: Known, judge: Judge) -> Score:
    """How much of each class each client holds: the part of the distribution that a guess has right."""
    return _judged(transcript, level, known, judge.shares, "overlap")


def _judged(
    transcript: Transcript, level: str, known: Known, judge: Callable[[dict[str, Tensor]], float], measure: str
) -> Score:
    found: dict[str, Told] = {}
    rank: dict[str, tuple[int, bool]] = {}
    contents: tuple[Content, ...] = ("counts", "presence", "labels", "weights", "update", "gradient", "features")
    first = 0
    for seen in transcript.seen(level, *contents):
        first = first or seen.round
        if seen.round > first + 1 and len(found) == len(known.sizes):  # later ones say the same, less clearly
            break
        if (told := evidence(transcript, seen, known)) is None:
            continue
        better = len(seen.clients), "pull" in told[1]  # what is about one client, and what is told outright
        for id in seen.clients:
            if id not in found or better < rank[id]:
                found[id], rank[id] = told, better
    if not found:
        raise NothingToSee("nothing that is seen depends on classes")
    about = ", ".join(sorted({how for _, how in found.values()}))
    usual = known.reserve[1].bincount(minlength=known.classes).double()
    blind = dict.fromkeys(found, usual / usual.sum())
    return Score(judge({id: guess for id, (guess, _) in found.items()}), judge(blind), measure, about)


def evidence(transcript: Transcript, seen: Seen, known: Known) -> Told | None:
    """A guess at the shares of the classes, and what it rests on."""
    told: tuple[Content, ...] = ("counts", "presence")
    for content in told:
        for value in seen.holding(content).values():
            for counts in value.values() if isinstance(value, dict) else [value]:
                if counts.numel() == known.classes and counts.sum() > 0:
                    return counts.double() / counts.sum(), content
    if seen.holding("images") and (some := images_in(seen, known.method.task)) is not None:
        counts = some[1].bincount(minlength=known.classes).double()
        if seen.holding("labels"):
            return counts / counts.sum(), "labels of images"
    for name, value in seen.holding("features").items():
        shape = schema_of(seen.kind)[name][1].shape
        if isinstance(shape, tuple) and "classes" in shape and isinstance(value, Tensor) and value.numel():
            size = value.movedim(shape.index("classes"), 0).flatten(1).double().norm(dim=1)
            return size / size.sum().clamp_min(1e-12), "features"
    with suppress(FedgistError):
        return _pull(transcript, seen, known)
    return None


def _pull(transcript: Transcript, seen: Seen, known: Known) -> Told | None:
    update = transcript.update_in(seen)
    model = known.method.model
    if update is None or f"{model.classifier}.bias" not in update.update:
        return None
    pull = -update.update[f"{model.classifier}.bias"].double()
    with torch.no_grad():
        expected = model(update.before, known.reserve[0][:200]).logits.softmax(1).mean(0).double()
    down = pull < 0
    # The furthest that no share is negative: where labels are skewed, some class is all but absent.
    reach = float((expected[down] / -pull[down]).min()) if down.any() else 0.0
    return (expected + reach * pull).clamp_min(0), "pull at the classifier"
