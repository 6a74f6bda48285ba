"""Encoded updates as both ends handle them: made by a fit, applied, remembered for those who missed some. TOFU.

No gradient can encode BatchNorm statistics: they travel beside an encoded update, as one vector.
"""

import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.task import Model
from fedgist.core.work import Compute, Place, compute, execute, scan
from fedgist.options import option
from fedgist.synthesis.encoding import OBJECTIVES, PARAMETRISATIONS, PRIORS, Encoder, Sent, as_float32, learning_rates

log = logging.getLogger("fedgist")

PIXELS = {"float32": torch.float32, "float16": torch.float16, "uint8": torch.uint8}


@dataclass(frozen=True)
class EncoderOptions:
    """In what updates are encoded, and how; method configurations inherit these."""

    images: int = option(64, "Synthetic images that encode an update, N.", low=1, safe=("1..1024",))
    iterations: int = option(1000, "Iterations of the encoder.", low=0, safe=("0..100000",))
    encoder_lr: float = option(0.1, "Learning rate of images, labels and weights (Adam).", above=0)
    objective: str = option(
        "layers", "Cosine that is fitted: global (Eq. 3), mean of layers, decoded.", choices=OBJECTIVES
    )
    labels: str = option("free", "Labels and weights: free numbers, or through a softmax.", choices=PARAMETRISATIONS)
    prior: str = option(
        "full", "Images as sent: full size, one channel (grey), half the height and width.", choices=PRIORS
    )
    pixels: str = option("float32", "Pixels on the wire.", choices=PIXELS)

    def encoder(self, model: Model) -> Encoder:
        return Encoder(model, self.prior, self.labels, self.objective, PIXELS[self.pixels])


async def encode(
    encoder: Encoder, options: EncoderOptions, update: Params, w: Params, rng: Rng, damped: bool
) -> tuple[Sent, Tensor]:
    """How an update of the weights `w` is sent, and the cosine of what will be decoded from that."""
    direction, norms = await compute(encoder.aim, update)
    rates = {"lr": learning_rates(options.encoder_lr, options.iterations)}
    begin = encoder.init(encoder.start(rng, options.images))
    variables, _ = await scan(encoder.step, begin, rates, w, direction, norms)
    return await compute(encoder.finish, variables, w, direction, norms, torch.tensor(float(damped)))


def worth_sending(encoder: Encoder, images: int) -> int:
    """How many encoded updates together are smaller than the weights; says so where one is larger already."""
    size, whole = encoder.payload(images), 4 * (encoder.model.size + encoder.statistics)
    if size > whole:
        fitting = bisect_right(range(1, images), whole, key=encoder.payload)
        fewer = f"{fitting} image{'s' * (fitting > 1)}" if fitting else "not even one image"
        log.warning(f"tofu: an encoded update has {size} bytes, the weights only {whole}; {fewer} would be smaller")
    return max(1, whole // size)


def remember(past: Sent, new: Sent, most: int) -> Sent:
    """Encoded updates one after the other, each field stacked: the last `most` of them."""
    joined = {name: torch.cat([past[name].to(new[name]), new[name][None]]) for name in past}
    return {name: field[-most:] for name, field in joined.items()}


def statistics(model: Model, w: Params) -> Tensor:
    """The BatchNorm statistics of a model, which no gradient can encode, as one vector."""
    buffers = [w[name].flatten() for name in model.shapes if name in model.buffers]
    return torch.cat(buffers) if buffers else next(iter(w.values())).new_zeros(0)


def apply_update(model: Model, w: Params, update: Params, statistics: Tensor) -> Params:
    """θ ← θ − U, with new BatchNorm statistics."""
    buffers = [name for name in model.shapes if name in model.buffers]
    parts = statistics.split([w[name].numel() for name in buffers]) if buffers else ()
    new = {name: part.view_as(w[name]) for name, part in zip(buffers, parts, strict=True)}
    return {name: new[name] if name in new else w[name] - update[name] for name in w}


def part_of(msg: Any, i: int = 0) -> Sent:
    """One of the encoded updates in a message; copies, as where a tensor lies can change the last bit of a product."""
    return {name: getattr(msg, name)[i].clone() for name in ("images", "ends", "labels", "weights", "scales")}


def replayed(encoder: Encoder, messages: Sequence[Any], single: bool) -> tuple[Params, Params] | None:
    """The weights at which the last message was encoded, and its update; None where it is no encoded update.

    The messages before are applied as the client applied them: weights as they came, or encoded updates; where it is
    `single`, its own as well. A `LookupError` says that some are missing.
    """
    *earlier, last = messages
    if not hasattr(last, "scales"):
        return None
    w: Params = {}
    reached = -1
    for msg in earlier:
        if hasattr(msg, "w"):
            w, reached = msg.w, msg.version
        elif hasattr(msg, "scales") and w:
            own = hasattr(msg, "version")
            if own and not single:
                continue
            for i, running in enumerate([as_float32(msg.statistics / msg.p)] if own else msg.statistics):
                w, reached = apply_update(encoder.model, w, _decoded(encoder, msg, w, i), running), reached + 1
    if reached != last.version:
        raise LookupError("not all requests")
    return w, _decoded(encoder, last, w)


def _decoded(encoder: Encoder, msg: Any, w: Params, i: int = 0) -> Params:
    some = next(iter(w.values()))
    found: Params = execute(Compute(encoder.decode, (part_of(msg, i), w)), Place(some.device, some.dtype))
    return found
