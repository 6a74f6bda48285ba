"""How many numbers a method sends to get as far as FedAvg, and what that would cost encrypted.

"TOFU: Towards Obfuscated Federated Updates by Encoding Weight Updates into Gradients from Proxy Data" (Garg et al.
2022), sections 4.1 and 4.2: η is the numbers that FedAvg sends up to its best accuracy, over those that the method
sends up to its own, in one direction. The two accuracies may differ, so η at equal accuracy stands beside it: both are
counted up to the first round that reaches what both of them reach. The cost of encryption is the paper's estimate, that
of secure aggregation (Bonawitz et al. 2017): n + k for a client and n·k + n² for the server, a round, for n clients
that send k numbers each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedgist.experiments.fairness import ALONE
from fedgist.experiments.report.runs import Group

BASE = "fedavg"
"""What η compares with."""
ENCRYPTED = (BASE, "tofu")
"""The methods for which the paper estimates the cost of encryption."""


@dataclass(frozen=True)
class Cost:
    """What a method sent, counted as the papers do, up to its best accuracy."""

    label: str
    method: str
    accuracy: float
    round: int
    numbers: float
    """From one client, on average."""
    client: float
    """The estimate of the work of encryption for a client, and for the server."""
    server: float
    by_definition: float | None = None
    """η, where there is a run of FedAvg to compare with: of the same model, and both no worse than learning alone."""
    at_equal_accuracy: float | None = None
    common_accuracy: float | None = None


def costs(groups: Sequence[Group]) -> list[Cost]:
    """One for each method that sends anything."""
    base = next((group for group in groups if group.method == BASE and group.curve), None)
    alone = max((group.best for group in groups if group.method == ALONE and group.curve), default=0.0)
    sending = [group for group in groups if group.curve and sum(group.first.wire.paper_up.values())]
    return [_cost(group, base if base is not None and _comparable(group, base, alone) else None) for group in sending]


def _comparable(group: Group, base: Group, alone: float) -> bool:
    """Whether a ratio would mean anything: of one and the same model, and better than what needs no message."""
    return group.model == base.model and min(group.best, base.best) >= alone


def rounds_to(group: Group, accuracy: float) -> int:
    """The first round after which the mean over the seeds is at least that good, as it is after one of them."""
    return next(r for r, _, mean, _ in group.curve if mean >= accuracy)


def _cost(group: Group, base: Group | None) -> Cost:
    top = group.best
    until = rounds_to(group, top)
    a_round = _numbers_by_round(group, until)
    n, numbers = int(group.first.config["clients"]), sum(a_round)
    client = sum(n + k for k in a_round)
    server = sum(n * k + n * n for k in a_round)
    cost = Cost(group.label, group.method, top, until, numbers, client, server)
    if base is None or base is group:
        return cost
    common = min(top, base.best)
    defined, equal = _ratio(base, base.best, group, top), _ratio(base, common, group, common)
    return replace(cost, by_definition=defined, at_equal_accuracy=equal, common_accuracy=common)


def _ratio(base: Group, its: float, group: Group, ours: float) -> float | None:
    """What the baseline sends up to its accuracy, over what the group sends up to its own."""
    sent = sum(_numbers_by_round(group, rounds_to(group, ours)))
    return sum(_numbers_by_round(base, rounds_to(base, its))) / sent if sent else None


def _numbers_by_round(group: Group, until: int) -> list[float]:
    """How many numbers a client sends in each round up to that one, on average over the clients."""
    clients = int(group.first.config["clients"])
    return [sent / 4 / clients for round, sent in group.first.wire.paper_up.items() if round <= until]
