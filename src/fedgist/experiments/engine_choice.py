"""Which engine `auto` is: by device, model and length of a run, not by timing, which would pick, and so change the last
digit, from run to run."""

import logging

from fedgist.data.cards import CARDS
from fedgist.experiments.config import OWN, RunConfig
from fedgist.families.local_training import TrainingOptions

log = logging.getLogger("fedgist")

WORTH_COMPILING = 150_000_000
"""Samples in all steps of all clients of a run from which on compiled steps save more time than compiling takes: 22 s
for a LeNet5 on an H200, whose steps are then 0.7 ms shorter for 100 clients with batches of 32."""


def fitting_engine(config: RunConfig, device: str) -> str:
    nets = {net.partition(":")[0] for net in config.architectures or (config.model,)}
    if device == "cpu":
        return "stacked" if nets <= {"mlp", "cnn"} else "threaded"
    samples = samples_trained_on(config)
    if not nets <= {"mlp", "cnn", "lenet5"} or samples < WORTH_COMPILING:  # larger nets are their convolutions
        return "stacked"
    log.warning(
        "steps are compiled, because clients are to train on %d million samples in all: half a minute in the first "
        "round, less where it was done before; engine=stacked does without",
        samples // 1_000_000,
    )
    return "compiled"


def samples_trained_on(config: RunConfig) -> int:
    """In all local steps of all clients of a run; 0 where that is not known before its data are, or sites train."""
    card, options = CARDS.get(config.dataset), config.options
    if card is None or card.sizes is None or config.partition == OWN or not isinstance(options, TrainingOptions):
        return 0
    active = getattr(options, "active", 0) or config.clients
    asked = active if active >= 1 else active * config.clients
    held = min(card.sizes[0], config.limit or card.sizes[0]) / config.clients
    one = options.steps * min(options.batch, held) if options.steps else options.epochs * held
    return int(config.rounds * asked * one)
