"""Independent learning: every client trains its own model on its own data, and nobody sends anything but "done"."""

import fedgist.api as fg


@fg.message
class Train:
    """Train for one more round."""


class Independent(fg.OwnModel[fg.OwnModelOptions]):
    name = "independent"
    summary = "No collaboration: every client trains alone; the lower line of every comparison."
    profiles = {
        "paper": {"dataset": "mnist", "model": "lenet5-thesis", "rounds": 100, "optimiser": "adam", "lr": 0.001},
        "small": {"dataset": "mnist5k", "model": "lenet5", "rounds": 30, "steps": 20, "lr": 0.1}
        | {"note": "5,000 digits, 10 clients, 30 rounds of 20 steps"},
        "demo": {"model": "mlp", "rounds": 15, "steps": 20, "lr": 0.1, "note": "15 rounds of 20 steps"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "momentum": 0.9},
    }

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        await fed.ask(fed.ids, Train(), fg.Done)
        return state

    @fg.handler
    async def update(self, me: fg.Site, msg: Train) -> fg.Done:
        me.state["w"] = await fg.train(self.config, fg.trainer(self.config, self.model_of(me)), me, me.state["w"])
        return fg.Done()
