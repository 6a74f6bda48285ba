"""What the messages of a round cost before any is sent: blank ones are measured at the codec."""

import logging
from typing import Any

import torch

from fedgist.core.codec import Codec, size
from fedgist.core.method import Method
from fedgist.families.global_model import Global
from fedgist.words import size as in_words

log = logging.getLogger("fedgist")


def payload(method: Method[Any], *messages: object) -> int:
    """The bytes of messages between the server and a client of its architecture, their headers aside."""
    codec = Codec(method.bounds(method.task.model))
    return sum(size(type(msg), codec.pack(msg)).payload for msg in messages)


def warn_if_dearer(method: Method[Any], bytes: int, advice: str) -> None:
    """Say so where FedAvg, whose weights go up and down, would be cheaper than so many bytes of a client and round."""
    usual = 2 * payload(method, Global({name: torch.zeros(shape) for name, shape in method.model.shapes.items()}))
    if bytes > usual:
        log.warning(
            f"{method.name} will move {in_words(bytes)} a round for each client, {bytes / usual:,.1f} times what "
            f"fedavg would with {method.model.name}; {advice}"
        )
