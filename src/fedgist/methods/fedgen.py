"""FedGen: data-free distillation with a generator in latent space. Zhu et al. 2021, Algorithm 1, Eqs. 4 and 5.

Deviations from the paper (docs/fedgen.md tells more):
1. loss="code", the default, is that of the released code: label-weighted cross-entropy of each user instead of that of
   averaged logits, guidance that starts at 10 and decays, a second guidance by divergence, uniform noise and labels.
   loss="paper" is Eqs. 4 and 5.
2. The server sees heads and sample counts n_k of each user, but only sums of extractors; of label counts only sums too,
   unless the loss weighs users by them (loss="code").
3. Averages are weighted by sample counts, not uniform; `weighting` chooses.
4. The generator's BatchNorm statistics travel, so that users can run it; the released code passes a reference.
5. The first round is not guided: there is no trained generator yet.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

import fedgist.api as fg
from fedgist.learning.distillation import GuidedTrainer, label_weights
from fedgist.learning.optimisers import Adam
from fedgist.synthesis.generators import Generator, GeneratorTrainer, draw_labels

T = TypeVar("T")


@dataclass(frozen=True)
class Config(fg.GlobalModelOptions):
    loss: str = fg.option("code", "Losses of the paper (Eqs. 4, 5) or of its released code.", choices=("paper", "code"))
    latent: str | None = fg.option(None, "Layer that generated features enter; without it, the classifier.")
    guidance: float | None = fg.option(
        None, "Weight of generated features: 10 with loss=code, 1 with loss=paper.", low=0
    )
    echo: float = fg.option(10.0, "loss=code: weight of the divergence from what the user's labels generate.", low=0)
    guidance_decay: float = fg.option(
        0.98, "loss=code: factor a round of both weights, down to 0.0001.", above=0, high=1
    )
    guided_steps: int | None = fg.option(
        None, "Local steps that are guided: 20 with loss=code, all with loss=paper.", low=0
    )
    generated: int = fg.option(
        0, "Generated features in a local step, B_G; 0 is as many as samples.", low=0, safe=("0..4096",)
    )
    noise: str = fg.option(
        "auto", "Noise of the generator; auto is uniform with loss=code.", choices=("auto", "normal", "uniform")
    )
    noise_size: int = fg.option(32, "Dimensions of the noise.", low=1, safe=("1..1024",))
    hidden: int = fg.option(256, "Hidden units of the generator.", low=1, safe=("1..4096",))
    generator_steps: int = fg.option(50, "Steps of the generator a round.", low=0)
    generator_batch: int = fg.option(32, "Samples in a batch of the generator.", low=2)
    generator_lr: float = fg.option(3e-4, "Learning rate of the generator (Adam) in the first round.", above=0)
    generator_decay: float = fg.option(0.98, "Factor a round of the generator's learning rate.", above=0, high=1)
    generator_weight_decay: float = fg.option(0.01, "L2 penalty of the generator.", low=0)
    diversity: float = fg.option(1.0, "Weight of the diversity loss of the generator.", low=0)
    label_weights: str = fg.option(
        "counts", "loss=code: users weigh by label counts, which they show, or alike.", choices=("counts", "uniform")
    )

    def guidance_at(self, round: int, batch: int) -> tuple[float, float]:
        """α_t and β_t of a step on so many samples."""
        if self.loss == "paper":
            return (1.0 if self.guidance is None else self.guidance), 0.0
        decay, start = self.guidance_decay ** (round - 1), 10.0 if self.guidance is None else self.guidance
        alpha, beta = (max(min(1e-4, weight), weight * decay) for weight in (start, self.echo))
        return alpha * (self.generated or batch) / batch, beta

    @property
    def guided_until(self) -> float:
        """The local step that is no longer guided."""
        return {"code": 20, "paper": math.inf}[self.loss] if self.guided_steps is None else self.guided_steps

    @property
    def noise_kind(self) -> str:
        return {"code": "uniform", "paper": "normal"}[self.loss] if self.noise == "auto" else self.noise

    @property
    def echoes(self) -> bool:
        return self.loss == "code" and self.echo > 0

    @property
    def shows_counts(self) -> bool:
        return self.loss == "code" and self.label_weights == "counts"


@fg.message
class Broadcast:
    """θ, the generator w and the label prior p̂(y) (Algorithm 1, line 3)."""

    theta: fg.Params = fg.wire(shape="weights", holds="weights")
    statistics: fg.Params = fg.wire(shape="statistics", paper=False, holds="statistics")
    generator: fg.Params = fg.wire(shape="generator")
    generator_statistics: fg.Params = fg.wire(shape="generator statistics", paper=False)
    prior: Tensor = fg.wire(shape=("classes",))


@fg.message
class Upload:
    """θ_k and c_k (line 11): the head to see, the extractor as p_k θ_k to sum; p_k = n_k / n_ref."""

    head: fg.Params = fg.wire(shape="head", holds="weights")
    extractor: fg.Params = fg.wire(shape="extractor", additive=True, per="p", holds="weights")
    statistics: fg.Params = fg.wire(
        shape="extractor statistics", additive=True, paper=False, per="p", holds="statistics"
    )
    counts: fg.Params = fg.wire(shape="summed counts", additive=True, low=0, holds="counts")
    own_counts: fg.Params = fg.wire(shape="shown counts", low=0, holds="counts")
    p: float = fg.wire(paper=False, low=0, high=1, holds="size")


class FedGen(fg.GlobalModel[Config]):
    name = "fedgen"
    summary = "A generator learned from the users' heads teaches every user what the others know (Zhu et al. 2021)."
    citation = "zhu2021data"
    profiles = {
        "paper": {"dataset": "mnist", "normalise": "half", "model": "cnn", "partition": "dirichlet-fedgen"}
        | {"ratio": 0.5, "alpha": 0.1, "partition_seed": 42, "clients": 20, "active": 10, "rounds": 200, "steps": 20}
        | {"batch": 32, "lr": 0.01, "schedule": "exponential", "decay": 0.99, "published": True},
        "emnist": {"dataset": "emnist-letters", "normalise": "half", "model": "cnn", "partition": "dirichlet-fedgen"}
        | {"ratio": 0.1, "alpha": 0.1, "min_size": 260, "partition_seed": 42, "clients": 20, "active": 10}
        | {"rounds": 200, "steps": 20, "batch": 32, "lr": 0.01, "schedule": "exponential", "echo": 1.0}
        | {"generator_lr": 1e-4, "published": True},
        "celeba": {"dataset": "celeba", "model": "cnn", "partition": "group", "clients": 25, "active": 10, "lr": 0.01}
        | {"rounds": 200, "steps": 20, "batch": 32, "schedule": "exponential", "hidden": 128, "published": True},
        "small": {"dataset": "mnist5k", "model": "cnn", "alpha": 0.1, "rounds": 60, "steps": 20}
        | {"lr": 0.02, "schedule": "exponential", "note": "5,000 digits, 10 clients, all active, 60 rounds, lr 0.02"},
        "demo": {"model": "cnn", "rounds": 15, "steps": 20, "lr": 0.02} | {"note": "15 rounds of 20 steps"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "active": 0.6}
        | {"noise_size": 4, "hidden": 8, "generator_steps": 3, "generator_batch": 8},
    }

    def __init__(self, config: Config, task: fg.Task):
        for model in task.models.values():
            if config.latent is not None and config.latent not in model.layer_shapes:
                raise fg.unknown(f"layer of {model.name}", config.latent, model.layer_shapes)
        if config.share == "body":
            raise fg.FedgistError("fedgen learns from heads, so that they travel: set share to all or head")
        super().__init__(config, task, head_from=config.latent)
        self.latent = config.latent or self.model.classifier
        self.generator = Generator(task.classes, self.model.layer_shapes[self.latent], config.noise_size, config.hidden)
        adam = Adam(weight_decay=config.generator_weight_decay)
        self.teaching = GeneratorTrainer(self.generator, self.model, self.latent, adam, config.loss, config.diversity)

    def bounds(self, model: str) -> fg.Bounds:
        net, generator = self.task.models[model], self.generator
        head, rest = self.parts(net, net.shapes)
        extractor, statistics = fg.statistics_apart(net.buffers, rest)
        weights, generator_statistics = fg.statistics_apart(generator.buffers, generator.shapes)
        counts = {"labels": (self.task.classes,)}
        shown, summed = (counts, {}) if self.config.shows_counts else ({}, counts)
        return {
            **super().bounds(model),
            "head": head,
            "extractor": extractor,
            "extractor statistics": statistics,
            "generator": weights,
            "generator statistics": generator_statistics,
            "shown counts": shown,
            "summed counts": summed,
        }

    def parts(self, model: fg.Model, w: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
        """The head, BatchNorm statistics included (it must run), and what travels of the rest."""
        head = self.travel.head(model)
        rest = [name for name in self.travel.names(model) if name not in head]
        return {name: w[name] for name in w if name in head}, {name: w[name] for name in rest}

    def server_init(self, rng: fg.Rng) -> fg.State:
        w = self.generator.init(rng("generator"))
        counts = torch.zeros(self.task.classes)
        return {**super().server_init(rng), "generator": w, "adam": self.teaching.init(w), "counts": counts}

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        answers = await fed.ask(fed.sample(self.config.active), self.broadcast(state), Upload)
        uploads = [answers[id] for id in answers if answers[id].p > 0]  # who holds no data has nothing to teach
        if not uploads:
            return state
        heads = fg.tree.stack([upload.head for upload in uploads])
        p = torch.tensor([upload.p for upload in uploads], device=state["counts"].device)
        if self.config.shows_counts:
            each = torch.stack([upload.own_counts["labels"] for upload in uploads])
            counts, weights = each.sum(0), label_weights(each)
        else:
            counts = answers.sum.counts["labels"]
            weights = torch.full((len(uploads), self.task.classes), 1 / len(uploads))
        generator, adam = await self.teach(state, heads, counts, weights, fed)
        theta = {name: torch.tensordot(p.to(head), head, 1) for name, head in heads.items()}
        theta = fg.tree.scale({**theta, **answers.sum.extractor, **answers.sum.statistics}, 1 / float(p.sum()))
        seen = counts if self.config.loss == "paper" else state["counts"] + counts
        w = {name: theta[name] for name in state["w"]}
        return {"w": w, "generator": generator, "adam": adam, "counts": seen}

    def broadcast(self, state: fg.State) -> Broadcast:
        theta = fg.statistics_apart(self.model.buffers, state["w"])
        generator = fg.statistics_apart(self.generator.buffers, state["generator"])
        return Broadcast(*theta, *generator, self.prior(state["counts"]))

    async def teach(
        self, state: fg.State, heads: fg.Params, counts: Tensor, weights: Tensor, fed: fg.Federation
    ) -> tuple[fg.Params, fg.Tree]:
        """Fit the generator to the heads (line 14, Eq. 4); gives it and its optimiser's state."""
        steps = (self.config.generator_steps, self.config.generator_batch)
        noise = self.generator.draw(self.config.noise_kind, steps, fed.rng("noise"))
        batches = {"y": draw_labels(self.prior(counts), steps, fed.rng("labels")), "noise": noise}
        rate = self.config.generator_lr * self.config.generator_decay ** (fed.round - 1)
        lr = torch.tensor(rate, dtype=torch.float64)  # rounded once, where it is used
        return await fg.scan(self.teaching.step, (state["generator"], state["adam"]), batches, heads, weights, lr)

    @fg.handler
    async def update(self, me: fg.Site, msg: Broadcast) -> Upload:
        """A user's local steps (lines 5 to 11)."""
        model, w = self.model_of(me), self.start(me, {**msg.theta, **msg.statistics})
        plan = self.config.plan(me.data, me.rng("batches"))
        labels = me.data.y[plan["index"]]
        if me.data.n > 0:
            learner = GuidedTrainer(fg.trainer(self.config, model), self.latent)
            guidance = torch.tensor(self.config.guidance_at(me.round, labels.shape[1]), dtype=torch.float64)
            plan |= await self.lessons(msg, labels, me.round, me.rng)
            w = await fg.train(self.config, learner, me, w, *guidance, plan=plan)
        self.keep(me, w)
        p = fg.client_weight(self.config, me)
        head, rest = self.parts(model, w)
        held = labels[..., None] == torch.arange(self.task.classes, device=labels.device)
        counts = {"labels": (held * plan["mask"].to(labels.device)[..., None]).sum((0, 1))}
        shown, summed = (counts, {}) if self.config.shows_counts else ({}, counts)
        return Upload(head, *fg.statistics_apart(model.buffers, fg.tree.scale(rest, p)), summed, shown, p)

    async def lessons(self, msg: Broadcast, labels: Tensor, round: int, rng: fg.Rng) -> dict[str, Tensor]:
        """What the generator adds to each local step (line 7); it does not change meanwhile, so it is asked once."""
        steps, batch = labels.shape
        extra = self.config.generated or batch
        drawn = draw_labels(msg.prior, (steps, extra), rng("labels")).to(labels.device)
        asked = torch.cat([drawn, labels], 1) if self.config.echoes else drawn
        generator = {**msg.generator, **msg.generator_statistics}
        noise = self.generator.draw(self.config.noise_kind, asked.shape, rng("noise"))
        z = await fg.compute(self.generator.sample, generator, asked, noise)
        on = (torch.arange(steps) < self.config.guided_until) & (round > 1)
        echo = {"echo": z[:, extra:]} if self.config.echoes else {}
        return {"z": z[:, :extra], "label": drawn, "on": on.float(), **echo}

    def prior(self, counts: Tensor) -> Tensor:
        """p̂(y): in proportion to the counts, or (loss="code") uniform over the labels seen; before any, uniform.

        Where a secure sum hides the counts of each, one that lies can make the sum of all negative.
        """
        known = counts.clamp_min(0) if self.config.loss == "paper" else (counts > 0).to(counts.dtype)
        return known / known.sum() if known.sum() > 0 else torch.ones_like(counts) / len(counts)
