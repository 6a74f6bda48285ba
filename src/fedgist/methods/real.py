"""REAL: FedDM's control, which sends real images in place of synthetic ones. Xiong et al. 2023, section 3.4.

It is no method for private data: it shows how much of FedDM's accuracy the synthesis itself brings.

Deviations from the paper: it does not say whether images are drawn once or each round; `redraw` chooses.
"""

from dataclasses import dataclass

import fedgist.api as fg
from fedgist.synthesis.augmentation import KINDS


@dataclass(frozen=True)
class Config(fg.SurrogateOptions):
    redraw: bool = fg.option(True, "Send other samples in each round.")


class Real(fg.Surrogate[Config]):
    name = "real"
    summary = "FedDM's control, no privacy at all: clients send as many real images (Xiong et al. 2023)."
    profiles = {
        "paper": {"dataset": "cifar10", "model": "convnet", "partition": "dirichlet-balanced", "rounds": 20}
        | {"server_augmentation": KINDS, "server_decay": 0.1},
        "small": {"dataset": "mnist5k", "model": "convnet:width=16", "partition": "dirichlet-balanced", "rounds": 5}
        | {"server_epochs": 40, "server_batch": 64, "server_lr": 0.03}
        | {"note": "5,000 digits, ConvNet of width 16, 5 rounds, 40 server epochs"},
        "demo": {"model": "convnet:width=16", "rounds": 3, "ipc": 5, "server_epochs": 40, "server_batch": 64}
        | {"server_lr": 0.03, "note": "ConvNet of width 16, 3 rounds, 5 images a class, 40 server epochs"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "ipc": 2, "min_class": 2, "server_epochs": 3}
        | {"server_batch": 8, "rho": 0.5},
    }

    @fg.handler
    async def pick(self, me: fg.Site, msg: fg.Current) -> fg.Images:
        held = self.held(me)
        rng = me.rng("images") if self.config.redraw else fg.Rng(me.rng.root)("client", me.id, "images")
        return self.share(me, held, self.some_real(me, held, rng))
