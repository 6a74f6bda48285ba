"""What is known of a client's update when it is made by SGD: how far it goes for one unit of gradient.

With momentum ρ, which starts at zero in each round, τ steps from w give w − w_k = η Σ_s a_s g_s, where g_s is the
gradient of step s and a_s = (1 − ρ^(τ−s)) / (1 − ρ) for s = 0 … τ − 1: how often g_s is still felt. FedNova (Wang et
al. 2020, Section 4.1) divides updates by Σ_s a_s, and it is what SCAFFOLD's K must be when there is momentum.
"""


def effective_steps(steps: int, momentum: float) -> float:
    """‖a‖₁ = Σ_s a_s = [τ − ρ (1 − ρ^τ) / (1 − ρ)] / (1 − ρ); without momentum it is the number of steps τ."""
    if momentum == 0:
        return float(steps)
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
