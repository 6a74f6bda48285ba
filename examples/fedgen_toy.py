"""FedGen in two dimensions (Zhu et al. 2021, Figures 2 and 3): three users, each of whom hardly knows one class.

`python examples/fedgen_toy.py [PICTURE]` draws the users alone and their averaged weights; the users after learning
from the generator and an oracle that saw all data; what the generator makes over its training, on the raw plane.
"""

import sys

import torch
from matplotlib.figure import Figure

from fedgist import models
from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.core.work import Place, Scan, execute
from fedgist.learning.distillation import GuidedTrainer, label_weights
from fedgist.learning.optimisers import SGD, Adam
from fedgist.learning.training import Trainer
from fedgist.synthesis.generators import Generator, GeneratorTrainer

RNG, CENTRES = Rng(3), torch.tensor([[0.0, 1.5], [-1.3, -0.8], [1.3, -0.8]])
MODEL = models.build("mlp", (1, 1, 2), 3, hidden=(32,))
USER = GuidedTrainer(Trainer(MODEL, SGD(momentum=0.9)), "flatten")
G = Generator(classes=3, latent=(1, 1, 2), noise=8, hidden=64)
SERVER = GeneratorTrainer(G, MODEL, "flatten", Adam(weight_decay=0.01))


def points(y, rng):
    return (CENTRES[y] + 0.55 * rng.normal(len(y), 2)).view(-1, 1, 1, 2)


def learn(w, data, rng, generator=None, steps=200):
    """A user's steps on its data and, if there is a generator, on as many points that it makes (Eq. 5)."""
    plan = {"index": rng("batch").integers(len(data["y"]), steps, 32), "mask": torch.ones(steps, 32)}
    plan |= {"label": rng("label").integers(3, steps, 32), "on": torch.full((steps,), float(generator is not None))}
    plan["z"] = G.sample(generator or G.init(rng), plan["label"], G.draw("normal", (steps, 32), rng("noise")))
    rates = (torch.tensor(0.02), torch.tensor(1.0), torch.tensor(0.0))
    return execute(Scan(USER.step, (w, USER.init(w)), plan, (data, *rates)), Place())[0]


def show(axis, title, w, data):
    grid = torch.cartesian_prod(torch.linspace(-4, 4, 100), torch.linspace(-4, 4, 100)).view(-1, 1, 1, 2)
    regions = MODEL(w, grid).logits.argmax(1).view(100, 100).T.numpy()
    axis.imshow(regions, extent=(-4, 4, -4, 4), origin="lower", cmap="Pastel1", vmin=0, vmax=8)
    axis.scatter(*data["x"].view(-1, 2).T.numpy(), c=data["y"].flatten().numpy(), s=4, cmap="Set1", vmin=0, vmax=8)
    axis.set(title=title, xticks=[], yticks=[], xlim=(-4, 4), ylim=(-4, 4))


def main(picture):
    labels = [torch.tensor([c for c in range(3) for _ in range(2 if c == k else 150)]) for k in range(3)]
    users = [{"x": points(y, RNG("user", k)), "y": y} for k, y in enumerate(labels)]
    pooled = {name: torch.cat([user[name] for user in users]) for name in ("x", "y")}
    start = MODEL.init(RNG("start"))
    alone = [learn(start, user, RNG("alone", k)) for k, user in enumerate(users)]
    average, oracle = tree.map(lambda each: each.mean(0), tree.stack(alone)), learn(start, pooled, RNG("oracle"))

    w, y = G.init(RNG("generator")), RNG("labels").integers(3, 250, 64)
    carry, made, noise = (w, SERVER.init(w)), {0: w}, G.draw("normal", (250, 64), RNG("noise"))
    consts = (tree.stack(alone), label_weights(torch.stack([y.bincount().float() for y in labels])), torch.tensor(0.01))
    for first, last in ((0, 50), (50, 150), (150, 250)):
        carry = execute(Scan(SERVER.step, carry, {"y": y[first:last], "noise": noise[first:last]}, consts), Place())
        made[last] = carry[0]
    taught = [learn(alone[k], users[k], RNG("taught", k), made[250]) for k in range(3)]

    panels = {f"user {k} alone": (alone[k], users[k]) for k in range(3)} | {"averaged weights": (average, pooled)}
    panels |= {f"user {k} taught": (taught[k], users[k]) for k in range(3)} | {"oracle": (oracle, pooled)}
    figure, truth = Figure(figsize=(12, 9), layout="constrained"), torch.arange(3).repeat(500)
    axes = iter(figure.subplots(3, 4).flat)
    for name, (w, data) in panels.items():
        right = (MODEL(w, points(truth, RNG("test"))).logits.argmax(1) == truth).float().mean()
        print(f"{name}: {right:.1%}")
        show(next(axes), f"{name}: {right:.1%}", w, data)
    for steps, w in made.items():
        show(next(axes), f"generator, {steps} steps", oracle, {"x": G.sample(w, y[:3], noise[:3]), "y": y[:3]})
    figure.savefig(picture)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "fedgen_toy.png")
