"""Shared images: whose samples lie near them, and whether they are nearer to what was trained on than to what was not.

Distances are diagnostics and no guarantee: that none is conspicuous does not mean that nothing leaks.
"""

import torch
from torch import Tensor

from fedgist.core.message import schema_of
from fedgist.core.task import Samples, Task
from fedgist.privacy.attacks.interface import EQUAL, Judge, Known, NothingToSee, Score
from fedgist.privacy.attacks.membership import nearness, told_apart, unseen
from fedgist.privacy.transcript import Seen, Transcript
from fedgist.synthesis.encoding import full_size
from fedgist.synthesis.pixels import dequantise


def image_membership(transcript: Transcript, level: str, known: Known, judge: Judge) -> Score:
    """Whether a sample was trained on, from its distance to the nearest shared image of its class."""
    found, blind = [], []
    shared = shared_images(transcript, level)
    for clients, images in shared.items():
        challenge = judge.challenge(clients)
        found.append(judge.membership(challenge, nearness(images, challenge.x, challenge.y)))
        blind.append(unseen(known, judge, challenge))
    return told_apart(found, blind, _about(shared))


def copied(transcript: Transcript, level: str, known: Known, judge: Judge) -> Score:
    """How many of the shared images are, to an eye, one that a client holds; and how many are nearer to one of theirs
    than to any of as many that nobody holds, which says less where clients hold far more than those.
    """
    shared = shared_images(transcript, level)
    everybody = tuple(sorted({id for clients in shared for id in clients}))
    x, y = (torch.cat(parts) for parts in zip(*shared.values(), strict=True))
    nearer, rows = judge.nearer(everybody, x, y)
    more = {"nearer": nearer, "nearer, blind": judge.nearer(everybody, *known.reserve)[0]}
    found, blind = (judge.found_again(everybody, images) for images in (x, known.reserve[0]))
    return Score(found, blind, f"share, to {EQUAL:g} dB", _about(shared), more, rows)


def shared_images(transcript: Transcript, level: str) -> dict[tuple[str, ...], Samples]:
    """All images that clients sent or that were made of what they sent, by the clients that they are of."""
    parts: dict[tuple[str, ...], list[Samples]] = {}
    for seen in (*transcript.seen(level, "images"), *transcript.asked("images")):
        some = images_in(seen, transcript.method.task)
        if some is not None and len(some[1]):
            parts.setdefault(seen.clients, []).append(some)
    if not parts:
        raise NothingToSee("no images are shared")
    return {id: (torch.cat([x for x, _ in some]), torch.cat([y for _, y in some])) for id, some in parts.items()}


def images_in(seen: Seen, task: Task) -> Samples | None:
    """The images of a message at full size, with their likeliest labels; None where they are no such."""
    labels = [*seen.holding("labels").values(), *seen.holding("logits").values()]
    for name, images in seen.holding("images").items():
        shape = schema_of(seen.kind)[name][1].shape
        if not len(labels) or images.numel() == 0:
            return None
        if shape[-1] == "input":
            rank = len(shape) - 1
            if images.dtype == torch.uint8 and rank > 1:  # each has a scale of its own
                return None
            images = dequantise(images, task.low, task.high) if images.dtype == torch.uint8 else images
            images = full_size(images.float().flatten(0, rank - 1), task.shape)
        elif images.shape[1:].numel() == torch.Size(task.shape).numel():
            images = images.float().reshape(-1, *task.shape)
        else:  # what enters a later layer is no picture
            return None
        return images, _hard(labels[0], len(images))
    return None


def _hard(labels: Tensor, count: int) -> Tensor:
    return labels.flatten() if labels.numel() == count else labels.reshape(count, -1).argmax(1)


def _about(shared: dict[tuple[str, ...], Samples]) -> str:
    return f"{sum(len(y) for _, y in shared.values())} images"
