"""FedYogi: Yogi on the server. Reddi et al. 2021, Algorithm 2.

Deviations from the paper:
1. The updates Δ_k are averaged by sample counts, as in the paper's experiments; Algorithm 2's plain mean is
   weighting="uniform".
2. BatchNorm, which the paper does not use: its statistics are averaged, or stay local, and never pass through Yogi.
"""

import fedgist.api as fg
from fedgist.families.server_optimisers import profiles
from fedgist.learning.server_optimisers import ServerYogi


class FedYogi(fg.AdaptiveServer):
    name = "fedyogi"
    summary = "FedAvg whose server takes the mean update for a gradient and runs Yogi on it (Reddi et al. 2021)."
    profiles = profiles(paper=0.00316, small=0.01)
    rule = ServerYogi
