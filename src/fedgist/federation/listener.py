"""Runs NVFlare's server, which says nothing when TLS turns a connection away; this does.

Used as a program: python -m fedgist.federation.listener, with the arguments of NVFlare's server_train.
"""

import logging
import runpy
import ssl

log = logging.getLogger("fedgist")


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
    ssl.SSLContext.sslobject_class = Watched
    runpy.run_module("nvflare.private.fed.app.server.server_train", run_name="__main__", alter_sys=True)
