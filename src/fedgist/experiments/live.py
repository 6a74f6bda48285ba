"""The report while runs run: a server on this machine that knows one page, made anew when there is news of the runs.

It listens on 127.0.0.1 only and answers only to that name, so that no page from elsewhere can ask it by another one.
"""

import hashlib
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from fedgist.core.errors import FedgistError
from fedgist.experiments import report
from fedgist.experiments.folder import run_folders

HERE = "127.0.0.1"
PATIENCE = 5.0  # seconds that a reader gets to fetch the last page, and after which one who is silent has gone
RESTRAINT = 10.0  # making pages may take one part in so many of the time, the rest is for the runs
WAITING = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="1"><title>fedgist</title>'
    "<p>Waiting for the first run to begin …"
)


class LiveReport:
    """Serves the report of the runs in `folder`, as long as it is entered; `url` says where."""

    def __init__(self, folder: Path, port: int = 0):
        self.folder = folder
        report.check_installed()  # says now, and not in the middle of a run, what is missing
        try:
            self.server = _Server((HERE, port), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or "it is no port"
            raise FedgistError(f"cannot listen on port {port}: {why}; choose another with --port") from error
        self.server.live = self
        self.url = f"http://{HERE}:{self.server.server_port}/"
        self.names = {f"{name}:{self.server.server_port}" for name in (HERE, "localhost")}
        self._lock = threading.Lock()
        self._news: Any = None
        self._page, self._version, self._made, self._cost = WAITING, "", 0.0, 0.0
        self._asked, self._fetched = -PATIENCE, ""

    def __enter__(self) -> "LiveReport":
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whoever looks on gets the last page before the server goes."""
        until = time.monotonic() + PATIENCE
        last = self._current(restrained=False)[1] if time.monotonic() - self._asked < PATIENCE else self._fetched
        while self._fetched != last and time.monotonic() < until:
            time.sleep(0.05)
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def ask(self, known: str | None) -> tuple[str, str] | None:
        """The page and its version, or nothing if the reader knows it."""
        page, version = self._current()
        self._asked, self._fetched = time.monotonic(), version
        return None if version and known == version else (page, version)

    def _current(self, restrained: bool = True) -> tuple[str, str]:
        with self._lock:
            rested = time.monotonic() - self._made >= RESTRAINT * self._cost
            news = self._stamps()
            if news != self._news and (rested or not restrained):
                begun = time.monotonic()
                with suppress(FedgistError, OSError, ValueError):  # a folder that is only just being made: next time
                    self._page = report.page(run_folders(self.folder), live=True)
                    self._version = f'"{hashlib.sha256(self._page.encode()).hexdigest()[:16]}"'
                    self._news = news
                self._made = time.monotonic()
                self._cost = self._made - begun
            return self._page, self._version

    def _stamps(self) -> Any:
        """What changes when there is something new to show."""
        with suppress(FedgistError, OSError):
            return [
                (run.path, run.metrics.stat().st_size if run.metrics.is_file() else 0, run.finished)
                for run in run_folders(self.folder)
            ]
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    live: LiveReport


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        live = self.server.live
        if self.headers.get("Host") not in live.names:
            return self._answer(403, "this server answers only on this machine")
        if self.path != "/":
            return self._answer(404, "there is only one page here")
        answer = live.ask(self.headers.get("If-None-Match"))
        if answer is None:
            return self._answer(304)
        self._answer(200, *answer)

    def _answer(self, status: int, text: str = "", version: str = "") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if version:
            self.send_header("ETag", version)
        self.end_headers()
        with suppress(ConnectionError):  # the reader has gone
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal belongs to the run."""
