"""Centralized learning: one site with everybody's data, the upper line of every comparison."""

from typing import Any

from fedgist.core.federation import Federation, Site
from fedgist.core.message import Done, message
from fedgist.learning.own_model import OwnModel, OwnModelOptions
from fedgist.learning.training import train, trainer


@message
class Train:
    """Train for one more round."""


class Centralized(OwnModel):
    name = "centralized"
    summary = "All data pooled at one site, against the whole point; the upper line of every comparison."
    citation = ""
    pooled = True
    Config = OwnModelOptions
    profiles = {
        "paper": {"dataset": "mnist", "model": "lenet5-thesis", "rounds": 100, "optimiser": "adam", "lr": 0.001},
        "small": {"dataset": "mnist5k", "model": "lenet5", "rounds": 10, "lr": 0.1, "note": "5,000 digits, 10 epochs"},
        "demo": {"model": "mlp", "rounds": 10, "lr": 0.1, "note": "10 epochs"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1},
    }

    async def round(self, state: Any, fed: Federation) -> Any:
        await fed.ask(fed.ids, Train(), Done)
        return state

    async def update(self, me: Site, msg: Train) -> Done:
        me.state["w"] = await train(self.config, trainer(self.config, self.model), me, me.state["w"])
        return Done()
