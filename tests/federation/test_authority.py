"""Who vouches for whom: keys are made at a site, announced under its certificate, and signed into the roster."""

import json
import shutil
import stat
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")

from cryptography import x509

from fedgist.cli import app
from fedgist.core.errors import FedgistError
from fedgist.federation import authority, kits
from fedgist.federation.kits import FederationFolder
from fedgist.federation.protocol import keys, roster


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> FederationFolder:
    return kits.new(tmp_path_factory.mktemp("made") / "The Hospitals", "localhost", ["east", "north"])


@pytest.fixture
def federation(made: FederationFolder, tmp_path: Path) -> FederationFolder:
    """A federation of its own for each test."""
    shutil.copytree(made.path, tmp_path / "fed")
    return kits.load(tmp_path / "fed")


def root(federation: FederationFolder) -> x509.Certificate:
    return x509.load_pem_x509_certificate((federation.server_kit / "startup" / "rootCA.pem").read_bytes())


def test_a_new_federation_has_a_roster_without_keys(federation: FederationFolder) -> None:
    first = authority.load(federation)
    assert (first.number, first.federation) == (1, "the-hospitals")
    assert [member.enrolled for member in first.members] == [False, False]
    assert roster.load(federation.kit("east")) == first
    assert stat.S_IMODE((federation.authority / authority.KEY).stat().st_mode) == 0o600
    assert (root(federation).not_valid_after_utc - root(federation).not_valid_before_utc).days == 3650


def test_private_keys_are_made_once_and_only_at_the_site(federation: FederationFolder) -> None:
    kit, found = federation.kit("east"), []
    threads = [threading.Thread(target=lambda: found.append(keys.load_or_make(kit))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({own.signing.private_bytes_raw() + own.agreement.private_bytes_raw() for own in found}) == 1
    assert stat.S_IMODE((kit / keys.FILE).stat().st_mode) == 0o600
    authority.update(federation)
    secret = (kit / keys.FILE).read_bytes()
    for path in federation.path.rglob("*"):
        if path.is_file() and path != kit / keys.FILE:
            held = path.read_bytes()
            assert secret[:32] not in held and secret[32:].hex().encode() not in held
    (kit / keys.FILE).write_bytes(b"short")
    with pytest.raises(FedgistError, match=r"site\.keys is damaged"):
        keys.load_or_make(kit)


def test_announced_keys_come_into_the_roster_by_the_command(federation: FederationFolder, tmp_path: Path) -> None:
    """A kit that was carried away: what it announces comes back as a file; a kit that is used here is found."""
    away = tmp_path / "away"
    shutil.move(federation.kit("north"), away)
    (tmp_path / "north.keys").write_bytes(keys.announce(away))
    keys.load_or_make(federation.kit("east"))
    said = CliRunner().invoke(app, ["federation", "roster", str(federation.path), str(tmp_path / "north.keys")])
    assert said.exit_code == 0 and "roster 2 of the-hospitals" in said.output, said.output
    signed = authority.load(federation)
    own = keys.load_or_make(away)
    assert signed["north"].signing == own.signing.public_key().public_bytes_raw()
    assert signed["north"].agreement == own.agreement.public_key().public_bytes_raw()
    assert signed["east"].enrolled and roster.load(federation.kit("east")) == signed
    again = CliRunner().invoke(app, ["federation", "roster", str(federation.path)])
    assert "roster 2 of" in again.output  # nothing has changed, nothing is signed
    assert roster.accept(away, (federation.path / roster.FILE).read_bytes()) == signed


def test_announcements_that_are_not_believed(federation: FederationFolder, tmp_path: Path) -> None:
    data = keys.announce(federation.kit("east"))
    assert keys.check(data, root(federation)).name == "east"
    told = json.loads(data)
    north = (federation.kit("north") / "startup" / "client.crt").read_text()
    stranger = kits.new(tmp_path / "other", "localhost", ["east"])
    cases = {
        "cannot be read": [b"", b"[]", b"x" * 20_000, json.dumps({**told, "keys": "00"}).encode()],
        "not signed by the key of its certificate": [
            json.dumps({**told, "keys": "11" * 64}).encode(),
            json.dumps({**told, "certificate": north}).encode(),
        ],
        "its certificate is not of this federation": [keys.announce(stranger.kit("east"))],
    }
    for why, announcements in cases.items():
        for announcement in announcements:
            with pytest.raises(FedgistError, match=why):
                keys.check(announcement, root(federation))
    with pytest.raises(FedgistError, match="site north announces the keys of east"):
        authority.keep_announcement(federation, "north", data)
    (tmp_path / "bad.keys").write_bytes(b"{}")
    said = CliRunner().invoke(app, ["federation", "roster", str(federation.path), str(tmp_path / "bad.keys")])
    assert said.exit_code == 0 and "not believed" in said.stderr and "cannot be read" in said.stderr


def test_what_a_run_brings_waits_for_the_authority(federation: FederationFolder) -> None:
    data = keys.announce(federation.kit("east"))
    assert authority.keep_announcement(federation, "east", data)
    (federation.kit("east") / keys.FILE).unlink()  # as if the kit were elsewhere
    assert authority.update(federation)[0]["east"].enrolled
    assert not authority.keep_announcement(federation, "east", data)


def test_without_the_authority_nothing_is_signed(federation: FederationFolder, tmp_path: Path) -> None:
    federation.authority.rename(tmp_path / "safe")
    keys.load_or_make(federation.kit("east"))
    said = CliRunner().invoke(app, ["federation", "roster", str(federation.path)])
    assert said.exit_code == 2 and "only where the authority is can a roster be signed" in said.stderr, said.output


def test_a_federation_from_before_gets_a_roster(federation: FederationFolder) -> None:
    for path in federation.path.rglob("*"):
        if path.name in (authority.KEY, roster.FILE, roster.AUTHORITY):
            path.unlink()
    assert authority.update(federation)[0].number == 1
    assert roster.load(federation.kit("north")).number == 1
