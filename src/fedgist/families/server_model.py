"""What methods share whose server alone has a model that lasts: its start, its test, and that it is the result."""

from typing import TypeVar

from fedgist.core.federation import Federation, State
from fedgist.core.message import Params
from fedgist.core.method import Method
from fedgist.core.rng import Rng
from fedgist.core.task import Samples
from fedgist.learning.evaluation import scores

Options = TypeVar("Options")


class ServerModel(Method[Options]):
    """Abstract: the server's weights `w`."""

    def server_init(self, rng: Rng) -> State:
        return {"w": self.model.init(rng)}

    async def evaluate(self, state: State, fed: Federation, test: Samples) -> dict[str, float]:
        return await scores(self.model, state["w"], test)

    def weights(self, state: State, model: str | None = None) -> Params | None:
        w: Params = state["w"]
        return w
