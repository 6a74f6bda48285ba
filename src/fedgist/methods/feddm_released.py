"""FedDM by released class sums: clients release sums of features, and the server makes the images. After Xiong et al.

    public   classes, nets w_1 … w_M around w_r (a seed), centres a_j, clip C
    client   Σ over its records of each class of clip_C(u_j(x) − a_j)/C, for all j, and how many there are
    server   images whose mean under each net is that of the sums; w_{r+1} by training on them

Algorithm 2 of FedDM clips what a whole batch gives, and pays in every step of matching. Here one record moves what a
client sends by √M at most, that is all it ever sends of its data in a round, and images are matched to it as often as
one likes: in a private run one Gaussian release a round, each client's own noise, or once for all in a secure sum.

Deviations from FedDM (docs/feddm.md):
1. The server makes one set of images for everybody's data, all classes of the public list; they start as noise.
2. Features and logits are scaled to norm 1, moved by a public centre (where the images of the last round lie), clipped.
3. M nets a round instead of one in each step; Adam instead of SGD, as such features have small gradients.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import fedgist.api as fg
from fedgist.synthesis.class_sums import ClassSums, SumMatcher
from fedgist.synthesis.pixels import pixel_range


@dataclass(frozen=True)
class Config(fg.ImageTrainingOptions):
    nets: int = fg.option(8, "Public nets M under which sums are released, a round.", low=1)
    ipc: int = fg.option(20, "Images of each class that the server makes.", low=1)
    clip: float = fg.option(0.5, "Bound C on a record's features, which have norm 1, less their centre.", above=0)
    steps: int = fg.option(500, "Matching steps of the server, a round.", low=0)
    lr: float = fg.option(0.1, "Learning rate of the images.", above=0)
    batch: int = fg.option(500, "Samples whose features are held at once; it changes nothing but rounding.", low=1)
    noise_multiplier: float = fg.option(
        0.0,
        "Deviation of a round's noise over what one record can change; 0: in a private run the least that ε allows in "
        "all rounds, otherwise no noise.",
        low=0,
        role=fg.Role.LATER,
    )
    private_steps = 1
    """A round is one release."""
    sampling = 1.0
    """Of all records."""


@fg.message
class Around:
    """The weights w_r, the seeds of nets around them, and the centre under each."""

    w: fg.Params
    seeds: Tensor = fg.wire(fg.int64, shape=("nets",))
    centres: Tensor = fg.wire(fg.float32, shape=("nets", "features"))


@fg.message
class Released:
    """Sums over the records of each class, under each net, and in the last column their number; seen only as totals."""

    total: Tensor = fg.wire(fg.float64, shape=("nets", "classes", "columns"), additive=True, holds="features")


class FedDMReleased(fg.ImageTrained[Config]):
    name = "feddm-released"
    summary = "Clients release sums of each class's features, the server makes images that match them: FedDM with DP."
    profiles = {
        "paper": {"dataset": "mnist", "model": "convnet:width=64", "partition": "dirichlet-balanced", "rounds": 5},
        "small": {"dataset": "mnist5k", "model": "convnet:width=16", "partition": "dirichlet-balanced", "rounds": 3}
        | {"nets": 4, "steps": 100, "ipc": 10, "server_epochs": 100, "server_batch": 64, "server_lr": 0.03}
        | {"note": "5,000 digits, ConvNet of width 16, 3 rounds, 4 nets, T = 100, 100 server epochs"},
        "demo": {"model": "convnet:width=16", "rounds": 2, "nets": 4, "steps": 60, "ipc": 5, "server_epochs": 100}
        | {"server_batch": 64, "server_lr": 0.03}
        | {"note": "ConvNet of width 16, 2 rounds, 4 nets, 5 images a class, T = 60, 100 server epochs"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "nets": 2, "steps": 3, "ipc": 2, "batch": 16}
        | {"server_epochs": 3, "server_batch": 8, "rho": 0.5},
    }

    def __init__(self, config: Config, task: fg.Task):
        super().__init__(config, task)
        fg.check_noise(config.noise_multiplier, task)
        self.sums = ClassSums(self.model, config.rho, config.clip)
        self.matcher = SumMatcher(self.sums, config.lr)

    def bounds(self, model: str) -> fg.Bounds:
        size = self.sums.size
        exact = {"nets": fg.Exactly(self.config.nets), "features": fg.Exactly(size), "columns": fg.Exactly(size + 1)}
        return {**super().bounds(model), **exact}

    @property
    def releases(self) -> fg.Declared:
        """Where the run is private: a record is in the row of its class, under every net."""
        if not self.config.noise_multiplier:
            raise fg.FedgistError("set noise_multiplier: sums without noise are not private")
        cost = fg.Release(self.config.noise_multiplier)
        return {Released: fg.Sums({"total": fg.Sum(self.sums.sensitivity(self.config.nets), 0.0)}, release=cost)}

    # The server

    def server_init(self, rng: fg.Rng) -> fg.State:
        images = rng("images").normal(self.task.classes * self.config.ipc, *self.task.shape)
        return {**super().server_init(rng), "x": images}

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        w, x, seeds = state["w"], state["x"], fed.rng("nets").seeds(self.config.nets)
        centres = await fg.compute(self.sums.centres, x, w, seeds)
        answers = await fed.ask(fed.ids, Around(w, seeds, centres), Released)
        means = self.sums.means(answers.sum.total).to(x)
        x = await self.match(x, w, seeds, centres, means)
        y = torch.arange(self.task.classes, device=x.device).repeat_interleave(self.config.ipc)
        fed.show("images that the server made", x, y)
        return {"w": await self.train(w, x, y, torch.ones(len(x)).to(x), fed.rng("batches")), "x": x}

    async def match(self, x: Tensor, w: fg.Params, seeds: Tensor, centres: Tensor, means: Tensor) -> Tensor:
        """The images after T steps, under one net after the other."""
        box = pixel_range(self.task.low, self.task.high, len(self.task.shape)).to(x)
        turns = {"net": torch.arange(self.config.steps) % self.config.nets}
        found, _ = await fg.scan(self.matcher.step, self.matcher.init(x), turns, w, seeds, centres, means, box)
        made: Tensor = found["x"]
        return made

    # A client

    @fg.handler
    async def release(self, me: fg.Site, msg: Around) -> Released:
        plan = me.data.epochs(me.rng("order"), 1, self.config.batch)
        return Released(await fg.compute(self.sums.sums, plan, me.data.pool, msg.w, msg.seeds, msg.centres))
