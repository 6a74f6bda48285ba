"""A site's own keys: made at the site on first use, they never leave it; the public ones are announced, and signed.

The kit's TLS key signs the announcement: only who holds the kit can announce keys for its name. The authority, which
made that TLS key, checks it before it puts the public keys into the roster; the private ones it never had.
"""

import hashlib
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.x509.oid import NameOID

from fedgist.core.errors import FedgistError
from fedgist.federation.protocol.roster import Member
from fedgist.words import plain

FILE = "site.keys"
PURPOSE = b"fedgist keys 1\n"
LARGEST = 1 << 14
PADDING = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)


@dataclass(frozen=True)
class SiteKeys:
    """The private keys of a site: to sign, and to agree on secrets."""

    signing: Ed25519PrivateKey
    agreement: X25519PrivateKey


def load_or_make(kit: Path) -> SiteKeys:
    """The keys in a kit; made if there are none, once, however many processes ask at the same time."""
    path = kit / FILE
    if not path.is_file():
        _make(path)
    data = path.read_bytes()
    if len(data) != 64:
        raise FedgistError(f"{path} is damaged: remove it, start the site, and have its new keys put into the roster")
    return SiteKeys(Ed25519PrivateKey.from_private_bytes(data[:32]), X25519PrivateKey.from_private_bytes(data[32:]))


def _make(path: Path) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(64))  # any 32 bytes are a private key, in both schemes
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)  # unlike a rename it never replaces what another process has made meanwhile
    except FileExistsError:
        pass
    finally:
        draft.unlink(missing_ok=True)


def announce(kit: Path) -> bytes:
    """A site's public keys and its certificate, signed with the key of that certificate."""
    own = load_or_make(kit)
    pem = (kit / "startup" / "client.crt").read_bytes()
    tls = serialization.load_pem_private_key((kit / "startup" / "client.key").read_bytes(), None)
    if not isinstance(tls, RSAPrivateKey):
        raise FedgistError(f"{kit}: client.key is not the RSA key that NVFlare makes; ask for a new kit")
    public = own.signing.public_key().public_bytes_raw() + own.agreement.public_key().public_bytes_raw()
    signature = tls.sign(PURPOSE + public, PADDING, hashes.SHA256())
    told = {"certificate": pem.decode("ascii"), "keys": public.hex(), "signature": signature.hex()}
    return json.dumps(told, indent=1).encode("ascii") + b"\n"


def check(data: bytes, root: x509.Certificate) -> Member:
    """The site that announces its keys in these bytes, if its certificate is of this root and has signed them."""
    try:
        if len(data) > LARGEST:
            raise ValueError("too long")
        told = json.loads(data)
        certificate = x509.load_pem_x509_certificate(told["certificate"].encode("ascii"))
        public, signature = bytes.fromhex(told["keys"]), bytes.fromhex(told["signature"])
        (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        tls = certificate.public_key()
        if len(public) != 64 or not isinstance(tls, RSAPublicKey):
            raise ValueError("no such keys")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise FedgistError("what a site announces as its keys cannot be read") from None
    who = plain(str(name.value), 80)
    try:
        certificate.verify_directly_issued_by(root)
    except (InvalidSignature, ValueError, TypeError):
        raise FedgistError(f"keys of {who}: its certificate is not of this federation") from None
    try:
        tls.verify(signature, PURPOSE + public, PADDING, hashes.SHA256())
    except InvalidSignature:
        raise FedgistError(f"keys of {who}: they are not signed by the key of its certificate") from None
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public[32:]))
    except ValueError:  # as zeros, with which everybody would fail
        raise FedgistError(f"keys of {who}: nobody can agree on a secret with that of X25519") from None
    return Member(who, fingerprint(certificate), public[:32], public[32:])


def fingerprint(certificate: x509.Certificate) -> bytes:
    """The SHA-256 of a certificate, as TLS shows it."""
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()
