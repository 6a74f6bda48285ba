"""A site's release policy: its own file, read by its own process; nothing that a server sends can change it."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fedgist.core.errors import FedgistError
from fedgist.core.message import tag_of
from fedgist.core.method import Handler, Method
from fedgist.data.client_data import ClientData
from fedgist.options import build, option

EVERYTHING = "all"
LARGEST_MODEL = 50_000_000
"""Weights: more than any model here has with its usual options, and little enough for a small machine."""


class Refused(Exception):
    """A request is outside the policy."""


@dataclass(frozen=True)
class Policy:
    """What may leave a site."""

    methods: tuple[str, ...] = option((EVERYTHING,), "Methods that this site takes part in; all allows every one.")
    messages: tuple[str, ...] = option(
        (EVERYTHING,), "Replies that may leave this site, as the method's page names them; all allows every one."
    )
    min_samples_per_class: int = option(
        1, "Samples of a class with fewer than this are not used at all, as if they were not there.", low=1
    )

    def check_method(self, method: str) -> None:
        if not {method, EVERYTHING} & set(self.methods):
            raise Refused(f"its policy does not allow the method {method}")

    def check_reply(self, handler: Handler) -> None:
        tag = tag_of(handler.reply)
        if not {tag, handler.reply.__name__, EVERYTHING} & set(self.messages):
            raise Refused(f"its policy does not allow {tag} to leave")

    def check_any_reply(self, method: Method) -> None:
        """A run of which no message may leave is refused as a whole."""
        if not any(self._allows(handler) for handler in method.handlers.values()):
            raise Refused(f"its policy allows none of the messages of {method.name} to leave")

    def _allows(self, handler: Handler) -> bool:
        try:
            self.check_reply(handler)
        except Refused:
            return False
        return True

    def admit(self, data: ClientData) -> ClientData:
        """The data without the classes of which there are too few samples."""
        enough = data.counts() >= self.min_samples_per_class
        if bool(enough[data.y].all()):
            return data
        kept = torch.nonzero(enough[data.y]).flatten()
        if not len(kept):
            raise Refused(f"none of its classes has the {self.min_samples_per_class} samples that its policy asks for")
        return replace(data, x=data.x[kept], y=data.y[kept])


def load(path: Path) -> Policy:
    """The policy in a TOML file."""
    try:
        return build(Policy, tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise FedgistError(f"cannot read the policy {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedgistError(f"{path} is not TOML: {error}") from error
    except FedgistError as error:
        raise FedgistError(f"{path}: {error}") from error
