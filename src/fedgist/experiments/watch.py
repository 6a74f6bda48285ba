"""What a run warns of while it runs, each thing once: it goes on, and what comes out would look sound."""

import logging

from fedgist.core.federation import SERVER
from fedgist.engines.engine import Engine, RoundReport
from fedgist.experiments import artifacts
from fedgist.experiments.config import RunConfig
from fedgist.experiments.inputs import Inputs

log = logging.getLogger("fedgist")


class Watch:
    def __init__(self, title: str, config: RunConfig, inputs: Inputs):
        self.title, self.config, self.inputs = title, config, inputs
        self.finite = self.in_range = True

    def clients(self) -> None:
        clients, split = self.inputs.sites.values(), f"{self.config.dataset}, seed {self.config.seed}"
        if empty := sum(client.n == 0 for client in clients):
            log.warning(
                f"{split}: {empty} of {len(clients)} clients hold no data, so that nothing is learned from them; "
                "if that is not meant, choose fewer clients or another partition"
            )

    def states(self, engine: Engine) -> None:
        """The accuracy alone would look like that of a model that guesses."""
        if self.finite and (diverged := engine.diverged()):
            self.finite = False
            clients, done = len(set(diverged) - {SERVER}), engine.rounds_done
            holders = ["the server"] * (SERVER in diverged) + [f"{clients} of the clients"] * (clients > 0)
            log.warning(
                f"{self.title}: what {' and '.join(holders)} learned up to round {done} is not finite (NaN or "
                "infinity), so that no result from here on means anything; a smaller lr helps most often"
            )

    def images(self, report: RoundReport) -> None:
        """What learns from them goes on as if they were sound."""
        if self.in_range and (wild := artifacts.out_of_range(report.shown, self.inputs.task)):
            self.in_range = False
            log.warning(
                f"{self.title}: {wild} in round {report.round}, so that little can be learned from them; a smaller "
                f"learning rate of theirs helps most often (`fedgist config {self.config.method}` names it)"
            )
