"""FedAdagrad: Adagrad on the server. Reddi et al. 2021, Algorithm 2.

Deviations from the paper:
1. The updates Δ_k are averaged by sample counts, as in the paper's experiments; Algorithm 2's plain mean is
   weighting="uniform".
2. BatchNorm, which the paper does not use: its statistics are averaged, or stay local, and never pass through Adagrad.
3. By default β₁ is 0.9 as in the other two, which Algorithm 2 has room for; the paper's runs, and so the profile
   `paper`, have no momentum: beta1=0.
"""

import fedgist.api as fg
from fedgist.families.server_optimisers import profiles
from fedgist.learning.server_optimisers import ServerAdagrad


class FedAdagrad(fg.AdaptiveServer):
    name = "fedadagrad"
    summary = "FedAvg whose server takes the mean update for a gradient and runs Adagrad on it (Reddi et al. 2021)."
    profiles = profiles(paper=0.1, small=0.03, beta1=0.0)
    rule = ServerAdagrad
