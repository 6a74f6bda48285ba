"""Runs NVFlare's server or client, or one of ours, so that it ends with who started it; the server tells TLS refusals.

Used as a program: python -m fedgist.federation.listener server, client, conductor or fedgist, and their arguments.
"""

import hashlib
import logging
import runpy
import ssl
import sys
from pathlib import Path

from fedgist.federation.processes import end_with_parent

log = logging.getLogger("fedgist")
PROGRAMS = {
    "server": "nvflare.private.fed.app.server.server_train",
    "client": "nvflare.private.fed.app.client.client_train",
    "conductor": "fedgist.federation.conductor",
    "fedgist": "fedgist",
}

GLANCE = "check_status server"
"""The conductor's look at who is there, twice a second: in NVFlare's audit log that would be 7 GB a year."""
REVOKED = "revoked"
"""In the server's kit: the SHA-256 of each certificate that is not accepted any more, whose it was, and since when."""


class Watched(ssl.SSLObject):
    """A TLS connection that logs why its handshake failed, and does not accept a certificate that was revoked."""

    kit = Path()

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            log.warning(f"refused a connection: its certificate is not of this federation ({error.reason})")
            raise
        digest = hashlib.sha256(self.getpeercert(binary_form=True) or b"").hexdigest()
        if self.server_side and (whose := revoked(self.kit).get(digest)):  # read each time: it holds at once
            log.warning(f"refused a connection: the certificate of {whose} has been revoked")
            raise ssl.SSLError(ssl.SSL_ERROR_SSL, "certificate revoked")


def revoked(kit: Path) -> dict[str, str]:
    """The certificates that are not accepted any more, and whose they were."""
    lines = (kit / REVOKED).read_text("ascii").splitlines() if (kit / REVOKED).is_file() else []
    return {digest: whose for digest, whose, _ in map(str.split, lines)}


if __name__ == "__main__":
    end_with_parent()
    program = PROGRAMS[sys.argv.pop(1)]
    if program == PROGRAMS["server"]:
        Watched.kit = Path(sys.argv[sys.argv.index("-m") + 1])
        ssl.SSLContext.sslobject_class = Watched
        from nvflare.fuel.sec.audit import EXCLUDED_ACTIONS  # NVFlare is not needed to know who was revoked

        EXCLUDED_ACTIONS.add(GLANCE)
    runpy.run_module(program, run_name="__main__", alter_sys=True)
