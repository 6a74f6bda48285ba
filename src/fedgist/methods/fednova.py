"""FedNova: normalised averaging of updates made of unequal numbers of steps. Wang et al. 2020, Section 4.

Deviations from the paper:
1. The learning rate η is not divided out of d_i and multiplied in again on the server; it cancels.
2. p_i d_i, p_i ‖a_i‖₁ and p_i with p_i = n_i / n_ref travel, so that the server needs only sums; over the clients that
   answered it divides by Σ p_i.
3. τ_eff = Σ p_i ‖a_i‖₁, the choice of the paper's experiments; the server has no learning rate or momentum of its own.
4. BatchNorm, which the paper does not treat: its statistics are averaged as in FedAvg, or stay local.
"""

import fedgist.api as fg
from fedgist.learning.local_updates import effective_steps


@fg.message
class Normalised:
    """p_i d_i, p_i ‖a_i‖₁ and p_i (and p_i times the BatchNorm statistics), of which the server sees only the sums."""

    pd: fg.Params = fg.wire(shape="weights", additive=True, per="p", holds="gradient")
    statistics: fg.Params = fg.wire(shape="statistics", additive=True, per="p", holds="statistics")
    pa: float = fg.wire(additive=True, low=0, per="p")
    p: float = fg.wire(additive=True, paper=False, low=0, high=1, holds="size")


class FedNova(fg.GlobalModel[fg.GlobalModelOptions]):
    name = "fednova"
    summary = (
        "FedAvg of updates divided by their effective steps, so that busy clients do not bias it (Wang et al. 2020)."
    )
    citation = "wang2020tackling"
    by_training = (Normalised,)
    profiles = {
        "paper": {"dataset": "cifar10", "model": "vgg13", "partition": "dirichlet", "alpha": 0.1, "clients": 16}
        | {"rounds": 100, "epochs": 2, "batch": 32, "lr": 0.02, "momentum": 0.9, "weight_decay": 1e-4},
        "small": {"dataset": "mnist5k", "model": "lenet5", "rounds": 30, "epochs": 2, "lr": 0.05, "momentum": 0.5}
        | {"note": "5,000 digits, 10 clients, 30 rounds of 2 epochs"},
        "demo": {"model": "mlp", "rounds": 15, "epochs": 2, "lr": 0.1, "note": "15 rounds of 2 epochs"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "epochs": 1, "batch": 16, "lr": 0.1, "momentum": 0.9}
        | {"active": 0.6},
    }

    def __init__(self, config: fg.GlobalModelOptions, task: fg.Task):
        fg.check_updates(self.name, config)
        super().__init__(config, task)

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        total = (await fed.ask(fed.sample(self.config.active), fg.Global(state["w"]), Normalised)).sum
        if total.p == 0:  # nobody who answered holds any data
            return state
        tau_eff = total.pa / total.p
        step = fg.tree.scale(total.pd, tau_eff / total.p)  # τ_eff Σ p_i d_i (Eq. 6)
        trained = {name: state["w"][name] - step[name] for name in step}
        return {"w": {**state["w"], **trained, **fg.tree.scale(total.statistics, 1 / total.p)}}

    @fg.handler
    async def update(self, me: fg.Site, msg: fg.Global) -> Normalised:
        model, start = self.model_of(me), self.start(me, msg.w)
        learner = fg.learner(self.config, model)
        plan = fg.plan_of(self.config, learner, me)
        w = await fg.train(self.config, learner, me, start, plan=plan)
        self.keep(me, w)
        p, a = fg.client_weight(self.config, me), effective_steps(len(plan["index"]), self.config.momentum)
        moved = {name: start[name] - w[name] for name in msg.w if name not in model.buffers}
        statistics = {name: w[name] for name in msg.w if name in model.buffers}
        return Normalised(fg.tree.scale(moved, p / a if a else 0.0), fg.tree.scale(statistics, p), p * a, p)
