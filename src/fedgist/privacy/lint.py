"""A look at what a run with secure sums put on the wire: masked bytes are uniform, nothing secret is there twice.

It finds mistakes, as a mask that was left out or used again; that nothing is found proves nothing.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.core.message import schema_of

NAME = re.compile(r"(\d+-\w+-\d+)-.+-([\w.]+)\.safetensors")
UNLIKELY = 1e-6
"""Of uniform bytes, a chi-square as large as this has this chance."""
FEWEST = 256 * 20
"""Bytes from which on their frequencies can be judged."""


@dataclass
class Finding:
    """What was looked at, and what is wrong."""

    messages: int = 0
    counts: Tensor = field(default_factory=lambda: torch.zeros(256, dtype=torch.int64))
    wrong: list[str] = field(default_factory=list)

    @property
    def masked_bytes(self) -> int:
        return int(self.counts.sum())

    @property
    def chance(self) -> float:
        """Of a chi-square with 255 degrees of freedom to be this large, by Wilson and Hilferty's approximation."""
        expected = self.masked_bytes / 256
        chi = float(((self.counts - expected) ** 2 / expected).sum())
        deviate = ((chi / 255) ** (1 / 3) - (1 - 2 / (9 * 255))) / math.sqrt(2 / (9 * 255))
        return math.erfc(deviate / math.sqrt(2)) / 2


def lint(folder: Path, replies: Iterable[type]) -> Finding:
    """Look at the recorded messages of a run, whose method has these replies."""
    summed = {
        f"masked.{reply.__name__}": {name for name, (_, declared) in schema_of(reply).items() if declared.additive}
        for reply in replies
    }
    found, secrets = Finding(), Counter[tuple[str, bytes]]()
    nonces: dict[bytes, set[str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        named = NAME.fullmatch(path.name)
        if named and named[2] in summed:
            _masked(load_file(path), summed[named[2]], found, secrets)
        elif named and named[2] == "secure_sum.Invitation":
            nonces.setdefault(load_file(path)["nonce"].numpy().tobytes(), set()).add(named[1])
    if not found.messages:
        raise FedgistError(f"{folder} holds no masked message: record a run with --secure masks --record all")
    for at in nonces.values():
        if len(at) > 1:
            found.wrong.append(f"a nonce is used in {len(at)} exchanges: {', '.join(sorted(at))}")
    often = {"vector": 1, "seal": 1, "key": 2}  # a pair's key is committed to by both
    for (kind, _), times in secrets.items():
        if times > often[kind]:
            found.wrong.append(f"a {kind} is there {times} times")
    if found.masked_bytes < FEWEST:
        found.wrong.append(f"{found.masked_bytes} masked bytes are too few to judge; record more")
    elif found.chance < UNLIKELY:
        found.wrong.append(f"masked bytes are not uniform: the chance of their frequencies is {found.chance:.1g}")
    return found


def _masked(
    leaves: Mapping[str, Tensor], summed: set[str], found: Finding, secrets: Counter[tuple[str, bytes]]
) -> None:
    found.messages += 1
    for name, leaf in leaves.items():
        if name.split("/")[0] in summed:
            data = leaf.contiguous().reshape(-1).view(torch.uint8)
            found.counts += torch.bincount(data.int(), minlength=256)
            if len(data) >= 16:  # shorter ones may be alike by chance
                secrets["vector", data.numpy().tobytes()] += 1
    secrets.update(("seal", row.numpy().tobytes()) for row in leaves["shares"])
    secrets.update(("key", row.numpy().tobytes()) for row in leaves["commitments"])
