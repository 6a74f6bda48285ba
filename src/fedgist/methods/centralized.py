"""Centralized learning: one site with everybody's data, the upper line of every comparison."""

import fedgist.api as fg


@fg.message
class Train:
    """Train for one more round."""


class Centralized(fg.OwnModel[fg.OwnModelOptions]):
    name = "centralized"
    summary = "All data pooled at one site, against the whole point; the upper line of every comparison."
    pooled = True
    profiles = {
        "paper": {"dataset": "mnist", "model": "lenet5-thesis", "rounds": 100, "optimiser": "adam", "lr": 0.001},
        "small": {"dataset": "mnist5k", "model": "lenet5", "rounds": 10, "lr": 0.1, "note": "5,000 digits, 10 epochs"},
        "demo": {"model": "mlp", "rounds": 10, "lr": 0.1, "note": "10 epochs"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1},
    }

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        await fed.ask(fed.ids, Train(), fg.Done)
        return state

    @fg.handler
    async def update(self, me: fg.Site, msg: Train) -> fg.Done:
        me.state["w"] = await fg.train(self.config, fg.trainer(self.config, self.model), me, me.state["w"])
        return fg.Done()
