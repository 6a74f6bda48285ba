"""What methods share whose clients send labelled images and whose server trains on them. Xiong et al. 2023, Eqs. 3, 5.

The pooled images are the server's surrogate of everybody's data, good only near w_r. A method that inherits from
`Surrogate` writes only how a client makes its images.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.core.federation import Answers, Federation, Site, State
from fedgist.core.message import Bounds, Params, float16, float32, int64, message, uint8, wire
from fedgist.core.rng import Rng
from fedgist.core.work import Pool, scan
from fedgist.data.client_data import ClientData
from fedgist.families.participation import active_option
from fedgist.families.server_model import ServerModel
from fedgist.learning.optimisers import SGD
from fedgist.learning.training import Trainer
from fedgist.options import Role, option
from fedgist.synthesis.augmentation import KINDS, Augmentation
from fedgist.synthesis.pixels import dequantise, quantise
from fedgist.synthesis.trust_region import SurrogateTrainer, weighted_cross_entropy

log = logging.getLogger("fedgist")


@dataclass(frozen=True)
class ImageTrainingOptions:
    """How a server trains on images that are good only near the weights for which they were made."""

    rho: float = option(5.0, "Radius ρ of the ball around the round's weights in which the images are good.", above=0)
    server_epochs: int = option(500, "Passes of the server over all images, a round.", low=0)
    server_batch: int = option(256, "Images in a batch of the server.", low=1)
    server_lr: float = option(0.01, "Learning rate of the server.", above=0)
    server_decay: float = option(1.0, "Factor of that rate in the second half of a round's steps.", above=0, high=1)
    server_momentum: float = option(0.9, "Momentum of the server, started anew each round.", low=0, high=0.9999)
    server_weight_decay: float = option(5e-4, "L2 penalty of the server.", low=0)
    server_augmentation: tuple[str, ...] = option(
        (), "Changes of each image in the server's batches, one of those named, as in color,crop,cutout.", choices=KINDS
    )
    server_kinds: str = option(
        "image",
        "Which of them: drawn for every image, or one for a whole batch.",
        choices=("image", "batch"),
        role=Role.LATER,
    )


@dataclass(frozen=True)
class SurrogateOptions(ImageTrainingOptions):
    """Which images the clients send, and how the server trains on them."""

    ipc: int = option(
        10,
        "Images for each class that a client holds.",
        low=1,
        safe=("1..20",),
        reveals="The more images, the more of the samples that they were made from can be told apart.",
    )
    min_class: int = option(
        10,
        "A class with fewer samples than this counts as not held.",
        low=1,
        safe=("10..1000000",),
        reveals="Images of a class with few samples are nearly those samples.",
    )
    pixels: str = option("float32", "How a pixel travels.", choices=("float32", "float16", "uint8"))
    active: float = active_option()
    weighting: str = option(
        "uniform",
        "Weight of an image: all alike, or the samples it stands for.",
        choices=("uniform", "samples"),
        safe=("uniform",),
        reveals="With samples, the server sees how many samples of each class a site holds.",
    )


@message
class Current:
    """The server's weights w_r."""

    w: Params


@message
class Images:
    """S_k: images and labels, all of them visible; how many samples each class has, only where images weigh by it."""

    images: Tensor = wire(float32, float16, uint8, shape=("images", "input"), holds="images")
    labels: Tensor = wire(int64, shape=("images",), paper=False, low=0, below="classes", holds="labels")
    counts: Params = wire(shape="shown counts", paper=False, low=0, holds="counts")


Training = TypeVar("Training", bound=ImageTrainingOptions)
Options = TypeVar("Options", bound=SurrogateOptions)


class ImageTrained(ServerModel[Training]):
    """Abstract: one server model of any architecture, of which clients need the forward pass and keep nothing."""

    citation = "xiong2023feddm"

    def bounds(self, model: str) -> Bounds:
        """The server's architecture is everybody's, whatever a client would use for itself."""
        return {**super().bounds(model), "model": self.model.shapes}

    async def train(self, w: Params, x: Tensor, y: Tensor, weight: Tensor, rng: Rng) -> Params:
        """w_{r+1}: the surrogate's minimum in B_ρ(w_r), as far as SGD gets (Algorithm 1, line 8)."""
        config = self.config
        plan = ClientData(x, y, self.task.classes).epochs(rng, config.server_epochs, config.server_batch)
        plan["mask"] = plan["mask"].to(weight.device) * weight[plan["index"]]
        steps, batch = plan["index"].shape
        plan["lr"] = torch.full((steps,), config.server_lr, dtype=torch.float64)
        plan["lr"][steps // 2 :] *= config.server_decay
        if config.server_augmentation and steps:  # vmap needs a seed to map over
            seeds = rng("augmentation").seeds(steps)[:, None] + torch.arange(batch)
            augmentation = Augmentation(config.server_augmentation, self.task.shape[1:])
            plan["changes"] = augmentation.draw(seeds.to(x.device), one_kind=config.server_kinds == "batch")
        sgd = SGD(config.server_momentum, config.server_weight_decay)
        learner = SurrogateTrainer(Trainer(self.model, sgd, weighted_cross_entropy), config.rho)
        w, _ = await scan(learner.step, (w, learner.trainer.init(w)), plan, Pool(x=x, y=y), w)
        return w


class Surrogate(ImageTrained[Options]):
    """Abstract: clients send labelled images."""

    def bounds(self, model: str) -> Bounds:
        shown = {"counts": (self.task.classes,)} if self.config.weighting == "samples" else {}
        return {**super().bounds(model), "shown counts": shown, "images": self.task.classes * self.config.ipc}

    async def round(self, state: State, fed: Federation) -> State:
        answers = await fed.ask(fed.sample(self.config.active), Current(state["w"]), Images)
        x, y, weight = self.pool(answers)
        if len(y) == 0:
            log.warning(
                f"{self.name}, round {fed.round}: no client that answered holds min_class={self.config.min_class} "
                "samples of any class, so that nothing was learned"
            )
            return state
        fed.show("images that the clients sent", x, y)
        return {"w": await self.train(state["w"], x, y, weight, fed.rng("batches"))}

    # The server

    def pool(self, answers: Answers[Images]) -> tuple[Tensor, Tensor, Tensor]:
        """All images, their labels, and their weights, which are 1 on average."""
        received = [self._checked(id, answers[id]) for id in answers]
        x, y, weight = (torch.cat(part) for part in zip(*received, strict=True))
        return x, y, weight / weight.mean().clamp_min(1e-12)

    def _checked(self, id: str, sent: Images) -> tuple[Tensor, Tensor, Tensor]:
        """Here again: where all are in one process, nobody has looked at values."""
        x, y = sent.images, sent.labels
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < self.task.classes:
            raise FedgistError(f"client {id} sent labels that are not between 0 and {self.task.classes - 1}")
        if x.dtype == uint8:
            x = dequantise(x, self.task.low, self.task.high)
        weight = torch.ones(len(y), dtype=x.dtype, device=x.device)
        if sent.counts:  # Eq. 10 with n_k,c: an image stands for its share of the class
            weight = sent.counts["counts"][y].to(x.dtype) / y.bincount(minlength=self.task.classes)[y]
        return x, y, weight

    # A client

    def held(self, me: Site) -> list[int]:
        """The classes that a client has enough samples of."""
        return [c for c, n in enumerate(me.data.counts().tolist()) if n >= self.config.min_class]

    def some_real(self, me: Site, held: Sequence[int], rng: Rng) -> Tensor:
        """`ipc` samples of each class, class after class; a class that has fewer gives some of them again."""
        chosen = []
        for c in held:
            own = (me.data.y == c).nonzero().flatten()
            order = rng(c).permutation(len(own)).to(own.device)
            chosen.append(own[order[torch.arange(self.config.ipc, device=own.device) % len(own)]])
        return me.data.x[torch.cat(chosen)] if chosen else me.data.x[:0]

    def share(self, me: Site, held: Sequence[int], images: Tensor) -> Images:
        """What a client sends: `ipc` images of each class that it holds, class after class."""
        labels = torch.tensor(held, dtype=torch.int64, device=images.device).repeat_interleave(self.config.ipc)
        counts = {"counts": me.data.counts().to(images.dtype)} if self.config.weighting == "samples" else {}
        if self.config.pixels == "uint8":
            images = quantise(images, self.task.low, self.task.high)
        elif self.config.pixels == "float16":
            images = images.half()
        return Images(images, labels, counts)
