"""What sites write to each other, as it travels with an envelope; sealed and opened it is elsewhere (desk.py)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fedgist.core.message import WireError

NONCE, TAG = 12, 16
"""Bytes by which a letter is longer than what is in it."""


@dataclass(frozen=True)
class About:
    """The place of a letter; both ends know it, and it does not travel."""

    run: str
    version: str
    sender: str
    receiver: str
    answers: str = ""
    """For a reply, the nonce of the letter that it answers."""


class Desk(Protocol):
    """Where a site seals its letters, and opens those to it."""

    def seal(self, about: About, data: bytes) -> bytes:
        """A letter that only its receiver can open."""

    def open(self, about: About, letter: bytes) -> bytes:
        """What its sender sealed for this place, and nobody has touched; or a `WireError`."""


def nonce_of(letter: bytes) -> str:
    return letter[:NONCE].hex()


def bundle(told: Mapping[str, Any], letters: Mapping[str, bytes]) -> bytes:
    """What is told and some letters, as they follow an envelope's header."""
    text = json.dumps({**told, "letters": {name: len(letter) for name, letter in letters.items()}}).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *letters.values()])


def unbundle(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What `bundle` put together, or a `WireError`."""
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        if len(data) < 8 or end > len(data):
            raise ValueError("cut short")
        told = json.loads(data[8:end])
        letters: dict[str, bytes] = {}
        for name, length in told.pop("letters").items():
            if type(length) is not int or not NONCE + TAG <= length <= len(data) - end:
                raise ValueError("no length")
            letters[name], end = data[end : end + length], end + length
        if end != len(data):
            raise ValueError("too long")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WireError("letters that do not fit together") from error
    return told, letters
