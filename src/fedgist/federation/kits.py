"""Provisioning: one authority, one server, one kit a site, by NVFlare's own provisioning; mutual TLS between all.

NVFlare lets whoever submits a job run code, read files and collect logs at a site. A kit made here takes that back:
jobs bring no code, only the few classes that fedgist needs may be named in them, there is no shell, and logs stay home.
"""

import contextlib
import io
import json
import re
import shutil
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgist import methods, storage
from fedgist.core.errors import FedgistError
from fedgist.federation.leftovers import STORE
from fedgist.federation.protocol.policy import COMMON, Policy
from fedgist.options import Option, options, toml_value

try:
    from fedgist.federation import authority
    from fedgist.federation.protocol.roster import NAME
except ImportError:  # cryptography, which NVFlare brings along
    raise FedgistError("a federation across machines needs NVFlare: pip install 'fedgist[nvflare]'") from None

PROJECT, ORGANISATION, ADMIN = "fedgist", "fedgist", "admin@fedgist.org"
PORT = 8002
ROOT_DAYS = 3650
"""For how long the authority's certificate is valid; those of members end after NVFlare's 360 days, and are renewed."""
SITE_CLASSES = ["fedgist.federation.site.ProvisionedSite", "nvflare.collab.runtime.executor.CollabExecutor"]
SERVER_CLASSES = [
    "fedgist.federation.protocol.flare_link.FlareServer",
    "nvflare.collab.runtime.controller.CollabController",
]
RIGHTS = {"submit_job": "any", "manage_job": "any", "view": "any", "operate": "none"}
RIGHTS |= {"shell_commands": "none", "byoc": "none", "server-predeployed-flwr": "none"}
"""What the one who runs methods may do at a site."""

HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,250}[A-Za-z0-9])?")


@dataclass(frozen=True)
class FederationFolder:
    """A provisioned federation on disk: where its parts lie."""

    path: Path
    server: str
    port: int
    sites: tuple[str, ...]

    @property
    def server_kit(self) -> Path:
        return self.path / "server"

    @property
    def admin_kit(self) -> Path:
        return self.path / "admin"

    @property
    def authority(self) -> Path:
        """What vouches for everybody; it need not be on the server's machine, and better is not."""
        return self.path / "authority"

    def kit(self, site: str) -> Path:
        return self.path / "sites" / site


def load(path: str | Path) -> FederationFolder:
    """The federation in a folder that `new` made."""
    path = Path(path).expanduser().resolve()
    if not (path / "federation.toml").is_file():
        raise FedgistError(f"there is no federation in {path}: make one with `fedgist federation new {path.name} …`")
    known = tomllib.loads((path / "federation.toml").read_text(encoding="utf-8"))
    return FederationFolder(path, known["server"], known["port"], tuple(known["sites"]))


def new(
    path: str | Path, server: str, sites: Sequence[str], port: int = PORT, rules: Policy | None = None
) -> FederationFolder:
    """Make certificates and kits in a folder that does not exist yet; `rules` are the policy to begin with."""
    path = Path(path).expanduser().resolve()
    if path.exists():
        raise FedgistError(f"{path} exists already; name a new folder")
    if not HOST.fullmatch(server):
        raise FedgistError(f"the server must be a host name that all sites can reach, not {server!r}")
    check_sites(server, sites)
    if not 0 < port < 2**16:
        raise FedgistError(f"--port must be from 1 to 65535, not {port}")
    federation = FederationFolder(path, server, port, tuple(sorted(sites)))
    with provisioned(federation) as produced:
        shutil.move(produced / server, federation.server_kit)
        shutil.move(produced / ADMIN, federation.admin_kit)
        for site in federation.sites:
            make_kit(federation, site, produced, rules)
    _make_server(federation.server_kit)
    authority.found(federation)
    save(federation)  # last: it says that all is there
    return federation


def check_names(sites: Sequence[str]) -> None:
    """Refuses names that sites cannot have, and none at all."""
    for site in sites:
        if not NAME.fullmatch(site):
            raise FedgistError(f"a site's name has small letters, digits and dashes, as in hospital-a, not {site!r}")
    if len(set(sites)) < len(sites) or not sites:
        raise FedgistError("name each site once, as in --sites hospital-a,hospital-b")


def check_sites(server: str, sites: Sequence[str]) -> None:
    """The same beside a server."""
    check_names(sites)
    if server in sites or "server" in sites:
        raise FedgistError("a site and the server cannot have the same name")


def make_kit(federation: FederationFolder, site: str, produced: Path, rules: Policy | None = None) -> None:
    """A site's kit from what NVFlare has made for it, with `rules` as the policy to begin with."""
    federation.kit(site).parent.mkdir(exist_ok=True)
    shutil.move(produced / site, federation.kit(site))
    _close_site(federation.kit(site))
    (federation.kit(site) / "policy.toml").write_text(policy_text(rules or Policy()), encoding="utf-8")


def save(federation: FederationFolder) -> None:
    """Write down who belongs to a federation, and how it is run."""
    told = {"server": federation.server, "port": federation.port, "sites": federation.sites}
    text = "".join(f"{name} = {toml_value(value)}\n" for name, value in told.items())
    for name, content in (("README.md", _readme(federation)), ("federation.toml", text)):
        storage.write(federation.path / name, content.encode())


def settle_server(kit: Path) -> None:
    """Have the server's kit allow what a job names there, as one from before has the classes where they were then, and
    keep its jobs in itself, wherever it was carried from: so two federations on a machine do not meet."""
    path = kit / "local" / "resources.json"
    before = path.read_text(encoding="utf-8")
    resources = json.loads(before)
    resources["class_allow_list"] += [name for name in SERVER_CLASSES if name not in resources["class_allow_list"]]
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(kit / "store" / "snapshots")
    for part in resources["components"]:
        if part["id"] == "job_manager":
            part["args"]["uri_root"] = str(kit / STORE)
    if resources != json.loads(before):
        _write(path, resources)


def policy_text(rules: Policy) -> str:
    """A policy with a sentence on each rule, and what every method's options may be."""
    lines = ["# What may leave this site. The site owns this file: nothing that a server sends can change it.\n"]
    for name, rule in options(Policy).items():
        lines.append(f"# {rule.help}\n{name} = {toml_value(getattr(rules, name))}\n")
    about = "What options of local training may be: values, and ranges with two dots."
    lines.append(_ranges("options", about, "", COMMON.values(), rules))
    for method, kind in methods.registry().items():
        own = [
            one
            for name, one in options(kind.Config).items()
            if one.safe is not None
            if name in rules.options.get(method, {}) or one.safe != getattr(COMMON.get(name), "safe", None)
        ]
        if own:
            lines.append(_ranges(f'options."{method}"', f"In {method}, if it is allowed above:", method, own, rules))
    return "\n".join(lines)


def _ranges(table: str, about: str, method: str, known: Iterable[Option], rules: Policy) -> str:
    lines = [f"# {about}\n[{table}]"]
    for one in known:
        lines += [f"# {one.reveals}"] * bool(one.reveals)
        lines.append(f"{one.name} = {toml_value(rules.allowed(method, one))}")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def provisioned(federation: FederationFolder) -> Iterator[Path]:
    """Run NVFlare's provisioning; gives the folder of what it made, which is gone afterwards: keys lie in it.

    What the authority has vouched for before stays as it was, so that only what is new has to be taken from there.
    """
    try:
        from nvflare.lighter.provision import prepare_builders, prepare_packager, prepare_project
        from nvflare.lighter.provisioner import Provisioner
    except ImportError:
        raise FedgistError("a federation across machines needs NVFlare: pip install 'fedgist[nvflare]'") from None
    work, port = federation.authority, federation.port
    days = authority.root_days(federation) or ROOT_DAYS
    builders: list[dict[str, Any]] = [
        {"path": "nvflare.lighter.impl.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
        {"path": "nvflare.lighter.impl.static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
        {"path": "nvflare.lighter.impl.cert.CertBuilder", "args": {"root_valid_days": days}},
        {"path": "nvflare.lighter.impl.signature.SignatureBuilder", "args": {}},
    ]
    who: list[dict[str, Any]] = [
        {"name": federation.server, "type": "server", "org": ORGANISATION, "fed_learn_port": port, "admin_port": port},
        {"name": ADMIN, "type": "admin", "org": ORGANISATION, "role": "project_admin"},
        *({"name": site, "type": "client", "org": ORGANISATION} for site in federation.sites),
    ]
    project = {"api_version": 3, "name": PROJECT, "description": "", "participants": who, "builders": builders}
    work.mkdir(parents=True, exist_ok=True)
    work.chmod(0o700)  # the authority's private key is in it
    with contextlib.redirect_stdout(io.StringIO()):
        made = Provisioner(str(work), prepare_builders(project), prepare_packager(project))
        made.provision(prepare_project(project))
    produced = max((work / PROJECT).glob("prod_*"))
    try:
        yield produced
    finally:
        shutil.rmtree(produced)


def _close_site(kit: Path) -> None:
    """What a site lets others do, in its folder `local`, which is the site's own and not signed."""
    local = kit / "local"
    resources = json.loads((local / "resources.json.default").read_text(encoding="utf-8"))
    resources |= {"class_allow_list": SITE_CLASSES, "class_list_enforcement_mode": "enforce"}
    resources |= {"allow_log_streaming": False}
    resources["components"] = [part for part in resources["components"] if part["id"] != "site_log_streamer"]
    _write(local / "resources.json", resources)
    _write(local / "authorization.json", {"format_version": "1.0", "permissions": {"project_admin": RIGHTS}})


def _make_server(kit: Path) -> None:
    """How the server runs jobs, in its folder `local`, which is the server's own and not signed."""
    local = kit / "local"
    resources = json.loads((local / "resources.json.default").read_text(encoding="utf-8"))
    resources["class_allow_list"] = SERVER_CLASSES
    for part in resources["components"]:
        if part["id"] == "job_scheduler":  # a job for all sites, and one for each that came later
            part["args"]["max_jobs"] = 1000
    resources["components"] = [part for part in resources["components"] if part["id"] != "log_receiver"]
    resources["servers"][0]["heart_beat_timeout"] = 60  # seconds; a site is heard every ten
    _write(local / "resources.json", resources)
    settle_server(kit)


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _readme(federation: FederationFolder) -> str:
    first = federation.sites[0]
    return f"""# A federation

Server: {federation.server}, port {federation.port}. Sites: {", ".join(federation.sites)}.

## Each site

Send every site its folder of `sites/`, and only its own, by a way that you trust: the key in it is the site's identity.
The site reads `policy.toml` in it, changes it to its own rules, and runs

    pip install 'fedgist[nvflare]'
    fedgist site start {first} --data FOLDER --model MODEL

where `{first}` stands for the kit, FOLDER holds the site's images (`train` and `test`, in any format that docs/data.md
names) and MODEL is its architecture; without --model it runs what the server's run says.

## The server

On {federation.server}, with this folder (sites need to reach port {federation.port}, nobody else):

    fedgist federation start {federation.path.name}
    fedgist federation run fedavg --federation {federation.path.name} --dataset DATASET --rounds 20

The first stays; the second is repeated for every run. DATASET is what the server tests on, of the same form as the
sites' images.

`authority/` holds the private key that vouches for everybody. Keep it away from the server and the sites.
"""
