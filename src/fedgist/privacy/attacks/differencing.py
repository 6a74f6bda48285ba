"""Sums over cohorts that differ by one client: their difference is what that client sent, if the rest sent the same."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fedgist.core.message import Content, schema_of
from fedgist.privacy.attacks.interface import Judge, Known, NothingToSee, Score
from fedgist.privacy.attacks.membership import mean
from fedgist.privacy.transcript import Seen, Transcript

SUMMED: tuple[Content, ...] = ("weights", "update", "gradient", "features", "products", "logits", "counts")
MOST = 10


def differencing(transcript: Transcript, level: str, known: Known, judge: Judge) -> Score:
    """How much of what sets one client's message apart from the mean is found: 1 all of it, 0 nothing."""
    if level == "replies":
        raise NothingToSee("who sees each reply needs no sums")
    sums = [seen for seen in transcript.seen(level, *SUMMED) if _vector(seen) is not None]
    found = [_explained(transcript, larger, smaller) for larger, smaller in _pairs(sums)[:MOST]]
    if not found:
        raise NothingToSee("no two sums are over sets that differ by one")
    return Score(mean(found), 0.0, "share explained", f"{len(found)} pairs of sums")


def _pairs(sums: list[Seen]) -> list[tuple[Seen, Seen]]:
    """Neighbours in time first: the less has happened between them, the more alike are the rest."""
    found: list[tuple[int, Seen, Seen]] = []
    for i, a in enumerate(sums):
        for b in sums[i + 1 :]:
            larger, smaller = (a, b) if len(a.clients) > len(b.clients) else (b, a)
            by_one = len(larger.clients) - len(smaller.clients) == 1
            if a.kind is b.kind and by_one and {*smaller.clients} < {*larger.clients}:
                found.append((abs(a.round - b.round), larger, smaller))
    return [(larger, smaller) for _, larger, smaller in sorted(found, key=lambda pair: pair[0])]


def _explained(transcript: Transcript, larger: Seen, smaller: Seen) -> float:
    (one,) = {*larger.clients} - {*smaller.clients}
    total, less = _vector(larger), _vector(smaller)
    assert total is not None and less is not None
    (kept,) = [
        kept
        for kept in transcript.kept
        if kept.up and (kept.round, kept.exchange, kept.client) == (larger.round, larger.exchange, one)
    ]
    sent = transcript.codec.values(larger.kind, transcript.leaves(kept), additive=True)
    truth = _vector(Seen(larger.round, larger.exchange, (one,), larger.kind, sent, None))
    assert truth is not None
    blind = total / len(larger.clients)
    apart = (blind - truth).square().sum()
    return float(1 - (total - less - truth).square().sum() / apart) if apart > 0 else 1.0


def _vector(seen: Seen) -> Tensor | None:
    """What is summed, as one vector."""
    parts = [*_tensors(seen)]
    return torch.cat(parts) if len(seen.clients) and parts else None


def _tensors(seen: Seen) -> Iterator[Tensor]:
    for name, value in seen.values.items():
        declared = schema_of(seen.kind)[name][1]
        if declared.additive and declared.holds in SUMMED:
            yield from (leaf.double().flatten() for leaf in (value.values() if isinstance(value, dict) else [value]))
