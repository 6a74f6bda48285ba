"""The likelihood ratio attack (Carlini et al. 2022): was a sample trained on, judged by runs with and without it.

Of many runs, each on a random half of the samples, any one may be the target, and the others are its shadows. How sure
a model is of a sample's label, as log p / (1 − p), is taken for normal over runs, with one mean where the sample was
held and another where it was not (the online attack; one deviation for all samples, as the paper advises for few runs).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.privacy.attacks.interface import auc, tpr


@dataclass(frozen=True)
class Rates:
    """How well members are told from others: by chance, 0.5 and the rate itself."""

    auc: float
    at_one_percent: float | None
    at_a_thousandth: float | None
    """The share of members found where so many of the others are taken for one; None where they are too few to say."""


def confidence(logits: Tensor, y: Tensor) -> Tensor:
    """log p / (1 − p) of the true class: its logit less the log-sum-exp of the others, which never overflows."""
    own = logits.gather(1, y[:, None]).squeeze(1)
    others = logits.scatter(1, y[:, None], -torch.inf).logsumexp(1)
    return own - others


def ratios(sure: Tensor, held: Tensor, target: int, seen: int | None = None) -> Tensor:
    """The log-likelihood ratio of every sample having been held in the run `target`, from [runs, samples].

    `seen` is whose confidences are judged; another's than the target's say nothing, which is the blind guess.
    """
    others = torch.arange(len(sure)) != target
    if seen is not None:
        others[seen] = False
    shadows, inside = sure[others].double(), held[others]
    means, spread = [], torch.zeros((), dtype=torch.float64)
    for group in (inside, ~inside):
        count = group.sum(0)
        mean = torch.where(group, shadows, 0.0).sum(0) / count.clamp_min(1)
        means.append(mean)
        spread = spread + torch.where(group, shadows - mean, 0.0).square().sum()
    free = max(1, shadows.numel() - 2 * shadows.shape[1])
    variance = (spread / free).clamp_min(1e-12)
    known = (inside.any(0)) & (~inside).any(0)
    at = sure[target if seen is None else seen].double()
    ratio = ((at - means[1]).square() - (at - means[0]).square()) / (2 * variance)
    return torch.where(known, ratio, 0.0)


def rates(scores: Tensor, held: Tensor) -> Rates:
    """Of scores that should be larger for samples that were held."""
    inside, outside = scores[held].double(), scores[~held].double()
    fine = tpr(inside, outside, 0.001) if len(outside) >= 1000 else None
    return Rates(auc(inside, outside), tpr(inside, outside), fine)
