"""The configuration of a run: one frozen dataclass, read from and written to TOML, every field with its sentence.

A configuration is made in layers, the later winning: defaults, a profile of the method, a TOML file, the command line.
Keys are flat: `--set lr=0.1` finds the method's `lr` as `--set clients=5` finds the run's `clients`; in a file the
method's own options stand in the table `[options]`.
"""

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedgist.core.errors import FedgistError, check_known, unknown
from fedgist.options import ALL, Role, build, option, options, toml

OWN = "own"  # the name of data and models that a Python caller brings


_data = partial(option, group="Data", role=Role.GROUND)
_split = partial(option, group="Clients", role=Role.GROUND | Role.SITES)
_model = partial(option, group="Model")
_rounds = partial(option, group="Rounds and seeds")
_judged = partial(option, group="Evaluation")
_computed = partial(option, group="Computation", role=Role.EXECUTION)
_network = partial(option, group="Network", role=Role.SIMULATION)
_private = partial(option, group="Differential privacy", role=Role.LATER)
_kept = partial(option, group="What is kept", role=Role.EXECUTION)


@dataclass(frozen=True)
class RunConfig:
    """All that a run depends on; the same configuration and seed give the same result.

    The order of the fields is part of the names of folders (`digest`).
    """

    method: str = option("fedavg", "The method; `fedgist list methods` names them.")
    dataset: str = _data("digits", "The data set; `fedgist list datasets` names them.", flag="NAME")
    data_dir: str | None = _data(
        None, "Folder with data files; without it, the folder that FEDGIST_DATA names.", role=Role.EXECUTION, flag="DIR"
    )
    normalise: str = _data(
        "dataset",
        "How inputs are scaled: dataset (its mean and deviation), sums (over all clients), half, train or unit.",
    )
    limit: int | None = _data(None, "Use at most this many training samples.", low=1)
    clients: int = _split(10, "How many clients the training data is split over.", low=1, flag="N")
    partition: str = _split("dirichlet", "How it is split; `fedgist list partitions` names the ways.", flag="NAME")
    alpha: float = _split(0.5, "Dirichlet concentration: small is heterogeneous, large is even.", above=0, flag="X")
    min_size: int = _split(10, "Balanced Dirichlet partitions: every client has at least this many samples.", low=0)
    ratio: float = _split(0.5, "Partitions of FedGen: the share of the data that is used.", above=0, high=1)
    shards_per_client: int = _split(2, "Partition shards: how many each client gets.", low=1)
    partition_seed: int | None = _split(None, "Seed of the split; without it, the seed of the run.", low=0, high=ALL)
    discrepancy: tuple[str, ...] = _split(
        (),
        "How clients see the data differently: rotation, blur, contrast, labels; as in rotation:degrees=30,labels.",
        role=Role.GROUND | Role.SIMULATION,
    )
    proxy: str | None = _model(None, "Unlabelled images of the server: their number, or as in fashion-mnist:2000.")
    model: str = _model(
        "mlp", "The model, with options as in mlp:hidden=200x100; `fedgist list models` names them.", flag="NAME"
    )
    architectures: tuple[str, ...] = _model(
        (), "Models of the clients, dealt out in turn; without it, all `model`.", role=Role.SITES
    )
    rounds: int = _rounds(10, "Communication rounds.", low=1, flag="N")
    max_bytes: int | None = _rounds(
        None,
        "Stop before more than so many bytes, up and down, were sent; rounds are taken to cost as much as before.",
        low=1,
        role=Role.LATER,
    )
    finish: str | None = _rounds(
        None,
        "After the last round, an exact head from sums over all clients' data: gist, on the features that the model "
        "learned, or with fixed ones beside them, as in gist+scattering; options of gist as in gist:wire=float16.",
        role=Role.LATER,
        flag="NAME",
    )
    seed: int = _rounds(0, "Seed of everything random.", low=0, high=ALL, role=Role.GROUND | Role.EXECUTION, flag="N")
    seeds: int = _rounds(
        1,
        "How many runs, with the seeds seed, seed + 1, …; each has its own folder.",
        low=1,
        role=Role.GROUND | Role.EXECUTION | Role.SIMULATION,
        flag="N",
    )
    eval_every: int = _judged(1, "Evaluate every so many rounds, and at the end; 0 is only at the end.", low=0)
    client_test: str = _judged(
        "all",
        "What clients test their own models on: all test data, that of their labels, or their share of the validation.",
        ("all", "own-labels", "own-share"),
        role=Role.GROUND | Role.SIMULATION,
    )
    validation: float = _judged(
        0.0,
        "Judge on this share of every client's samples, on which nobody then trains, not on the test set.",
        low=0,
        high=0.9,
        role=Role.SIMULATION,
    )
    engine: str = _computed("auto", "Who computes: auto, sequential, threaded, stacked or compiled.", flag="NAME")
    device: str = _computed("auto", "Where: auto (a GPU where there is one), cpu, cuda or cuda:1.", flag="NAME")
    workers: str | None = _computed(
        None,
        "Spread the clients over so many processes here, or over a cluster of your own (ray://HOST:10001); needs Ray.",
        role=Role.EXECUTION | Role.SIMULATION | Role.LATER,
        flag="N",
    )
    tf32: bool = _computed(
        False,
        "On a GPU, round the inputs of products to 10 bits: faster, no longer exact float32.",
        role=Role.NONE,  # it changes what comes out
    )
    offline: float = _network(
        0.0, "Chance that a client does not answer in a round.", low=0, high=1, role=Role.GROUND | Role.SIMULATION
    )
    delay: int = _network(
        0, "A reply is late by up to so many rounds, at random; until then its sender is busy.", low=0
    )
    topology: str | None = _network(
        None,
        "Who talks to whom without a server, as in ring; `fedgist list topologies` names them. Without it, a server.",
        role=Role.NONE,
        flag="KIND",
    )
    secure: str | None = _network(
        None,
        "Hide what is summed from the server: masks, helper, or additive where a method shows more (masks:group=5).",
        role=Role.LATER,
        flag="HOW",
    )
    adversary: str | None = _network(
        None,
        "Bad clients, how many: sign-flip:3, or scale, noise, free-rider, collude, alie, label-flip, backdoor.",
        role=Role.SIMULATION | Role.LATER,
        flag="KIND:N",
    )
    defence: str | None = _network(
        None,
        "How the server holds replies against each other: clip, trimmed, median, krum; filter for images.",
        role=Role.SIMULATION | Role.LATER,
        flag="HOW",
    )
    checkpoint_every: int = _kept(1, "Write a checkpoint every so many rounds, and at the end.", low=1)
    artifacts_every: int | None = _kept(
        None, "Keep images and features for the report every so many rounds; 0 never, without it about 8 times.", low=0
    )
    record: tuple[str, ...] = _kept((), "Message types of which the encoded messages are kept.", flag="TYPES")
    epsilon: float | None = _private(
        None,
        "Budget ε of every client's data in this run, for a record (dp-fedavg: a client) added or removed; none: no "
        "guarantee.",
        above=0,
        flag="X",
    )
    delta: float = _private(
        1e-5, "The δ at which ε holds: far below one by the number of records.", above=0, high=0.1, flag="X"
    )
    dp_noise: str = _private(
        "local",
        "local: each client's noise protects it from the server; sum: only the sum's does, which then must be secure.",
        ("local", "sum"),
    )
    colluders: int = _private(0, "With dp_noise=sum: clients that may tell the server their noise.", low=0)
    plan: str | None = _private(
        None, "A file of `fedgist privacy plan --out`, which stands in for dp-accounting where that is not installed."
    )
    options: Any = None


def method_options(method: str) -> dict[str, Any]:
    """The method's own options by name; a name that the run has too would make `--set` ambiguous."""
    from fedgist import methods

    own, of_every_run = options(methods.find(method).Config), options(RunConfig)
    for name in own:
        if name in of_every_run:
            raise TypeError(f"option {name!r} of method {method!r} has the name of an option of every run")
    return own


def resolve(*layers: Mapping[str, Any], profile: str | None = None) -> RunConfig:
    """The configuration from flat layers, the later winning; the profile of the method comes before them all."""
    from fedgist import methods

    flat = {key: value for layer in layers for key, value in layer.items()}
    name = str(flat.get("method", RunConfig.method))
    own, run = method_options(name), options(RunConfig)
    known = {**own, **run}
    now = {option.formerly: key for key, option in known.items() if option.formerly}
    given = {now.get(key, key): value for layer in layers for key, value in layer.items()}
    flat = {**profile_of(name, profile), **given}
    for key in flat:
        check_known("option", key, known)
    config = build(RunConfig, {key: value for key, value in flat.items() if key in run})
    own_config: Any = build(methods.find(name).Config, {key: value for key, value in flat.items() if key in own})
    config = dataclasses.replace(config, options=own_config)
    check(config)
    return config


def profile_of(method: str, profile: str | None) -> dict[str, Any]:
    """The flat overrides of a profile, if any, without its note."""
    from fedgist import methods

    profiles = methods.find(method).profiles
    if profile is None:
        return {}
    if not profiles:
        raise FedgistError(f"{method} has no profiles: leave out --profile {profile}")
    check_known(f"profile of {method}", profile, profiles)
    return {key: value for key, value in profiles[profile].items() if key != "note"}


def profile_note(method: str, profile: str | None) -> str | None:
    """What the profile reduced, in a sentence."""
    from fedgist import methods

    note = methods.find(method).profiles[profile].get("note") if profile else None
    return None if note is None else str(note)


def base_layers(
    command: str, flags: Mapping[str, Any], file: Path | None, begun: Path | None = None
) -> list[dict[str, Any]]:
    """What lies below the options that were typed: the run that goes on, or a file; one of them names the method."""
    if begun is not None:
        return [load(begun)]
    layers = [load(file, flags.get("method"))] if file else []
    if not any("method" in layer for layer in [*layers, flags]):
        raise FedgistError(f"which method? name one, as in `{command}`; `fedgist list methods` shows them")
    return layers


def assignments(pairs: list[str]) -> dict[str, str]:
    """`key=value` texts as a mapping."""
    for pair in pairs:
        if "=" not in pair:
            raise FedgistError(f"--set wants key=value, not {pair!r}")
    return {key.strip(): value.strip() for key, _, value in (pair.partition("=") for pair in pairs)}


def read(path: str | Path) -> dict[str, Any]:
    """A TOML file as it stands."""
    path = Path(path)
    if not path.is_file():
        raise FedgistError(f"there is no configuration file {path}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedgistError(f"{path} is not TOML: {error}") from error


def load(path: str | Path, method: str | None = None) -> dict[str, Any]:
    """A TOML file as a flat layer, with what it has for `method` alone; a file about one method names it."""
    own, common = load_several(path)
    if method is None and "method" not in common and len(own) == 1:
        common["method"] = next(iter(own))
    return {**common, **own.get(method or common.get("method", ""), {})}


def load_several(path: str | Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """A TOML file as a flat layer for each method that has a table of its own, and one for all."""
    from fedgist import methods

    values = read(path)
    own = values.pop("options", {})
    tables = {name: value for name, value in values.items() if isinstance(value, dict) and name in methods.available()}
    values = {name: value for name, value in values.items() if name not in tables}
    if not isinstance(own, dict):
        raise FedgistError(f"{path}: options must be a table, [options]")
    for key, value in {**values, **own}.items():
        if isinstance(value, dict):
            raise FedgistError(
                f"{path}: there is no table [{key}]; the method's own options stand in [options] or under its name"
            )
    for key in own:
        if key in options(RunConfig):
            raise FedgistError(f"{path}: {key} is an option of the run: write it above [options]")
    return tables, {**values, **own}


def dump(config: RunConfig) -> str:
    """The configuration as TOML, every value under its sentence."""
    lines = ["# A run of fedgist; repeat it with: fedgist run --config FILE\n"]
    for heading, of in (("", config), ("[options]\n\n", config.options)):
        if of is not None and (known := options(of)):
            lines.append(heading + toml(known, {name: getattr(of, name) for name in known}))
    return "\n".join(lines)


def flat(config: RunConfig) -> dict[str, Any]:
    """The configuration as a flat layer: `resolve(flat(config)) == config`."""
    own = {} if config.options is None else {name: getattr(config.options, name) for name in options(config.options)}
    return {**{name: getattr(config, name) for name in options(RunConfig)}, **own}


def digest(config: RunConfig) -> str:
    """Eight hex digits that name all of the configuration but its seed."""
    known = {**options(RunConfig), **(options(config.options) if config.options else {})}
    named = {
        name: value
        for name, value in flat(dataclasses.replace(config, seed=0, seeds=1)).items()
        if not (known[name].role & Role.LATER and value == known[name].default)
    }
    text = json.dumps(named)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Where two configurations differ so that one cannot go on as the other, one phrase a key; rounds may grow.

    A finish comes after all rounds, so that it may come later, or be another.
    """
    before, after = flat(old), flat(new)
    keys = [key for key in {**before, **after} if before.get(key, OWN) != after.get(key, OWN)]
    keys = [key for key in keys if key != "rounds" or new.rounds < old.rounds]
    keys = [key for key in keys if key != "finish" or new.finish is None]
    return [f"{key} was {before.get(key)!r} and is now {after.get(key)!r}" for key in keys]


def check(config: RunConfig) -> None:
    """What no single option can know: whether the numbers fit together."""
    active = getattr(config.options, "active", None)
    if active is not None and active > config.clients:
        raise FedgistError(
            f"{active:g} active clients a round are more than the {config.clients} clients that there are"
        )
    if active is not None and active > 1 and active != int(active):
        raise FedgistError(f"active must be a whole number of clients, or a fraction below 1, not {active:g}")
    for spec in (config.model, *config.architectures):
        model_spec(spec)
    if config.proxy is not None:
        proxy_spec(config.proxy)
    if config.topology is not None:
        _check_topology(config)
    if config.finish is not None:
        _check_finish(config)
    if config.normalise == "sums":
        _check_sums(config)
    if config.record:
        _check_record(config)
    if config.client_test == "own-share" and (not config.validation or config.discrepancy):
        raise FedgistError(
            "client_test = own-share is what validation holds out of a client: set it, and leave out discrepancy"
        )


def _check_finish(config: RunConfig) -> None:
    from fedgist import methods

    name, given = finish_spec(config.finish or "")
    build(methods.find(name).Config, given)
    if config.method == name:
        raise FedgistError(f"{name} has the exact head already: leave out finish")
    if config.topology is not None:
        raise FedgistError("a finish is made by a server: leave out finish or topology")
    if config.epsilon is not None:
        raise FedgistError(
            "a finish would spend a budget of its own beside that of the rounds: leave out finish or epsilon"
        )


def _check_sums(config: RunConfig) -> None:
    if config.epsilon is not None:
        raise FedgistError(
            "normalise=sums tells sums of all samples, which get no noise: in a private run state public numbers in "
            "columns.toml, or take --set normalise=unit"
        )
    if config.topology is not None:
        raise FedgistError("normalise=sums needs a server that adds up: leave out topology, or take normalise=unit")


def _check_topology(config: RunConfig) -> None:
    from fedgist import methods

    if not methods.find(config.method).peer_to_peer:
        able = ", ".join(name for name, method in methods.registry().items() if method.peer_to_peer)
        raise FedgistError(f"{config.method} needs a server: leave out topology, or take a method without one: {able}")


def _check_record(config: RunConfig) -> None:
    from fedgist import methods
    from fedgist.core.message import tag_of

    pairs = methods.find(config.method).handlers.values()
    tags = {tag_of(kind) for pair in pairs for kind in (pair.request, pair.reply)}
    names = {name.rsplit(".", 1)[-1] for name in tags}
    for name in config.record:
        if name not in tags | names | {"all"}:
            raise unknown(f"message type of {config.method}", name, names | {"all"})


def finish_spec(text: str) -> tuple[str, dict[str, Any]]:
    """The method and its options in a text such as `gist+scattering:grid=5`.

    Alone, learned features stay as they are, so that the head fits into the model that they come from.
    """
    both, known = model_spec(text)
    given = {key: text.split(f":{key}=")[1].split(":")[0] for key in known}  # as text: gist knows what each is
    name, _, beside = both.partition("+")
    if name != "gist" or "features" in given:
        raise FedgistError(f"finish must be gist, or gist+NAME for a feature map beside the model's, not {text!r}")
    return name, {"features": f"learned+{beside}", **given} if beside else {"features": "learned", "clip": 0.0, **given}


def proxy_spec(text: str) -> tuple[str | None, int]:
    """The data set, if one is named, and the number of images in a text such as `2000` or `fashion-mnist:2000`."""
    name, _, count = text.rpartition(":")
    if not count.isdecimal() or int(count) == 0:
        raise FedgistError(f"proxy must be a number of images or NAME:NUMBER, as in fashion-mnist:2000, not {text!r}")
    return name or None, int(count)


def is_own(spec: str) -> bool:
    """Whether a model is code of a user's: of a Python caller `own`, or of several `own1`, `own2`, …; of a site
    `module:features=64`."""
    return spec.rstrip("0123456789") == OWN or spec.startswith("module:")


def model_spec(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the options in a text such as `mlp:hidden=200x100:norm=batch`."""
    name, *pairs = text.split(":")
    if len(pairs) == 1 and pairs[0].isidentifier():
        raise FedgistError(
            f"a model's options are written name:key=value, not {text!r}; code, package:factory, is for `site start` "
            "and `federation run`; on one machine give the module to fedgist.run in Python"
        )
    for pair in pairs:
        if "=" not in pair:
            raise FedgistError(f"a model's options are written name:key=value:key=value, not {text!r}")
    given = {key: _value(value) for key, _, value in (pair.partition("=") for pair in pairs)}
    if len(given) < len(pairs):
        raise FedgistError(f"model {text!r} has an option twice: leave out one of the two")
    return name, given


def _value(text: str) -> Any:
    """The option of a model: 200x100 is (200, 100), digits are a number, the rest is text."""
    parts = text.split("x")
    if not all(part.isdecimal() for part in parts):
        return text
    return int(text) if len(parts) == 1 else tuple(map(int, parts))
