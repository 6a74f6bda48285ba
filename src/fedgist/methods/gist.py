"""Gist: the exact ridge classifier of everybody's data on a fixed feature map, from one exchange of sums. Our own.

    public   feature map φ (a name and a seed) with ‖φ‖ ≤ 1, clip C
    ask 1    client: (Σ φ(x), Σ y)                                         sum → n, mean μ, prior ȳ
    ask 2    client: z = clip_C(φ(x) − μ) / C;  (Σ z zᵀ, Σ z (y − 1/c)ᵀ)    sum → S, V
    server   W = (S₊ + λ I)⁻¹ V, with the intercept ȳ                       φ, μ, C, cW and cȳ are the model

Sums over clients are sums over the union, so how the data are split changes nothing but rounding: neither label skew,
nor sizes, nor how many clients there are. No client trains. Once all clients have answered, nobody is asked again.

Relatives: Fed3R (Fanì et al. 2024) and AFL (He et al. 2024) do this on the features of a pretrained net.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import fedgist.api as fg
from fedgist.features import SHARES, Ground, Moments, Sizes, build, drawn, learned, linear_model, usual
from fedgist.learning.ridge import Ridge, as_logits, balanced, ridge_of, symmetric

WIRES = {"float64": fg.float64, "float32": fg.float32, "float16": fg.float16}
SMALL = (fg.float64, fg.float32)
FROM_SUMS = [2.0 ** (k / 2) for k in range(-40, 21)]
CANDIDATES = [4.0**k for k in range(-6, 4)]
"""Ridges to choose from, as multiples of the mean eigenvalue of S: many, or few where each W travels."""


@dataclass(frozen=True)
class Config(fg.OwnHeadOptions):
    features: str | None = fg.option(
        None,
        "The feature map: scattering, fourier (of scattering; of what is no image, of values), convolutions (random), "
        "model (as it begins), learned (in a finish), or a+b; none: scattering of images and signals, else fourier.",
    )
    grid: int = fg.option(4, "Scattering, convolutions: cells along a side, over which they are averaged.", low=1)
    scales: int = fg.option(2, "Scattering of images: scales, each on images of half the size.", low=1, high=6)
    orientations: int = fg.option(8, "Scattering of images: directions of wavelets.", low=1, high=64)
    dimensions: int = fg.option(2048, "Fourier and convolutions: how many features.", low=2)
    bandwidth: float = fg.option(1.0, "Fourier: width s of the kernel; features before it have norm 1.", above=0)
    ridge: str = fg.option("sums", "λ: a number, sums (cross-validated on S and V) or validation (hits at clients).")
    held_out: int = fg.option(10, "With ridge=validation: every so many-th sample of a client judges λ alone.", low=2)
    balance: bool = fg.option(False, "Rare classes count as much as others: labels of mean 0 and deviation 1 for each.")
    clip: float = fg.option(
        2.0,
        "Bound C on the norm of centred features; from 2 on nothing is shortened. 0: as they are, for features=learned "
        "alone, so that W becomes the net's last layer.",
        low=0,
    )
    batch: int = fg.option(256, "Samples whose features are held at once; it changes nothing but rounding.", low=1)
    mirrored: bool = fg.option(False, "A sample is itself and its mirror image, with half the weight each.")
    wire: str = fg.option("float32", "How S and V travel; the sums of ask 1 never in float16.", choices=WIRES)
    spend: tuple[float, ...] = fg.option(SHARES, "Privacy budget: shares of Σφ, Σy, S, V.", above=0, role=fg.Role.LATER)


@fg.message
class Describe:
    """Give Σ φ(x) and Σ y; the seed is that of the feature map, `w` the net that it is about where that learned."""

    seed: int
    w: fg.Params = fg.wire(shape="learned")


@fg.message
class First:
    """First moments, seen only as totals."""

    features: Tensor = fg.wire(*SMALL, shape=("features",), additive=True, per="labels", holds="features")
    labels: Tensor = fg.wire(*SMALL, shape=("classes",), additive=True, low=0, holds="counts")


@fg.message
class Centre:
    """Give the products of what is centred at μ and clipped."""

    seed: int
    mean: Tensor = fg.wire(*SMALL, shape=("features",), holds="centre")


@fg.message
class Second:
    """Second moments, seen only as totals: Σ z zᵀ as its upper triangle, and Σ z (y − 1/c)ᵀ."""

    products: Tensor = fg.wire(*WIRES.values(), shape=("triangle",), additive=True, holds="products")
    targets: Tensor = fg.wire(*WIRES.values(), shape=("features", "classes"), additive=True, holds="features")


@fg.message
class Judge:
    """Count how many of your held-out samples each of these classifiers gets right."""

    seed: int
    mean: Tensor = fg.wire(*SMALL, shape=("features",))
    weights: Tensor = fg.wire(fg.float32, shape=("candidates", "features", "classes"))
    intercept: Tensor = fg.wire(fg.float32, shape=("classes",))


@fg.message
class Hits:
    """Held-out samples that each candidate got right, and at the end how many there are; seen only as totals."""

    correct: Tensor = fg.wire(fg.int64, shape=("counts",), additive=True, low=0)


class Gist(fg.OwnHeads[Config]):
    name = "gist"
    summary = "Sums of fixed features and of their products give everybody's exact ridge classifier in one round."
    profiles = {
        "paper": {"dataset": "cifar10", "rounds": 1},
        "small": {"dataset": "mnist5k", "rounds": 1, "note": "5,000 digits"},
        "demo": {"rounds": 1, "note": "nothing but the data: one round is all it has"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "features": "model+fourier", "grid": 2}
        | {"orientations": 4, "dimensions": 16, "ridge": "validation", "clip": 0.4, "batch": 64},
    }

    def __init__(self, config: Config, task: fg.Task, w: fg.Params | None = None):
        """`w` is what a net has learned, for the server: its clients are told."""
        super().__init__(config, task)
        self.net, self.w = task.models[task.model], w or {}
        sizes = Sizes(config.grid, config.scales, config.orientations, config.dimensions, config.bandwidth)
        ground = Ground(task.shape, task.low, task.high, self.net)
        self.folded = config.clip == 0
        names = config.features or usual(task.shape)
        if self.folded and names != "learned":
            raise fg.FedgistError(f"clip = 0 is for features = learned alone, not {names}")
        if config.mirrored:
            fg.only_images("mirrored", task.shape)
        if config.balance and (config.own or task.private):
            raise fg.FedgistError("balance is for sums without noise and for the common head alone: set it to false")
        self.features, self.learned = build(names, ground, sizes, raw=self.folded), learned(names, self.net)
        self.moments = Moments(self.features, task.classes, config.clip, config.mirrored, exact=task.private)
        self.wire = fg.float64 if task.private else WIRES[config.wire]
        self.linear = linear_model(names, ground, sizes)
        self.learns = f"linear on {names}"
        self.validated = config.ridge == "validation"
        self.fixed_ridge = None if config.ridge in ("sums", "validation") else ridge_of(config.ridge)
        self.leave_out({Judge: not self.validated})

    @property
    def model(self) -> fg.Model:
        """What comes out: φ, μ, C and W; or the net with another last layer."""
        return self.net if self.folded else self.linear

    def bounds(self, model: str) -> fg.Bounds:
        size, count = self.features.size, len(CANDIDATES)
        sizes = {"features": size, "triangle": size * (size + 1) // 2, "candidates": count, "counts": count + 1}
        return {**super().bounds(model), **sizes, "learned": self.net.shapes if self.learned else {}}

    @property
    def releases(self) -> dict[type, fg.Sums]:
        """Where the run is private: how far one record moves these sums."""
        if self.validated or self.config.own:
            raise fg.FedgistError("counts of hits get no noise: set ridge to sums and own to false in a private run")
        return dict(zip((First, Second), self.moments.releases(self.config.spend), strict=True))

    # The server

    def server_init(self, rng: fg.Rng) -> fg.State:
        if self.learned and not self.w:
            raise fg.FedgistError("features = learned is for a finish: run a method with --finish gist")
        size, classes = self.features.size, self.task.classes
        fitted = {"mean": torch.zeros(size), "weight": torch.zeros(size, classes), "intercept": torch.zeros(classes)}
        return {"seed": rng("features").seed, "w": self.w, **fitted, "ridge": torch.zeros(()), "answered": 0}

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        if state["answered"] == len(fed.ids):  # everybody's sums are in it: asked again, they would say the same
            return state
        seed: int = state["seed"]
        described = await fed.ask(fed.ids, Describe(seed, state["w"]), First)
        n = max(1.0, (counts := described.sum.labels.clamp_min(0)).sum().item())  # noise may make some negative
        prior, centre = counts / n, Centre(seed, self.on_wire(described.sum.features / n))
        multiplied = await fed.ask(described.ids, centre, Second)
        classifier = Ridge.of(symmetric(multiplied.sum.products), multiplied.sum.targets, self.wire)
        ridge = await self.by_hits(classifier, centre, prior, multiplied.ids, fed) if self.validated else None
        if ridge is None:  # Σ‖y − ȳ‖² = n (1 − ‖ȳ‖²), as each y is one of the unit vectors
            ridge = self.ridge_from(classifier, n, n * (1 - prior.square().sum().item()))
        fitted = {"mean": centre.mean, "weight": classifier.weights(ridge), "intercept": prior}
        if self.config.own:
            await fed.ask(multiplied.ids, fg.Head(seed, **fg.tree.map(self.on_wire, fitted)), fg.Done)
        sums = {**vars(described.sum), **vars(multiplied.sum)}  # who joins later changes these
        fitted |= {"ridge": torch.tensor(ridge, dtype=torch.float64)}
        about_this_mean = set(described.ids) & (set(multiplied.ids) - multiplied.late.keys())
        return {**state, **fitted, "sums": sums, "answered": len(about_this_mean)}

    def ridge_from(self, classifier: Ridge, samples: float, spread: float) -> float:
        """λ as it is given, or as the sums say."""
        return self.fixed_ridge or classifier.best(samples, spread, self.ridges(classifier, FROM_SUMS))

    def ridges(self, classifier: Ridge, factors: list[float]) -> list[float]:
        """What to choose λ from: never below what rounding on the wire, or noise, may have done to S."""
        return [max(classifier.least, classifier.scale * factor) for factor in factors]

    async def by_hits(
        self, fit: Ridge, centre: Centre, prior: Tensor, ids: Sequence[str], fed: fg.Federation
    ) -> float | None:
        """The candidate with the most hits on held-out samples, of equals the strongest; None where there are none."""
        ridges = self.ridges(fit, CANDIDATES)
        weights = torch.stack([fit.weights(ridge) for ridge in ridges])
        judged = await fed.ask(ids, Judge(centre.seed, centre.mean, weights.float(), prior.float()), Hits)
        *hits, samples = judged.sum.correct.tolist()
        return max(zip(hits, ridges, strict=True))[1] if samples else None

    def weights(self, state: fg.State, model: str | None = None) -> fg.Params:
        mean, head = state["mean"], (state["weight"], state["intercept"])
        weight, intercept = as_logits(*(balanced(*head) if self.config.balance else head))
        if self.folded:  # (φ − μ) W + ȳ = φ W + (ȳ − μ W)
            last = self.net.classifier
            return {**state["w"], f"{last}.weight": weight.T, f"{last}.bias": intercept - mean @ weight}
        fixed = {f"features.{name}": value.to(weight) for name, value in self.public(state["seed"], state["w"]).items()}
        clip = torch.tensor(self.config.clip).to(weight)
        return {**fixed, "head.mean": mean, "head.clip": clip, "head.weight": weight, "head.bias": intercept}

    # A client

    @fg.handler
    async def describe(self, me: fg.Site, msg: Describe) -> First:
        me.state["w"] = msg.w
        features, labels = await fg.compute(self.moments.first, *self.work(me, msg.seed))
        return First(self.on_wire(features), self.on_wire(labels))

    @fg.handler
    async def multiply(self, me: fg.Site, msg: Centre) -> Second:
        products, targets = await fg.compute(self.moments.second, *self.work(me, msg.seed), msg.mean)
        return Second(products.to(self.wire), targets.to(self.wire))

    async def own_sums(self, me: fg.Site, head: fg.Head) -> tuple[Tensor, Tensor]:
        return await fg.compute(replace(self.moments, one=True).second, *self.work(me, head.seed), head.mean)

    @fg.handler
    async def judge(self, me: fg.Site, msg: Judge) -> Hits:
        work = self.work(me, msg.seed, held_out=True)
        return Hits(await fg.compute(self.moments.hits, *work, msg.mean, msg.weights, msg.intercept))

    def work(self, me: fg.Site, seed: int, held_out: bool = False) -> tuple[dict[str, Tensor], fg.Tree, fg.Params]:
        """Batches of what a client learns from, or holds out (all else under mask 0); its samples; φ's own."""
        enough = 1 << max(0, me.data.n - 1).bit_length()  # not each its own size, so that small clients are stacked
        plan = me.data.epochs(me.rng("order"), 1, min(self.config.batch, enough))
        if self.validated:
            aside = plan["index"] % self.config.held_out == self.config.held_out - 1
            plan = {**plan, "mask": plan["mask"] * (aside == held_out)}
        return plan, me.data.pool, self.public(seed, me.state["w"])

    def public(self, seed: int, w: fg.Params) -> fg.Params:
        """What the feature map computes with: known from a seed, and what was learned."""
        learned = {there: w[here] for there, here in zip(self.learned, self.net.shapes, strict=False)}
        return {**drawn(self.features, seed), **learned}

    def on_wire(self, total: Tensor) -> Tensor:
        """As the small messages travel: counts and means in float16 would not be worth what it saves."""
        return total.to(fg.float64 if self.wire == fg.float64 else fg.float32)
