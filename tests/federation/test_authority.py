"""Who vouches for whom: keys are made at a site, announced under its certificate, and signed into the roster."""

import json
import shutil
import stat
import threading
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

from fedgist.cli import app
from fedgist.core.errors import FedgistError
from fedgist.federation import authority, kits, listener, membership, status
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


def fedgist(command: str, federation: FederationFolder, *names: str) -> Result:
    return CliRunner().invoke(app, ["federation", command, str(federation.path), *names])


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
    said = fedgist("roster", federation, str(tmp_path / "north.keys"))
    assert said.exit_code == 0 and "roster 2 of the-hospitals" in said.output, said.output
    signed = authority.load(federation)
    own = keys.load_or_make(away)
    assert signed["north"].signing == own.signing.public_key().public_bytes_raw()
    assert signed["north"].agreement == own.agreement.public_key().public_bytes_raw()
    assert signed["east"].enrolled and roster.load(federation.kit("east")) == signed
    again = fedgist("roster", federation)
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
    said = fedgist("roster", federation, str(tmp_path / "bad.keys"))
    assert said.exit_code == 0 and "not believed" in said.stderr and "cannot be read" in said.stderr


def lied(kit: Path, public: bytes) -> bytes:
    """Such keys, as the site of this kit announces them."""
    tls = serialization.load_pem_private_key((kit / "startup" / "client.key").read_bytes(), None)
    assert isinstance(tls, RSAPrivateKey)
    signature = tls.sign(keys.PURPOSE + public, keys.PADDING, hashes.SHA256())
    told = {"certificate": (kit / "startup" / "client.crt").read_text(), "keys": public.hex()}
    return json.dumps({**told, "signature": signature.hex()}).encode()


def test_a_site_cannot_announce_what_is_not_its_own(federation: FederationFolder) -> None:
    """Of another's keys, which are in every roster, no roster could be made: nobody's run would begin any more."""
    east, north = (federation.kit(site) for site in ("east", "north"))
    keys.load_or_make(north)
    first = authority.update(federation)[0]
    for public in (first["north"].signing + bytes([9] * 32), bytes([9] * 32) + first["north"].agreement):
        assert authority.keep_announcement(federation, "east", lied(east, public))
        assert authority.update(federation) == (
            first,
            ["keys of east: those of north, which it cannot have made"],
        )
    with pytest.raises(FedgistError, match="keys of east: nobody can agree on a secret with that of X25519"):
        authority.keep_announcement(federation, "east", lied(east, bytes([9] * 32) + bytes(32)))
    assert authority.keep_announcement(federation, "east", lied(east, bytes([8] * 32 + [9] * 32)))
    assert authority.update(federation)[0]["east"].enrolled


def test_what_a_run_brings_waits_for_the_authority(federation: FederationFolder) -> None:
    data = keys.announce(federation.kit("east"))
    assert authority.keep_announcement(federation, "east", data)
    (federation.kit("east") / keys.FILE).unlink()  # as if the kit were elsewhere
    assert authority.update(federation)[0]["east"].enrolled
    assert not authority.keep_announcement(federation, "east", data)


def test_without_the_authority_nothing_is_signed(federation: FederationFolder, tmp_path: Path) -> None:
    federation.authority.rename(tmp_path / "safe")
    keys.load_or_make(federation.kit("east"))
    said = fedgist("roster", federation)
    assert said.exit_code == 2 and "members and their keys change only where the authority is" in said.stderr, (
        said.output
    )


def test_a_federation_from_before_gets_a_roster(federation: FederationFolder) -> None:
    for path in federation.path.rglob("*"):
        if path.name in (authority.KEY, roster.FILE, roster.AUTHORITY):
            path.unlink()
    assert authority.update(federation)[0].number == 1
    assert roster.load(federation.kit("north")).number == 1


def test_a_site_is_added_and_the_others_stay(federation: FederationFolder) -> None:
    before = {path: path.read_bytes() for path in federation.path.glob("sites/*/startup/client.*")}
    for kit in ("east", "north"):
        keys.load_or_make(federation.kit(kit))
    authority.update(federation)
    said = fedgist("add-site", federation, "south")
    assert said.exit_code == 0 and "roster 3 is signed" in said.output, said.output
    grown = kits.load(federation.path)
    assert grown.sites == ("east", "north", "south")
    assert {path: path.read_bytes() for path in before} == before
    held = [{path.name for path in grown.kit(site).iterdir()} for site in ("south", "east")]
    assert held[0] == held[1] - {keys.FILE}
    signed = roster.load(grown.kit("south"))
    assert (signed.number, [member.enrolled for member in signed.members]) == (3, [True, True, False])
    assert [path.name for path in (grown.authority / "fedgist").iterdir() if path.name.startswith("prod")] == []
    for name, why in (("south", "is, or was, a site south"), ("South", "small letters"), ("localhost", "same name")):
        said = fedgist("add-site", federation, name)
        assert said.exit_code == 2 and why in said.stderr, said.output


def test_certificates_are_renewed_under_the_same_root(federation: FederationFolder) -> None:
    """The site's own keys stay; what it had announced under the old certificate holds, what is new would not."""
    old = (federation.kit("east") / "startup" / "client.crt").read_bytes()
    shutil.copytree(federation.kit("east"), federation.path / "elsewhere")
    data = keys.announce(federation.path / "elsewhere")
    authority.keep_announcement(federation, "east", data)
    first = authority.update(federation)[0]["east"]
    said = fedgist("renew", federation)
    assert said.exit_code == 0 and said.output.count("new: ") == 8, said.output
    second = authority.load(federation)["east"]
    assert second.keys == first.keys and second.certificate != first.certificate
    new = x509.load_pem_x509_certificate((federation.kit("east") / "startup" / "client.crt").read_bytes())
    assert keys.fingerprint(new) == second.certificate
    new.verify_directly_issued_by(root(federation))
    assert (federation.kit("east") / "startup" / "client.key").read_bytes() != (
        federation.path / "elsewhere" / "startup" / "client.key"
    ).read_bytes()
    assert old != (federation.kit("east") / "startup" / "client.crt").read_bytes()
    (federation.path / "elsewhere" / keys.FILE).unlink()
    assert authority.keep_announcement(federation, "east", keys.announce(federation.path / "elsewhere"))
    known, refused = authority.update(federation)
    assert known["east"] == second and "a certificate that has been replaced" in refused[0]
    said = fedgist("renew", federation, "west")
    assert said.exit_code == 2 and "unknown member of the federation 'west'" in said.stderr


def test_a_revoked_site_is_out_with_all_its_certificates(federation: FederationFolder) -> None:
    def der(kit: Path) -> bytes:
        pem = (kit / "startup" / "client.crt").read_bytes()
        return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)

    kit = federation.kit("north")
    first = der(kit)
    assert fedgist("renew", federation, "north").exit_code == 0
    second, other = der(kit), der(federation.kit("east"))
    assert listener.revoked(federation.server_kit) == {}
    said = fedgist("revoke", federation, "north")
    assert said.exit_code == 0 and "site north is revoked" in said.output, said.output
    refused = listener.revoked(federation.server_kit)
    assert [refused.get(sha256(one).hexdigest()) for one in (first, second, other)] == ["north", "north", None]
    fewer = kits.load(federation.path)
    assert fewer.sites == ("east",) and "north" not in authority.load(fewer)
    assert not kit.exists() and "north" not in (federation.path / "README.md").read_text()
    for arguments, why in (
        (("revoke", federation, "north"), "site north is revoked already"),
        (("revoke", federation, "est"), "unknown site 'est'"),
        (("revoke", federation, "east"), "is the only site"),
        (("add-site", federation, "north"), "there is, or was, a site north"),
    ):
        said = fedgist(*arguments)
        assert said.exit_code == 2 and why in said.stderr, said.output


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_renewal_that_broke_off_is_finished_by_the_next(
    federation: FederationFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = authority.issued(federation, "east")
    with monkeypatch.context() as patch:
        patch.setattr(kits, "provisioned", stop)
        with pytest.raises(KeyboardInterrupt):
            membership.renew(federation, ["east"])
    with pytest.raises(FedgistError, match="east has no certificate, as its renewal broke off: do it again"):
        membership.sign(federation)
    assert fedgist("renew", federation, "east").exit_code == 0
    crt = x509.load_pem_x509_certificate((federation.kit("east") / "startup" / "client.crt").read_bytes())
    assert authority.issued(federation, "east") == [*first, keys.fingerprint(crt).hex()]
    assert authority.load(federation)["east"].certificate == keys.fingerprint(crt)


@pytest.mark.parametrize("at", ["kits.save", "authority.update"])
def test_a_revocation_that_broke_off_is_finished_by_the_next(
    at: str, federation: FederationFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(f"fedgist.federation.{at}", stop)
        with pytest.raises(KeyboardInterrupt):
            membership.revoke(federation, "north")
    assert "north" in authority.load(federation)
    fedgist("revoke", federation, "north")
    assert "north" not in authority.load(federation) and kits.load(federation.path).sites == ("east",)
    assert set(listener.revoked(federation.server_kit).values()) == {"north"}


def test_members_change_only_where_the_authority_is(federation: FederationFolder, tmp_path: Path) -> None:
    federation.authority.rename(tmp_path / "safe")
    for arguments in (("add-site", federation, "south"), ("renew", federation), ("revoke", federation, "east")):
        said = fedgist(*arguments)
        assert said.exit_code == 2 and "members and their keys change only where the authority is" in said.stderr


def test_a_run_that_began_before_signs_for_those_who_are_members_now(federation: FederationFolder) -> None:
    """Keys that sites announce are signed by the process of the run, which may have begun long ago."""
    membership.add_sites(federation, ["south", "west"])
    membership.revoke(federation, "north")
    keys.load_or_make(federation.kit("east"))
    signed, _ = membership.sign(federation)
    assert [member.name for member in signed.members] == ["east", "south", "west"] and signed["east"].enrolled


def test_one_who_changes_a_federation_waits_for_the_other(federation: FederationFolder) -> None:
    """Two rosters of one number would be refused by every site that has seen the other one."""
    grown = threading.Thread(target=fedgist, args=("add-site", federation, "south"))
    with membership.held(federation):
        grown.start()
        grown.join(1.0)
        assert grown.is_alive() and kits.load(federation.path).sites == ("east", "north")
        keys.load_or_make(federation.kit("east"))
        assert authority.update(federation)[0].number == 2
    grown.join()
    now = authority.load(federation)
    assert now.number == 3 and now["east"].enrolled and "south" in now


def test_a_federation_from_before_grows_under_its_own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its authority's certificate was made for 360 days, which NVFlare would refuse to mix with another number."""
    monkeypatch.setattr(kits, "ROOT_DAYS", 360)
    old = kits.new(tmp_path / "old", "localhost", ["east"])
    monkeypatch.undo()
    assert fedgist("add-site", old, "north").exit_code == 0


def test_ends_of_certificates_are_shown_and_warned_about(federation: FederationFolder) -> None:
    lines = status.describe(federation)
    assert lines[0] == "server localhost:8002: not running" and "site east: not here" in lines
    assert not [line for line in lines if "warning" in line]
    soon = datetime.now(UTC) + timedelta(days=20, hours=1)
    assert membership.Ending("east", soon).warning == (
        f"the certificate of east ends in 20 days, on {soon:%Y-%m-%d}: `fedgist federation renew DIR east`"
    )
    assert "has ended" in membership.Ending("east", datetime.now(UTC) - timedelta(days=1)).warning
    assert membership.Ending("east", datetime.now(UTC) + timedelta(days=31)).warning == ""
    said = fedgist("status", federation)
    assert said.exit_code == 0
    days = [(one.end - datetime.now(UTC)).days for one in membership.endings(federation)]
    assert days == [3649, 359, 359, 359, 359] and "certificates end: authority 20" in said.output
