"""Which engine `auto` is: by device, layers and length of a run, not by timing, which would change from run to run, and
the last digit with it."""

import logging
from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from fedgist import engines
from fedgist.data.cards import CARDS
from fedgist.experiments.config import OWN, RunConfig
from fedgist.families.local_training import TrainingOptions
from fedgist.models import is_dense

log = logging.getLogger("fedgist")

WORTH_COMPILING = 150_000_000
"""Samples in all steps of all clients of a run from which on compiled steps save more time than compiling takes: 22 s
for a LeNet5 on an H200, whose steps are then 0.7 ms shorter for 100 clients with batches of 32."""
COMPILED = {"mlp", "cnn", "lenet5"}
"""Models whose steps a compiler shortens; larger ones are their convolutions, which it leaves as they are."""
STACKED = {"mlp", "tabular", "cnn"}
"""Models that many clients train faster together on a CPU: linear layers, and convolutions over few places."""


def fitting_engine(config: RunConfig, modules: Mapping[str, nn.Module] = MappingProxyType({})) -> str:
    """What `auto` is; `modules` are a caller's own, by name."""
    named = config.architectures or (config.model,)
    if engines.find_device(config.device).type == "cpu":
        light = all(is_dense(modules[net]) if net in modules else _kind(net) in STACKED for net in named)
        return "stacked" if light else "threaded"
    samples = samples_trained_on(config)
    if samples < WORTH_COMPILING or not {*map(_kind, named)} <= COMPILED:
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


def _kind(net: str) -> str:
    return net.partition(":")[0]
