"""The two ends of a run on Flower: the ServerApp that drives it, and the ClientApp that answers at a site.

An app that `fedgist federation flower` writes names these two, which both ends have installed, and brings no code.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedgist.core.errors import FedgistError
from fedgist.experiments import config as configs
from fedgist.experiments.folder import RunFolder
from fedgist.experiments.progress import Lines
from fedgist.federation import runs, site_setup
from fedgist.federation.flower_app import App
from fedgist.federation.kits import NAME
from fedgist.federation.protocol import flower_transport, policy
from fedgist.federation.protocol.remote_engine import Patience
from fedgist.federation.protocol.site_host import SiteHost
from fedgist.words import size

log = logging.getLogger("fedgist")


def site_name(context: Context) -> str:
    """What this node says that it is; nothing where its operator has not said it."""
    return str(context.node_config.get("site-name", ""))


def make_host(context: Context) -> SiteHost:
    """What answers at this node, as its node config says. A site that has not said what it allows does not answer."""
    known, name = context.node_config, site_name(context)
    if not NAME.fullmatch(name):
        raise FedgistError(f"a site-name has small letters, digits and dashes, as in hospital-a, not {name!r}")
    if missing := [key for key in ("data", "policy") if key not in known]:
        raise FedgistError(f"the node config says nothing about {' and '.join(missing)}")
    folder = Path(str(known.get("folder", Path.home() / ".fedgist" / name))).expanduser()
    settings = site_setup.Settings(
        data=str(Path(str(known["data"])).expanduser()),
        model=str(known.get("model", "")),
        device=str(known.get("device", "cpu")),
        threads=int(known["threads"]) if "threads" in known else None,
    )
    folder.mkdir(parents=True, exist_ok=True)
    return site_setup.make_host(name, folder, settings, policy.load(Path(str(known["policy"])).expanduser()))


client_app = flower_transport.client_app(site_name, make_host)
server_app = ServerApp()


@server_app.main()
def drive(grid: Grid, context: Context) -> None:
    """One run, as the app's configuration says."""
    app = App.read(context.run_config)
    out, layer = Path(app.out).expanduser(), app.run
    if RunFolder(out).started and not app.resume:
        raise FedgistError(
            f"{out} holds a run: --run-config 'resume=true' goes on with it, and 'out=\"FOLDER\"' makes another"
        )
    if app.resume and (out / "config.toml").is_file():
        layer = configs.load(out / "config.toml")

    @contextmanager
    def connected() -> Iterator[flower_transport.FlowerTransport]:
        transport = flower_transport.FlowerTransport(grid)
        for site in sorted(transport.find(app.sites, app.wait)):
            log.warning(f"site {site} is not there; it can join later, with resume=true")
        if not transport.nodes:
            raise FedgistError(
                f"none of {', '.join(app.sites)} has connected within {app.wait:g} s: start their nodes, each with "
                "its site-name in the file for --node-config"
            )
        yield transport

    def resolve(known: dict[str, Any]) -> configs.RunConfig:
        return configs.resolve(layer, known)

    patience = Patience(app.timeout, app.enough, app.min_sites, app.max_norm)
    settled = runs.settle(app.sites, resolve, out, app.resume)
    result = runs.run(settled, connected, app.resume, patience, Lines())
    print(f"accuracy  {result.accuracy:.4f}\nbytes     {size(result.bytes_up)} up, {size(result.bytes_down)} down")
    print(f"run       {result.folder}\nreport    with `fedgist report {result.folder}`", flush=True)
