"""DFedAvg: decentralised federated averaging, or gossip. Sun, Li and Wang 2023, Algorithm 1.

Every client i trains its own model x_i, gives it to its neighbours, and replaces it by a mean of theirs and its own.
With a topology nobody gets more than its neighbours' models; with a server it is FedAvg whose clients keep the mean.

Deviations from the paper:
1. The mixing weights w_ij are equal over a client and those of its neighbours that answer. That is the paper's doubly
   stochastic W where all have equally many neighbours (ring, regular, gossip, full) and nobody is away; elsewhere the
   mean over all clients moves a little with every round.
2. A client that was away keeps its model, and mixes again when it is back.
"""

from dataclasses import dataclass

import fedgist.api as fg


@dataclass(frozen=True)
class Config(fg.OwnModelOptions):
    keep_momentum: bool = fg.option(False, "Keep the optimiser's state from round to round instead of starting anew.")
    common_start: bool = fg.option(True, "All clients of one architecture begin at the same weights.")


@fg.message
class Train:
    """Train your own model for one round."""


@fg.message
class Give:
    """Give your model as it is now."""


class DFedAvg(fg.OwnModel[Config]):
    name = "dfedavg"
    summary = "Gossip: every client averages its weights with its neighbours', without a server (Sun et al. 2023)."
    citation = "sun2023decentralized"
    peer_to_peer = True
    profiles = {
        "paper": {"dataset": "mnist", "model": "mlp:hidden=200x200", "clients": 20, "partition": "shards"}
        | {"topology": "ring", "rounds": 100, "epochs": 1, "batch": 50, "lr": 0.01, "momentum": 0.9},
        "small": {"dataset": "mnist5k", "model": "lenet5", "topology": "ring", "rounds": 30, "steps": 20, "lr": 0.1}
        | {"note": "5,000 digits, 10 clients on a ring, 30 rounds of 20 steps"},
        "demo": {"model": "mlp", "rounds": 15, "steps": 20, "lr": 0.1, "note": "15 rounds of 20 steps"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "momentum": 0.9},
    }

    def __init__(self, config: Config, task: fg.Task):
        super().__init__(config, task)
        for name, model in task.models.items():
            if model.shapes != self.model.shapes:
                raise fg.MixedModels(f"{self.name} averages weights: {name} and {task.model} have different ones")

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        mine = [fed.node] if fed.node in fed.ids else fed.ids  # a server does for all what a peer does for itself
        await fed.ask(mine, Train(), fg.Done)
        total = (await fed.ask(fed.ids, Give(), fg.Local)).sum
        await fed.ask(mine, fg.Global(fg.tree.scale(total.pw, 1 / total.p)), fg.Done)
        return state

    @fg.handler
    async def update(self, me: fg.Site, msg: Train) -> fg.Done:
        """z_i: K local steps from x_i."""
        me.state["w"] = await fg.train(self.config, fg.trainer(self.config, self.model_of(me)), me, me.state["w"])
        return fg.Done()

    @fg.handler
    async def give(self, me: fg.Site, msg: Give) -> fg.Local:
        return fg.Local(me.state["w"], 1.0)

    @fg.handler
    async def mix(self, me: fg.Site, msg: fg.Global) -> fg.Done:
        """x_i = Σ_j w_ij z_j."""
        me.state["w"] = msg.w
        return fg.Done()
