"""TOFU: weight updates encoded as the gradient of a few synthetic images. Algorithm of sections 3.2 to 3.4.

"TOFU: Towards Obfuscated Federated Updates by Encoding Weight Updates into Gradients from Proxy Data" (Garg et al.).

Deviations from the paper, which leaves much to a supplement that is not public (docs/tofu.md tells more):
1. The result of a round travels with the request of the next, so that a round is one exchange; the first request
   carries the common start, which the paper takes for granted and the paper's count leaves out.
2. A client that missed rounds gets the encoded updates that it missed, or the weights where they are smaller; the
   paper knows only full participation. A reply that is late was encoded at weights that are gone, and is left out.
3. Averages are weighted by sample counts, not uniform; `weighting` chooses.
4. How labels and weights are parametrised, and by layers or as a whole, the paper does not say; all are offered.
5. BatchNorm statistics, which no gradient can encode, travel as they are beside the images, and are frozen (evaluation
   mode) while encoding and decoding. The paper does not mention them.
6. `steps` (Synfreq in mini-batches) draws from a fresh shuffle each round; what an epoch has left over is not kept.
7. In the rounds of full weights (switch₂) both directions carry weights, as in FedAvg.
"""

import logging
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedgist.core import tree
from fedgist.core.errors import FedgistError
from fedgist.core.federation import Federation, Site
from fedgist.core.message import Bounds, Params, float16, float32, message, uint8, wire
from fedgist.core.method import Method, Task
from fedgist.core.rng import Rng
from fedgist.core.work import compute, scan
from fedgist.learning.evaluation import accuracy
from fedgist.learning.global_model import Global, Local, average
from fedgist.learning.training import LocalOptions, client_weight, train, trainer
from fedgist.options import option
from fedgist.synthesis import encoding
from fedgist.synthesis.encoding import Encoder, Sent, as_float32, moved

log = logging.getLogger("fedgist")

PIXELS = {"float32": float32, "float16": float16, "uint8": uint8}


@dataclass(frozen=True)
class Config(LocalOptions):
    """Synfreq of the paper is `steps` (mini-batches) or `epochs`."""

    images: int = option(64, "Synthetic images that encode an update, N.", low=1)
    iterations: int = option(1000, "Iterations of the encoder.", low=0)
    encoder_lr: float = option(0.1, "Learning rate of images, labels and weights (Adam).", above=0)
    objective: str = option(
        "layers", "Cosine that is fitted: global (Eq. 3), mean of layers, decoded.", choices=encoding.OBJECTIVES
    )
    labels: str = option(
        "free", "Labels and weights: free numbers, or through a softmax.", choices=encoding.PARAMETRISATIONS
    )
    prior: str = option(
        "full", "Images as sent: full size, one channel (grey), half the height and width.", choices=encoding.PRIORS
    )
    pixels: str = option("float32", "Pixels on the wire.", choices=PIXELS)
    feedback: bool = option(False, "Add what an encoding lost to the next update (error feedback).")
    single: bool = option(False, "One client and no way down: it applies its own decoded updates (section 4.1).")
    switch1: int | None = option(None, "Scale updates by their cosine after so many rounds; none never does.", low=0)
    switch2: int | None = option(None, "Exchange full weights after so many rounds; none never does.", low=0)
    active: float = option(0.0, "Clients asked in a round: a number, a fraction below 1, or 0 for all.", low=0)
    weighting: str = option("samples", "Weight of a client in the average.", choices=("samples", "uniform"))
    n_ref: int = option(1 << 20, "Sample count that weighs 1; no client may hold more.", low=1)


@message
class Start:
    """The common start, for a client that was never asked before."""

    w: Params = wire(shape="model", paper=False)
    version: int = wire(torch.int64, paper=False)


@message
class Weights:
    """The weights after `version` updates, for a client that missed so many that this is smaller."""

    w: Params
    version: int = wire(torch.int64, paper=False)


@message
class Encoded:
    """Updates one after the other, each as D_syn = (x, y, α) with the norms of its layers."""

    images: Tensor = wire(float32, float16, uint8, shape=("updates", "images", "channels", "height", "width"))
    ends: Tensor = wire(shape=("updates", "bytes", 2), paper=False)
    labels: Tensor = wire(shape=("updates", "images", "classes"))
    weights: Tensor = wire(shape=("updates", "images"))
    scales: Tensor = wire(shape=("updates", "layers"), paper=False)


@message
class Updates(Encoded):
    """The updates of the global model that a client misses, with BatchNorm statistics after each."""

    statistics: Tensor = wire(shape=("updates", "statistics"), paper=False)


@message
class Upload(Encoded):
    """A client's update of the model after `version` updates; p_k = n_k / n_ref, and p_k times what is summed."""

    version: int = wire(torch.int64, paper=False)
    p: float = wire(paper=False)
    statistics: Tensor = wire(shape=("statistics",), additive=True, paper=False)
    cosine: float = wire(additive=True, paper=False)


class TOFU(Method):
    name = "tofu"
    summary = "Updates travel as a few synthetic images whose gradient they are, up and down (Garg et al. 2022)."
    citation = """@article{garg2022tofu,
  title   = {{TOFU}: Towards Obfuscated Federated Updates by Encoding Weight Updates into Gradients from Proxy Data},
  author  = {Garg, Isha and Nagaraj, Manish and Roy, Kaushik},
  journal = {arXiv preprint arXiv:2201.08494},
  year    = {2022}
}"""
    Config = Config
    profiles = {
        "paper": {"dataset": "mnist", "model": "lenet5", "partition": "iid", "clients": 10, "rounds": 133}
        | {"switch2": 130, "batch": 64, "lr": 0.01, "images": 64, "iterations": 1000},
        "small": {"dataset": "mnist5k", "model": "mlp:hidden=64", "partition": "iid", "rounds": 12, "lr": 0.1}
        | {"images": 32, "iterations": 150, "note": "5,000 digits, a small MLP, 12 rounds, 32 images, 150 iterations"},
        "demo": {"model": "mlp:hidden=32", "rounds": 10, "steps": 20, "lr": 0.1, "images": 24}
        | {"iterations": 30, "objective": "decoded"}
        | {"note": "10 rounds of 20 steps, 24 images, 30 iterations of the encoder"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "active": 0.6}
        | {"images": 3, "iterations": 4, "feedback": True},
    }

    def __init__(self, config: Any, task: Task, encoder: Encoder | None = None):
        """`encoder` replaces the one that the options describe."""
        super().__init__(config, task)
        if any(model != self.model for model in task.models.values()):
            raise FedgistError("tofu needs one model for all: a gradient means the same only at the same weights")
        pixels = PIXELS[config.pixels]
        self.encoder = encoder or Encoder(self.model, config.prior, config.labels, config.objective, pixels)
        model = self.model
        self.statistics = sum(math.prod(model.shapes[name]) for name in model.buffers)
        size, whole = self._bytes(config.images), 4 * (model.size + self.statistics)
        self.worth_catching_up = max(1, whole // size)
        if size > whole:
            fitting = bisect_right(range(1, config.images), whole, key=self._bytes)
            fewer = f"{fitting} image{'s' * (fitting > 1)}" if fitting else "not even one image"
            log.warning(f"tofu: an encoded update has {size} bytes, the weights only {whole}; {fewer} would be smaller")

    def _bytes(self, images: int) -> int:
        """Of an update that is encoded in so many images."""
        return self.encoder.payload(images) + 4 * self.statistics

    def bounds(self, model: str) -> Bounds:
        channels, height, width = self.encoder.shape
        return {
            "model": self.task.models[model].shapes,
            "updates": self.worth_catching_up,
            "images": self.config.images,
            "bytes": self.config.images if self.config.pixels == "uint8" else 0,
            "channels": channels,
            "height": height,
            "width": width,
            "classes": self.task.classes,
            "layers": len(self.encoder.layers),
            "statistics": self.statistics,
        }

    def server_init(self, rng: Rng) -> Any:
        w = self.model.init(rng)
        none = {**self.encoder.nothing(self.config.images), "statistics": encoding.statistics(self.model, w)}
        past = {name: field[None][:0] for name, field in none.items()}
        return {"w": w, "version": 0, "past": past, "held": {}, "residual": {}, "cosine": {}}

    async def round(self, state: Any, fed: Federation) -> Any:
        chosen = fed.sample(self.config.active)
        if passed(self.config.switch2, fed.round):
            total = (await fed.ask(chosen, Global(state["w"]), Local)).sum
            return {**state, "w": average(total, otherwise=state["w"]), "cosine": {}}
        if self.config.single and len(fed.ids) > 1:
            raise FedgistError(f"single = true is for one client, not {len(fed.ids)}: set clients = 1")
        answers = await fed.ask(self.news(state, chosen), None, Upload)
        uploads, w = [answers[id] for id in answers], state["w"]
        held = {id: answers[id].version + (self.config.single and answers[id].p > 0) for id in answers}
        state = {**state, "held": {**state["held"], **held}}
        usable = [upload for upload in uploads if upload.p > 0 and upload.version == state["version"]]
        if not usable:
            return state
        for upload in usable:
            fed.show("proxy images up", upload.images[0], stretched=True)
        parts = [await self.decode(part_of(upload), w) for upload in usable]
        share = [upload.p / sum(upload.p for upload in usable) for upload in usable]
        update = tree.map(lambda *each: sum(p * u for p, u in zip(share, each, strict=True)), *parts)
        p = sum(upload.p for upload in uploads)
        statistics = as_float32(answers.sum.statistics / p)
        state["cosine"] = {"cosine_up": torch.tensor(answers.sum.cosine / p)}
        if not self.config.single:
            aimed, sent, cosine = await self.encode(update, state["residual"], w, fed.rng, fed.round)
            update = await self.decode(sent, w)
            state |= {"past": self.remember(state["past"], {**sent, "statistics": statistics})}
            state["residual"] = self.lost(aimed, update)
            state["cosine"]["cosine_down"] = cosine
            fed.show("proxy images down", sent["images"], stretched=True)
        return {**state, "w": moved(self.model, w, update, statistics), "version": state["version"] + 1}

    def news(self, state: Any, ids: Sequence[str]) -> dict[str, Any]:
        """What each client needs to be where the server is; one message for all who need the same."""
        version, held = state["version"], state["held"]
        needs = {id: version - held[id] if id in held else None for id in ids}
        made = {missed: self.message(state, missed) for missed in set(needs.values())}
        return {id: made[missed] for id, missed in needs.items()}

    def message(self, state: Any, missed: int | None) -> Start | Weights | Updates:
        past, version = state["past"], state["version"]
        if missed is None:
            return Start(state["w"], version)
        if missed > len(past["scales"]):
            return Weights(state["w"], version)
        return Updates(**self.on_wire({name: field[len(field) - missed :] for name, field in past.items()}))

    def remember(self, past: Any, new: Any) -> Any:
        """The encoded updates that together are still smaller than the weights."""
        joined = {name: torch.cat([past[name].to(new[name]), new[name][None]]) for name in past}
        return {name: field[-self.worth_catching_up :] for name, field in joined.items()}

    def on_wire(self, sent: Any) -> Any:
        return {**sent, "images": sent["images"].to(PIXELS[self.config.pixels])}

    async def encode(self, update: Params, residual: Params, w: Params, rng: Rng, round: int) -> Any:
        """The update with what earlier ones lost, how it is sent, and the cosine of what will be decoded from that."""
        update = tree.add(update, residual) if residual else update
        config, encoder = self.config, self.encoder
        aim = await compute(encoder.aim, update)
        rates = {"lr": encoding.learning_rates(config.encoder_lr, config.iterations)}
        begin = encoder.init(encoder.start(rng("encoder"), config.images))
        variables, _ = await scan(encoder.step, begin, rates, w, *aim)
        damped = torch.tensor(float(passed(config.switch1, round)))
        sent, cosine = await compute(encoder.finish, variables, w, *aim, damped)
        return update, sent, cosine

    async def decode(self, sent: Sent, w: Params) -> Params:
        """The update that everybody applies. Alone: were their roundings different, weights would drift apart."""
        decoded: Params = await compute(self.encoder.decode, sent, w, alone=True)
        return decoded

    def lost(self, update: Params, decoded: Params) -> Params:
        """What the next update makes up for (error feedback)."""
        return tree.sub(update, decoded) if self.config.feedback else {}

    async def start(self, me: Site, msg: Start) -> Upload:
        me.state |= {"w": msg.w, "version": msg.version, "residual": {}}
        return await self.contribute(me)

    async def catch_up(self, me: Site, msg: Weights) -> Upload:
        me.state |= {"w": msg.w, "version": msg.version}
        return await self.contribute(me)

    async def update(self, me: Site, msg: Updates) -> Upload:
        for i, statistics in enumerate(msg.statistics):
            decoded = await self.decode(part_of(msg, i), me.state["w"])
            me.state |= {"w": moved(self.model, me.state["w"], decoded, statistics), "version": me.state["version"] + 1}
        return await self.contribute(me)

    async def contribute(self, site: Site) -> Upload:
        """Train, and encode U_real, the difference between the starting and the ending weights."""
        w, version, p = site.state["w"], site.state["version"], client_weight(self.config, site)
        if p == 0:
            nothing = {name: field[None] for name, field in self.on_wire(self.encoder.nothing(0)).items()}
            return Upload(
                **nothing, version=version, p=0.0, statistics=0 * encoding.statistics(self.model, w), cosine=0.0
            )
        trained = await train(self.config, trainer(self.config, self.model), site, w)
        real = {name: w[name] - trained[name] for name in self.encoder.names}
        aimed, sent, cosine = await self.encode(real, site.state["residual"], w, site.rng, site.round)
        statistics = as_float32(encoding.statistics(self.model, trained) * p)
        if self.config.feedback or self.config.single:
            decoded = await self.decode(sent, w)
            site.state["residual"] = self.lost(aimed, decoded)
        if self.config.single:  # the server will do the same, so nothing need come back
            site.state |= {"w": moved(self.model, w, decoded, as_float32(statistics / p)), "version": version + 1}
        fields = {name: field[None] for name, field in self.on_wire(sent).items()}
        return Upload(**fields, version=version, p=p, statistics=statistics, cosine=p * float(cosine))

    async def full(self, me: Site, msg: Global) -> Local:
        """A round of FedAvg (switch₂)."""
        w, p = await train(self.config, trainer(self.config, self.model), me, msg.w), client_weight(self.config, me)
        return Local(tree.scale(w, p), p)

    async def evaluate(self, state: Any, fed: Federation, test: tuple[Tensor, Tensor]) -> dict[str, float]:
        cosines = {name: float(cosine) for name, cosine in state["cosine"].items()}
        return {"accuracy": await accuracy(self.model, state["w"], test), **cosines}

    def weights(self, state: Any) -> Params:
        return state["w"]


def passed(switch: int | None, round: int) -> bool:
    return switch is not None and round > switch


def part_of(msg: Any, i: int = 0) -> Sent:
    """One of the encoded updates in a message; copies, as where a tensor lies can change the last bit of a product."""
    return {name: getattr(msg, name)[i].clone() for name in ("images", "ends", "labels", "weights", "scales")}
