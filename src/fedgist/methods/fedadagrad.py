"""FedAdagrad: Adagrad on the server. Reddi et al. 2021, Algorithm 2.

Deviations from the paper:
1. The updates Δ_k are averaged by sample counts, as in the paper's experiments; Algorithm 2's plain mean is
   weighting="uniform".
2. BatchNorm, which the paper does not use: its statistics are averaged, or stay local, and never pass through Adagrad.
"""

from fedgist.learning.server_optimisers import AdaptiveOptions, AdaptiveServer, ServerAdagrad


class FedAdagrad(AdaptiveServer):
    name = "fedadagrad"
    summary = "FedAvg whose server takes the mean update for a gradient and runs Adagrad on it (Reddi et al. 2021)."
    citation = r"""@inproceedings{reddi2021adaptive,
  title     = {Adaptive Federated Optimization},
  author    = {Reddi, Sashank J. and Charles, Zachary and Zaheer, Manzil and Garrett, Zachary and Rush, Keith and
               Kone{\v{c}}n{\'y}, Jakub and Kumar, Sanjiv and McMahan, H. Brendan},
  booktitle = {ICLR},
  year      = {2021}
}"""
    Config = AdaptiveOptions
    profiles = {
        "paper": {"dataset": "femnist", "model": "lenet5", "partition": "group", "clients": 3400, "active": 10}
        | {"rounds": 1500, "epochs": 1, "batch": 20, "lr": 0.0316, "server_lr": 0.1},
        "small": {"dataset": "mnist5k", "model": "lenet5", "rounds": 30, "steps": 20, "lr": 0.1, "server_lr": 0.03}
        | {"note": "5,000 digits, 10 clients, 30 rounds of 20 steps"},
        "demo": {"model": "mlp", "rounds": 15, "steps": 20, "lr": 0.1, "server_lr": 0.03}
        | {"note": "15 rounds of 20 steps"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "active": 0.6},
    }

    @property
    def optimiser(self) -> ServerAdagrad:
        return ServerAdagrad(self.config.beta1, self.config.beta2, self.config.tau)
