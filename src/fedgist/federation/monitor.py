"""Metrics of a federation's runs on a port of this machine, as OpenMetrics, for a collector that asks."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fedgist.core.errors import FedgistError
from fedgist.federation import records
from fedgist.federation.processes import Say

HERE = "127.0.0.1"
"""Nobody else's business: who wants it elsewhere puts a proxy with a password before it."""
FORM = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class _Page(BaseHTTPRequestHandler):
    """The metrics as they are when somebody asks."""

    timeout = 10  # seconds for a request to be spoken

    def __init__(self, federation: Path, *request: object):
        self.federation = federation
        super().__init__(*request)  # type: ignore[arg-type]  # which answers

    def do_GET(self) -> None:
        if self.path != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, "there is only /metrics")
            return
        text = records.metrics(records.load(self.federation)).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", FORM)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Who asks every few seconds is not worth a line each time."""


@contextmanager
def monitored(federation: Path, port: int | None, say: Say) -> Iterator[int | None]:
    """For as long as this lasts, metrics are on the port, or on a free one where it is 0; gives that."""
    if port is None:
        yield None
        return
    try:
        server = ThreadingHTTPServer((HERE, port), partial(_Page, federation))
    except (OSError, OverflowError) as error:
        raise FedgistError(f"--metrics-port {port} cannot be had ({error}): name another one") from error
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        say(f"metrics of runs: http://{HERE}:{server.server_port}/metrics")
        try:
            yield server.server_port
        finally:
            server.shutdown()
