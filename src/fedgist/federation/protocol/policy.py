"""A site's release policy: its own file, read by its own process; nothing that a server sends can change it.

It is an allow-list. A line that is not there means what it means in a fresh kit, so that a file from before a rule came
to be is as strict about it as a new one.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedgist.core.errors import FedgistError, unknown
from fedgist.core.message import tag_of
from fedgist.core.method import Handler, Method, who_sees_what
from fedgist.data.client_data import ClientData
from fedgist.families.global_model import GlobalModelOptions
from fedgist.options import Option, build, option, options, toml_value, within

EVERYTHING = "all"
SUMS = "sums"
"""In `methods`: those whose clients show the server only sums. `all`, which files from before have, means the same."""
LARGEST_MODEL = 50_000_000
"""Weights: more than any model here has with its usual options, and little enough for a small machine."""

COMMON = {name: one for name, one in options(GlobalModelOptions).items() if one.safe is not None}
"""The options of local training, which most methods have."""

Allowed = tuple[Any, ...]
"""Values of an option, and ranges of numbers as in "10..1000"."""


class Refused(Exception):
    """A request is outside the policy."""


@dataclass(frozen=True)
class Policy:
    """What may leave a site, and what a server may make it spend."""

    methods: tuple[str, ...] = option(
        (SUMS,),
        "Methods that this site takes part in: sums stands for those whose clients show the server only sums; every "
        "other one, above all real, which sends real images, must be named.",
    )
    messages: tuple[str, ...] = option(
        (EVERYTHING,), "Replies that may leave this site, as the method's page names them; all allows every one."
    )
    neighbours: tuple[str, ...] = option(
        (EVERYTHING,),
        "Sites that may be this site's neighbours in runs without a server, and then see its replies; all: any member.",
    )
    min_samples_per_class: int = option(
        10, "Samples of a class with fewer than this are not used at all, as if they were not there.", low=1
    )
    min_test_samples: int = option(
        50, "With fewer test images than this no score leaves; classes as rare as above are not tested.", low=1
    )
    min_samples: int = option(
        50, "Sums of columns, by which everybody standardises, are over at least so many samples here.", low=1
    )
    secure: bool = option(
        False, "Whether what is summed leaves only in secure sums, which the server cannot look into."
    )
    min_sum: int = option(
        3,
        "A secure sum is over at least so many sites; sums of a round, or of the same question, tell of no fewer.",
        low=2,
    )
    sum_trips: int = option(
        2,
        "With 3, a site helps to open a sum only once it has seen that others were told of the same set of sites.",
        low=2,
        high=3,
    )
    helper: str = option(
        "", "The member of the federation that may hold what opens this site's secure sums (--secure helper)."
    )
    max_model: int = option(LARGEST_MODEL, "Weights of the largest model that is built.", low=1)
    max_models: int = option(100, "Architectures that a run may name.", low=1)
    max_batch_samples: int = option(10_000_000, "Samples that the batches of one exchange may count in all.", low=1)
    max_seconds: float = option(3600.0, "Seconds that answering one request may take.", above=0)
    max_runs: int = option(20, "Runs whose states are kept; the one that was asked longest ago goes first.", low=1)
    epsilon: float | None = option(
        None,
        "Budget ε of this site's data, for all runs together; with it, only differentially private runs are answered.",
        above=0,
    )
    delta: float = option(1e-5, "The δ at which that budget holds.", above=0, high=0.1)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Where the operator says otherwise than the method: by option, or by method and option, what is allowed."""

    def check_method(self, method: str) -> None:
        """What can be said by the name alone; `check_run` says the rest."""
        if not {method, SUMS, EVERYTHING} & set(self.methods):
            raise _not_allowed(method)

    def check_run(self, method: Method) -> None:
        """Whether a method with its options may run here; one of which no message may leave is refused as a whole."""
        if method.name not in self.methods:
            self.check_method(method.name)
            if shown := sorted({reply for _, reply, _, additive in who_sees_what(method) if not additive}):
                raise _not_allowed(method.name, f", which shows {', '.join(shown)} of each site")
        if not any(self.allows(handler) for handler in method.handlers.values()):
            raise Refused(f"its policy allows none of the messages of {method.name} to leave")

    def check_peers(self, method: Method, neighbours: Iterable[str]) -> None:
        """Whether a method may run here without a server: no sum hides a reply from who asks for it, so that it must be
        named; and whether these may be neighbours."""
        if method.name not in self.methods:
            raise _not_allowed(method.name, " without a server, which shows its replies to neighbours")
        if self.secure:
            raise Refused("its policy allows replies to leave only in secure sums, and neighbours would see them")
        for site in neighbours:
            if not {site, EVERYTHING} & set(self.neighbours):
                raise Refused(f"its policy does not allow {site} as a neighbour")

    def check_options(self, method: str, config: object) -> None:
        """Whether each option is as safe as this site wants it; before anything is built with it."""
        if outside := self.outside(method, config):
            name, allowed = next(iter(outside.items()))
            value = options(config)[name].written(getattr(config, name))
            raise Refused(
                f"its policy does not allow {name} = {toml_value(value)} in {method}, only "
                f"{', '.join(map(str, allowed)) or 'nothing'}"
            )

    def outside(self, method: str, config: object) -> dict[str, Allowed]:
        """The options that are not as this site allows them, and what it allows."""
        bounded = {name: one for name, one in options(config).items() if one.safe is not None}
        return {
            name: given
            for name, one in bounded.items()
            if not within(one.written(getattr(config, name)), given := self.allowed(method, one))
        }

    def allowed(self, method: str, declared: Option) -> Allowed:
        """What an option may be here: as the policy says for this method, for all, or as the method declares it.

        What is said for all is about local training: FedDM's steps are others, and have a line of their own or none.
        """
        own, usual = self.options.get(method, {}), COMMON.get(declared.name)
        everywhere = self.options.get(declared.name) if usual and usual.safe == declared.safe else None
        found: Allowed = own.get(declared.name, declared.safe if everywhere is None else everywhere)
        return found

    def check_reply(self, handler: Handler) -> None:
        if not self.allows(handler):
            raise Refused(f"its policy does not allow {tag_of(handler.reply)} to leave")

    def allows(self, handler: Handler) -> bool:
        return bool({tag_of(handler.reply), handler.reply.__name__, EVERYTHING} & set(self.messages))

    def admit(self, data: ClientData, private: bool = False) -> ClientData:
        """The data without the classes of which there are too few samples, and without a test set that is too small.

        In a private run nothing is left out: that would depend on more than one record, and noise protects all. How
        much of it suffices is for the site to say, by its budget: a run may promise an ε that promises nothing.
        """
        if private and self.epsilon is None and self.min_samples_per_class > 1:
            raise Refused(
                f"its policy leaves out classes with fewer than {self.min_samples_per_class} samples, which no private "
                "run can, and has no privacy budget that would protect them instead: set epsilon in policy.toml"
            )
        if private:
            return replace(data, test=None, most=self.max_batch_samples)
        x, y = self._common(data.x, data.y, data.classes)
        if len(data.y) and not len(y):
            raise Refused(f"none of its classes has the {self.min_samples_per_class} samples that its policy asks for")
        test = self._common(*data.test, data.classes) if data.test else None
        if test is not None and len(test[1]) < self.min_test_samples:
            test = None
        return replace(data, x=x, y=y, test=test, most=self.max_batch_samples)

    def _common(self, x: torch.Tensor, y: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
        enough = torch.bincount(y, minlength=classes) >= self.min_samples_per_class
        kept = torch.nonzero(enough[y]).flatten()
        return (x, y) if len(kept) == len(y) else (x[kept], y[kept])


def _not_allowed(method: str, why: str = "") -> Refused:
    return Refused(
        f"its policy does not allow the method {method}{why}; the site's operator can name it in methods of policy.toml"
    )


def opened(method: Method, rules: Policy) -> Policy:
    """These rules, widened until they let this run through, whatever it shows; for trials on one's own machine."""
    declared = options(method.config)
    wider = {
        name: (
            *given,
            *(value if isinstance(value := declared[name].written(getattr(method.config, name)), tuple) else (value,)),
        )
        for name, given in rules.outside(method.name, method.config).items()
    }
    known = {**rules.options, method.name: {**rules.options.get(method.name, {}), **wider}} if wider else rules.options
    return replace(rules, methods=tuple(dict.fromkeys((*rules.methods, method.name))), options=known)


def leaves(method: Method, rules: Policy) -> list[str]:
    """What of a run leaves a site, a line for each kind of reply."""
    lines = []
    for handler in method.handlers.values():
        fields = [
            (name, sums) for request, _, name, sums in who_sees_what(method) if request == handler.request.__name__
        ]
        summed, shown = ([name for name, sums in fields if sums is kind] for kind in (True, False))
        parts = [f"{', '.join(shown)} as they are"] * bool(shown) + [f"{', '.join(summed)} to be summed"] * bool(summed)
        if rules.allows(handler) and parts:
            lines.append(f"{handler.reply.__name__}: {'; '.join(parts)}")
    return list(dict.fromkeys(lines))


def load(path: Path) -> Policy:
    """The policy in a TOML file."""
    try:
        known = tomllib.loads(path.read_text(encoding="utf-8"))
        ranges = known.pop("options", {})
        return replace(build(Policy, known), options=_ranges(ranges))
    except OSError as error:
        raise FedgistError(f"cannot read the policy {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedgistError(f"{path} is not TOML: {error}") from error
    except FedgistError as error:
        raise FedgistError(f"{path}: {error}") from error


def _ranges(table: Any, inner: bool = False) -> dict[str, Any]:
    """The table of options: lists of what is allowed, by option, or by method and option."""
    if not isinstance(table, dict):
        raise FedgistError("options must be a table, as in [options]")
    found: dict[str, Any] = {}
    for name, given in table.items():
        if isinstance(given, dict) and not inner:
            found[name] = _ranges(given, inner=True)
        elif isinstance(given, list):
            within(0, given)  # says what is wrong with a range
            found[name] = tuple(given)
        else:
            raise FedgistError(f'{name} in [options] must be a list of what is allowed, as in [0, "10..1000"]')
    return found


def check_names(rules: Policy, known: Mapping[str, type[Method]]) -> None:
    """Whether the policy names methods and options that there are: a mistyped rule would be none."""
    tables = {name for name, given in rules.options.items() if isinstance(given, Mapping)}
    for name in sorted({*rules.methods} - {SUMS, EVERYTHING} | tables):
        if name not in known:
            raise unknown("method", name, known)
        bounded = [key for key, one in options(known[name].Config).items() if one.safe is not None]
        for key in rules.options.get(name, {}):
            if key not in bounded:
                raise unknown(f"option of {name}", key, bounded)
    for name, given in rules.options.items():
        if not isinstance(given, Mapping) and name not in COMMON:
            raise unknown("option for all methods", name, COMMON)
