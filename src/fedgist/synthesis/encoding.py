"""Weight updates encoded as the gradient of a few synthetic images. TOFU, section 3.2, Eqs. 1 to 3.

D_syn = {(x_i, y_i, α_i)} is optimised until U_syn = ∇_θ Σ_i α_i CE(θ(x_i), y_i) points where an update U_real points;
whoever holds the same weights θ turns D_syn back into an update with one forward and one backward pass.

BatchNorm is frozen here: both passes normalise by the running statistics of θ, so that one image's gradient does not
depend on the others and the decoder needs nothing but θ and D_syn.
"""

import math
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from fedgist.core import tree
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.task import Model
from fedgist.core.tree import Tree
from fedgist.core.work import gradient
from fedgist.learning.optimisers import Adam, Optimiser
from fedgist.options import only_images

Proxy = dict[str, Tensor]
"""D_syn: `images` [N, *input] as small as the prior makes them, `labels` [N, C], `weights` [N]."""

Sent = dict[str, Tensor]
"""An encoded update as it travels: D_syn, the norms of the layers (`scales`), the `ends` of images sent as bytes."""

PRIORS = ("full", "grey", "half")
OBJECTIVES = ("global", "layers", "decoded")
PARAMETRISATIONS = ("free", "softmax")

ADAM = Adam()
TINY = 1e-30  # below any squared norm that means something, and a normal number in float32


def sent_shape(shape: tuple[int, ...], prior: str) -> tuple[int, ...]:
    """The shape of a synthetic image as it is sent: full size, one channel, or half the height and width."""
    if prior == "full":
        return shape
    only_images(f"prior={prior}", shape)
    channels, height, width = shape
    return (1, height, width) if prior == "grey" else (channels, (height + 1) // 2, (width + 1) // 2)


def full_size(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What the network sees: the one channel repeated, or each pixel doubled (nearest neighbour), as the shape asks."""
    if images.shape[1:] == shape:
        return images
    channels, height, width = shape
    if images.shape[-2:] != (height, width):
        images = images.repeat_interleave(2, -2).repeat_interleave(2, -1)[..., :height, :width]
    return images.expand(*images.shape[:-3], channels, height, width)


def learning_rates(lr: float, iterations: int) -> Tensor:
    """One for each iteration: a tenth of it after 3/8, 5/8 and 7/8 of them."""
    position = torch.arange(iterations, dtype=torch.float64)
    passed = torch.stack([position >= iterations * eighths / 8 for eighths in (3, 5, 7)])
    return lr * 0.1 ** passed.double().sum(0)


@dataclass(frozen=True)
class Encoder:
    """Fits D_syn to an update and decodes it. A value, so that equal encoders of many clients are one computation.

    prior: images are sent at full size, with one channel (`grey`), or with half the height and width.
    labels: labels and weights are free numbers (the weights divided by their sum) or go through a softmax.
    objective: what is one minus the reconstruction loss: the cosine of the whole update (`global`, Eq. 3), the mean of
    the layers' cosines (`layers`), or the cosine after each layer got its norm (`decoded`), which is the mean of the
    layers' cosines weighted by their squared norms.
    pixels: the type of a pixel on the wire; labels, weights and norms are float32.
    """

    model: Model
    prior: str = "full"
    labels: str = "free"
    objective: str = "layers"
    pixels: torch.dtype = torch.float32
    optimiser: Optimiser = ADAM

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a synthetic image as it is sent."""
        return sent_shape(self.model.input_shape, self.prior)

    @property
    def names(self) -> list[str]:
        """What an update holds: the trained tensors, in the order of the model."""
        return [name for name in self.model.shapes if name not in self.model.buffers]

    @property
    def layers(self) -> list[int]:
        """The number of weights of each layer; a weight and its bias are one layer."""
        sizes = [(name.rpartition(".")[0], math.prod(self.model.shapes[name])) for name in self.names]
        return [sum(size for _, size in group) for _, group in groupby(sizes, key=lambda item: item[0])]

    def start(self, rng: Rng, count: int) -> Proxy:
        """The variables before the first step: normal images, random labels, equal weights."""
        noise = rng("labels").normal(count, self.model.classes)
        free = self.labels == "free"
        return {
            "images": rng("images").normal(count, *self.shape),
            "labels": noise.softmax(1) if free else noise,
            "weights": torch.ones(count) if free else torch.zeros(count),
        }

    def init(self, variables: Proxy) -> tuple[Proxy, Tree]:
        """What the scan of `step` begins with."""
        return variables, self.optimiser.init(variables)

    def proxy(self, variables: Proxy) -> Proxy:
        """D_syn of the variables: the weights sum to 1.

        Free weights may get a negative sum. Divided by it they would turn U_syn round, and the fit would begin anew;
        but an image's gradient α (p Σ_c y_c − y) is the same for −α and −y, so the labels take the sign.
        """
        labels, weights = variables["labels"], variables["weights"]
        if self.labels == "softmax":
            return {"images": variables["images"], "labels": labels.softmax(-1), "weights": weights.softmax(-1)}
        total = weights.sum(-1, keepdim=True)
        return {"images": variables["images"], "labels": labels * total.sign(), "weights": weights / total}

    def synthetic(self, proxy: Proxy, w: Params) -> Tensor:
        """U_syn (Eqs. 1 and 2), flat."""
        images = full_size(proxy["images"], self.model.input_shape)
        names, buffers = self.names, {name: w[name] for name in self.model.buffers}

        def loss(trained: Params) -> tuple[Tensor, tuple[()]]:
            logits = self.model({**trained, **buffers}, images).logits
            each = -(proxy["labels"] * logits.log_softmax(1)).sum(1)
            return (proxy["weights"] * each).sum(), ()

        return self._flat(gradient(loss, {name: w[name] for name in names})[0])

    def aim(self, update: Params) -> tuple[Tensor, Tensor]:
        """The direction of each layer of U_real, flat, and each layer's norm."""
        flat = self._flat(update)
        norms = self._sums(flat * flat).sqrt()
        return flat / self._spread(norms.clamp_min(TINY)), norms

    def cosines(self, synthetic: Tensor, direction: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
        """The cosine of each layer, and that of the whole update."""
        dots, squares = self._sums(synthetic * direction), self._sums(synthetic * synthetic)
        whole = (dots * norms).sum() / (root(squares.sum()) * root((norms * norms).sum()))
        return dots / root(squares), whole

    def reconstruction_loss(self, variables: Proxy, w: Params, direction: Tensor, norms: Tensor) -> Tensor:
        """R_loss (Eq. 3), or one of its forms by layers."""
        each, whole = self.cosines(self.synthetic(self.proxy(variables), w), direction, norms)
        if self.objective == "global":
            return 1 - whole
        return 1 - (each.mean() if self.objective == "layers" else after_scaling(each, norms))

    def step(
        self, carry: tuple[Proxy, Tree], x: Tree, w: Params, direction: Tensor, norms: Tensor
    ) -> tuple[Proxy, Tree]:
        """One iteration: a gradient of a function of a gradient."""
        variables, state = carry
        grads, _ = gradient(lambda v: (self.reconstruction_loss(v, w, direction, norms), ()), variables)
        return self.optimiser.step(variables, grads, state, x["lr"])

    def finish(
        self, variables: Proxy, w: Params, direction: Tensor, norms: Tensor, damped: Tensor
    ) -> tuple[Sent, Tensor]:
        """What is sent, rounded as the wire rounds, and the cosine of what will be decoded from it with U_real.

        Where `damped` is 1, norms are multiplied by 1 − R_loss (switch₁): each by that of its layer, where layers have
        their own. The cosine is that of before, at the norms of U_real.
        """
        sent = self._rounded(self.proxy(variables))
        each, whole = self.cosines(self.synthetic(self.read(sent), w), direction, norms)
        factor = whole.expand_as(each) if self.objective == "global" else each
        scales = norms * torch.lerp(torch.ones_like(factor), factor.clamp_min(0.0), damped.to(factor))
        return {**sent, "scales": as_float32(scales)}, after_scaling(each, norms)

    def nothing(self, count: int) -> Sent:
        """Blank images, for whoever has no update."""
        sent = self._rounded(tree.zeros_like(self.start(Rng(0), count)))
        return {**sent, "scales": torch.zeros(len(self.layers))}

    @property
    def statistics(self) -> int:
        """How many BatchNorm statistics there are, which no gradient can encode."""
        return sum(math.prod(self.model.shapes[name]) for name in self.model.buffers)

    def payload(self, count: int) -> int:
        """The bytes of an update that is encoded in so many images, with the statistics beside it."""
        ends = 8 if self.pixels is torch.uint8 else 0
        image = math.prod(self.shape) * self.pixels.itemsize + ends + 4 * (self.model.classes + 1)
        return count * image + 4 * (len(self.layers) + self.statistics)

    def decode(self, sent: Sent, w: Params) -> Params:
        """The update: each layer of U_syn at the norm that was sent."""
        flat = self.synthetic(self.read(sent), w)
        flat = flat * self._spread(sent["scales"] / root(self._sums(flat * flat)))
        names = self.names
        parts = flat.split([w[name].numel() for name in names])
        return {name: part.view_as(w[name]) for name, part in zip(names, parts, strict=True)}

    def _rounded(self, proxy: Proxy) -> Sent:
        images, ends = proxy["images"], proxy["weights"][:0, None].expand(0, 2)
        if self.pixels is torch.uint8:
            images, ends = quantise(images)
        else:
            images = images.to(self.pixels).to(images.dtype)
        labels, weights = as_float32(proxy["labels"]), as_float32(proxy["weights"])
        return {"images": images, "ends": ends, "labels": labels, "weights": weights}

    def read(self, sent: Sent) -> Proxy:
        """What a receiver makes of it: the images that bytes stand for."""
        images = restore(sent["images"], sent["ends"]) if self.pixels is torch.uint8 else sent["images"]
        return {**sent, "images": images}

    def _flat(self, update: Params) -> Tensor:
        return torch.cat([update[name].flatten() for name in self.names])

    def _sums(self, flat: Tensor) -> Tensor:
        """The sum over each layer."""
        return torch.stack([part.sum() for part in flat.split(self.layers)])

    def _spread(self, each: Tensor) -> Tensor:
        """A number for each layer, repeated for each of its weights."""
        return torch.cat([number.expand(size) for number, size in zip(each.unbind(), self.layers, strict=True)])


def root(squares: Tensor) -> Tensor:
    """A square root whose derivative stays finite: the gradient of a layer that no image reaches is zero."""
    return squares.clamp_min(TINY).sqrt()


def after_scaling(each: Tensor, norms: Tensor) -> Tensor:
    """The cosine of an update whose layers have the given cosines once each has its right norm: Σ s² cos / Σ s²."""
    return (each * norms * norms).sum() / (norms * norms).sum().clamp_min(TINY)


def as_float32(numbers: Tensor) -> Tensor:
    """What float32 on the wire leaves of the numbers, in their own dtype."""
    return numbers.float().to(numbers.dtype)


def quantise(images: Tensor) -> tuple[Tensor, Tensor]:
    """Images as bytes, and the smallest and the largest value of each, [N, 2]."""
    pixels = images.flatten(1)
    ends = as_float32(torch.stack([pixels.amin(1), pixels.amax(1)], 1))
    low, high = ends[:, :1], ends[:, 1:]
    steps = (pixels - low) / (high - low).clamp_min(TINY) * 255
    return steps.round().clamp(0, 255).to(torch.uint8).view_as(images), ends


def restore(bytes: Tensor, ends: Tensor) -> Tensor:
    """The images that bytes stand for."""
    low, high = (end.view(-1, *[1] * (bytes.dim() - 1)) for end in ends.unbind(1))
    return low + bytes.to(ends.dtype) * ((high - low) / 255)
