"""What dreaming together costs in bytes, as a configuration tells before anything is sent."""

import logging
import math
from typing import Any

from fedgist.models.model import Model
from fedgist.synthesis.dream_spaces import FreeDreams, GeneratedDreams
from fedgist.words import size

log = logging.getLogger("fedgist")


def dream_traffic(config: Any, space: FreeDreams | GeneratedDreams, student: Model, classes: int) -> tuple[int, int]:
    """Payload bytes of a client and round, up and down: of this configuration of Co-Dream, and of FedAvg."""
    model = 4 * sum(map(math.prod, student.shapes.values()))
    dream_bytes, outputs = min(4, max(2, config.bits // 8)), 4 * config.dreams * classes
    v = sum(map(math.prod, space.shapes.values()))
    taught = config.dreams * math.prod(space.shape) * dream_bytes + outputs
    exchanges = model if config.offload else config.exchanges * v * (dream_bytes + config.bits // 8)
    dreaming = exchanges + v * dream_bytes + outputs if config.collaborate else taught
    return dreaming + taught * (config.learners == "all"), 2 * model


def warn_of_traffic(config: Any, space: FreeDreams | GeneratedDreams, student: Model, classes: int) -> None:
    """Say so where FedAvg would be cheaper."""
    ours, usual = dream_traffic(config, space, student, classes)
    if ours > usual:
        log.warning(
            f"codream will move {size(ours)} a round for each client, {ours / usual:,.1f} times what "
            f"fedavg would with {student.name}; fewer exchanges, fewer dreams or bits=8 make it cheaper"
        )
