"""Numbers in a ring: what is masked must be whole numbers modulo 2^b, which add up to the same bits in any order.

A float x becomes round(x / step) in Z_2^64. All sites of an exchange use one step, so it follows from what all of them
know: how many they are, and the range ±2^R of the field, which travels with the request. A small range leaves a small
step, so that FedAvg's w·n_k/2^20 of a client with ten samples keeps its digits. Whole numbers have the step 1, bytes
are added in Z_2^16, and in Z_2^32 where more than 257 of them would not fit.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.unsignedinteger]
"""Elements of a ring, in as many bits as it has."""

UNSIGNED = {16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {16: np.int16, 32: np.int32, 64: np.int64}
MOST_BYTES = 257
"""So many times 255 is 2^16 − 1."""
FIRST_RANGE, WIDEST_RANGE = 6, 52
"""Floats begin with ±2^6; a field that needs more gets it, for all sites."""
NOISE_BITS, ROOM = 23, 30
"""Noise is drawn in steps of about 2^-23 of its deviation, and what it is added to may be 2^30 times as large."""


class OutOfRange(ValueError):
    """A field does not fit its range; `needed` is the R of ±2^R in which it would."""

    def __init__(self, field: str, why: str, needed: int):
        super().__init__(f"{field} {why}")
        self.field, self.needed = field, needed


@dataclass(frozen=True)
class Ring:
    """Z_2^bits, in which so many sites add multiples of 2^-exponent."""

    bits: int
    exponent: int
    addends: int
    kind: str
    """float, integer or byte."""

    @property
    def step(self) -> float:
        return math.ldexp(1.0, -self.exponent)

    @property
    def limit(self) -> float:
        """The size that what one site adds stays below; a bit is left for rounding and for noise."""
        if self.kind == "byte":
            return 256
        return math.ldexp(1.0, self.bits - 2 - self.exponent) / self.addends

    def enter(self, field: str, values: NDArray[np.generic]) -> Vector:
        """The values as elements of the ring; what would not fit into the sum is refused."""
        wide = values.astype(np.float64, copy=False)
        largest = float(np.maximum(np.max(wide, initial=0.0), -np.min(wide, initial=0.0)))
        if not math.isfinite(largest):
            raise OutOfRange(field, "holds a number that is not finite", WIDEST_RANGE + 1)
        if largest >= self.limit:
            needed = math.frexp(largest)[1] if self.kind == "float" else WIDEST_RANGE + 1
            times = largest / self.limit
            why = f"holds {largest:.3g}, {times:.3g} times the {self.limit:.3g} that {self.addends} sites may add each"
            raise OutOfRange(field, why, needed)
        if self.kind != "float":
            return values.astype(UNSIGNED[self.bits])
        steps = wide * 2.0**self.exponent  # exact
        return np.rint(steps, out=steps).astype(SIGNED[self.bits]).view(UNSIGNED[self.bits])

    def leave(self, total: Vector) -> NDArray[np.generic]:
        """The sum that ring elements stand for: float64, or int64 for whole numbers."""
        if self.kind == "byte":
            return total.astype(np.int64)
        whole = total.view(SIGNED[self.bits]).astype(np.int64)
        return np.ldexp(whole.astype(np.float64), -self.exponent) if self.kind == "float" else whole

    def holds(self, total: Vector) -> bool:
        """Whether this can be the sum of what `enter` lets so many sites add, and an eighth for rounding and noise."""
        if self.kind == "byte":
            return bool(np.max(total, initial=0) <= 255 * self.addends)
        whole, most = total.view(SIGNED[self.bits]), 9 << self.bits - 5
        return bool(-most < np.min(whole, initial=0) and np.max(whole, initial=0) < most)


@dataclass(frozen=True)
class Grid:
    """How floats become whole numbers, the same for all sites of a run.

    With 32 bits they take half the bytes, in steps of 2^-step: what it costs is digits, so it has to be stated.
    """

    bits: int = 64
    step: int = 0
    """Of 32 bits; with 64 it follows from the range."""

    def __post_init__(self) -> None:
        if self.bits not in (32, 64):
            raise ValueError(f"floats are added in 32 or 64 bits, not {self.bits}")
        if self.bits == 32 and not 0 < self.step < 30:
            raise ValueError("32 bits need a step from 1 to 29 (the step is 2^-step), as in masks:bits=32:step=20")
        if self.bits == 64 and self.step:
            raise ValueError("a step is for 32 bits: with 64 it follows from the range")

    def floats(self, addends: int, range: int = FIRST_RANGE) -> Ring:
        """The ring of floats within ±2^range; with 32 bits the step decides, and the range is what is left."""
        if self.bits == 32:
            return Ring(32, self.step, addends, "float")
        return Ring(64, 62 - _width(addends) - range, addends, "float")

    @staticmethod
    def range_of(addends: int, deviation: float) -> int:
        """The R for numbers with noise of this deviation: up to 512 sites what they add enters the ring as it is, and
        there is room for all that they could hold, which no site has to say."""
        bits = max(62 - _width(addends) - NOISE_BITS, ROOM) + math.ceil(math.log2(deviation))
        return min(max(bits, FIRST_RANGE), WIDEST_RANGE)

    @staticmethod
    def integers(addends: int) -> Ring:
        return Ring(64, 0, addends, "integer")

    @staticmethod
    def bytes(addends: int) -> Ring:
        return Ring(16 if addends <= MOST_BYTES else 32, 0, addends, "byte")


def _width(addends: int) -> int:
    """⌈log2⌉: the bits by which a sum is wider than its addends."""
    return max(addends - 1, 0).bit_length()
