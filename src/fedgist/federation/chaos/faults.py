"""What goes wrong in a schedule, and how often: all of it follows from a seed and the schedule's number."""

import random
from dataclasses import dataclass, field


class Crash(BaseException):
    """The process that is running dies here and now; nothing of it may catch this."""


RATES = {
    "loss": (0.01, 0.15),
    "delay": (0.02, 0.2),
    "duplicate": (0.05, 0.4),
    "corruption": (0.01, 0.15),
    "truncation": (0.01, 0.15),
    "strays": (0.5, 1.0),
    "site crash": (0.002, 0.03),
    "server crash": (0.005, 0.04),
    "full disk": (0.002, 0.02),
    "power": (0.5, 1.0),
    "clock": (0.02, 0.2),
    "visitor": (0.02, 0.2),
}
"""The least and the most often that each kind happens, where it does: of messages, of steps, of deaths."""

LOSING = {"loss", "delay", "corruption", "truncation", "site crash", "full disk"}
"""Those that cost answers; without them a run must end exactly where one without faults ends."""

STEPS = 250
"""Writes and messages after which all is well again, so that every run can end."""


@dataclass
class Faults:
    """The dice of one schedule. Every third kind of fault takes part, so that rare ones are not drowned by others."""

    seed: int
    number: int
    rates: dict[str, float] = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        self.dice = random.Random(f"{self.seed}/{self.number}")
        kinds = RATES.keys() - LOSING if self.dice.random() < 0.3 else RATES.keys()
        for kind, (least, most) in RATES.items():
            if self.dice.random() < 0.35 and kind in kinds:
                self.rates[kind] = self.dice.uniform(least, most)

    def strikes(self, kind: str) -> bool:
        """Whether it happens now."""
        rate = self.rates.get(kind)
        return rate is not None and self.steps < STEPS and self.dice.random() < rate

    def __str__(self) -> str:
        return ", ".join(f"{kind} {rate:.3f}" for kind, rate in self.rates.items()) or "none"
