"""What a test of privacy asks: are releases in two worlds, which differ by one record, as alike as was promised?"""

import math
from statistics import NormalDist

from torch import Tensor


def least_mu(without: Tensor, with_record: Tensor, confidence: float = 0.9999) -> float:
    """A μ that the release has at least, from the scores of many independent releases in either world.

    For Gaussian scores (Nasr et al. 2023): μ is the distance of the two means in deviations. Its estimate from n scores
    in each world has the variance 2/n + μ²/4n (the means', and the pooled deviation's).
    """
    n = min(len(without), len(with_record))
    spread = math.sqrt((without.double().var().item() + with_record.double().var().item()) / 2)
    found = (with_record.double().mean().item() - without.double().mean().item()) / max(spread, 1e-300)
    return found - NormalDist().inv_cdf(confidence) * math.sqrt(2 / n + found**2 / (4 * n))
