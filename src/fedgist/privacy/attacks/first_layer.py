"""Images read off the update of a first layer that is linear, without a search (Phong et al. 2017, section 3).

For a neuron i of W x + b the gradient of one image is (δᵢ x, δᵢ): the row of W over the entry of b is the image. Of a
batch, a row over its entry is a mean of those images that open the neuron, with weights δ: the image itself where one
alone does. Rows that agree with each other are such images, for means over several differ from neuron to neuron.
"""

import math

import torch
from torch import Tensor

from fedgist.privacy.attacks.interface import Judge, Known, NothingToSee, Score
from fedgist.privacy.attacks.inversion import first_update
from fedgist.privacy.attacks.moments import class_means
from fedgist.privacy.transcript import Transcript, Update

MOST = 16
ALIKE = 0.002
"""How far apart readings of one image may be, on average, as a part of the range of values: rounding, no more."""


def first_layer(transcript: Transcript, level: str, known: Known, judge: Judge) -> Score:
    """How alike rows of the first layer's update, over their biases' entries, are to what clients hold."""
    seen, task = first_update(transcript, level), known.method.task
    images = read_off(seen, task.shape, *known.ends)
    value, true = judge.alike(seen.seen.clients, images)
    best = max(judge.alike(seen.seen.clients, image[None])[0] for image in images)
    blind, _ = judge.alike(seen.seen.clients, class_means(known))
    rows = {"read off": judge.pixels(images), "most alike of a client": true} if len(task.shape) == 3 else {}
    about = f"an update of {len(seen.seen.clients)} client{'s' * (len(seen.seen.clients) > 1)}, {len(images)} readings"
    return Score(value, blind, "PSNR, dB", about, {"best": best}, rows)


def read_off(seen: Update, shape: tuple[int, ...], low: Tensor, high: Tensor) -> Tensor:
    """The likeliest images: those that most neurons agree upon, and that keep to the range of values."""
    inputs, layer = math.prod(shape), next(iter(seen.update)).removesuffix(".weight")
    parts = [seen.update.get(f"{layer}.{part}") for part in ("weight", "bias")]
    if parts[0] is None or parts[1] is None or parts[0].shape[1:] != (inputs,):
        raise NothingToSee("the first layer is no linear one with biases")
    weight, bias = (part.double() for part in parts if part is not None)
    strong = bias.abs() > 1e-4 * bias.abs().max()
    images = (weight[strong] / bias[strong, None]).view(-1, *shape)
    outside = ((low - images).clamp_min(0) + (images - high).clamp_min(0)).div(high - low).flatten(1).mean(1)
    inside = images.clamp(low.double(), high.double())
    apart = torch.cdist(inside.flatten(1), inside.flatten(1), p=1) / inputs / float((high - low).mean())
    agree = (apart < ALIKE).sum(1)
    chosen: list[int] = []
    for i in sorted(range(len(images)), key=lambda i: (-int(agree[i]), float(outside[i]))):
        if len(chosen) < MOST and all(apart[i, j] >= ALIKE for j in chosen):
            chosen.append(i)
    return inside[chosen].float()
