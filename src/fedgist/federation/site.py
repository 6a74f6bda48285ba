"""A site on NVFlare: its kit, its policy, and what NVFlare calls there."""

import json
import socket
import ssl
from collections import deque
from dataclasses import asdict
from pathlib import Path

from fedgist import engines, methods
from fedgist.core.errors import FedgistError, unknown
from fedgist.engines.layer import SiteLayer
from fedgist.engines.schemes import HelperSide
from fedgist.federation import gains, kits, leftovers, membership, processes, records, site_models, site_setup
from fedgist.federation.protocol import audit, keys, policy, roster, secure_sums
from fedgist.federation.protocol.desk import open_desk
from fedgist.federation.protocol.envelope import Start
from fedgist.federation.protocol.flare_site import FlareSite
from fedgist.federation.protocol.helper_host import HelperHost
from fedgist.federation.protocol.host import Host
from fedgist.federation.protocol.letters import Desk
from fedgist.federation.protocol.network import Network
from fedgist.federation.protocol.site_host import SiteHost
from fedgist.federation.site_setup import Settings

SETTINGS = "site.json"
LAST = 5
"""Runs and refusals that `status` shows."""


class ProvisionedSite(FlareSite):
    """What NVFlare calls at a site that was started with `fedgist site start`."""

    def make_host(self, site: str, kit: Path) -> Host:
        return _host(site, kit) if _settings(kit).data else _helper(site, kit)

    def settings(self, kit: Path) -> object:
        """What the operator may change while the site is running."""
        return [(kit / name).read_bytes() for name in (SETTINGS, "policy.toml")]


def _settings(kit: Path) -> Settings:
    return Settings(**json.loads((kit / SETTINGS).read_text(encoding="utf-8")))


def _host(site: str, kit: Path) -> SiteHost:
    rules = policy.load(kit / "policy.toml")

    def layer(start: Start, folder: Path) -> SiteLayer:
        if not start.layer:
            return secure_sums.plain(rules)  # without a look at keys, which an old kit has none of
        return secure_sums.site_layer(site, start, folder, rules, roster.load(kit), keys.load_or_make(kit))

    def desk(network: Network) -> Desk:
        return open_desk(site, network, roster.load(kit), keys.load_or_make(kit))

    return site_setup.make_host(
        site, kit / "fedgist", _settings(kit), rules, lambda told: _enrol(kit, told), layer, desk
    )


def _helper(site: str, kit: Path) -> HelperHost:
    rules, folder = policy.load(kit / "policy.toml"), kit / "fedgist"

    def side(known: roster.Roster) -> HelperSide:
        return secure_sums.helper_side(site, folder, rules, known, keys.load_or_make(kit))

    return HelperHost(site, folder, lambda told: _enrol(kit, told), lambda: roster.load(kit), side)


def _enrol(kit: Path, told: bytes) -> bytes:
    """Keep a newer roster, and announce the site's keys; a kit from before rosters knows nobody who could sign one."""
    if not (kit / roster.AUTHORITY).is_file():
        return b""
    try:
        if told:
            roster.accept(kit, told)
    except roster.BadRoster as error:
        raise policy.Refused(str(error)) from error
    return keys.announce(kit)


def export(kit: Path, run: str, out: Path, say: processes.Say) -> None:
    """Write the model that a site keeps of a run into a folder."""
    name, _ = _identity(kit)
    runs = sorted(path.name for path in (kit / "fedgist" / "runs").glob("*/"))
    if run not in runs:
        raise unknown(f"run of site {name}", run, runs)
    site_models.export(_host(name, kit), run, out, say)


def start(kit: Path, settings: Settings, say: processes.Say) -> int:
    """Run a site until it is interrupted; what a user may have got wrong is found before anything is started."""
    name, target = _identity(kit)
    rules = _rules(kit)
    has = "no data: it helps with secure sums, by holding what hides them"
    if settings.data:
        engines.executor(settings.engine, settings.device)
        train, test = site_setup.read_images(Path(settings.data))
        has = f"{len(train.labels):,} samples to learn from, {len(test.labels):,} to test on, {settings.data}"
        site_setup.check_model(settings.model, train)
    _check_certificate(kit, *target)
    log = records.logged(kit / "logs" / "site.log", say)
    with processes.only_one(kit) as lock, log as tell, leftovers.bounded(kit):
        (kit / SETTINGS).write_text(json.dumps(asdict(settings)) + "\n", encoding="utf-8")
        tell(f"site {name}: {has}")
        tell(_summary(rules, kit))
        tell(f"every message is noted in {kit / 'fedgist' / 'audit.jsonl'}")
        if warning := _ending(kit, name).warning:
            tell(f"warning: {warning}")
        return processes.watch(processes.client(kit, name, kits.ORGANISATION), processes.AT_SITE, tell, lock)


def status(kit: Path) -> list[str]:
    """What a person wants to know of a site: whether it runs, what may leave, what could leave in its last runs."""
    name, (host, port) = _identity(kit)
    lines = [f"site {name} of the server {host}:{port}; {'running' if processes.in_use(kit) else 'not running'}"]
    lines.append(_summary(_rules(kit), kit))
    end = _ending(kit, name)
    lines.append(f"its certificate ends on {end.end:%Y-%m-%d}")
    lines += [f"warning: {end.warning}"] * bool(end.warning)
    runs, refused = deque[str](maxlen=LAST), deque[str](maxlen=LAST)
    for note in audit.read(kit / "fedgist" / "audit.jsonl"):
        if note["direction"] == "leaves":
            runs.append(f"{note['time']} {note['run']}: {' | '.join(note['leave']) or 'nothing'}")
        if note.get("refused"):
            refused.append(f"{note['time']} refused: {note['why']}")
    return [*lines, *runs, *gains.known_gains(kit / "fedgist")[-LAST:], *refused]


def _ending(kit: Path, name: str) -> membership.Ending:
    return membership.ending(name, kit / "startup" / "client.crt")


def _rules(kit: Path) -> policy.Policy:
    """The policy of a kit; one with a mistyped name, which would be no rule at all, is an error."""
    rules = policy.load(kit / "policy.toml")
    try:
        policy.check_names(rules, methods.registry())
    except FedgistError as error:
        raise FedgistError(f"{kit / 'policy.toml'}: {error}") from error
    return rules


def _summary(rules: policy.Policy, kit: Path) -> str:
    named = [name for name in rules.methods if name not in (policy.SUMS, policy.EVERYTHING)]
    sums = ["methods that show only sums"] if len(named) < len(rules.methods) else []
    allowed = ", ".join([*sums, *named]) or "no method"
    return f"policy: {allowed}; messages {', '.join(rules.messages)}; {kit / 'policy.toml'}"


def _identity(kit: Path) -> tuple[str, tuple[str, int]]:
    """The site's name, and the host and port of its server."""
    for part in ("startup/fed_client.json", "policy.toml"):
        if not (kit / part).is_file():
            raise FedgistError(f"{kit} is not the kit of a site: there is no {part} in it")
    for part in ("client.crt", "client.key", "rootCA.pem"):
        if not (kit / "startup" / part).is_file():
            raise FedgistError(f"the kit {kit} has no certificate: startup/{part} is missing; ask for a new kit")
    known = json.loads((kit / "startup" / "fed_client.json").read_text(encoding="utf-8"))
    host, _, port = known["servers"][0]["service"]["target"].rpartition(":")
    return str(known["client"]["fqsn"]), (host, int(port))


def _check_certificate(kit: Path, host: str, port: int) -> None:
    """Shake hands once, to say clearly what NVFlare would only retry; a server that is not up yet is no mistake."""
    context = ssl.create_default_context(cafile=str(kit / "startup" / "rootCA.pem"))
    context.load_cert_chain(kit / "startup" / "client.crt", kit / "startup" / "client.key")
    context.check_hostname = False  # NVFlare checks who the server is by a challenge of its own
    try:
        with socket.create_connection((host, port), timeout=10) as plain:
            accepted = _shake_hands(context, plain)
    except ssl.SSLCertVerificationError as error:
        raise FedgistError(
            f"refused: the server at {host}:{port} is not of this kit's federation ({error.verify_message})"
        ) from error
    except OSError:
        return
    if not accepted:
        raise FedgistError(
            f"refused: the server at {host}:{port} does not accept the certificate of this kit; ask for a new one"
        )


def _shake_hands(context: ssl.SSLContext, plain: socket.socket) -> bool:
    """Whether the server talks to us. In TLS 1.3 it refuses a certificate only after the handshake."""
    with context.wrap_socket(plain) as secure:
        try:
            secure.sendall(b"GET / HTTP/1.1\r\nHost: fedgist\r\nConnection: close\r\n\r\n")
            return bool(secure.recv(1))
        except (ssl.SSLError, ConnectionError):
            return False
