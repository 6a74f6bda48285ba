"""FedAdam: Adam on the server. Reddi et al. 2021, Algorithm 2.

Deviations from the paper:
1. The updates Δ_k are averaged by sample counts, as in the paper's experiments; Algorithm 2's plain mean is
   weighting="uniform".
2. BatchNorm, which the paper does not use: its statistics are averaged, or stay local, and never pass through Adam.
"""

from fedgist.learning.server_optimisers import AdaptiveServer, ServerAdam, profiles


class FedAdam(AdaptiveServer):
    name = "fedadam"
    summary = "FedAvg whose server takes the mean update for a gradient and runs Adam on it (Reddi et al. 2021)."
    profiles = profiles(paper=0.00316, small=0.01)

    @property
    def optimiser(self) -> ServerAdam:
        return ServerAdam(self.config.beta1, self.config.beta2, self.config.tau)
