"""FedAvg: federated averaging. McMahan et al. 2017, Algorithm 1.

Deviations from the paper:
1. The clients' weights w_k travel multiplied by p_k = n_k / n_ref, so that the server needs only sums.
2. BatchNorm, which the paper does not use: its statistics are averaged with the weights, or stay local, as chosen.
3. In a private run clients train by DP-SGD (docs/privacy.md).
"""

import fedgist.api as fg


class FedAvg(fg.GlobalModel[fg.GlobalModelOptions]):
    name = "fedavg"
    summary = "Federated averaging: clients train locally, the server averages their weights (McMahan et al. 2017)."
    citation = "mcmahan2017communication"
    by_training = (fg.Local,)
    profiles = {
        "paper": {"dataset": "mnist", "model": "mlp", "partition": "shards", "clients": 100, "rounds": 100}
        | {"active": 10, "epochs": 5, "batch": 10, "lr": 0.1},
        "small": {"dataset": "mnist5k", "model": "lenet5", "rounds": 30, "steps": 20, "lr": 0.1}
        | {"note": "5,000 digits, 10 clients, 30 rounds of 20 steps"},
        "demo": {"model": "mlp", "rounds": 15, "steps": 20, "lr": 0.1, "note": "15 rounds of 20 steps"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "active": 0.6},
    }

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        total = (await fed.ask(fed.sample(self.config.active), fg.Global(state["w"]), fg.Local)).sum
        return {"w": fg.average(total, otherwise=state["w"])}

    @fg.handler
    async def update(self, me: fg.Site, msg: fg.Global) -> fg.Local:
        learner = fg.learner(self.config, self.model_of(me))
        return await self.sent(me, await fg.train(self.config, learner, me, self.start(me, msg.w)))
