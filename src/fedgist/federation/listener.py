"""Runs NVFlare's server or client, or fedgist, so that it ends with who started it; the server tells TLS refusals.

Used as a program: python -m fedgist.federation.listener server, client or fedgist, with the arguments of that program.
"""

import logging
import runpy
import ssl
import sys

from fedgist.federation.processes import end_with_parent

log = logging.getLogger("fedgist")
PROGRAMS = {
    "server": "nvflare.private.fed.app.server.server_train",
    "client": "nvflare.private.fed.app.client.client_train",
    "fedgist": "fedgist",
}


class Watched(ssl.SSLObject):
    """A TLS connection that logs why its handshake failed."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            log.warning(f"refused a connection: its certificate is not of this federation ({error.reason})")
            raise


if __name__ == "__main__":
    end_with_parent()
    program = PROGRAMS[sys.argv.pop(1)]
    if program == PROGRAMS["server"]:
        ssl.SSLContext.sslobject_class = Watched
    runpy.run_module(program, run_name="__main__", alter_sys=True)
