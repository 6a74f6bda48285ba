"""The live report: one page on this machine, news when there is some, and nothing else."""

import http.client
import sys
import threading
import time
from contextlib import closing, suppress
from html import unescape
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from fedgist.cli import app
from fedgist.core.errors import FedgistError
from fedgist.experiments import config as configs
from fedgist.experiments import live as lives
from fedgist.experiments import runner
from fedgist.experiments.folder import RunFolder
from fedgist.experiments.live import LiveReport

CONFIG = {"method": "fedavg", "rounds": 2, "clients": 2, "steps": 1, "model": "mlp:hidden=8", "device": "cpu"}


@pytest.fixture
def folder(tmp_path):
    runner.run(configs.resolve(CONFIG), tmp_path / "run")
    return RunFolder(tmp_path / "run")


def ask(live, path="/", method="GET", **headers):
    """The answer's status, headers and text."""
    with closing(http.client.HTTPConnection(urlsplit(live.url).netloc, timeout=20)) as connection:
        connection.request(method, path, headers=headers)
        with connection.getresponse() as answer:
            return answer.status, answer.headers, answer.read().decode()


@pytest.fixture(autouse=True)
def no_restraint(monkeypatch):
    monkeypatch.setattr(lives, "RESTRAINT", 0.0)


def test_it_serves_the_report_and_only_on_this_machine(folder):
    with LiveReport(folder.path) as live:
        assert live.url.startswith("http://127.0.0.1:")
        status, headers, text = ask(live)
        assert status == 200
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert "fedavg on digits" in text and "data-live" in text
        assert "connect-src 'self'" in unescape(text)


@pytest.mark.parametrize("path", ["/config.toml", "/../run/config.toml", "/?x", "/report.html", "/%2e%2e/"])
def test_nothing_but_the_page_is_served(folder, path):
    with LiveReport(folder.path) as live:
        status, _, text = ask(live, path)
        assert (status, text) == (404, "there is only one page here")


def test_other_methods_and_other_names_are_refused(folder):
    with LiveReport(folder.path) as live:
        assert ask(live, method="POST")[0] == 501
        assert ask(live, method="DELETE")[0] == 501
        assert ask(live, Host="evil.example")[0] == 403


def test_a_reader_hears_only_news(folder):
    whole = folder.metrics.read_text()
    folder.metrics.write_text(whole.splitlines(keepends=True)[0])
    folder.result.unlink()
    with LiveReport(folder.path) as live:
        _, first, text = ask(live)
        assert "1 of 2, unfinished" in text
        assert ask(live, **{"If-None-Match": first["ETag"]})[0] == 304
        folder.metrics.write_text(whole)
        status, second, text = ask(live, **{"If-None-Match": first["ETag"]})
        assert status == 200
        assert second["ETag"] != first["ETag"]
        assert "2 of 2, unfinished" in text


def test_making_pages_leaves_time_for_the_run(folder, monkeypatch):
    monkeypatch.setattr(lives, "RESTRAINT", 1e9)
    monkeypatch.setattr(lives, "PATIENCE", 0.0)
    whole = folder.metrics.read_text()
    folder.metrics.write_text(whole.splitlines(keepends=True)[0])
    with LiveReport(folder.path) as live:
        before = ask(live)[2]
        folder.metrics.write_text(whole)
        assert ask(live)[2] == before


def test_before_the_first_round_it_waits(tmp_path):
    with LiveReport(tmp_path / "nothing yet") as live:
        status, headers, text = ask(live)
        assert status == 200 and "Waiting" in text and headers["ETag"] is None


def test_before_the_first_round_the_server_has_seen_nothing_yet(folder):
    """Not `nothing`, which is what methods promise that send nothing."""
    folder.metrics.write_text("")
    folder.ledger.unlink()
    folder.result.unlink()
    with LiveReport(folder.path) as live:
        assert ">nothing yet<" in ask(live)[2]


def test_whoever_looks_on_gets_the_last_page(folder):
    whole = folder.metrics.read_text()
    folder.metrics.write_text(whole.splitlines(keepends=True)[0])
    pages = []
    with LiveReport(folder.path) as live:
        pages.append(ask(live)[2])
        folder.metrics.write_text(whole)
        late = threading.Timer(0.3, lambda: pages.append(ask(live)[2]))
        late.start()
    late.join()
    assert len(pages) == 2 and pages[1] != pages[0]


def test_a_port_that_is_taken(folder):
    with LiveReport(folder.path) as live, pytest.raises(FedgistError, match="cannot listen on port"):
        LiveReport(folder.path, urlsplit(live.url).port)


@pytest.mark.parametrize("command", [["run"], ["compare"]])
def test_a_port_without_a_report_to_serve_is_refused(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*command, "fedavg", "--rounds", "1", "--port", "8000"])
    assert result.exit_code == 2
    said = "fedgist: --port 8000 is where --live would listen: add --live, or leave out --port\n"
    assert result.stderr.endswith(said) and not list(tmp_path.iterdir())


def test_it_says_at_once_what_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(FedgistError, match="the report needs plotly"):
        LiveReport(tmp_path)


def test_a_run_from_the_command_line_can_be_watched(tmp_path, monkeypatch):
    """A reader who asks again and again sees the rounds arrive, and the finished run before the server goes."""
    pages = []

    class Watched(LiveReport):
        def __enter__(self):
            super().__enter__()
            self.reader = threading.Thread(target=self.read, daemon=True)
            self.reader.start()
            return self

        def __exit__(self, *error):
            super().__exit__(*error)
            self.reader.join()

        def read(self):
            with suppress(OSError, http.client.HTTPException):
                while True:
                    pages.append(ask(self)[2])
                    time.sleep(0.02)

    monkeypatch.setattr(lives, "LiveReport", Watched)
    monkeypatch.chdir(tmp_path)
    arguments = ["--dataset", "digits", "--rounds", "6", "--clients", "2", "--model", "mlp:hidden=8", "--out", "run"]
    result = CliRunner().invoke(app, ["run", "fedavg", *arguments, "--live", "--quiet"], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stderr.startswith("live report: http://127.0.0.1:")
    assert "fedavg on digits" in pages[-1]
    assert "unfinished" not in pages[-1].partition("</head>")[2]
