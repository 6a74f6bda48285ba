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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import fedgist.api as fg
from fedgist.synthesis import encoded_updates
from fedgist.synthesis.encoded_updates import EncoderOptions, apply_update, part_of, statistics
from fedgist.synthesis.encoding import Encoder, Sent, as_float32


@dataclass(frozen=True)
class Config(EncoderOptions, fg.LocalOptions):
    """Synfreq of the paper is `steps` (mini-batches) or `epochs`."""

    feedback: bool = fg.option(False, "Add what an encoding lost to the next update (error feedback).")
    single: bool = fg.option(False, "One client and no way down: it applies its own decoded updates (section 4.1).")
    switch1: int | None = fg.option(None, "Scale updates by their cosine after so many rounds; none never does.", low=0)
    switch2: int | None = fg.option(None, "Exchange full weights after so many rounds; none never does.", low=0)
    active: float = fg.active_option()
    weighting: str = fg.weighting_option()
    n_ref: int = fg.n_ref_option()


@fg.message
class Start:
    """The common start, for a client that was never asked before."""

    w: fg.Params = fg.wire(shape="model", paper=False, holds="weights")
    version: int = fg.wire(torch.int64, paper=False)


@fg.message
class Weights:
    """The weights after `version` updates, for a client that missed so many that this is smaller."""

    w: fg.Params
    version: int = fg.wire(torch.int64, paper=False)


@fg.message
class Encoded:
    """Updates one after the other, each as D_syn = (x, y, α) with the norms of its layers."""

    images: Tensor = fg.wire(fg.float32, fg.float16, fg.uint8, shape=("updates", "images", "input"), holds="images")
    ends: Tensor = fg.wire(shape=("updates", "bytes", 2), paper=False)
    labels: Tensor = fg.wire(shape=("updates", "images", "classes"), holds="labels")
    weights: Tensor = fg.wire(shape=("updates", "images"))
    scales: Tensor = fg.wire(shape=("updates", "layers"), paper=False)


@fg.message
class Updates(Encoded):
    """The updates of the global model that a client misses, with BatchNorm statistics after each."""

    statistics: Tensor = fg.wire(shape=("updates", "statistics"), paper=False)


@fg.message
class Upload(Encoded):
    """A client's update of the model after `version` updates; p_k = n_k / n_ref, and p_k times what is summed."""

    version: int = fg.wire(torch.int64, paper=False, low=0)
    p: float = fg.wire(paper=False, low=0, high=1, holds="size")
    statistics: Tensor = fg.wire(shape=("statistics",), additive=True, paper=False, per="p", holds="statistics")
    cosine: float = fg.wire(additive=True, paper=False)


class TOFU(fg.PrivatelyTrained[Config], fg.ServerModel[Config]):
    name = "tofu"
    summary = "Updates travel as a few synthetic images whose gradient they are, up and down (Garg et al. 2022)."
    citation = "garg2022tofu"
    by_training = (Upload, fg.Local)
    profiles = {
        "paper": {"dataset": "mnist", "model": "lenet5", "partition": "iid", "clients": 10, "rounds": 133}
        | {"switch2": 130, "batch": 64, "lr": 0.01, "images": 64, "iterations": 1000},
        "small": {"dataset": "mnist5k", "model": "mlp:hidden=64", "partition": "iid", "rounds": 12, "lr": 0.1}
        | {"images": 32, "iterations": 150, "note": "5,000 digits, a small MLP, 12 rounds, 32 images, 150 iterations"},
        "demo": {"model": "mlp:hidden=32", "rounds": 10, "steps": 20, "lr": 0.1, "images": 24, "iterations": 30}
        | {"objective": "decoded", "note": "10 rounds of 20 steps, 24 images, 30 iterations of the encoder"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "active": 0.6}
        | {"images": 3, "iterations": 4, "feedback": True},
    }

    def __init__(self, config: Config, task: fg.Task, encoder: Encoder | None = None):
        """`encoder` replaces the one that the options describe."""
        super().__init__(config, task)
        if any(model != self.model for model in task.models.values()):
            raise fg.FedgistError("tofu needs one model for all: a gradient means the same only at the same weights")
        self.encoder = encoder or config.encoder(self.model)
        self.worth_catching_up = encoded_updates.worth_sending(self.encoder, config.images)

    def bounds(self, model: str) -> fg.Bounds:
        images, encoder = self.config.images, self.encoder
        sizes = {"images": images, "bytes": images * (self.config.pixels == "uint8"), "statistics": encoder.statistics}
        sizes |= {"updates": self.worth_catching_up, "layers": fg.Exactly(len(encoder.layers))}
        return {**super().bounds(model), **sizes, "input": encoder.shape}

    def server_init(self, rng: fg.Rng) -> fg.State:
        state = super().server_init(rng)
        none = {**self.encoder.nothing(self.config.images), "statistics": statistics(self.model, state["w"])}
        past = {name: field[None][:0] for name, field in none.items()}
        return {**state, "version": 0, "past": past, "held": {}, "residual": {}, "cosine": {}}

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        chosen = fed.sample(self.config.active)
        if passed(self.config.switch2, fed.round):
            total = (await fed.ask(chosen, fg.Global(state["w"]), fg.Local)).sum
            return {**state, "w": fg.average(total, otherwise=state["w"]), "cosine": {}}
        if self.config.single and len(fed.ids) > 1:
            raise fg.FedgistError(f"single = true is for one client, not {len(fed.ids)}: set clients = 1")
        answers = await fed.ask(self.news(state, chosen), None, Upload)
        uploads, w = [answers[id] for id in answers], state["w"]
        held = {id: answers[id].version + (self.config.single and answers[id].p > 0) for id in answers}
        state = {**state, "held": {**state["held"], **held}}
        usable = [each for each in uploads if each.p > 0 and each.version == state["version"] and self.complete(each)]
        if not usable:
            return state
        for upload in usable:
            fed.show("proxy images up", upload.images[0], stretched=True)
        parts = [await self.decode(part_of(upload), w) for upload in usable]
        share = [upload.p / sum(upload.p for upload in usable) for upload in usable]
        update = fg.tree.map(lambda *each: sum(p * u for p, u in zip(share, each, strict=True)), *parts)
        p = sum(upload.p for upload in uploads)
        running = as_float32(answers.sum.statistics / p)
        state["cosine"] = {"cosine_up": torch.tensor(answers.sum.cosine / p)}
        if not self.config.single:
            aimed, sent, cosine = await self.encode(update, state["residual"], w, fed.rng, fed.round)
            update = await self.decode(sent, w)
            new = {**sent, "statistics": running}
            state["past"] = encoded_updates.remember(state["past"], new, self.worth_catching_up)
            state["residual"] = self.lost(aimed, update)
            state["cosine"]["cosine_down"] = cosine
            fed.show("proxy images down", sent["images"], stretched=True)
        return {**state, "w": apply_update(self.model, w, update, running), "version": state["version"] + 1}

    def news(self, state: fg.State, ids: Sequence[str]) -> dict[str, Start | Weights | Updates]:
        """What each client needs to be where the server is; one message for all who need the same."""
        needs = {id: state["version"] - state["held"][id] if id in state["held"] else None for id in ids}
        made = {missed: self.message(state, missed) for missed in set(needs.values())}
        return {id: made[missed] for id, missed in needs.items()}

    def message(self, state: fg.State, missed: int | None) -> Start | Weights | Updates:
        past, version = state["past"], state["version"]
        if missed is None:
            return Start(state["w"], version)
        if missed > len(past["scales"]):
            return Weights(state["w"], version)
        return Updates(**self.on_wire({name: field[len(field) - missed :] for name, field in past.items()}))

    async def evaluate(self, state: fg.State, fed: fg.Federation, test: fg.Samples) -> dict[str, float]:
        cosines = {name: float(cosine) for name, cosine in state["cosine"].items()}
        return {**await super().evaluate(state, fed, test), **cosines}

    def complete(self, upload: Upload) -> bool:
        """Whether it is one update in the agreed form, of which a declaration gives only the largest size."""
        (updates, images), small = upload.images.shape[:2], self.encoder.pixels == fg.uint8
        right = (upload.images.dtype == fg.uint8) == small and upload.ends.shape[1] == images * small
        return updates == 1 and images > 0 and right

    def disclosed(self, messages: Sequence[object]) -> tuple[fg.Params, fg.Params] | None:
        """A client's weights and update, for who has seen all messages between it and the server, the last one its."""
        return encoded_updates.replayed(self.encoder, messages, self.config.single)

    def on_wire(self, sent: Sent) -> Sent:
        return {**sent, "images": sent["images"].to(self.encoder.pixels)}

    async def encode(
        self, update: fg.Params, residual: fg.Params, w: fg.Params, rng: fg.Rng, round: int
    ) -> tuple[fg.Params, Sent, Tensor]:
        """The update with what earlier ones lost, how it is sent, and the cosine of what will be decoded from that."""
        update = fg.tree.add(update, residual) if residual else update
        damped = passed(self.config.switch1, round)
        sent, cosine = await encoded_updates.encode(self.encoder, self.config, update, w, rng("encoder"), damped)
        return update, sent, cosine

    async def decode(self, sent: Sent, w: fg.Params) -> fg.Params:
        """The update that everybody applies. Alone: were their roundings different, weights would drift apart."""
        return await fg.compute(self.encoder.decode, sent, w, alone=True)

    def lost(self, update: fg.Params, decoded: fg.Params) -> fg.Params:
        """What the next update makes up for (error feedback)."""
        return fg.tree.sub(update, decoded) if self.config.feedback else {}

    @fg.handler
    async def start(self, me: fg.Site, msg: Start) -> Upload:
        me.state |= {"w": msg.w, "version": msg.version, "residual": {}}
        return await self.contribute(me)

    @fg.handler
    async def catch_up(self, me: fg.Site, msg: Weights) -> Upload:
        me.state |= {"w": msg.w, "version": msg.version}
        return await self.contribute(me)

    @fg.handler
    async def update(self, me: fg.Site, msg: Updates) -> Upload:
        for i, running in enumerate(msg.statistics):
            decoded = await self.decode(part_of(msg, i), me.state["w"])
            me.state["w"] = apply_update(self.model, me.state["w"], decoded, running)
            me.state["version"] += 1
        return await self.contribute(me)

    async def contribute(self, me: fg.Site) -> Upload:
        """Train, and encode U_real, the difference between the starting and the ending weights."""
        w, version, p = me.state["w"], me.state["version"], fg.client_weight(self.config, me)
        if p == 0:
            nothing = {name: field[None] for name, field in self.on_wire(self.encoder.nothing(0)).items()}
            return Upload(**nothing, version=version, p=0.0, statistics=0 * statistics(self.model, w), cosine=0.0)
        trained = await fg.train(self.config, fg.learner(self.config, self.model), me, w)
        real = {name: w[name] - trained[name] for name in self.encoder.names}
        aimed, sent, cosine = await self.encode(real, me.state["residual"], w, me.rng, me.round)
        running = as_float32(statistics(self.model, trained) * p)
        if self.config.feedback or self.config.single:
            decoded = await self.decode(sent, w)
            me.state["residual"] = self.lost(aimed, decoded)
        if self.config.single:  # the server will do the same, so nothing need come back
            me.state |= {"w": apply_update(self.model, w, decoded, as_float32(running / p)), "version": version + 1}
        fields = {name: field[None] for name, field in self.on_wire(sent).items()}
        return Upload(**fields, version=version, p=p, statistics=running, cosine=p * float(cosine))

    @fg.handler
    async def full(self, me: fg.Site, msg: fg.Global) -> fg.Local:
        """A round of FedAvg (switch₂)."""
        w = await fg.train(self.config, fg.learner(self.config, self.model), me, msg.w)
        p = fg.client_weight(self.config, me)
        return fg.Local(await fg.weighted(w, p), p)


def passed(switch: int | None, round: int) -> bool:
    return switch is not None and round > switch
