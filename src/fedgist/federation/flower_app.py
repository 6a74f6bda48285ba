"""The Flower app of a run: a folder with one file, which names what both ends have installed, and the run's options."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedgist.core.errors import FedgistError
from fedgist.experiments import config as configs
from fedgist.experiments.config import RunConfig
from fedgist.federation.kits import check_names
from fedgist.federation.runs import check
from fedgist.options import Role, build, having, option, options, toml
from fedgist.words import duration

SECONDS = 15.0
"""What an exchange costs on Flower, about: it starts a process at each site, which imports torch."""
MANY = 10
"""Exchanges a round from which on another engine is better."""


@dataclasses.dataclass(frozen=True)
class App:
    """What the app's configuration says; each may be changed for one run with `flwr run --run-config`."""

    sites: tuple[str, ...] = option((), "The sites that take part, by the site-name of their nodes.")
    out: str = option("", "The run's folder, on the machine of the ServerApp.")
    resume: bool = option(False, "Go on with the run in that folder from its last checkpoint.")
    timeout: float = option(600.0, "Seconds until a silent site is given up for this run.", above=0)
    enough: float = option(1.0, "The share of the asked sites whose answers suffice.", above=0, high=1)
    min_sites: int = option(1, "Fewest sites to go on with.", low=1)
    max_norm: float = option(100.0, "Who adds so many times the median of a round is refused.", above=0)
    wait: float = option(120.0, "Seconds to wait for sites that are not there yet.", above=0)
    run: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The options of the run and of the method, flat."""

    @classmethod
    def read(cls, known: Mapping[str, Any]) -> "App":
        """From Flower's flat configuration, in which the options of the run begin with `run.`."""
        own = {name: value for name, value in known.items() if not name.startswith("run.")}
        run = {name.removeprefix("run."): value for name, value in known.items() if name.startswith("run.")}
        return dataclasses.replace(build(cls, own), run=run)

    def __post_init__(self) -> None:
        check_names(self.sites)


def write(folder: Path, app: App) -> None:
    """The app as `flwr run` wants it, every option under its sentence."""
    if folder.exists():
        raise FedgistError(f"{folder} exists already; name a new folder")
    config = configs.resolve(app.run, {"clients": len(app.sites)})
    check(config)
    if config.secure or config.topology:
        what = "secure sums" if config.secure else "letters between sites"
        raise FedgistError(f"{what} need the signed roster of a federation on NVFlare, which Flower does not have")
    if config.data_dir is not None:  # Flower runs the ServerApp wherever it likes
        config = dataclasses.replace(config, data_dir=str(Path(config.data_dir).expanduser().resolve()))
    elsewhere = having(RunConfig, Role.SITES | Role.SIMULATION)
    chosen = {name: value for name, value in configs.flat(config).items() if name not in elsewhere}
    known = {**options(RunConfig), **options(config.options)}
    folder.mkdir(parents=True)  # only now, when all that the user may have got wrong has been read
    (folder / "pyproject.toml").write_text(
        f"""# A run of fedgist on Flower. Start it with: flwr run {folder.name} SUPERLINK --stream

[project]
name = "fedgist-{config.method.replace("+", "-plus")}"
version = "1.0.0"
description = "A run of fedgist, which all sites have installed"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedgist"

[tool.flwr.app.components]
serverapp = "fedgist.federation.flower:server_app"
clientapp = "fedgist.federation.flower:client_app"

[tool.flwr.app.config]

{toml(options(App), _flat({name: getattr(app, name) for name in options(App)}))}
[tool.flwr.app.config.run]

{toml(known, _flat(chosen))}""",
        encoding="utf-8",
    )


def expectation(config: RunConfig) -> str:
    """How long the exchanges of a run take on Flower, with a warning where that is what the run will mostly do."""
    each = int(getattr(config.options, "exchanges", 1))  # methods that make more than one or two have this option
    total = duration(SECONDS * each * config.rounds)
    said = (
        f"about {each:,} exchange{'s' * (each > 1)} a round: Flower needs about {SECONDS:g} s for each, {total} in all"
    )
    if each < MANY:
        return said
    return f"warning: {config.method} makes {said}; NVFlare, which takes a fraction of a second, suits it better"


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flower's configurations hold no lists; fedgist reads them from text."""
    return {name: ",".join(map(str, value)) if isinstance(value, tuple) else value for name, value in values.items()}
